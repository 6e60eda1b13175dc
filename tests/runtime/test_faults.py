"""A worker that dies, hangs or runs out of memory costs time only."""

from __future__ import annotations

import os
import pickle
import resource
import signal
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import pytest
import torch

from rlmux.core.actions import RunStage
from rlmux.core.events import PipelineFailed, PipelineRestarted, WorkerLost
from rlmux.core.model import Stage
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.workers.worker_calls import TrainCall


def pair_of(real, num_steps: int) -> list:
    return [
        real.submission("sort", seed=1, num_steps=num_steps),
        real.submission("tool", seed=2, num_steps=num_steps, task="calculator", staleness=1),
    ]


def undisturbed_run(real, folder, pair):
    run = real.run(folder, pair)
    assert run.status == {"sort": "finished", "tool": "finished"}
    return run


@pytest.fixture(scope="module")
def pair(real):
    return pair_of(real, 5)


@pytest.fixture(scope="module")
def undisturbed(real, pair, tmp_path_factory):
    return undisturbed_run(real, tmp_path_factory.mktemp("undisturbed"), pair)


def pid_of(recorder, pipeline: str, role: str) -> int | None:
    """None until its present process is known."""
    pids = [
        note.pid
        for note in recorder.notes
        if note.type == "worker" and note.pipeline == pipeline and note.role.startswith(role)
    ]
    return pids[-1] if pids else None


class KillsAtStages:
    """Kills a worker as a stage begins (or, where its process is not known yet, soon after), one after another."""

    def __init__(self, pipeline: str, victims: Sequence[tuple[str, Stage]]) -> None:
        self.left = list(victims)
        self.pipeline = pipeline
        self.seen = 0
        self.is_due = False

    def __call__(self, backend, recorder) -> bool:
        new, self.seen = recorder.actions[self.seen :], len(recorder.actions)
        if not self.left:
            return False
        role, stage = self.left[0]
        self.is_due |= any(
            isinstance(action, RunStage) and action.step > 0
            and (action.pipeline, action.stage) == (self.pipeline, stage)
            for action in new
        )  # fmt: skip
        pid = pid_of(recorder, self.pipeline, role)
        if self.is_due and pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.left.pop(0)
            self.is_due = False
        return False


ROLES = ("rollout", "train", "env")
STAGES = (Stage.GENERATE, Stage.REFERENCE_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)


def assert_only_time_is_lost(real, make_backend, pair, undisturbed, folder, name, victims) -> None:
    kills = KillsAtStages(name, victims)
    run = real.run(folder, pair, watch=kills, make_backend=make_backend)
    assert run.status == undisturbed.status, run.recorder.events[-3:]
    assert kills.left == []
    lost = [event for event in run.recorder.events if isinstance(event, WorkerLost | PipelineRestarted)]
    assert {event.pipeline for event in lost} == {name}
    assert run.sha256 == undisturbed.sha256


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sort", "tool"])
def test_any_worker_may_die_as_any_stage_begins(real, make_backend, tmp_path, name):
    pair = pair_of(real, 10)
    undisturbed = undisturbed_run(real, tmp_path / "undisturbed", pair)
    victims = [(role, stage) for stage in STAGES for role in ROLES]
    assert_only_time_is_lost(real, make_backend, pair, undisturbed, tmp_path / "run", name, victims)


def test_a_worker_of_each_role_may_die(real, make_backend, pair, undisturbed, tmp_path):
    """On Ray a new worker costs a process of Ray's beside its own; every role at every stage is slow there."""
    victims = [("rollout", Stage.GENERATE), ("env", Stage.GENERATE), ("train", Stage.UPDATE)]
    assert_only_time_is_lost(real, make_backend, pair, undisturbed, tmp_path / "run", "sort", victims)


def once_at(pipeline: str, stage: Stage, step: int, act):
    """Calls `act(backend, recorder)` as that stage of that step begins, once. Its workers are known long before."""
    done = []

    def watch(backend, recorder) -> bool:
        is_there = any(
            isinstance(action, RunStage) and (action.pipeline, action.stage, action.step) == (pipeline, stage, step)
            for action in recorder.actions
        )
        if is_there and not done:
            done.append(True)
            act(backend, recorder)
        return False

    return watch


