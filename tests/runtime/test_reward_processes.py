"""A pipeline whose rewards run in processes of their own trains the same weights, and a fault in one is a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.events import PipelineFailed, WorkerLost

REWARDS = """
import os

def shares(prompts, completions, log_metric, **columns):
    log_metric("length", sum(map(len, completions)) / 7)
    return [len(set(each)) / 3 for each in completions]

def leaves(prompts, completions, **columns):
    os._exit(7)
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "process_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    return tmp_path


def pipeline(real: Any, name: str, function: str, num_processes: int) -> Any:
    submission = real.submission(name, seed=3)
    task = replace(submission.config.task, reward=f"process_rewards:{function}", num_reward_processes=num_processes)
    return replace(submission, config=replace(submission.config, task=task))


def test_a_pipeline_with_reward_processes_trains_the_weights_that_it_trains_without(real: Any, code: Path) -> None:
    runs = {number: real.run(code / f"run{number}", [pipeline(real, "a", "shares", number)]) for number in (0, 2)}
    assert {run.status["a"] for run in runs.values()} == {"finished"}
    assert runs[2].sha256["a"] == runs[0].sha256["a"]
    logged = [
        [note.metrics["reward/length"] for note in run.recorder.notes if note.type == "step"] for run in runs.values()
    ]
    assert logged[0] == logged[1]
    assert len(logged[0]) == 2


def test_a_reward_that_ends_its_process_fails_its_pipeline_and_loses_no_worker(real: Any, code: Path) -> None:
    run = real.run(code / "run", [pipeline(real, "a", "leaves", 2), pipeline(real, "b", "shares", 1)])
    assert run.status == {"a": "failed", "b": "finished"}
    (failure,) = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    assert "at step 1 prompt 0 sample 0 ended its process (exit code 7)" in failure.reason
    assert not [event for event in run.recorder.events if isinstance(event, WorkerLost)]
