"""A call is given up when it neither ends nor shows that it lives: long ones may take as long as they compute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.config.load import load_spec
from rlmux.core.errors import SpecError
from rlmux.core.model import Pipeline
from rlmux.rl.config import TaskConfig, TrainingConfig
from rlmux.rl.types import FinishedTurn
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.launch import submissions
from rlmux.runtime.weights.checkpoints import is_due
from rlmux.runtime.workers.processes import WorkerProcess

LIMIT_S = 2.5
WORKER = """
import time
from contextlib import nullcontext
from rlmux.runtime.workers.heartbeat import beat, beating


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Worker:
    def computes(self, seconds, is_long):
        with beating() if is_long else nullcontext():
            compute(seconds)

    def hangs(self, is_long):
        with beating() if is_long else nullcontext():
            time.sleep(600)

    def answers(self, number):
        for _ in range(number):
            time.sleep(0.5)
            beat()

    def answers_at_once(self, number):
        for _ in range(number):
            beat()
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_timed_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path / "code")
    from my_timed_worker import Worker

    worker = WorkerProcess("p/train", Worker, (), cores=(), log_path=tmp_path / "log", call_limit_s=LIMIT_S)
    said: list[Any] = []
    worker.call(time.monotonic(), "build", (), said.append)
    while not said:
        worker.receive(time.monotonic())
    yield worker
    worker.kill()


def is_given_up(worker: WorkerProcess, method: str, *args: Any) -> bool:
    """Whether the call is overdue before it is answered."""
    said: list[Any] = []
    worker.call(time.monotonic(), method, args, said.append)
    while not said:
        if worker.connection.poll(0.05):
            worker.receive(time.monotonic())
        if worker.is_overdue(time.monotonic()):
            return True
    return False


@pytest.mark.slow
def test_a_long_call_that_computes_is_never_given_up(worker: WorkerProcess) -> None:
    assert not is_given_up(worker, "computes", 2 * LIMIT_S, True)
    assert worker.num_beats >= 2


@pytest.mark.parametrize(("method", "args"), [("hangs", (True,)), ("hangs", (False,)), ("computes", (600.0, False))])
def test_a_call_that_hangs_is_given_up_and_a_bounded_one_that_does_not_end(
    worker: WorkerProcess, method: str, args: tuple[Any, ...]
) -> None:
    assert is_given_up(worker, method, *args)


def test_each_answer_of_user_code_is_a_sign_of_life(worker: WorkerProcess) -> None:
    assert not is_given_up(worker, "answers", 8)
    assert worker.num_beats == 8


def test_answers_of_one_moment_are_one_sign_of_life(worker: WorkerProcess) -> None:
    assert not is_given_up(worker, "answers_at_once", 1000)
    assert worker.num_beats <= 2


def test_the_env_worker_shows_life_after_every_reward() -> None:
    num_answers = 0

    def count() -> None:
        nonlocal num_answers
        num_answers += 1

    env = PipelineEnv(TrainingConfig(name="p", num_steps=1, task=TaskConfig(name="sort")), on_answer=count)
    requests = env.begin_step(1)
    before = num_answers
    env.on_turns(
        [
            FinishedTurn(
                id=request.id, tokens=(3,), is_sampled=(True,), logprobs=(-1.0,), versions=(0,),
                stop_reason="stop", num_turns=1,
            )
            for request in requests
        ]
    )  # fmt: skip
    assert num_answers - before == len(requests)


FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults: {checkpoint_every: 4}
pipelines:
  - {name: a, task: sort, steps: 2, call_limit_s: 7, keep_checkpoints: 3}
  - {name: b, task: sort, steps: 2, checkpoint_every: 5}
"""


def test_limits_and_checkpoints_are_keys_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(FILE)
    base = WorkerOptions(chunk_s=0.25)
    a, b = (one.worker_options(base) for one in submissions(load_spec(path)))
    assert (a.call_limit_s, a.checkpoint_every, a.keep_checkpoints, a.chunk_s) == (7.0, 4, 3, 0.25)
    assert (b.call_limit_s, b.checkpoint_every, b.keep_checkpoints, b.chunk_s) == (120.0, 5, 2, 0.25)


LARGE = "model: {hidden_size: 4096, layers: 32, intermediate_size: 12288, heads: 32}"


@pytest.mark.parametrize(
    ("keys", "interval"),
    [
        ("", 1),
        (LARGE, 10),
        (f"{LARGE}, checkpoint_every: 1", 1),
        (f"{LARGE}, checkpoint_every: 3", 3),
        (f"{LARGE}, adapter: {{rank: 4, alpha: 8}}", 1),
    ],
)
def test_what_trains_a_billion_parameters_has_fewer_checkpoints_unless_the_file_says_how_many(
    tmp_path: Path, keys: str, interval: int
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(FILE.replace("defaults: {checkpoint_every: 4}", "").replace("checkpoint_every: 5", keys))
    _, given = submissions(load_spec(path))
    assert given.checkpoint_every == interval
    due = [step for step in range(1, 31) if is_due(replace(given, pipeline=stale(given)), step, interval)]
    assert all(step in due for step in range(interval, 31, interval))
    assert all({step - 1, step} <= set(due) for step in range(interval, 31, interval) if step > 1)


def stale(given: Submission) -> Pipeline:
    """The pipeline with a staleness of 1, whose checkpoints come with the one before them."""
    return replace(given.pipeline, staleness=1)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("checkpoint_every", "0", "1 or more"),
        ("keep_checkpoints", "none", "a whole number"),
        ("call_limit_s", "-1", "more than 0"),
        ("call_limits_s", "5", "keep_checkpoints, call_limit_s"),
    ],
)
def test_a_mistake_in_one_of_them_is_named_with_its_line(tmp_path: Path, key: str, value: str, accepted: str) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(FILE.replace("checkpoint_every: 5", f"{key}: {value}"))
    with pytest.raises(SpecError, match=rf"two\.yaml:6: .*{key}") as error:
        load_spec(path)
    assert accepted in str(error.value)
