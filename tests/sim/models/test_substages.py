"""The simulator at the grain of sub-stages: nothing is lost, nothing runs twice, rates are those of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.events import NodeJoined, NodeLost
from rlmux.core.model import DeviceId, Footprint, NodeId, Phase, PipelineStatus
from rlmux.policies import make_policy
from rlmux.sim.models.costs import rollout_costs
from rlmux.sim.models.decoder import Decoder, Unfinished
from rlmux.sim.models.interference import estimated_table, fraction_grid, sharing_table
from rlmux.sim.models.multi_turn import ToolUse
from rlmux.sim.models.rates import InterferenceRates
from rlmux.sim.models.substages import SubStageWorld
from rlmux.sim.node_changes import NodeFailure
from rlmux.sim.results.sweep import SimRun, run_simulation
from rlmux.sim.simulator import Simulation, simulate
from rlmux.sim.workloads.substage_pairs import GSM8K_06B, GSM8K_4B, GSM8K_8B, HOMOGENEOUS, MATH_06B, crowd

TABLE = estimated_table(fraction_grid("H100"))
NOTHING_HELPS = SharingTable.of(
    [SharingEntry(sub_stage_a="x", sub_stage_b="y", device_fraction=0.5, slowdown_a=1.0, slowdown_b=1.0)]
)
"""A table in which no pair of real sub-stages is."""


def world(**fields) -> SubStageWorld:
    settled = {
        "model": "qwen3-4b", "lengths_of": "gsm8k_qwen3_4b", "num_sequences": 64, "num_rollout_devices": 2,
        "num_train_devices": 2,
    }  # fmt: skip
    return SubStageWorld(**{**settled, **fields})


def decoder(lengths: list[int], *, slots: int = 64) -> Decoder:
    return Decoder(rollout_costs("qwen3-4b"), [Unfinished(n, -100.0) for n in lengths], slots=slots)


# --- one rollout shard


def test_a_rollout_takes_what_the_cost_model_says():
    """1024 sequences on one engine of 4 GPUs took 121 s in the recorded run."""
    recorded = world(num_sequences=1024, num_rollout_devices=1, slots=256)
    assert recorded.mean_phases().rollout_s == pytest.approx(121, rel=0.1)


def test_fewer_slots_make_a_rollout_longer_and_leave_no_sequence_out():
    wide, narrow = decoder([50] * 40, slots=40), decoder([50] * 40, slots=8)
    assert (wide.num_active, wide.num_waiting) == (40, 0)
    assert (narrow.num_active, narrow.num_waiting) == (8, 32)
    assert narrow.seconds_left > 2 * wide.seconds_left
    assert sum(one.left for one in narrow.sequences()) == 2000


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    slots=st.integers(1, 32),
    parts=st.lists(st.floats(0.0, 0.7), max_size=4),
)
def test_no_token_is_lost_or_made_twice_by_moving(lengths, slots, parts):
    source, target = decoder(lengths, slots=slots), decoder([7, 300], slots=slots)
    for part in parts:
        before = sum(one.left for one in (*source.sequences(), *target.sequences()))
        target.give(source.take(), 0.5)
        assert source.seconds_left == 0.0
        assert sum(one.left for one in target.sequences()) == before
        target.advance(part * target.seconds_left)
        source, target = target, source
    assert sum(one.left for one in (*source.sequences(), *target.sequences())) <= sum(lengths) + 307


def test_moved_contexts_are_kept_and_cost_time_before_decoding_goes_on():
    source, target = decoder([500]), decoder([500])
    source.advance(source.seconds_left / 2)
    moved = source.take()
    assert 340 < moved[0].context < 360
    alone_s = target.seconds_left
    target.give(moved, 3.0)
    assert target.seconds_left == pytest.approx(alone_s + 3.0, rel=0.1)


def test_reports_come_at_the_borders_of_sub_stages_only():
    shard = decoder(list(range(1, 201)), slots=200)
    num_reports = 0
    while shard.seconds_left > 1e-6:
        shard.advance(shard.until_report(1.0))
        num_reports += 1
    assert num_reports <= 12


def test_a_world_without_sequences_is_refused():
    with pytest.raises(UserError, match="num_sequences is 0"):
        world(num_sequences=0)


# --- whole runs


def conserved(workload, policy, failures=()) -> Simulation:
    """Run it; after every event all is well, and every unfinished trajectory is in exactly one place."""
    left: dict[tuple[str, int], int] = {}

    def count(name: str) -> int:
        pipeline, query = simulation.pipelines[name], simulation.scheduler.query
        devices = query.pipeline(name).rollout_devices
        places = [paused.work for place, paused in pipeline.paused.items() if isinstance(place, DeviceId)]
        places += [one.work for one in simulation.running if one.pipeline is pipeline and one.is_rollout]
        for ready in query.ready_work():
            if ready.pipeline == name and ready.phase is Phase.ROLLOUT and not ready.is_continuation:
                (device,) = ready.devices
                if device not in pipeline.paused:
                    places.append(pipeline.world.shard(ready.step, devices.index(device), len(devices)))
        migrating = sum(len(one.trajectories) for one in simulation.migrations.values() if one.pipeline is pipeline)
        return sum(len(place.sequences()) for place in places) + migrating

    def check(event, actions) -> None:
        query = simulation.scheduler.query
        for pipeline in query.pipelines():
            run = query.pipeline(pipeline)
            step = (pipeline, run.rollout_step)
            if isinstance(event, NodeLost | NodeJoined) or query.status(pipeline) is PipelineStatus.WAITING:
                left.pop(step, None)  # it begins this step again
            num_left = count(pipeline)
            assert num_left <= left.get(step, num_left), f"{step}: trajectories from nowhere after {event}"
            left[step] = num_left
            if not run.is_rollout_open:
                assert num_left == 0, f"{step} left trajectories behind"

    simulation = Simulation(
        workload, policy, rates=InterferenceRates(TABLE), failures=failures, observer=check, checks=True
    )
    simulation.run()
    return simulation


@settings(max_examples=examples(10), deadline=None)
@given(
    picks=st.lists(st.integers(0, len(HOMOGENEOUS) - 1), min_size=1, max_size=3),
    num_gpus=st.sampled_from([4, 8, 12]),
    staleness=st.integers(0, 2),
    is_sharing=st.booleans(),
    tools=st.sampled_from([None, ToolUse(mean_calls=1.0, wait_s=5.0), ToolUse(wait_s=1.0, keeps_slots=True)]),
    seed=st.integers(0, 1000),
)
def test_small_workloads_end_with_every_trajectory_trained_on(picks, num_gpus, staleness, is_sharing, tools, seed):
    workload = crowd(
        [HOMOGENEOUS[pick] for pick in picks], num_gpus=num_gpus, num_steps=2, sequences_per_device=12,
        staleness=staleness, tools=tools, seed=seed,
    )  # fmt: skip
    done = conserved(workload, make_policy("jigsaw", sharing=sharing_table(TABLE) if is_sharing else NOTHING_HELPS))
    assert done.scheduler.query.is_idle()
    query = done.scheduler.query
    for pipeline in query.pipelines():
        run = query.pipeline(pipeline)
        assert (query.status(pipeline), run.train_step, run.published_version) == ("finished", 2, 2), pipeline


def test_tails_migrate_and_nothing_is_lost_by_it():
    workload = crowd([GSM8K_06B, GSM8K_8B, MATH_06B], num_gpus=16, num_steps=3, sequences_per_device=32)
    assert conserved(workload, make_policy("jigsaw", sharing=NOTHING_HELPS)).collector.num_migrations > 0


def test_a_run_is_a_function_of_workload_and_policy():
    workload = crowd([GSM8K_06B, GSM8K_4B], num_gpus=8, num_steps=2, sequences_per_device=16)
    first, second = (run_simulation(SimRun(workload=workload, policy="jigsaw")) for _ in range(2))
    assert (first.hours, first.events, first.num_migrations) == (second.hours, second.events, second.num_migrations)


def test_alone_a_pipeline_runs_as_fast_as_its_solo_time_says():
    workload = crowd([GSM8K_4B], num_gpus=8, num_steps=3, sequences_per_device=32)
    for policy in ("colocated", "jigsaw", "rlmux"):
        assert run_simulation(SimRun(workload=workload, policy=policy)).mean_step_slowdown == pytest.approx(
            1.0, abs=0.01
        )


def test_sharing_beats_one_after_another_and_the_look_ahead_beats_fixed_rules():
    workload = crowd([GSM8K_4B, GSM8K_4B], num_gpus=8, num_steps=4)
    speed = {
        name: simulate(workload, make_policy(name)).tokens_per_s
        for name in ("colocated", "serial", "mux-rollouts", "mux-training", "jigsaw", "rlmux")
    }
    assert speed["jigsaw"] > 1.3 * speed["colocated"]
    assert speed["jigsaw"] >= max(speed["mux-rollouts"], speed["mux-training"], speed["serial"])
    assert speed["rlmux"] >= speed["jigsaw"]


@pytest.mark.parametrize("deployment", ["shared", "disaggregated"])
def test_both_grains_are_never_worse_than_either(deployment):
    for pair in ((GSM8K_4B, GSM8K_4B), (MATH_06B, GSM8K_8B)):
        workload = crowd(pair, num_gpus=8, num_steps=3, deployment=deployment)
        names = ("jigsaw", "rlmux") if deployment == "shared" else ("rollmux", "jigsaw", "rlmux")
        speed = {name: run_simulation(SimRun(workload=workload, policy=name)).tokens_per_s for name in names}
        assert speed["rlmux"] >= 0.999 * max(speed.values()), (pair, speed)


def test_staleness_lets_a_pipeline_fill_its_own_bubbles():
    in_step, off = (
        run_simulation(SimRun(workload=crowd([GSM8K_4B], num_gpus=8, num_steps=4, staleness=k), policy="jigsaw"))
        for k in (0, 1)
    )
    assert off.tokens_per_s > 1.2 * in_step.tokens_per_s


def test_two_on_a_device_run_at_the_rate_of_the_interference_table():
    """One sequence each, so that no sub-stage changes on the way."""
    workload = crowd([GSM8K_4B, GSM8K_4B], num_gpus=4, num_steps=1, sequences_per_device=4)
    seen = []
    rates = InterferenceRates(TABLE)

    def look(event, actions) -> None:
        there = rates.orders_on(DeviceId("gpu", 0, 0))
        if len(there) == 2 and all(one.sub_stage == "tail" for one in there):
            seen.append([(one.rate, one.device_fraction) for one in there])

    Simulation(workload, make_policy("jigsaw", sharing=sharing_table(TABLE)), rates=rates, observer=look).run()
    slow, _ = TABLE.slowdowns("tail", "tail", seen[-1][0][1])
    assert seen[-1][0][0] == pytest.approx(1 / slow)
    assert sum(device_fraction for _, device_fraction in seen[-1]) <= 1.0


def test_three_pipelines_share_a_device_that_holds_their_states_and_finish_sooner():
    roomy = crowd([GSM8K_06B] * 3, num_gpus=4, num_steps=2, sequences_per_device=32)
    part = Footprint(rollout_device_bytes=8e9, train_device_bytes=8e9)
    small = [replace(one, pipeline=replace(one.pipeline, footprint=part)) for one in roomy.arrivals]
    rates, most = InterferenceRates(TABLE), []

    def look(event, actions) -> None:
        there = rates.orders_on(DeviceId("gpu", 0, 0))
        assert sum(one.device_fraction for one in there) <= 1.0 + 1e-9
        most.append(len(there))

    policy = make_policy("rlmux", sharing=sharing_table(TABLE))
    workload = replace(roomy, arrivals=tuple(small))
    by_three = Simulation(workload, policy, rates=rates, observer=look, checks=True).run()
    by_two = simulate(roomy, policy, checks=True)
    assert max(most) == 3
    assert [one.steps for one in by_three.pipelines] == [2, 2, 2]
    assert by_three.hours < by_two.hours


@pytest.mark.parametrize("policy", ["colocated", "jigsaw", "rlmux"])
def test_a_lost_node_costs_sub_stage_pipelines_the_step_under_way_and_nothing_else(policy):
    workload = crowd([GSM8K_06B, GSM8K_4B], num_gpus=8, num_steps=3, sequences_per_device=16)
    undisturbed = simulate(workload, make_policy(policy))
    moment_s = 0.3 * undisturbed.hours * 3600
    failures = [NodeFailure(node=NodeId("gpu", 1), at_s=moment_s * k, down_s=0.5 * moment_s) for k in (1, 2)]
    broken = simulate(workload, make_policy(policy), failures=failures, checks=True)
    assert [one.steps for one in broken.pipelines] == [3, 3]
    assert broken.hours > undisturbed.hours


def test_no_trajectory_is_lost_when_nodes_are():
    workload = crowd([GSM8K_06B, GSM8K_4B], num_gpus=8, num_steps=2, sequences_per_device=12)
    failures = [NodeFailure(node=NodeId("gpu", k % 2), at_s=7.0 + 23.0 * k, down_s=5.0) for k in range(4)]
    done = conserved(workload, make_policy("jigsaw", sharing=sharing_table(TABLE)), failures)
    query = done.scheduler.query
    assert {query.pipeline(pipeline).published_version for pipeline in query.pipelines()} == {2}
