"""Tail batching for real: the same rounds and the same weights, however a pipeline is run."""

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
from rlmux.rl.config import TailBatchingConfig
from rlmux.runtime.backend import WorkerOptions

STEPS = 6
FINE = WorkerOptions(chunk_decode_steps=2)


def racing(real, name="racer", *, devices=1, **batching):
    """Rounds of 5 prompts and 5 answers each, of which 4 and 4 are trained on."""
    one = real.submission(name, num_steps=STEPS, max_new_tokens=32, num_rollout_nodes=devices)
    config = one.config
    rollout = real.replace(config.rollout, num_workers=devices, tail_batching=TailBatchingConfig(**batching))
    warmup = real.replace(config.sft_warmup, num_updates=30)
    return real.replace(one, config=real.replace(config, rollout=rollout, sft_warmup=warmup))


@pytest.fixture(scope="module")
def alone(real, tmp_path_factory):
    return real.run(tmp_path_factory.mktemp("alone"), [racing(real)], policy="solo")


def rounds(run, name="racer"):
    """(is long, cut, queued) of each step."""
    notes = [note for note in run.recorder.notes if note.type == "step" and note.pipeline == name]
    keys = ("is_long_round", "cut_trajectories", "queued_prompts")
    return [tuple(note.metrics[key] for key in keys) for note in notes]


def test_four_short_rounds_then_a_long_one_and_the_rest_of_the_run_drains_the_queue(alone):
    assert alone.status == {"racer": "finished"}
    assert rounds(alone) == [(0, 9, 1), (0, 9, 2), (0, 9, 3), (0, 9, 4), (1, 0, 0), (1, 0, 0)]


def test_two_devices_in_chunks_of_two_steps_keep_the_same(real, make_backend, alone, tmp_path):
    run = real.run(
        tmp_path / "run",
        [racing(real, devices=2)],
        policy="solo",
        on=real.cluster(rollout=2),
        options=FINE,
        make_backend=make_backend,
    )
    assert (run.sha256, rounds(run)) == (alone.sha256, rounds(alone))


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
def test_beside_another_pipeline_with_every_order_paused_it_keeps_the_same(real, alone, tmp_path):
    pair = [racing(real), real.submission("other", seed=2)]
    run = real.run(tmp_path / "run", pair, policy=PausesEverything(), options=FINE)
    assert run.status == {"racer": "finished", "other": "finished"}, run.recorder.notes
    assert (run.sha256["racer"], rounds(run)) == (alone.sha256["racer"], rounds(alone))


@pytest.mark.slow
@pytest.mark.parametrize("copies_kv", [True, False])
def test_shards_that_migrate_in_mid_race_keep_the_same(real, alone, tmp_path, copies_kv):
    run = real.run(
        tmp_path / "run",
        [real.migrating(racing(real, devices=2), copies_kv=copies_kv)],
        policy=real.MovesEverything(),
        on=real.cluster(rollout=2),
        options=WorkerOptions(chunk_decode_steps=1),
    )
    assert run.status == alone.status, run.recorder.notes
    assert sum(isinstance(action, MigrateShard) for action in run.recorder.actions) >= STEPS
    assert rounds(run) == rounds(alone)
    assert run.sha256 == alone.sha256


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
def test_workers_killed_in_mid_race_cost_time_only(real, alone, tmp_path):
    kills = Kills({2: "rollout", 3: "env", 5: "rollout", 6: "train"})
    run = real.run(
        tmp_path / "run", [racing(real)], policy="solo", options=WorkerOptions(chunk_decode_steps=1), watch=kills
    )
    assert run.status == alone.status, run.recorder.notes
    assert kills.victims == {}
    lost = [event for event in run.recorder.events if isinstance(event, WorkerLost | PipelineRestarted)]
    assert {type(event) for event in lost} == {WorkerLost, PipelineRestarted}
    assert run.sha256 == alone.sha256


FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults:
  steps: 7
  model: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64}
  sft_warmup: {updates: 20, batch_size: 16}
  rollout: {max_new_tokens: 32, slots: 8, tail_batching: {}}
  algorithm: {prompts_per_step: 4, group_size: 4, micro_batch_size: 4}
pipelines:
  - {name: sort, seed: 1, task: sort}
  - {name: reverse, seed: 2, task: reverse}
"""


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_weights_of_a_run_left_alone(tmp_path):
    """The queue of prompts comes back from the checkpoint; the verdict of `rlmux verify` is the same."""
    assert check_killed_twice(tmp_path, FILE) == [7], "restored from the checkpoint before it"
