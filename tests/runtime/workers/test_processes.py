"""A worker process: what user code may do in it, how its end is named, and that a trainer leaves its checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import PipelineError, WorkerLostError
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


SCORER = """
import os, signal, subprocess, time
from multiprocessing import Pool
from rlmux.rl.loading import call_each


class Scorer:
    def pools(self):
        with Pool(1) as pool:
            return pool.map(abs, [-2])

    def scores(self, how):
        call_each([("reward r:score at step 2, prompt 1", getattr(self, how))], 60.0)

    def exits(self):
        os._exit(7)

    def leaves(self):
        raise SystemExit("bye")

    def crashes(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def exits_as_without_a_fork_server(self):
        os._exit(255)

    def exits_beside_a_child(self):
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
"""


def asked(worker: WorkerProcess, method: str, *args: Any) -> Any:
    said: list[Any] = []
    worker.call(time.monotonic(), method, args, said.append)
    while not said:
        worker.receive(time.monotonic())
    return said[0]


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    (tmp_path / "my_scorer.py").write_text(SCORER)
    monkeypatch.syspath_prepend(tmp_path)
    from my_scorer import Scorer

    worker = WorkerProcess("p/env", Scorer, (), cores=(), log_path=tmp_path / "log", call_limit_s=60.0)
    yield worker
    worker.kill()


def test_user_code_may_start_processes_of_its_own(scorer):
    assert asked(scorer, "pools") == [2]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("exits", PipelineError, "reward r:score at step 2, prompt 1 ended its process (os._exit, exit code 7)"),
        ("exits_beside_a_child", PipelineError, "reward r:score at step 2, prompt 1 ended its process"),
        (
            "exits_as_without_a_fork_server",  # a borrowed one that was killed: not the user's code's doing
            WorkerLostError,
            "p/env is gone (exit code 255, in reward r:score at step 2, prompt 1)",
        ),
        ("leaves", PipelineError, "reward r:score at step 2, prompt 1 raised SystemExit: bye"),
        ("crashes", WorkerLostError, "p/env is gone (killed by SIGSEGV, in reward r:score at step 2, prompt 1)"),
    ],
)
def test_a_call_of_user_code_that_ends_its_process_is_named(scorer, how, error, text):
    with pytest.raises(error, match=re.escape(text)):
        asked(scorer, "scores", how)


def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerProcess:
    """A trainer that has begun to write `tmp_path/step_1`."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "my_slow_trainer.py").write_text(WORKER)
    monkeypatch.syspath_prepend(code)
    from my_slow_trainer import Trainer

    worker = WorkerProcess("p/train", Trainer, (), cores=(), log_path=tmp_path / "log", call_limit_s=60.0)
    asked(worker, "build")
    asked(worker, "hands_out", tmp_path / "step_1")
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