@pytest.mark.parametrize("role", ["rollout", pytest.param("train", marks=pytest.mark.slow)])
def test_a_worker_that_hangs_is_replaced(real, make_backend, pair, undisturbed, tmp_path, role):
    stage = Stage.GENERATE if role == "rollout" else Stage.UPDATE
    stopped = []

    def stop(backend, recorder):
        """And let its call take no longer: those before it, of processes that begin, take as long as they take."""
        stopped.append(pid_of(recorder, "sort", role))
        os.kill(stopped[0], signal.SIGSTOP)
        (worker,) = [one for one in backend.workers_by_pipeline["sort"].processes if one.pid == stopped[0]]
        worker.call_limit_s = 0.5

    run = real.run(tmp_path / "run", pair, watch=once_at("sort", stage, 3, stop), make_backend=make_backend)
    assert not psutil.pid_exists(stopped[0])
    assert any(note.type == "loss" and "no answer" in note.reason for note in run.recorder.notes)
    assert run.sha256 == undisturbed.sha256


class Storage(NamedTuple):
    """The storage of a tensor of so many bytes, once it is unpickled."""

    num_bytes: int

    def __reduce__(self):
        return torch.UntypedStorage, (self.num_bytes,)


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_is_replaced(real, make_backend, pair, undisturbed, tmp_path):
    def leave_no_memory(backend, recorder):
        """And have it ask for some: what its allocator has kept may do for the rest of the run."""
        trainer = backend.workers_by_pipeline["sort"].trainer
        used = psutil.Process(trainer.pid).memory_info().vms
        resource.prlimit(trainer.pid, resource.RLIMIT_AS, (used // 2, used // 2))
        payload = pickle.dumps(Storage(used))
        call = TrainCall(stage=Stage.UPDATE, payload=payload, max_seconds=1.0, is_load_needed=False)
        trainer.call(backend.now_s(), "run_stage", (call,), lambda _: None)

    watch = once_at("sort", Stage.REFERENCE_LOGPROBS, 3, leave_no_memory)
    run = real.run(tmp_path / "run", pair, watch=watch, make_backend=make_backend)
    (loss,) = [note.reason for note in run.recorder.notes if note.type == "loss"]
    assert "out of memory" in loss or "is gone" in loss
    assert run.sha256 == undisturbed.sha256


@pytest.mark.slow
def test_the_fork_server_itself_may_die(real, make_backend, pair, undisturbed, tmp_path):
    """All workers die with it; each pipeline begins again from its checkpoint, from a new fork server."""

    def kill_its_parent(backend, recorder):
        os.kill(psutil.Process(pid_of(recorder, "sort", "env")).ppid(), signal.SIGKILL)

    watch = once_at("sort", Stage.UPDATE, 4, kill_its_parent)
    run = real.run(tmp_path / "run", pair, watch=watch, make_backend=make_backend)
    restarted = {event.pipeline for event in run.recorder.events if isinstance(event, PipelineRestarted)}
    assert restarted == {"sort", "tool"}
    assert run.sha256 == undisturbed.sha256


def test_a_worker_that_always_dies_fails_its_pipeline_after_a_few_tries(
    real, make_backend, pair, undisturbed, tmp_path
):
    killed = []

    def kill_every_env_worker_of_sort(backend, recorder) -> bool:
        pids = [note.pid for note in recorder.notes if note.type == "worker"
                 and (note.pipeline, note.role) == ("sort", "env")]  # fmt: skip
        if pids and pids[-1] is not None and pids[-1] not in killed:
            killed.append(pids[-1])
            os.kill(pids[-1], signal.SIGKILL)
        return False

    options = WorkerOptions(max_losses=2)
    run = real.run(
        tmp_path / "run", pair, watch=kill_every_env_worker_of_sort, options=options, make_backend=make_backend
    )
    (failure,) = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    assert failure.pipeline == "sort"
    assert "sort/env" in failure.reason
    assert "3 times" in failure.reason
    assert len(killed) == 3
    assert run.status == {"sort": "failed", "tool": "finished"}
    assert run.sha256["tool"] == undisturbed.sha256["tool"]
