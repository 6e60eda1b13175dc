"""Salvages a run's damaged, truncated or missing log: the new log contains only what is readable.

    readable rows up to the first that is missing    ──▶ as they are
    readable rows behind it                          ──▶ notes only: events and orders mean nothing without their past
    ends of pipelines in ENDS_NAME that no row has   ──▶ note `pipeline_end`
    what is missing, and each newest checkpoint      ──▶ note `salvaged`, and lines for the console
    the old files                                    ──▶ a folder beside, unchanged

Weights come from checkpoints, not from the log, so a pipeline resumes from its newest intact one, as after a crash. A
copy of the header, required by every checkpoint, is in HEADER_NAME; the ends of pipelines are in ENDS_NAME, and ended
pipelines do not train further. Without a recorded end a pipeline counts as not over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlmux.core.errors import LogError
from rlmux.log import value_codec
from rlmux.log.damaged_log import Readable, is_whole, log_files, read_damaged
from rlmux.log.folder_lock import FolderLock
from rlmux.log.notes import PipelineEndNote, SalvagedNote, decode
from rlmux.log.run_log import LOG_NAME, SCHEMA_VERSION, Entry, LogReader, RunLog

HEADER_NAME = "header.json"
ENDS_NAME = "ends.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """Result of salvaging a damaged log."""

    num_rows: int
    """Rows of the new log that were in the old one."""
    num_set_aside: int
    """Readable events and orders that are omitted because earlier rows are missing."""
    missing: list[tuple[int, int]]
    """(first, last) number of each stretch of rows that is not readable."""
    ended: dict[str, str] | None
    """Status of each pipeline whose end is readable only in ENDS_NAME; None without this file."""
    damage: list[str]
    """A few words about each damaged file."""
    old_files: Path
    """Folder of the damaged files."""

    def lines(self) -> list[str]:
        """Messages for the user, one line each."""
        lines = [*self.damage, f"{self.num_rows} rows of the log are taken over"]
        lines += [f"rows {first} to {last} are missing" for first, last in self.missing]
        if self.num_set_aside:
            lines.append(f"{self.num_set_aside} events and orders behind them are left out: their past is missing")
        if self.ended is None:
            lines.append(f"without {ENDS_NAME} a pipeline that was over may do its last step again, or go on")
        lines += [f"pipeline {name} was over ({status}) and stays so" for name, status in (self.ended or {}).items()]
        lines.append(f"the damaged files are in {self.old_files}")
        return lines


def keep_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Write a copy of a run's header, atomically."""
    text = value_codec.dumps({"schema_version": SCHEMA_VERSION, **header})
    kept = {"header": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    _write_whole(folder, HEADER_NAME, json.dumps(kept))


def keep_ends(folder: Path, ended: Iterable[PipelineEndNote]) -> None:
    """Write a copy of pipelines' ends, atomically."""
    _write_whole(folder, ENDS_NAME, "".join(value_codec.dumps(end) + "\n" for end in ended))


def keep_end(folder: Path, end: PipelineEndNote) -> None:
    """Add one pipeline's end to the file of `keep_ends`."""
    handle = os.open(folder / ENDS_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "a", encoding="utf-8") as file:
        file.write(value_codec.dumps(end) + "\n")


def _write_whole(folder: Path, name: str, text: str) -> None:
    aside = folder / f".{name}.{os.getpid()}"
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
    aside.replace(folder / name)


def salvage(folder: Path) -> Salvaged | None:
    """Replace a damaged log by one of its readable rows; None if the log is intact.

    Raises LogError, with no file changed, for a missing header or a log of another version of rlmux. Raises
    FolderInUseError for a run in progress.
    """
    with FolderLock.take(folder):
        if (folder / LOG_NAME).is_file() and is_whole(folder):
            return None
        found = read_damaged(folder)
        header = _kept_header(folder) or found.header
        if header is None:
            raise LogError(
                f"{folder}: neither {LOG_NAME} nor {HEADER_NAME} has the run's header, without which it cannot go on; "
                "start it again: rlmux run"
            )
        if header.get("schema_version") != SCHEMA_VERSION:
            writer = header.get("rlmux_version", "of unknown version")
            raise LogError(f"{folder}: its log was written by rlmux {writer}, which alone can salvage it")
        new = _aside(folder, "salvaging")
        salvaged = _write(new, header, found, _kept_ends(folder), old_files=_aside(folder, "damaged"))
        _exchange(folder, new, salvaged.old_files)
        keep_header(folder, {name: value for name, value in header.items() if name != "schema_version"})
        return salvaged


def _kept_header(folder: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads((folder / HEADER_NAME).read_text(encoding="utf-8"))
        text = str(kept["header"])
        if hashlib.sha256(text.encode()).hexdigest() != kept["sha256"]:
            return None
        return cast("dict[str, Any]", value_codec.loads(text))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept_ends(folder: Path) -> list[PipelineEndNote] | None:
    """Readable ends; None without a file of them."""
    try:
        lines = (folder / ENDS_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    ends: list[PipelineEndNote] = []
    for line in lines:
        with contextlib.suppress(LogError, ValueError, KeyError, TypeError):  # the last line of a run that was killed
            end = decode(PipelineEndNote.type, value_codec.loads(line))
            ends += [end] if isinstance(end, PipelineEndNote) and end.pipeline else []
    return ends


def _aside(folder: Path, name: str) -> Path:
    """An unused name in the folder."""
    number = 1
    while (path := folder / f".{name}-{number}").exists():
        number += 1
    return path


def _exchange(folder: Path, new: Path, old_files: Path) -> None:
    """Replace the old files by the new ones, and keep the old ones in `old_files`."""
    old_files.mkdir(mode=0o700)
    replaced = log_files(folder)
    for path in replaced:
        for part in (path, path.with_name(f"{path.name}-wal")):
            if part.is_file():
                shutil.copy2(part, old_files / part.name)
        for suffix in ("-wal", "-shm"):  # they must not stay beside another database
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    written = log_files(new)
    for path in written:
        path.replace(folder / path.name)
    for path in replaced:
        if path.name not in [each.name for each in written]:
            path.unlink()
    new.rmdir()


def _write(
    new: Path, header: Mapping[str, Any], found: Readable, ends: list[PipelineEndNote] | None, *, old_files: Path
) -> Salvaged:
    """The new log, in a folder of its own."""
    missing = found.missing()
    whole_up_to = missing[0][0] if missing else max(found.entries, default=0) + 1
    num_rows = num_set_aside = 0
    with RunLog.create(new, {name: each for name, each in header.items() if name != "schema_version"}) as log:
        for seq, entry in sorted(found.entries.items()):
            if entry.kind == "header":
                continue
            if entry.kind == "note" or seq < whole_up_to:
                _append(log, entry)
                num_rows += 1
            else:
                num_set_aside += 1
        notes = [entry.note for entry in found.entries.values() if entry.type == PipelineEndNote.type]
        known = {note.pipeline for note in notes if isinstance(note, PipelineEndNote)}
        missed = {end.pipeline: end for end in ends or () if end.pipeline not in known}
        for end in missed.values():
            log.append_note(log.last_time_s, end)
        salvaged = Salvaged(
            num_rows=num_rows,
            num_set_aside=num_set_aside,
            missing=missing,
            ended=None if ends is None else {name: end.status for name, end in missed.items()},
            damage=found.damage,
            old_files=old_files,
        )
        note = SalvagedNote(rows=num_rows, missing=missing, damage=found.damage, left_out=num_set_aside)
        log.append_note(log.last_time_s, note)
    return salvaged


def _append(log: RunLog, entry: Entry) -> None:
    value: Any = entry.value
    if entry.kind == "event":
        log.append_event(value)
    elif entry.kind == "action":
        log.append_actions([value])
    else:
        log.note(entry.type, entry.time_s, **value)


def unknown_pipelines(folder: Path, known: Collection[str]) -> list[str]:
    """A line for each pipeline that has checkpoints and no submission in the log."""
    with LogReader(folder) as reader:
        state = reader.state()
    late = {name for submitted in state.submitted for name in submitted.pipelines}
    found = sorted({path.parent.name for path in folder.glob("*/step_*") if path.is_dir()})
    return [
        f"pipeline {name}: its checkpoints are there, and what it trains is not: it was submitted while the run went "
        "on; submit it again under another name, its newest checkpoint as model.path"
        for name in found
        if name not in known and name not in late and name not in state.ended
    ]
