"""Several training ranks: the same weights and figures as one, in a gang that is run, switched and lost as one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from rlmux.core.actions import Admit, RunStage, Switch
from rlmux.core.events import PipelineRestarted
from rlmux.core.model import AdmissionKind, GroupId, NodeId, Placement, Stage
from rlmux.policies import make_policy
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.heartbeat import Activity

STEPS = 2
TRAIN_STAGES = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE)


def of_ranks(
    real, count: int, name: str = "sort", *, micro_batch_size: int = 2, num_steps: int = STEPS, **changes: Any
):
    """A tiny pipeline that trains on `count` devices: 4 micro-batches in each of two updates of a step."""
    given = real.submission(name, num_steps=num_steps, **changes)
    algorithm = replace(given.config.algorithm, micro_batch_size=micro_batch_size)
    train = replace(given.config.train, num_workers=count)
    return replace(
        given,
        config=replace(given.config, algorithm=algorithm, train=train),
        pipeline=replace(given.pipeline, num_train_nodes=count),
    )


def figures(run) -> list[Any]:
    """Everything that the steps of a run were noted with, hashes of the weights among it."""
    return [note for note in run.recorder.notes if note.type == "step"]


@pytest.fixture(scope="module")
def alone(real, tmp_path_factory):
    """One pipeline on one rank, undisturbed."""
    run = real.run(tmp_path_factory.mktemp("alone"), [of_ranks(real, 1)])
    assert run.status == {"sort": "finished"}
    return run


@pytest.mark.parametrize(("count", "chunk_s"), [(2, 0.0), pytest.param(4, 0.5, marks=pytest.mark.slow)])
def test_ranks_give_the_weights_and_figures_of_one_wherever_stages_are_cut(
    real, alone, tmp_path, count, chunk_s
) -> None:
    options = WorkerOptions(chunk_s=chunk_s)
    run = real.run(tmp_path, [of_ranks(real, count)], on=real.cluster(train=count), options=options)
    assert figures(run) == figures(alone)
    roles = [note.role for note in run.recorder.notes if note.type == "worker"]
    assert sum(role.startswith("train") for role in roles) == count


def test_ranks_with_running_sums_give_their_own_bits_wherever_stages_are_cut(real, alone, tmp_path) -> None:
    given = of_ranks(real, 2)
    train = replace(given.config.train, equal_across_ranks=False)
    given = replace(given, config=replace(given.config, train=train))
    whole = real.run(tmp_path / "whole", [given], on=real.cluster(train=2))
    options = WorkerOptions(chunk_s=0.0)
    cut = real.run(tmp_path / "cut", [given], on=real.cluster(train=2), options=options)
    assert figures(cut) == figures(whole)
    found, expected = figures(whole)[0].metrics, figures(alone)[0].metrics
    for name in ("reward_mean", "tokens", "entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2), name


@pytest.mark.slow
def test_ranks_in_bfloat16_give_the_weights_and_figures_of_one(real, tmp_path) -> None:
    def rounded(count: int):
        given = of_ranks(real, count, num_steps=1)
        train = replace(given.config.train, dtype="bfloat16")
        return replace(given, config=replace(given.config, train=train))

    one = real.run(tmp_path / "one", [rounded(1)])
    two = real.run(tmp_path / "two", [rounded(2)], on=real.cluster(train=2))
    assert one.status == {"sort": "finished"}
    assert figures(two) == figures(one)


@pytest.mark.slow
def test_ranks_without_a_micro_batch_of_their_own_change_nothing(real, tmp_path) -> None:
    def all_in_one(count: int):
        given = of_ranks(real, count)
        train = replace(given.config.train, tokens_per_micro_batch=10_000)  # one micro-batch in an update
        return replace(given, config=replace(given.config, train=train))

    one = real.run(tmp_path / "one", [all_in_one(1)])
    four = real.run(tmp_path / "four", [all_in_one(4)], on=real.cluster(train=4))
    assert figures(four) == figures(one)


class KillsARank:
    """Kills the second rank while an update of step 2 is under way."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def __call__(self, backend, recorder) -> bool:
        is_due = any(
            isinstance(action, RunStage) and action.step == 2 and action.stage is Stage.UPDATE
            for action in recorder.actions
        )
        if is_due and not self.killed:
            (workers,) = backend.workers_by_pipeline.values()
            pid = workers.trainers[1].pid
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)
        return False


