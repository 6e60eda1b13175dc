"""A report of a log that has not changed stays; after any change it is made anew, to the same bytes as from nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import log_script

from rlmux.core.errors import LogError
from rlmux.log.run_log import LOG_NAME, LogLimits, RunLog
from rlmux.report.report_cache import MADE_NAME
from rlmux.report.reports import FILES, write_report

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, alternating_run: Callable[..., Any]) -> Path:
    """A run's folder with packed rows, sealed segments and a report."""
    run = alternating_run(num_steps=6)
    folder = tmp_path / "run"
    limits = LogLimits(block_rows=20, segment_rows=100)
    with RunLog.create(folder, run.header, limits=limits) as log:
        log_script.append(log, run.rows)
    assert len(list(folder.glob("run.0*.db"))) >= 2
    write_report(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def made_without_a_record(folder: Path, scratch: Path) -> dict[str, bytes]:
    copy = scratch / folder.name
    shutil.copytree(folder, copy)
    for name in (*FILES, MADE_NAME):
        (copy / name).unlink(missing_ok=True)
    write_report(copy)
    return contents(copy)


def append(folder: Path) -> None:
    with RunLog.open(folder) as log:
        log.note("end", log.last_time_s + 5.0, control_s=1.25)


def test_a_second_report_leaves_the_files_and_says_the_same(folder: Path, tmp_path: Path) -> None:
    before = {name: (folder / name).stat() for name in FILES}
    first = made_without_a_record(folder, tmp_path / "apart")
    summary = write_report(folder)
    after = {name: (folder / name).stat() for name in FILES}
    assert {name: (one.st_ino, one.st_mtime_ns) for name, one in before.items()} == {
        name: (one.st_ino, one.st_mtime_ns) for name, one in after.items()
    }
    assert contents(folder) == first
    assert summary == write_report(folder)


@pytest.mark.parametrize(
    "change",
    [
        append,
        lambda folder: (folder / "trace.json").unlink(),
        lambda folder: (folder / "summary.json").write_text("{}"),
        lambda folder: (folder / "timeline.html").write_bytes(b" " + (folder / "timeline.html").read_bytes()),
        lambda folder: (folder / MADE_NAME).write_bytes(b"\xff{"),
        lambda folder: (folder / MADE_NAME).write_text("[1]"),
        lambda folder: (folder / MADE_NAME).unlink(),
    ],
)
def test_whatever_has_changed_the_report_is_that_of_the_log(folder: Path, tmp_path: Path, change: Change) -> None:
    change(folder)
    write_report(folder)
    assert contents(folder) == made_without_a_record(folder, tmp_path / "apart")


def test_a_renamed_run_has_its_new_name(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "another")
    write_report(moved)
    assert contents(moved) == made_without_a_record(moved, tmp_path / "apart")
    assert b"another" in contents(moved)["timeline.html"]


def test_a_log_that_was_packed_meanwhile_has_the_same_report(folder: Path, tmp_path: Path) -> None:
    append(folder)
    write_report(folder)
    before = contents(folder)
    log = RunLog.open(folder)
    log._pack()
    log.close()
    write_report(folder)
    assert contents(folder) == before == made_without_a_record(folder, tmp_path / "apart")


@pytest.mark.parametrize("damaged", [LOG_NAME, "run.0001.db"])
def test_a_damaged_log_is_an_error_though_its_report_is_there(folder: Path, damaged: str) -> None:
    append(folder)
    write_report(folder)
    path = folder / damaged
    path.chmod(0o600)
    whole = path.read_bytes()
    assert (b"1.25" in whole) == (damaged == LOG_NAME)
    path.write_bytes(whole.replace(b"1.25", b"9.25") if damaged == LOG_NAME else whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(LogError, match=damaged):
        write_report(folder)
