"""One pipeline's fault is its own: it fails with a reason and a traceback, the others do not notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.events import PipelineFailed, WorkerLost
from rlmux.core.model import FailureCause
from rlmux.runtime.backend import WorkerOptions

USER_CODE = FailureCause.USER_CODE

REWARDS = """
import os, sys, time

def raises(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("gold")

def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return float("nan")

def garbage(data_source, solution_str, ground_truth, extra_info):
    return {"reward": "high"}

def hangs(data_source, solution_str, ground_truth, extra_info):
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass

def leaves(data_source, solution_str, ground_truth, extra_info):
    sys.exit("enough")

def vanishes(data_source, solution_str, ground_truth, extra_info):
    os._exit(7)

def crashes(data_source, solution_str, ground_truth, extra_info):
    os.abort()
"""

CASES = {
    "raises": (["my_bad_rewards:raises", "KeyError", "gold"], "KeyError: 'gold'"),
    "not_a_number": (["nan"], "Traceback"),
    "garbage": (["my_bad_rewards:garbage"], "Traceback"),
    "hangs": (["did not return within 0.3 s"], "Traceback"),
    "leaves": (["SystemExit", "enough"], "SystemExit: enough"),
    "vanishes": (["ended its process", "exit code 7"], ""),
    "crashes": (["SIGABRT", "lost 3 times"], "Fatal Python error: Aborted"),
}
"""By name of the reward: what the reason says, and what its folder's workers.log has."""


@pytest.fixture(scope="module")
def good(real):
    return real.submission("good", seed=1, num_steps=3)


@pytest.fixture(scope="module")
def alone(real, good, tmp_path_factory):
    return real.run(tmp_path_factory.mktemp("alone"), [good])


def bad(real, name: str):
    submission = real.submission(name, seed=3, num_steps=3)
    limit_s = 0.3 if name == "hangs" else 60.0  # the others are to fail of what they do, on a busy machine too
    task = replace(submission.config.task, reward=f"my_bad_rewards:{name}", reward_timeout_s=limit_s)
    return replace(submission, config=replace(submission.config, task=task))


@pytest.mark.slow
def test_whatever_user_code_does_its_pipeline_alone_fails(real, make_backend, good, alone, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_bad_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    given = [good, *(bad(real, name) for name in CASES)]
    run = real.run(tmp_path / "run", given, options=WorkerOptions(max_losses=2), make_backend=make_backend)
    assert run.status == {"good": "finished", **dict.fromkeys(CASES, "failed")}
    assert run.sha256["good"] == alone.sha256["good"]
    failures = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    reasons = {event.pipeline: event.reason for event in failures}
    assert {event.cause for event in failures if event.pipeline != "crashes"} == {USER_CODE}
    for name, (words, logged) in CASES.items():
        assert all(word in reasons[name] for word in words), reasons[name]
        assert "\n" not in reasons[name]
        assert logged in (tmp_path / "run" / name / "workers.log").read_text()
    query = run.scheduler.query
    assert all(not query.held_fraction(device) and not query.num_residents(device) for device in query.devices())


@pytest.mark.slow
def test_numbers_that_blow_up_fail_their_pipeline(real, make_backend, good, alone, tmp_path):
    submission = real.submission("wild", seed=3, num_steps=3)
    algorithm = replace(submission.config.algorithm, learning_rate=1e30)
    wild = replace(submission, config=replace(submission.config, algorithm=algorithm))
    run = real.run(tmp_path / "run", [wild, good], make_backend=make_backend)
    assert run.status == {"wild": "failed", "good": "finished"}
    (failure,) = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    assert "finite" in failure.reason or "nan" in failure.reason or "inf" in failure.reason
    assert run.sha256["good"] == alone.sha256["good"]


POISON = """
import os

from rlmux.runtime.workers.planned_workers import RolloutWorker


class Poisonable(RolloutWorker):
    def run_chunk(self, chunk):
        if any((request.id.step, request.id.prompt) == (2, 1) for request in chunk.requests):
            os.abort()
        return super().run_chunk(chunk)
"""


@pytest.mark.slow
def test_a_prompt_that_crashes_the_engine_each_time_fails_its_pipeline_alone(
    real, make_backend, good, alone, tmp_path, monkeypatch
):
    """The engine dies in C whenever it is given that prompt, in a new process as in the one before."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_poisonable_worker.py").write_text(POISON)
    monkeypatch.syspath_prepend(tmp_path / "code")
    from my_poisonable_worker import Poisonable

    def make_poisonable_backend(*given, **options):
        backend = make_backend(*given, **options)
        spawn = backend.workplace.spawn

        def spawn_poisonable(name, make_worker, args, **more):
            is_poisonable = name.startswith("poisoned/rollout")
            return spawn(name, Poisonable if is_poisonable else make_worker, args, **more)

        backend.workplace.spawn = spawn_poisonable
        return backend

    poisoned = real.submission("poisoned", seed=3, num_steps=3)
    run = real.run(
        tmp_path / "run",
        [good, poisoned],
        options=WorkerOptions(max_losses=2),
        make_backend=make_poisonable_backend,
    )
    assert run.status == {"good": "finished", "poisoned": "failed"}
    assert run.sha256["good"] == alone.sha256["good"]
    (failure,) = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    assert "SIGABRT" in failure.reason
    assert "lost 3 times" in failure.reason
    assert sum(isinstance(event, WorkerLost) for event in run.recorder.events) == 2
    log = (tmp_path / "run" / "poisoned" / "workers.log").read_text()
    assert log.count("Fatal Python error: Aborted") == 3
    assert "my_poisonable_worker.py" in log
    query = run.scheduler.query
    assert all(not query.held_fraction(device) and not query.num_residents(device) for device in query.devices())
