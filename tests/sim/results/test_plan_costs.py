"""What a plan is paid for: parts that sum to the price of the nodes, each by its cause."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from tests.examples import examples
from tests.sim.test_bounds import arrival, pipeline, workloads

from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pool, SwitchEstimate
from rlmux.policies import POLICIES
from rlmux.sim.api import plan
from rlmux.sim.results.plan_costs import PAID_FOR
from rlmux.sim.workloads.arrivals import Workload, h20_h800_cluster

ROLLOUT_USD, TRAIN_USD = 8 * 1.76, 8 * 5.28
"""Dollars per hour of a node."""
SHORT, LONG = PhaseSeconds(rollout_s=10.0, train_s=20.0), PhaseSeconds(rollout_s=10.0, train_s=60.0)


def planned(*pipelines, policy="fifo", cluster=None):
    cluster = cluster or h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1)
    return plan(Workload(name="w", cluster=cluster, arrivals=tuple(map(arrival, pipelines))), policy=policy)


def named(costs):
    return {part: usd for part, usd in costs["paid_for"].items() if usd}


@pytest.mark.parametrize("policy", POLICIES)
@given(made=workloads())
@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_parts_add_up_to_the_price_of_the_nodes(policy, made):
    costs = plan(made, policy=policy)
    assert list(costs["paid_for"]) == list(PAID_FOR)
    assert sum(costs["paid_for"].values()) == costs["paid_usd_per_hour"]
    assert min(costs["paid_for"].values()) >= 0.0
    assert costs["paid_for"]["compute"] == pytest.approx(costs["bound_usd_per_hour"])
    held = {node for one in costs["pipelines"] for node in one["rollout_nodes"] + one["train_nodes"]}
    prices = {name: pool.usd_per_node_hour for name, pool in made.cluster.pools.items()}
    numbers = [(pool.num_nodes, pool.name) for pool in made.cluster.pools.values()]
    expected = (
        sum(num_nodes * prices[name] for num_nodes, name in numbers)
        if all(num_nodes is not None for num_nodes, _ in numbers)
        else sum(prices[node.rpartition("-")[0]] for node in held)
    )
    assert costs["paid_usd_per_hour"] == pytest.approx(expected)


def test_the_parts_add_up_where_tails_leave_their_nodes():
    costs = plan("weave:tails=copied,slo_probability=mean", policy="rollmux")
    assert costs["paid_usd_per_hour"] == pytest.approx(costs["usd_per_hour"])
    assert costs["paid_for"]["dearer_nodes"] > 0.0


def test_a_pipeline_alone_pays_for_the_time_in_which_its_nodes_wait_for_its_other_phase():
    costs = planned(pipeline("a", estimate=SHORT))
    assert named(costs) == pytest.approx(
        {
            "compute": ROLLOUT_USD / 3 + TRAIN_USD * 2 / 3,
            "bubble_rollout": ROLLOUT_USD * 2 / 3,
            "bubble_train": TRAIN_USD / 3,
        }
    )
    assert costs["pipelines"][0]["bound_usd_per_hour"] == pytest.approx(costs["bound_usd_per_hour"])
    assert costs["usd_per_solo_hour"] == pytest.approx(ROLLOUT_USD + TRAIN_USD)


def test_a_group_whose_load_exceeds_its_cycle_pays_for_imbalance():
    costs = planned(pipeline("a", estimate=LONG), pipeline("b", estimate=LONG))
    assert costs["pipelines"][0]["step_s"] == pytest.approx(120.0)
    assert costs["paid_for"]["imbalance"] == pytest.approx(ROLLOUT_USD * (120.0 - 70.0) / 120.0)
    assert costs["paid_for"]["bubble_rollout"] == pytest.approx(ROLLOUT_USD * (70.0 - 20.0) / 120.0)
    assert costs["paid_for"]["bubble_train"] == pytest.approx(0.0)
    assert costs["usd_per_solo_hour"] == pytest.approx((ROLLOUT_USD + TRAIN_USD) / (2 * 70.0 / 120.0))
    parts = [one["bound_usd_per_hour"] for one in costs["pipelines"]]
    assert sum(parts) == pytest.approx(costs["bound_usd_per_hour"])


def test_counted_nodes_without_a_pipeline_are_paid_and_not_those_of_a_cloud():
    cluster = h20_h800_cluster(num_rollout_nodes=3, num_train_nodes=None)
    costs = planned(pipeline("a", estimate=SHORT), policy="solo", cluster=cluster)
    assert costs["paid_for"]["idle_nodes"] == pytest.approx(2 * ROLLOUT_USD)
    assert costs["paid_usd_per_hour"] == pytest.approx(costs["usd_per_hour"] + 2 * ROLLOUT_USD)


def test_switches_of_a_shared_node_are_a_part():
    switch = SwitchEstimate(rollout_s=2.0, train_s=3.0)
    pools = h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1).pools
    small = Cluster(pools={name: replace(pool, device_memory_bytes=1.0) for name, pool in pools.items()})
    both = [pipeline(name, estimate=LONG, switch=switch) for name in "ab"]
    costs = planned(*both, cluster=small)
    assert costs["paid_for"]["switches"] == pytest.approx((2 * 2.0 * ROLLOUT_USD + 2 * 3.0 * TRAIN_USD) / 126.0)


def test_time_for_hand_overs_is_a_part():
    held = PhaseSeconds(rollout_s=15.0, train_s=60.0)
    both = [pipeline(name, estimate=LONG, held=held, slo_slowdown=9.0) for name in "ab"]
    costs = planned(*both, policy="rollmux")
    assert costs["num_groups"] == 1
    assert costs["paid_for"]["slow_steps"] > 0.0


def test_slos_pay_for_nodes_that_the_same_work_would_not_need_without_them():
    strict, free = (
        planned(
            *(pipeline(name, estimate=PhaseSeconds(rollout_s=50.0, train_s=50.0), slo_slowdown=slo) for name in "abc"),
            policy="rollmux",
            cluster=h20_h800_cluster(),
        )
        for slo in (1.0, 9.0)
    )
    saved = strict["usd_per_hour"] - free["usd_per_solo_hour"] * strict["usd_per_hour"] / strict["usd_per_solo_hour"]
    assert strict["paid_for"]["slo"] == pytest.approx(saved)
    assert strict["paid_for"]["slo"] > 0.0
    assert free["paid_for"]["slo"] == 0.0


def test_work_on_dearer_nodes_is_what_it_costs_beyond_the_bound():
    there = PhaseSeconds(rollout_s=10.0, train_s=20.0)
    costs = planned(pipeline("a", estimate=SHORT, colocated_estimate=there), policy="colocated")
    assert costs["paid_for"]["dearer_nodes"] == pytest.approx(TRAIN_USD - (ROLLOUT_USD / 3 + TRAIN_USD * 2 / 3))


def test_where_no_pool_has_a_price_nothing_is_paid_for():
    pools = {"r": Pool(name="r", phase=Phase.ROLLOUT), "t": Pool(name="t", phase=Phase.TRAIN)}
    costs = planned(pipeline("a", estimate=SHORT), policy="solo", cluster=Cluster(pools=pools))
    assert (costs["paid_for"], costs["paid_usd_per_hour"]) == ({}, 0)
    assert any(note.startswith("no pool has a price") for note in costs["notes"])


def test_a_group_without_an_estimate_is_unknown():
    known = arrival(pipeline("a"))
    unknown = replace(known, pipeline=replace(known.pipeline, estimate=None))
    made = Workload(name="w", cluster=h20_h800_cluster(), arrivals=(unknown,))
    costs = plan(made, policy="solo")
    assert named(costs) == {"unknown": pytest.approx(ROLLOUT_USD + TRAIN_USD)}
    assert costs["usd_per_solo_hour"] is None
