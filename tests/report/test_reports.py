"""Reports come from the log alone, at any time, whole or not at all."""

from __future__ import annotations

import json
import re
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import LogError, StorageError
from rlmux.log.run_log import LOG_NAME, RunLog
from rlmux.report.report_cache import MADE_NAME
from rlmux.report.reports import load_summary, read_timeline, write_report
from rlmux.report.timeline.intervals import Cause

FILES = {"summary.json", "trace.json", "timeline.html"}


def test_report_writes_three_files_beside_the_log(tmp_path: Path, alternating_run: Callable[..., Any]) -> None:
    folder = alternating_run().write(tmp_path / "run")
    summary = write_report(folder)
    assert {path.name for path in folder.iterdir()} == FILES | {LOG_NAME, MADE_NAME}
    assert load_summary(folder) == summary == json.loads((folder / "summary.json").read_text())
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert (folder / "timeline.html").read_text().startswith("<!doctype html>")
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in FILES)


def test_log_and_memory_tell_the_same(tmp_path: Path, alternating_run: Callable[..., Any]) -> None:
    run = alternating_run(failing="tools")
    from_log, in_memory = read_timeline(run.write(tmp_path / "run")), run.timeline()
    assert from_log.devices == in_memory.devices
    assert from_log.pipelines == in_memory.pipelines


def test_report_can_be_written_while_the_run_writes(tmp_path: Path, alternating_run: Callable[..., Any]) -> None:
    run = alternating_run()
    log = RunLog.create(tmp_path / "run", run.header)
    for index, row in enumerate(run.rows):
        if row.kind == "event":
            log.append_event(row.value)
        elif row.kind == "action":
            log.append_actions([row.value])
        else:
            log.note(row.type, row.time_s, **row.value)
        log.commit()
        if index % 60 == 0:
            write_report(tmp_path / "run")
    log.close()
    assert write_report(tmp_path / "run")["pipelines"]["sort"]["status"] == "finished"


@pytest.mark.parametrize("kept", [0.15, 0.5, 0.95])
def test_report_after_a_crash_with_a_torn_tail(
    tmp_path: Path, alternating_run: Callable[..., Any], kept: float
) -> None:
    run = alternating_run()
    log = RunLog.create(tmp_path / "live", run.header)
    log._connection.execute("PRAGMA wal_autocheckpoint = 0")
    for row in run.rows[: int(len(run.rows) * 0.8)]:
        if row.kind == "event":
            log.commit()
            log.append_event(row.value)
        elif row.kind == "action":
            log.append_actions([row.value])
    log.commit()
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    (crashed / LOG_NAME).write_bytes((tmp_path / "live" / LOG_NAME).read_bytes())
    wal = (tmp_path / "live" / (LOG_NAME + "-wal")).read_bytes()
    (crashed / (LOG_NAME + "-wal")).write_bytes(wal[: int(len(wal) * kept)])
    log.close()
    summary = write_report(crashed)
    assert 0.0 < summary["makespan_s"] < run.timeline().makespan_s
    assert summary["pipelines"]["sort"]["status"] == "running"


def test_report_replaces_what_was_there(tmp_path: Path, alternating_run: Callable[..., Any]) -> None:
    folder = alternating_run().write(tmp_path / "run")
    for name in FILES:
        (folder / name).write_text("old")
    write_report(folder)
    assert all((folder / name).read_text() != "old" for name in FILES)


def test_a_report_that_does_not_fit_on_the_disk_is_one_line(
    tmp_path: Path, alternating_run: Callable[..., Any]
) -> None:
    alternating_run().write(tmp_path)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
    try:
        with pytest.raises(StorageError, match=r"summary.json: cannot be written: File too large"):
            write_report(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert not list(tmp_path.glob(".summary*"))


def test_missing_log_or_summary_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no run log"):
        write_report(tmp_path)
    with pytest.raises(LogError, match=r"there is no summary\.json; `rlmux report` makes it"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(LogError, match="not JSON"):
        load_summary(tmp_path)


def test_docs_show_code_that_runs(
    tmp_path: Path, alternating_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[2] / "docs" / "reference" / "report.md"
    codes = re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    alternating_run().write(tmp_path / "runs" / "demo")
    for code in codes:
        exec(compile(code, str(docs), "exec"), {})
    assert len(codes) == 3
    assert (tmp_path / "runs" / "demo" / "timeline.html").exists()


def test_docs_name_every_cause() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "reference" / "report.md").read_text()
    for cause in Cause:
        assert str(cause).removeprefix("waiting for ") in docs