def test_a_rank_that_dies_in_a_step_takes_its_gang_back_to_the_checkpoint(real, make_backend, alone, tmp_path) -> None:
    kills = KillsARank()
    on = real.cluster(train=2)
    run = real.run(tmp_path, [of_ranks(real, 2)], on=on, watch=kills, make_backend=make_backend)
    assert run.status == {"sort": "finished"}
    assert kills.killed
    (restart,) = [event for event in run.recorder.events if isinstance(event, PipelineRestarted)]
    assert restart.restored_step == 1
    assert figures(run) == figures(alone)


def test_the_rank_that_is_stopped_is_named_and_not_one_that_waits_for_it(real, tmp_path) -> None:
    workplace, given = real.Workplace(), of_ranks(real, 2)
    (tmp_path / "weights").mkdir()
    backend = WorkerBackend(real.cluster(train=2), tmp_path, workplace, tmp_path / "weights")
    backend.add_pipeline(given)
    train_nodes = (NodeId("train", 0), NodeId("train", 1))
    place = Placement(group=GroupId(1), rollout_nodes=(NodeId("rollout", 0),), train_nodes=train_nodes)
    backend.execute(Admit(pipeline=given.pipeline.id, placement=place, kind=AdmissionKind.NEW))
    for name, state in (("sort/train", "S"), ("sort/train-1", "T")):
        worker = workplace.workers[name]
        worker.is_overdue = lambda now_s: True
        worker.activity = lambda state=state: Activity(state=state, cpu_s=1.0)
    _, notes = backend.poll(0.0)
    (loss,) = [note.reason for note in notes if note.type == "loss"]
    assert loss.startswith("sort/train-1 gave no answer in time")


@pytest.mark.slow
@pytest.mark.parametrize("other_count", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_pipelines_that_share_training_devices_have_the_weights_of_alone(real, alone, tmp_path, other_count) -> None:
    on = real.cluster(train=2)
    other = of_ranks(real, other_count, "tool", seed=2, task="calculator")
    other_alone = real.run(tmp_path / "other", [other], on=on)
    shared = real.run(tmp_path / "shared", [of_ranks(real, 2), other], on=on)
    assert shared.sha256 == {**alone.sha256, **other_alone.sha256}
    orders = [action for action in shared.recorder.actions if isinstance(action, RunStage)]
    of_gang = [one for one in orders if one.pipeline == "sort" and one.stage in TRAIN_STAGES]
    assert {len(one.devices) for one in of_gang} == {2}
    assert Switch.WARM in {one.switch for one in of_gang}, "its state left the devices and came back"


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_another_number_of_ranks(real, alone, tmp_path) -> None:
    on, folder = real.cluster(train=4), tmp_path / "run"

    def interrupt(now_s, events, actions, notes) -> None:
        if any(note.type == "step" and note.step == 1 for note in notes):
            os.kill(os.getpid(), signal.SIGINT)

    listener = type("Interrupts", (), {"update": staticmethod(interrupt)})()
    policy = make_policy("rollmux")
    stopped = run_pipelines(on, [of_ranks(real, 2)], policy, folder, RunOptions(listeners=[listener]), spec={})
    assert not stopped.is_complete
    result = resume_pipelines(on, [of_ranks(real, 4)], make_policy("rollmux"), folder)
    assert result.summary["pipelines"]["sort"]["weights_sha256"] == alone.sha256["sort"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_ranks_on_several_ray_nodes_without_shared_memory_give_the_weights_of_one(
    real, alone, nodes, tmp_path, monkeypatch
) -> None:
    from rlmux.runtime.ray.weight_delivery import Deliveries

    second = nodes.add(train=2)
    try:
        apart = nodes.make_backend(is_sharing_memory=False)
        on = real.cluster(train=4)
        with monkeypatch.context() as patch:
            patch.setattr(Deliveries, "_begin", counting(senders := [], Deliveries._begin))
            run = real.run(tmp_path / "whole", [of_ranks(real, 4)], on=on, make_backend=apart)
            cut = real.run(tmp_path / "cut", [in_parts(of_ranks(real, 4))], on=on, make_backend=apart)
        cut_here = real.run(tmp_path / "here", [in_parts(of_ranks(real, 4))], on=on)
    finally:
        nodes.ray.remove_node(second)
    assert figures(run) == figures(alone)
    assert figures(cut) == figures(cut_here)
    assert senders == [2] * 2 * (STEPS + 1), "each version, the first too, came from both training nodes"


def in_parts(given):
    return replace(given, config=replace(given.config, train=replace(given.config.train, sharding="shard")))


def counting(senders: list[int], begin: Any) -> Any:
    """Notes how many senders each delivery has."""

    def begin_and_note(self, name, of_delivery, receivers):
        senders.append(len(of_delivery))
        return begin(self, name, of_delivery, receivers)

    return begin_and_note
