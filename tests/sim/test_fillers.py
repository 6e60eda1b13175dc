"""What fillers cost the others, on random crowds: nothing but safe points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Pause, RunStage
from rlmux.core.model import Cluster, Footprint, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage, Urgency
from rlmux.policies import make_policy
from rlmux.sim.results.result import SimResult
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds

FIXED_ORDERS = ("solo", "colocated", "rollmux")
"""Policies under which a later end of one order makes no other order begin before its turn."""
EVERY = (*FIXED_ORDERS, "split", "fifo", "gap-ratio", "gavel", "gavel-steps", "most-idle", "mux-all", "rlmux", "serial")
"""Every policy but `jigsaw`, which looks ahead from where it is when a filler has left."""
STATES = Footprint(rollout_host_bytes=1.0, train_host_bytes=1.0, rollout_device_bytes=1.0, train_device_bytes=1.0)
"""States of which any number fits on a device: then no order evicts one."""
SLOWLY = settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
SECONDS = st.integers(1, 40).map(lambda tenths: tenths * 0.3)


def arrival(name: str, seconds: PhaseSeconds, *, submit_s: float = 0.0, num_steps: int = 2, **fields) -> Arrival:
    pipeline = Pipeline(id=PipelineId(name), num_steps=num_steps, estimate=seconds, footprint=STATES, **fields)
    return Arrival(submit_s=submit_s, pipeline=pipeline, world=TrueSeconds.of_phases(seconds))


def filler(name: str, rollout_s: float, *, safe_point_s: float = 0.0, submit_s: float = 0.0, num_steps: int) -> Arrival:
    made = arrival(
        name,
        PhaseSeconds(rollout_s=rollout_s, train_s=0.0),
        submit_s=submit_s,
        num_steps=num_steps,
        urgency=Urgency.FILLER,
        stages=(Stage.GENERATE, Stage.REWARD),
    )
    return replace(made, safe_point_s=safe_point_s)


@st.composite
def crowds(draw) -> Workload:
    """One to four pipelines on one to three nodes of each pool."""
    pools = {
        phase.value: Pool(
            name=phase.value,
            phase=phase,
            num_nodes=draw(st.integers(1, 3)),
            usd_per_gpu_hour=1.0,
            device_memory_bytes=99.0,
        )
        for phase in (Phase.ROLLOUT, Phase.TRAIN)
    }
    arrivals = [
        arrival(
            f"p{index}",
            PhaseSeconds(rollout_s=draw(SECONDS), train_s=draw(SECONDS)),
            submit_s=draw(SECONDS),
            num_steps=draw(st.integers(1, 4)),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    arrivals.sort(key=lambda one: one.submit_s)
    return Workload(name="crowd", cluster=Cluster(pools=pools), arrivals=tuple(arrivals))


@st.composite
def filler_crowds(draw, safe_point_s: float) -> tuple[Arrival, ...]:
    """One to three fillers."""
    return tuple(
        filler(
            f"f{index}",
            draw(SECONDS),
            safe_point_s=safe_point_s,
            submit_s=draw(SECONDS),
            num_steps=draw(st.integers(1, 5)),
        )
        for index in range(draw(st.integers(1, 3)))
    )


class Watched:
    """A simulation, what it gave as results, and how often a filler was told to leave."""

    def __init__(self, workload: Workload, fillers: Sequence[Arrival], policy: str) -> None:
        arrivals = tuple(sorted((*workload.arrivals, *fillers), key=lambda one: one.submit_s))
        self.names = {one.pipeline.id for one in workload.arrivals}
        fillers_orders = set()
        self.num_pauses = 0
        self.starts: list[tuple] = []

        def watch(event, actions) -> None:
            for action in actions:
                if isinstance(action, Pause):
                    self.num_pauses += action.order in fillers_orders
                elif isinstance(action, RunStage) and action.pipeline not in self.names:
                    fillers_orders.add(action.order)
                elif isinstance(action, RunStage):
                    key = (action.pipeline, action.step, action.stage, action.devices, action.device_fraction)
                    self.starts.append((round(event.time_s, 6), *key))

        workload = replace(workload, arrivals=arrivals)
        self.result: SimResult = simulate(workload, make_policy(policy), observer=watch, checks=True)
        self.starts.sort()

    @property
    def makespan_s(self) -> float:
        return self.result.hours * 3600


@pytest.mark.parametrize("policy", EVERY)
@SLOWLY
@given(workload=crowds(), fillers=filler_crowds(safe_point_s=0.0))
def test_with_safe_points_that_take_no_time_all_others_start_as_without_fillers(policy, workload, fillers):
    alone, shared = Watched(workload, (), policy), Watched(workload, fillers, policy)
    assert shared.starts == alone.starts
    assert shared.result.cost_usd == pytest.approx(alone.result.cost_usd)
    assert [one.steps for one in shared.result.fillers] == [one.pipeline.num_steps for one in by_name(fillers)]


@SLOWLY
@given(workload=crowds(), fillers=filler_crowds(safe_point_s=0.0))
def test_a_policy_that_looks_ahead_plans_again_when_a_filler_has_left_and_ends_all(workload, fillers):
    alone, shared = Watched(workload, (), "jigsaw"), Watched(workload, fillers, "jigsaw")
    assert {start[1:4] for start in shared.starts} == {start[1:4] for start in alone.starts}
    assert [one.steps for one in shared.result.fillers] == [one.pipeline.num_steps for one in by_name(fillers)]


@pytest.mark.parametrize("policy", FIXED_ORDERS)
@SLOWLY
@given(workload=crowds(), fillers=filler_crowds(safe_point_s=0.25))
def test_the_makespan_of_the_others_grows_by_a_safe_point_for_each_pause_at_most(policy, workload, fillers):
    alone, shared = Watched(workload, (), policy), Watched(workload, fillers, policy)
    assert shared.makespan_s <= alone.makespan_s + 0.25 * shared.num_pauses + 1e-6
    assert shared.makespan_s >= alone.makespan_s - 1e-6


def by_name(fillers: Sequence[Arrival]) -> list[Arrival]:
    """In the order of the results: that of submission."""
    return sorted(fillers, key=lambda one: one.submit_s)


def small_workload(*arrivals: Arrival, num_nodes: int = 1) -> Workload:
    pools = {
        phase.value: Pool(
            name=phase.value,
            phase=phase,
            num_nodes=num_nodes,
            gpus_per_node=8,
            usd_per_gpu_hour=2.0,
            device_memory_bytes=99.0,
        )
        for phase in (Phase.ROLLOUT, Phase.TRAIN)
    }
    return Workload(name="two", cluster=Cluster(pools=pools), arrivals=arrivals)


def test_a_filler_is_billed_for_its_own_seconds_and_no_other_figure_counts_it():
    one = arrival("a", PhaseSeconds(rollout_s=2.0, train_s=1.0), num_steps=3)
    alone = simulate(small_workload(one), make_policy("solo"))
    shared = simulate(small_workload(one, filler("eval", 0.5, num_steps=4)), make_policy("solo"))
    (result,) = shared.fillers
    assert (result.steps, result.device_s) == (4, pytest.approx(2.0))
    assert result.usd == pytest.approx(2.0 * 16.0 / 3600)
    skipped = {"fillers", "wall_s", "events", "decision_ms"}
    figures = [{key: value for key, value in run.figures().items() if key not in skipped} for run in (alone, shared)]
    assert figures[0] == figures[1]
    assert shared.figures()["fillers"] == {
        "num": 1, "num_finished": 1, "steps": 4, "device_hours": pytest.approx(2 / 3600), "usd": result.usd
    }  # fmt: skip


def test_a_pause_takes_as_long_as_to_the_safe_point_and_no_longer_than_the_work():
    busy = arrival("a", PhaseSeconds(rollout_s=2.0, train_s=1.0), num_steps=4)
    watched = Watched(small_workload(busy), [filler("eval", 10.0, safe_point_s=0.25, num_steps=1)], "solo")
    begins = [time_s for time_s, _, _, stage, *_ in watched.starts if stage is Stage.GENERATE]
    assert [later - earlier for earlier, later in pairwise(begins)] == pytest.approx([3.25, 3.25, 3.25])
    nearly_done = Watched(small_workload(busy), [filler("eval", 1.1, safe_point_s=0.25, num_steps=1)], "solo")
    assert nearly_done.makespan_s == pytest.approx(12.1), "it ends before its safe point"
