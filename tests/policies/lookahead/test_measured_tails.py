"""Tails of rollouts leave the devices that another pipeline waits for, where that is expected to pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.actions import MigrateShard
from rlmux.core.model import MigrationEstimate, PhaseSeconds, Pipeline, PipelineId
from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import TrueSeconds

ENDS = (*(0.2 + 0.01 * number for number in range(30)), 0.99, 1.0)
"""Two of 32 responses take twice as long as the others."""


def arrival(name: str, *, rollout_s: float = 100.0, train_s: float = 10.0, **fields) -> Arrival:
    phases = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    return Arrival(
        submit_s=0.0,
        pipeline=Pipeline(id=PipelineId(name), num_steps=10, estimate=phases, **fields),
        world=replace(TrueSeconds.of_phases(phases), finish_fractions=ENDS),
    )


def run(*arrivals: Arrival, policy: str = "rollmux", tails: bool = True):
    """(hours, migrations ordered) on one rollout node of two devices and one training node."""
    cluster = h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1, devices_per_node=2)
    migrations: list[MigrateShard] = []
    result = simulate(
        Workload(name="tails", cluster=cluster, arrivals=arrivals),
        make_policy(policy, tails=tails),
        observer=lambda _, actions: migrations.extend(one for one in actions if isinstance(one, MigrateShard)),
        checks=True,
    )
    assert {one.steps for one in result.pipelines} == {10}
    return result.hours, migrations


@pytest.mark.parametrize("policy", ["rollmux", "rlmux"])
def test_a_tail_migrates_to_one_device_and_the_others_go_to_the_next_pipeline(policy):
    hours, migrations = run(arrival("a"), arrival("b"), policy=policy)
    without, none = run(arrival("a"), arrival("b"), policy=policy, tails=False)
    assert hours < 0.85 * without
    assert migrations
    assert not none


def test_no_tail_migrates_before_a_whole_rollout_was_seen():
    _, migrations = run(arrival("a"), arrival("b"))
    assert min(one.step for one in migrations) > 1


def test_no_tail_migrates_where_no_pipeline_waits_for_its_devices():
    assert run(arrival("a")) == run(arrival("a"), tails=False)


def test_no_tail_migrates_that_makes_the_longest_step_longer():
    _, migrations = run(arrival("long", train_s=200.0), arrival("short", rollout_s=20.0))
    assert "long" not in {one.pipeline for one in migrations}


@pytest.mark.parametrize(("copy_s", "recompute_s", "copies_kv"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_caches_are_copied_or_computed_again_by_what_is_cheaper(copy_s, recompute_s, copies_kv):
    estimate = MigrationEstimate(copy_s=copy_s, recompute_s=recompute_s)
    _, migrations = run(*(arrival(name, migration=estimate) for name in "ab"))
    assert migrations[0].copies_kv is copies_kv


def test_no_shard_migrates_because_of_another_pipelines_only_shard_which_is_no_tail():
    asked = (("wide", 2, 100.0, 40.0), ("narrow", 1, 100.0, 10.0), ("short", 1, 50.0, 10.0))
    arrivals = []
    for name, num_nodes, rollout_s, train_s in asked:
        phases = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
        pipeline = Pipeline(id=PipelineId(name), num_steps=6, num_rollout_nodes=num_nodes, estimate=phases)
        arrivals.append(Arrival(submit_s=0.0, pipeline=pipeline, world=TrueSeconds.of_phases(phases)))
    cluster = h20_h800_cluster(num_rollout_nodes=2, num_train_nodes=1)
    result = simulate(Workload(name="nodes", cluster=cluster, arrivals=tuple(arrivals)), make_policy("rollmux"))
    assert result.num_migrations == 0
