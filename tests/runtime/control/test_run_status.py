"""The status of a long run is read from what was kept of it, and is the same without."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import AlternatingRun, LogScript, append

from rlmux.log.run_log import LogLimits, LogReader, RunLog
from rlmux.report.timeline.condensed_state import CACHE_NAME
from rlmux.runtime.control import run_status
from rlmux.runtime.control.run_status import StatusReader

LIMITS = LogLimits(block_rows=10)


def read(folder: Path) -> dict[str, Any]:
    with closing(StatusReader(folder)) as reader:
        return reader.read()


def read_whole(folder: Path) -> dict[str, Any]:
    """The status without what was kept."""
    (folder / CACHE_NAME).unlink(missing_ok=True)
    return read(folder)


def write_on(log: RunLog, rows: Any) -> None:
    for row in rows:
        append(log, [row])
        log.commit()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> LogScript:
    monkeypatch.setattr(run_status, "KEPT_ROWS", 30)
    return AlternatingRun(num_steps=4).script


@pytest.mark.parametrize("segment_rows", [10**6, 45])
def test_a_long_run_is_known_by_what_was_kept_and_what_came_since(
    tmp_path: Path, script: LogScript, monkeypatch: Any, segment_rows: int
) -> None:
    rows, half = script.rows, len(script.rows) // 2
    limits = LogLimits(block_rows=10, segment_rows=segment_rows)
    with RunLog.create(tmp_path, script.header, limits=limits) as log:
        write_on(log, rows[:half])
    begun = read_whole(tmp_path)
    assert read(tmp_path) == begun
    with RunLog.open(tmp_path, limits=limits) as log:
        write_on(log, rows[half:])
    since: list[int] = []
    parts = LogReader.parts
    monkeypatch.setattr(
        LogReader, "parts", lambda self, after=0, **k: (since.append(after), parts(self, after, **k))[1]
    )
    ended = read(tmp_path)
    assert min(since) >= 30, "the rows before were read again"
    assert ended == read_whole(tmp_path)
    assert ended["pipelines"]["sort"]["step"] == 4


def test_what_was_kept_of_another_log_does_not_count(tmp_path: Path, script: LogScript) -> None:
    header = script.header
    others = AlternatingRun(num_steps=4, seed=5).script.rows
    for name, rows in (("one", script.rows), ("two", others)):  # the same id, as a log that was salvaged has
        with RunLog.create(tmp_path / name, header, limits=LIMITS) as log:
            write_on(log, rows)
    expected = read_whole(tmp_path / "two")
    read(tmp_path / "one")
    os.replace(tmp_path / "one" / CACHE_NAME, tmp_path / "two" / CACHE_NAME)
    assert read(tmp_path / "two") == expected


def test_the_status_of_a_short_run_leaves_no_file(tmp_path: Path, script: LogScript) -> None:
    with RunLog.create(tmp_path, script.header) as log:
        append(log, script.rows)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert read(tmp_path)["pipelines"]["sort"]["status"] == "finished"
    assert sorted(path.name for path in tmp_path.iterdir()) == before
