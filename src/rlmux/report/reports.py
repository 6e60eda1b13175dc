"""The reports of a run folder, from its log alone: while it runs, after it, after a crash.

write_report(folder)    summary.json  trace.json  timeline.html     each whole or not there; made once of the same log
load_summary(folder)    the summary as it was last written
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from rlmux.core.errors import LogError, StorageError
from rlmux.log.run_log import NOT_SHOWN, LogReader
from rlmux.report.figures.html import page
from rlmux.report.figures.perfetto import trace
from rlmux.report.report_cache import are_made_of, origin_of, record
from rlmux.report.summary import step_times, summarize
from rlmux.report.timeline.build import Timeline, build_timeline
from rlmux.report.timeline.history import History, without_collector

SUMMARY_NAME, TRACE_NAME, PAGE_NAME = "summary.json", "trace.json", "timeline.html"
FILES = (SUMMARY_NAME, TRACE_NAME, PAGE_NAME)


def read_timeline(folder: str | Path) -> Timeline:
    """What the log holds at this moment."""
    return _read_timeline(folder)


def _read_timeline(folder: str | Path, bare: Collection[str] = ()) -> Timeline:
    with LogReader(folder) as reader, without_collector():
        return build_timeline(History.of(reader.header, reader.parts(bare=bare)))


def write_report(folder: str | Path) -> dict[str, Any]:
    """Write the three files into the run's folder, unless they are there and of this very log; returns the summary."""
    folder = Path(folder)
    origin = origin_of(folder)
    if are_made_of(folder, origin, FILES):
        return load_summary(folder)
    with without_collector():
        summary = _write_all(folder)  # what it made is gone when the collector comes back
    record(folder, origin, FILES)  # if the log grew meanwhile, the origin is too old and the next report is generated
    return summary


def _write_all(folder: Path) -> dict[str, Any]:
    timeline = _read_timeline(folder, NOT_SHOWN)
    steps = step_times(timeline)
    summary = summarize(timeline, steps)
    _write(folder / SUMMARY_NAME, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    _write(folder / TRACE_NAME, json.dumps(trace(timeline, steps), separators=(",", ":"), allow_nan=False))
    _write(folder / PAGE_NAME, page(timeline, title=folder.absolute().name, steps=steps))
    return summary


def load_summary(folder: str | Path) -> dict[str, Any]:
    """The contents of `summary.json`."""
    path = Path(folder) / SUMMARY_NAME
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise LogError(f"{folder}: there is no {SUMMARY_NAME}; `rlmux report` makes it from the log") from None
    except ValueError as error:
        raise LogError(f"{path}: not JSON ({error}); `rlmux report` makes it anew from the log") from None


def _write(path: Path, text: str) -> None:
    """Aside, then in place: a reader or a kill never meets half a file. Raises StorageError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    except BaseException:  # an interrupt, too, leaves no half file; it goes on up
        aside.unlink(missing_ok=True)
        raise
