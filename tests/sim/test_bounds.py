"""Lower bounds: no simulated policy is ever below one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId, SwitchEstimate
from rlmux.policies import POLICIES, make_policy
from rlmux.sim.bounds import kept_slos_usd, steady_slo_slack_usd, work_usd
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import SYNCED, Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import Drifting, RandomVariation, SwitchSeconds, TrueSeconds

SWITCH = SwitchSeconds(cold_rollout_s=20.0, cold_train_s=15.0, warm_rollout_s=1.0, warm_train_s=3.0)


@st.composite
def workloads(draw):
    arrivals = []
    costs = draw(st.booleans())
    for number in range(draw(st.integers(1, 6))):
        phases = PhaseSeconds(rollout_s=draw(st.floats(5, 300)), train_s=draw(st.floats(5, 300)))
        there = draw(
            st.one_of(st.none(), st.builds(PhaseSeconds, rollout_s=st.floats(5, 300), train_s=st.floats(5, 300)))
        )
        submit_s = draw(st.floats(0, 2000))
        leaves_early = draw(st.booleans())
        sync_s = 2.0 if costs else 0.0
        variation = draw(st.sampled_from([RandomVariation(seed=number, cv=0.3), Drifting(ratios=(1.0, 0.6, 1.3))]))
        arrivals.append(
            Arrival(
                submit_s=submit_s,
                depart_s=submit_s + draw(st.floats(1, 3000)) if leaves_early else None,
                pipeline=Pipeline(
                    id=PipelineId(f"p{number}"),
                    num_steps=None if leaves_early else draw(st.integers(1, 12)),
                    stages=SYNCED,
                    num_rollout_nodes=draw(st.integers(1, 2)),
                    num_train_nodes=draw(st.integers(1, 2)),
                    estimate=replace(phases, sync_s=sync_s),
                    colocated_estimate=there,
                    slo_slowdown=draw(st.floats(1, 3)),
                    switch=SwitchEstimate(rollout_s=1.0, train_s=3.0) if costs else None,
                ),
                world=TrueSeconds.of_phases(phases, sync_s=sync_s, variation=variation),
                colocated_world=None if there is None else TrueSeconds.of_phases(there, variation=variation),
                switch=SWITCH if costs else SwitchSeconds(),
            )
        )
    num_nodes = draw(st.sampled_from([None, 4]))
    return Workload(
        name="random",
        cluster=h20_h800_cluster(num_rollout_nodes=num_nodes, num_train_nodes=num_nodes),
        arrivals=tuple(sorted(arrivals, key=lambda one: one.submit_s)),
    )


@pytest.mark.parametrize("policy", POLICIES)
@given(made=workloads())
@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_simulated_policy_is_ever_below_the_bound(policy, made):
    result = simulate(made, make_policy(policy))
    assert result.cost_usd >= result.bound_usd * (1 - 1e-9)
    assert sum(result.parts_usd.values()) == pytest.approx(result.cost_usd)
    assert min(result.parts_usd.values()) >= 0.0
    if result.slo_attainment == 1.0 and _are_in_their_pools(policy):
        assert result.cost_usd >= kept_slos_usd(made) * (1 - 1e-9)


def _are_in_their_pools(policy):
    """Whether it never trains on a rollout node, as if that were as fast as the training node it was measured on."""
    return policy in (
        "solo",
        "fifo",
        "colocated",
        "gap-ratio",
        "gavel",
        "gavel-steps",
        "most-idle",
        "random",
        "rollmux",
        "rlmux",
    )


def pipeline(name, *, estimate=PhaseSeconds(rollout_s=50.0, train_s=50.0), **fields):
    return Pipeline(id=PipelineId(name), num_steps=10, estimate=estimate, **fields)


def arrival(one, **more):
    return Arrival(submit_s=0.0, pipeline=one, world=TrueSeconds.of_phases(one.estimate), **more)


def test_work_costs_its_node_seconds_where_they_are_cheapest():
    cluster = h20_h800_cluster()
    apart = (50 * 8 * 1.76 + 50 * 8 * 5.28) / 3600
    assert work_usd(arrival(pipeline("a")), cluster, 10) == pytest.approx(10 * apart)
    quick = arrival(pipeline("a"), colocated_world=TrueSeconds.of_phases(PhaseSeconds(rollout_s=10.0, train_s=40.0)))
    assert work_usd(quick, cluster, 1) == pytest.approx(50 * 8 * 5.28 / 3600)
    assert work_usd(quick, cluster, 1, may_colocate=False) == pytest.approx(apart)
    wide = arrival(pipeline("a", num_rollout_nodes=2))
    assert work_usd(wide, cluster, 1) == pytest.approx(apart + 50 * 8 * 1.76 / 3600)


def test_what_is_paid_for_is_told_apart():
    """Ten steps of 50 s and 50 s, 2 s of a first switch on either node: each node is idle while the other computes."""
    switch = SwitchSeconds(cold_rollout_s=2.0, cold_train_s=2.0)
    made = Workload(name="one", cluster=h20_h800_cluster(), arrivals=(arrival(pipeline("a"), switch=switch),))
    solo, colocated = (simulate(made, make_policy(policy)) for policy in ("solo", "colocated"))
    rollout_usd, train_usd = 14.08 / 3600, 42.24 / 3600
    assert solo.parts_usd == pytest.approx(
        {
            "bound": 500 * (rollout_usd + train_usd),
            "switches": 2 * (rollout_usd + train_usd),
            "rollout_idle": 502 * rollout_usd,
            "train_idle": 502 * train_usd,
            "other": 0.0,
        },
        abs=1e-9,
    )
    assert solo.figures()["parts_usd"] == solo.parts_usd
    assert colocated.parts_usd["other"] > 0.0


def test_steps_that_an_slo_asks_for_until_a_departure_are_counted():
    """After 3 steps of 150 s and an open one the mean is within 1.5 until 600 s."""
    cluster = h20_h800_cluster()
    one = arrival(pipeline("a", slo_slowdown=1.5), depart_s=590.0)
    made = Workload(name="one", cluster=cluster, arrivals=(one,))
    assert kept_slos_usd(made) == pytest.approx(work_usd(one, cluster, 3))
    assert kept_slos_usd(made, uses_slack=False) == pytest.approx(work_usd(one, cluster, 5))


def test_a_policy_that_keeps_every_slo_may_be_below_steady_whole_nodes():
    """Two at once ask for 1.01 training nodes at all of their slack; one waits for the other, and makes up for it."""
    tight = pipeline("tight", slo_slowdown=1.05, estimate=PhaseSeconds(rollout_s=20.0, train_s=80.0))
    loose = replace(pipeline("loose", slo_slowdown=2.0), num_steps=100)
    cluster = h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1)
    made = Workload(name="two", cluster=cluster, arrivals=(arrival(tight), arrival(loose)))
    result = simulate(made, make_policy("solo"))
    assert result.slo_attainment == 1.0
    assert max(sample.usd_per_hour for sample in result.samples) < steady_slo_slack_usd([tight, loose], cluster)
    assert kept_slos_usd(made) <= result.cost_usd
