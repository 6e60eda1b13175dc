"""A worker process at its end: a trainer's checkpoint is on disk before it leaves, where the run is stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import WorkerProcess

WORKER = """
import time
from pathlib import Path
from rlmux.runtime.weights.checkpoints import CheckpointWriter


class Trainer:
    def __init__(self):
        self.checkpoints = CheckpointWriter()

    def hands_out(self, folder):
        def write(path):
            time.sleep(1.0)  # a large model on a slow disk
            Path(path).write_text("whole")
            return "sha"

        self.checkpoints.begin(folder, lambda: write)
"""


def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerProcess:
    """A trainer that has begun to write `tmp_path/step_1`."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "my_slow_trainer.py").write_text(WORKER)
    monkeypatch.syspath_prepend(code)
    from my_slow_trainer import Trainer

    worker = WorkerProcess("p/train", Trainer, (), cores=(), log_path=tmp_path / "log", call_limit_s=60.0)
    for method, args in (("build", ()), ("hands_out", (tmp_path / "step_1",))):
        said: list[Any] = []
        worker.call(time.monotonic(), method, args, said.append)
        while not said:
            worker.receive(time.monotonic())
    return worker


@pytest.mark.parametrize("finishes", [True, False])
def test_a_stopped_runs_trainer_leaves_once_its_checkpoint_is_written(tmp_path, monkeypatch, finishes):
    monkeypatch.setattr(processes, "_END_GRACE_S", 0.05)
    trainer(tmp_path, monkeypatch).end(finishes_checkpoint=finishes)
    assert (tmp_path / "step_1").exists() is finishes


def test_a_trainer_that_a_signal_stopped_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_END_GRACE_S", 0.05)
    worker = trainer(tmp_path, monkeypatch)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    worker.end(finishes_checkpoint=True)
    assert not (tmp_path / "step_1").exists()
