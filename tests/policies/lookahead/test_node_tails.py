"""Tails of rollouts leave nodes of several GPUs to the next member, as long as the books say, and no longer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from rlmux.core.actions import RunStage, SetDeviceFraction, Switch
from rlmux.core.model import PhaseSeconds, RolloutTail, Stage, TailPoint
from rlmux.papers.tail_migration import migration_gain, tailed_pipeline
from rlmux.policies import make_policy
from rlmux.sim.api import plan
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload, h20_h800_cluster, profiled_arrival, profiles
from rlmux.sim.workloads.rollout_tails import measured_tail
from rlmux.sim.world import TrueSeconds

TAIL = RolloutTail(points=(TailPoint(num_left=8, begins=0.8, growth=0.02),), device_fraction=0.125)


def arrival(name, profile="7B_8k", *, num_steps=30, tail=TAIL, **more):
    return profiled_arrival(
        name, profiles()[profile], submit_s=0.0, num_steps=num_steps, slo_slowdown=3.0, tail=tail, **more
    )


def on_nodes(*arrivals, num_rollout=1, num_train=1):
    cluster = h20_h800_cluster(num_rollout_nodes=num_rollout, num_train_nodes=num_train)
    return Workload(name="test", cluster=cluster, arrivals=arrivals)


def seconds_of(workload, policy="rollmux", **options):
    return simulate(workload, make_policy(policy, **options), checks=True).hours * 3600.0


@pytest.mark.parametrize("policy", ["rollmux", "rlmux"])
def test_two_pipelines_whose_rollouts_fill_their_node_are_faster(policy):
    pair = on_nodes(arrival("a"), arrival("b"))
    assert seconds_of(pair, policy) < 0.98 * seconds_of(pair, policy, tails=False)


@pytest.mark.parametrize(("names", "copies_kv"), product([("7B_8k", "7B_8k"), ("14B_8k", "14B_8k")], [True, False]))
def test_a_step_takes_what_placement_counts_on(names, copies_kv):
    arrivals = [
        arrival(f"{name} {number}", name, num_steps=60, tail=measured_tail(name, copies_kv=copies_kv))
        for number, name in enumerate(names)
    ]
    made = on_nodes(*arrivals)
    planned = plan(made, policy="rollmux")["pipelines"]
    for one, row in zip(simulate(made, make_policy("rollmux"), checks=True).pipelines, planned, strict=True):
        assert one.step_slowdown == pytest.approx(row["step_slowdown"], rel=0.01)


def test_three_rollouts_on_one_node_keep_what_placement_counts_on():
    made = on_nodes(*(arrival(name, num_steps=60) for name in "abc"))
    planned = plan(made, policy="rollmux")["pipelines"]
    for one, row in zip(simulate(made, make_policy("rollmux"), checks=True).pipelines, planned, strict=True):
        assert one.step_slowdown <= row["step_slowdown"] * 1.01


def test_a_tail_keeps_an_eighth_and_the_next_rollout_has_the_rest_until_it_has_ended():
    fractions: list[tuple[float, float]] = []
    running: dict[int, float] = {}

    def watch(event, actions):
        running.pop(getattr(event, "order", None), None)
        for action in actions:
            if isinstance(action, RunStage) and action.stage is Stage.GENERATE:
                running[action.order] = action.device_fraction
            if isinstance(action, SetDeviceFraction):
                running[action.order] = action.device_fraction
        fractions.append(tuple(sorted(running.values())))

    simulate(on_nodes(arrival("a"), arrival("b")), make_policy("rlmux"), observer=watch, checks=True)
    assert set(fractions) == {(), (1.0,), (0.125, 0.875)}


def test_a_pipeline_that_has_left_its_node_loads_its_state_again():
    switches: list[Switch] = []

    def watch(_, actions):
        switches.extend(one.switch for one in actions if isinstance(one, RunStage) and one.stage is Stage.GENERATE)

    simulate(on_nodes(arrival("a"), arrival("b")), make_policy("rlmux"), observer=watch)
    assert switches == [Switch.COLD] * 2 + [Switch.WARM] * 58


def test_no_tail_leaves_a_node_that_none_waits_for():
    alone = on_nodes(arrival("a"))
    assert seconds_of(alone) == seconds_of(alone, tails=False)


def test_no_tail_leaves_where_that_makes_the_meta_iteration_longer():
    """7B rolls out in the shade of 8B: a tail that ends later would delay its training."""
    late = RolloutTail(points=(TailPoint(num_left=32, begins=0.9, growth=0.5),), device_fraction=0.125)
    made = on_nodes(arrival("a", tail=late), arrival("b", "8B_8k", tail=None))
    assert seconds_of(made) == seconds_of(made, tails=False)


@pytest.mark.parametrize("policy", ["fifo", "gavel-steps", "most-idle"])
def test_policies_that_let_no_tail_leave_do_not_count_on_it(policy):
    pair, without = (on_nodes(*(arrival(name, tail=tail) for name in "ab")) for tail in (TAIL, None))
    assert seconds_of(pair, policy) == pytest.approx(seconds_of(without, policy))


def test_what_is_believed_of_tails_and_what_is_true_are_apart():
    """Rollouts that end as they always did, where their tails were expected to leave half-way, keep their nodes."""
    wrong = [arrival(name) for name in "ab"]
    steady = TrueSeconds.of_phases(profiles()["7B_8k"].disaggregated, sync_s=0.9)
    wrong = [replace(one, world=steady) for one in wrong]
    result = simulate(on_nodes(*wrong), make_policy("rollmux"), checks=True)
    assert {one.steps for one in result.pipelines} == {30}
    assert result.pipelines[0].step_slowdown == pytest.approx(269.4 / 247.5, rel=0.01)


def test_pipelines_that_leave_in_the_middle_of_a_tail_give_their_part_back():
    arrivals = [replace(arrival(name), depart_s=1000.0 + 37.0 * number) for number, name in enumerate("abc")]
    simulate(on_nodes(*arrivals), make_policy("rlmux"), checks=True)


@pytest.mark.parametrize("profile", ["7B_8k", "14B_8k"])
def test_a_node_as_one_device_flatters_tails_no_more_than_eight_gpus_that_are_devices(profile):
    """Pairs of the paper, whose batch is 128; compared with eight devices, between which shards migrate."""
    numbers = (16, 8, 4, 2)
    tail = measured_tail(profile, copies_kv=False, responses_for_each=1, numbers_left=numbers)
    one = tailed_pipeline(profile)
    phases = PhaseSeconds(rollout_s=one.rollout_s, train_s=one.train_s)

    def cycle_s(**options):
        world = TrueSeconds.of_phases(phases, tail=tail)
        arrivals = [replace(one.arrival(number, 40), world=world) for number in range(2)]
        arrivals = [replace(each, pipeline=replace(each.pipeline, tail=tail)) for each in arrivals]
        return seconds_of(on_nodes(*arrivals), **options)

    gain = cycle_s(tails=False) / cycle_s()
    assert 1.05 < gain <= migration_gain(profile, profile).gain


def test_the_trace_has_tails_where_lengths_were_measured():
    tailed = catalog.build("weave", tails="copied")
    by_model = {one.pipeline.id: one for one in tailed.arrivals if one.pipeline.tail is not None}
    assert len(by_model) == 131  # 7B and 14B, at caps of 4,096 and 8,192 tokens
    assert all(one.pipeline.tail == one.world.tail for one in by_model.values())
    assert not any(one.pipeline.tail for one in catalog.build("weave").arrivals)


def test_a_copied_tail_ends_earlier_than_a_recomputed_one():
    copied, recomputed = (measured_tail("7B_8k", copies_kv=copies_kv) for copies_kv in (True, False))
    growth = {point.num_left: point.growth for point in recomputed.points}
    assert [point.num_left for point in copied.points] == [32, 16, 8, 6, 4, 2]
    assert all(point.growth < growth.get(point.num_left, 1.0) for point in copied.points)
    begins = [point.begins for point in copied.points]
    assert begins == sorted(begins)
    assert 0.3 < begins[0] < 0.5
