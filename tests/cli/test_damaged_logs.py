"""A run folder whose log is damaged: every command that reads it says what can be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.core.events import NodeJoined
from rlmux.core.model import NodeId
from rlmux.log.run_log import LOG_NAME, RunLog, run_header
from rlmux.runtime.records.folders import RUN_HEADER


@pytest.fixture
def damaged(folder: Path) -> Path:
    """The folder of a run whose log lost its second half."""
    run = folder / "damaged"
    with RunLog.create(run, run_header(policy="rollmux", backend="local")) as log:
        for number in range(400):
            log.append_event(NodeJoined(time_s=number / 10, node=NodeId("rollout", number)))
            log.commit()
    path = run / LOG_NAME
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return run


@pytest.mark.parametrize(
    "words",
    [("report", "damaged"), ("status", "damaged", "--once"), ("status", "damaged", "--json"), ("resume", "damaged")],
    ids=" ".join,
)
def test_what_cannot_be_read_is_said_with_the_way_out(words, damaged, rlmux):
    said = rlmux(*words)
    assert said.code == 1
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "rlmux resume damaged --salvage" in said.err


def test_a_run_without_its_log_is_said_with_the_way_out(damaged, rlmux):
    (damaged / LOG_NAME).unlink()
    assert "rlmux resume" not in rlmux("report", "damaged").err, "nothing of a run is left"
    (damaged / RUN_HEADER).write_text("{}")
    said = rlmux("resume", "damaged")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert said.err.startswith("rlmux: damaged: holds no run (no run.db)")
    assert said.err.endswith("rlmux resume damaged --salvage\n")
