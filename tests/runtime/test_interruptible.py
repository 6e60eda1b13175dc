"""Interruptible rollouts for real: the same versions of tokens and the same weights, however a pipeline is run."""

from __future__ import annotations

import os
import signal

import pytest
from tests.runtime.killed_runs import check_killed_twice

from rlmux.core.actions import MigrateShard
from rlmux.core.decision.plan import GroupPlan, PauseOrder
from rlmux.core.decision.policy import Policy
from rlmux.core.events import ChunkFinished, PipelineRestarted, WorkerLost
from rlmux.core.model import Stage
from rlmux.policies.lookahead.dispatching import start_oldest_first
from rlmux.policies.rollmux import RollMux
from rlmux.rl.config import InterruptibleConfig
from rlmux.runtime.backend import WorkerOptions

STEPS = 6
FINE = WorkerOptions(chunk_decode_steps=2)
MODES = {"partial": (2, 0), "overlap": (2, 9), "synchronous": (0, 0)}
"""(staleness, overlap_ticks) by name."""


def interruptible(real, mode="overlap", *, name="p", devices=1, **changes):
    """Batches of 4 prompts with 4 answers each, 12 of which have a slot at once."""
    staleness, overlap_ticks = MODES[mode]
    one = real.submission(name, num_steps=STEPS, max_new_tokens=32, num_rollout_nodes=devices)
    setting = InterruptibleConfig(num_slots=12, overlap_ticks=overlap_ticks)
    rollout = real.replace(one.config.rollout, num_workers=devices, interruptible=setting)
    config = real.replace(
        one.config,
        rollout=rollout,
        sft_warmup=real.replace(one.config.sft_warmup, num_updates=30),
        algorithm=real.replace(one.config.algorithm, staleness=staleness, objective="decoupled"),
    )
    pipeline = real.replace(one.pipeline, staleness=min(1, overlap_ticks))
    return real.replace(one, config=config, pipeline=pipeline)


@pytest.fixture(scope="module", params=[pytest.param("partial", marks=pytest.mark.slow), "overlap"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def alone(real, mode, tmp_path_factory):
    return real.run(tmp_path_factory.mktemp("alone"), [interruptible(real, mode)], policy="solo")


def steps(run, name="p"):
    """What each step trained on, in numbers."""
    notes = [note for note in run.recorder.notes if note.type == "step" and note.pipeline == name]
    keys = ("tokens", "interrupted_trajectories", "staleness_max", "backlog_trajectories")
    return {note.step: tuple(note.metrics[key] for key in keys) for note in notes}


def same(run, alone):
    assert run.status["p"] == "finished", run.recorder.notes
    return (run.sha256["p"], steps(run)) == (alone.sha256["p"], steps(alone))


def test_trajectories_have_tokens_of_several_versions_within_the_bound(alone):
    assert alone.status == {"p": "finished"}, alone.recorder.notes
    found = list(steps(alone).values())
    assert len(found) == STEPS
    assert sum(interrupted for _, interrupted, _, _ in found) > 0
    assert 1 <= max(stale for _, _, stale, _ in found) <= 2
    assert found[-1][3] == 0, "all prompts are trained on"


@pytest.mark.slow
def test_without_staleness_and_overlap_it_is_the_synchronous_pipeline_bit_for_bit(real, tmp_path):
    one = interruptible(real, "synchronous")
    plain = real.replace(
        one, config=real.replace(one.config, rollout=real.replace(one.config.rollout, interruptible=None))
    )
    run, expected = (real.run(tmp_path / name, [each], policy="solo") for name, each in (("a", one), ("b", plain)))
    assert run.sha256 == expected.sha256


def test_two_devices_in_chunks_of_two_steps_end_with_the_same_weights(real, mode, make_backend, alone, tmp_path):
    run = real.run(
        tmp_path / "run",
        [interruptible(real, mode, devices=2)],
        policy="solo",
        on=real.cluster(rollout=2),
        options=FINE,
        make_backend=make_backend,
    )
    assert same(run, alone)


class PausesEverything(Policy):
    """Pauses every order at its first progress report."""

    name = "pauses"
    reacts_to_progress = True
    place = RollMux().place
    rebalance = RollMux().rebalance

    def __init__(self) -> None:
        self.seen: set[object] = set()

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        plan.choose(*start_oldest_first(plan))
        for order in plan.running:
            if order.num_active is not None and order.id not in self.seen:
                self.seen.add(order.id)
                plan.choose(PauseOrder(order=order.id))
        return plan


@pytest.mark.slow
def test_beside_another_pipeline_with_every_order_paused_it_ends_with_the_same_weights(real, mode, alone, tmp_path):
    pair = [interruptible(real, mode), real.submission("other", seed=2)]
    run = real.run(tmp_path / "run", pair, policy=PausesEverything(), options=FINE)
    assert run.status["other"] == "finished"
    assert same(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("copies_kv", [True, False])
def test_shards_that_migrate_in_the_middle_of_a_leg_end_with_the_same_weights(real, mode, alone, tmp_path, copies_kv):
    run = real.run(
        tmp_path / "run",
        [real.migrating(interruptible(real, mode, devices=2), copies_kv=copies_kv)],
        policy=real.MovesEverything(),
        on=real.cluster(rollout=2),
        options=WorkerOptions(chunk_decode_steps=1),
    )
    assert sum(isinstance(action, MigrateShard) for action in run.recorder.actions) >= STEPS
    assert same(run, alone)


class Kills:
    """Kills a worker of each role in the middle of rollouts, in the steps given."""

    def __init__(self, victims: dict[int, str]) -> None:
        self.victims, self.seen, self.step = victims, 0, 0

    def __call__(self, backend, recorder) -> bool:
        for action in recorder.actions[self.seen :]:
            self.step = action.step if getattr(action, "stage", None) is Stage.GENERATE else self.step
        self.seen = len(recorder.actions)
        is_under_way = recorder.events and isinstance(recorder.events[-1], ChunkFinished)
        if is_under_way and self.step in self.victims:
            role = self.victims.pop(self.step)
            notes = [note for note in recorder.notes if note.type == "worker"]
            os.kill([note.pid for note in notes if note.role.startswith(role)][-1], signal.SIGKILL)
        return False


@pytest.mark.slow
def test_workers_killed_in_mid_leg_cost_time_only(real, mode, alone, tmp_path):
    kills = Kills({2: "rollout", 3: "env", 5: "rollout", 6: "train"})
    run = real.run(
        tmp_path / "run",
        [interruptible(real, mode)],
        policy="solo",
        options=WorkerOptions(chunk_decode_steps=1),
        watch=kills,
    )
    assert kills.victims == {}
    lost = [event for event in run.recorder.events if isinstance(event, WorkerLost | PipelineRestarted)]
    assert {type(event) for event in lost} == {WorkerLost, PipelineRestarted}
    assert same(run, alone)


FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults:
  steps: 7
  model: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64}
  sft_warmup: {updates: 20, batch_size: 16}
  rollout: {max_new_tokens: 32, slots: 8, interruptible: {slots: 12, overlap_ticks: 7}}
  algorithm: {prompts_per_step: 4, group_size: 4, micro_batch_size: 4, staleness: 2, objective: decoupled}
pipelines:
  - {name: sort, seed: 1, task: sort}
  - {name: reverse, seed: 2, task: reverse}
"""


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_weights_of_a_run_left_alone(tmp_path):
    """The backlog comes back from the checkpoint; the verdict of `rlmux verify` is the same."""
    assert check_killed_twice(tmp_path, FILE) == [7], "restored from the checkpoint before it"
