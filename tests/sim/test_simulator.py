"""The simulator against arithmetic: what a policy promises is what its pipelines get."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.model import Cluster, Footprint, NodeId, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.papers.rollmux import WEAVE_ACCOUNTING
from rlmux.policies import POLICIES, make_policy, with_sharing
from rlmux.policies.baselines import Solo
from rlmux.policies.rollmux import RollMux
from rlmux.policies.without_moves import without_moves
from rlmux.sim import api
from rlmux.sim.node_changes import NodeFailure
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import Drifting, RandomVariation, SwitchSeconds, TrueSeconds


def arrival(name, rollout_s, train_s, *, submit_s=0.0, num_steps=20, slo=10.0, footprint=None, **more):
    phases = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    pipeline = Pipeline(
        id=PipelineId(name),
        num_steps=num_steps,
        estimate=phases,
        slo_slowdown=slo,
        footprint=footprint or Footprint(),
    )
    world = more.pop("world", TrueSeconds.of_phases(phases))
    return Arrival(submit_s=submit_s, pipeline=pipeline, world=world, **more)


def workload(*arrivals, cluster=None, **nodes):
    return Workload(name="test", cluster=cluster or h20_h800_cluster(**nodes), arrivals=arrivals)


def slowdowns(result):
    return {p.pipeline: p.step_slowdown for p in result.pipelines}


def test_a_pipeline_alone_takes_its_solo_time_and_costs_its_nodes():
    result = simulate(workload(arrival("a", 60.0, 40.0, num_steps=36)), RollMux())
    assert result.hours == pytest.approx(1.0)
    assert result.cost_usd == pytest.approx(8 * (1.76 + 5.28))
    assert slowdowns(result) == {"a": pytest.approx(1.0)}
    assert result.utilization == {"rollout": pytest.approx(0.6), "train": pytest.approx(0.4)}
    assert result.peak_gpus == {"rollout": 8, "train": 8}


def test_complementary_pipelines_share_a_node_pair_at_solo_speed():
    shared = simulate(workload(arrival("a", 50.0, 50.0), arrival("b", 50.0, 50.0)), RollMux())
    assert slowdowns(shared) == {"a": pytest.approx(1.0), "b": pytest.approx(1.0)}
    assert shared.peak_gpus == {"rollout": 8, "train": 8}
    assert shared.admissions == {"direct": 1, "scaled": 0, "new": 1}


@pytest.mark.parametrize(
    ("phases", "joins_s"),
    [
        ([(60.0, 30.0), (50.0, 40.0)], 70.0),
        ([(80.5, 77.0), (133.8, 112.8)], 1320.0),
        ([(30.0, 60.0), (20.0, 30.0), (10.0, 25.0)], 33.0),
        ([(90.0, 20.0), (90.0, 25.0), (40.0, 30.0)], 411.0),
    ],
)
def test_a_group_runs_at_its_strict_period_however_late_its_members_join(phases, joins_s):
    """max(T_cycle, T_load), whatever phase the others are in when one joins."""
    arrivals = [
        arrival(f"p{i}", *seconds, submit_s=i * joins_s, num_steps=None, depart_s=60_000.0)
        for i, seconds in enumerate(phases)
    ]
    cluster = h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1)
    result = simulate(workload(*arrivals, cluster=cluster), RollMux())
    cycle_s = max(rollout_s + train_s for rollout_s, train_s in phases)
    load_s = max(sum(r for r, _ in phases), sum(t for _, t in phases))
    for one, (rollout_s, train_s) in zip(result.pipelines, phases, strict=True):
        assert one.step_slowdown == pytest.approx(max(cycle_s, load_s) / (rollout_s + train_s), rel=0.02)


@pytest.mark.slow
def test_weave_costs_what_the_paper_says_and_keeps_every_slo_step_by_step():
    made = catalog.build("weave", seed=1, train_nodes_32b=1, **WEAVE_ACCOUNTING)
    solo = simulate(replace(made, arrivals=catalog.build("weave", **WEAVE_ACCOUNTING).arrivals), Solo())
    assert solo.cost_usd_per_hour == pytest.approx(944.96, abs=0.01)
    result = simulate(made, RollMux())
    assert result.cost_usd_per_hour == pytest.approx(510, rel=0.04)
    assert result.paper_slo_attainment == 1.0
    assert result.slo_attainment >= 0.99  # from submission: one of few steps waited for its first cycle slot
    assert result.predicted_slo_attainment == 1.0
    assert result.penalised_cost_usd == result.cost_usd


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    def decisions(seed):
        seen = []
        simulate(catalog.build("rh-s", seed=seed, num_pipelines=6), RollMux(), observer=lambda e, a: seen.append(a))
        return seen

    first = decisions(3)
    assert first == decisions(3)
    assert first != decisions(4)


def test_a_violated_slo_is_not_penalised_but_the_papers_figure_is():
    arrivals = [arrival(f"p{i}", 50.0, 50.0, num_steps=30, slo=1.01) for i in range(3)]
    result = simulate(workload(*arrivals), make_policy("most-idle"))
    assert result.slo_attainment < 1.0
    assert result.predicted_slo_attainment < 1.0
    assert result.penalised_cost_usd > 1.4 * result.cost_usd


def test_the_first_load_is_cold_and_the_later_ones_warm():
    switch = SwitchSeconds(cold_rollout_s=30.0, cold_train_s=20.0, warm_rollout_s=3.0, warm_train_s=2.0)
    alone = simulate(workload(arrival("a", 60.0, 40.0, num_steps=3, switch=switch)), RollMux())
    assert alone.hours * 3600 == pytest.approx(3 * 100.0 + 50.0)
    cluster = h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1)
    pair = [arrival(name, 60.0, 60.0, num_steps=3, switch=switch) for name in "ab"]
    both = simulate(workload(*pair, cluster=cluster), RollMux(), spans_until_s=1e9)
    by_step = [span.switch_s for span in both.spans if span.pipeline == "a" and span.stage is Stage.GENERATE]
    assert by_step == [30.0, 3.0, 3.0]


def test_sync_lengthens_a_step_and_holds_no_device():
    phases = PhaseSeconds(rollout_s=60.0, train_s=40.0)
    synced = arrival("a", 60.0, 40.0, num_steps=10, world=TrueSeconds.of_phases(phases, sync_s=5.0))
    synced = replace(synced, pipeline=replace(synced.pipeline, stages=(Stage.GENERATE, Stage.UPDATE, Stage.PUBLISH)))
    result = simulate(workload(synced), RollMux())
    assert result.hours * 3600 == pytest.approx(10 * 105.0)
    assert result.utilization["rollout"] == pytest.approx(60 / 105)


def test_host_memory_limits_which_pipelines_share_a_node():
    pools = {
        "r": Pool(name="r", phase=Phase.ROLLOUT, usd_per_gpu_hour=1.0, host_memory_bytes=100.0),
        "t": Pool(name="t", phase=Phase.TRAIN, usd_per_gpu_hour=1.0, host_memory_bytes=1000.0),
    }
    small = Footprint(rollout_host_bytes=60.0, train_host_bytes=1.0)
    pair = [arrival(name, 50.0, 50.0, footprint=small) for name in "ab"]
    result = simulate(workload(*pair, cluster=Cluster(pools=pools)), RollMux())
    assert result.peak_gpus == {"rollout": 2, "train": 1}


def test_a_full_cluster_makes_pipelines_wait_and_all_of_them_finish():
    arrivals = [arrival(f"p{i}", 60.0, 40.0, num_steps=5) for i in range(4)]
    result = simulate(workload(*arrivals, num_rollout_nodes=1, num_train_nodes=1), Solo())
    assert [p.steps for p in result.pipelines] == [5, 5, 5, 5]
    assert result.hours * 3600 == pytest.approx(2000.0)
    assert result.mean_wait_s == pytest.approx(750.0)


def test_a_cluster_without_a_pool_that_is_needed_refuses_with_the_reason():
    pools = {"t": Pool(name="t", phase=Phase.TRAIN)}
    result = simulate(workload(arrival("a", 1.0, 1.0), cluster=Cluster(pools=pools)), RollMux())
    assert result.num_refused == 1
    assert "no pool for rollout" in result.pipelines[0].refused


def test_a_lost_node_costs_the_step_under_way_and_nothing_else():
    failure = NodeFailure(node=NodeId("h20", 0), at_s=250.0, down_s=1000.0)
    made = workload(arrival("a", 60.0, 40.0, num_steps=5), arrival("b", 50.0, 30.0, num_steps=5, slo=1.0))
    result = simulate(made, RollMux(), failures=[failure])
    assert [p.steps for p in result.pipelines] == [5, 5]
    a = result.pipelines[0]
    assert a.left_s == pytest.approx(250.0 + 3 * 100.0)


def test_random_failures_never_lose_or_repeat_a_step():
    made = catalog.build("bl-s", seed=2, num_pipelines=60)
    made = replace(made, arrivals=tuple(replace(a, pipeline=replace(a.pipeline, num_steps=30)) for a in made.arrivals))
    failures = [
        NodeFailure(node=NodeId(pool, i % 5), at_s=5_000.0 + 9_000.0 * i, down_s=4_000.0)
        for i in range(40)
        for pool in ("h20", "h800")
    ]
    result = simulate(made, RollMux(), failures=failures)
    assert {p.steps for p in result.pipelines} == {30}


def test_sampled_and_drifting_steps_depend_on_the_step_alone():
    sampled = RandomVariation(seed=7, cv=0.3)
    factors = [sampled.factor(step) for step in range(1, 4001)]
    assert factors == [RandomVariation(seed=7, cv=0.3).factor(step) for step in range(1, 4001)]
    mean = sum(factors) / len(factors)
    assert mean == pytest.approx(1.0, abs=0.02)
    assert math.sqrt(sum((f - mean) ** 2 for f in factors) / len(factors)) == pytest.approx(0.3, abs=0.03)
    drifting = Drifting(ratios=(1.0, 0.8), amplitude=-0.5, steps_per_value=2)
    assert [drifting.factor(step) for step in (1, 2, 3, 9)] == pytest.approx([1.0, 1.0, 1.1, 1.1])


def test_drift_changes_the_truth_and_leaves_the_estimate():
    up = TrueSeconds.of_phases(
        PhaseSeconds(rollout_s=60.0, train_s=40.0), variation=Drifting(ratios=(1.0, 1.5), steps_per_value=5)
    )
    result = simulate(workload(arrival("a", 60.0, 40.0, num_steps=10, world=up)), RollMux())
    assert result.hours * 3600 == pytest.approx(5 * 100.0 + 5 * 150.0)
    assert slowdowns(result)["a"] == pytest.approx(1.0)


def test_every_policy_plays_the_same_workload_to_its_end():
    """Pipelines come and go five times as fast, so that as many are there at once, with fewer steps each."""
    made = catalog.build("mixed", seed=5, num_pipelines=8, departure="wall")
    hastened = [replace(one, submit_s=one.submit_s / 5, depart_s=one.depart_s / 5) for one in made.arrivals]
    made = replace(made, arrivals=tuple(hastened))
    for name, make in POLICIES.items():
        result = simulate(made, make())
        assert all(p.left_s is not None for p in result.pipelines), name
        assert result.hours == pytest.approx(made.end_s / 3600), name


def test_the_penalty_and_the_cost_agree_with_a_hand_made_integral():
    pair = [
        arrival("a", 60.0, 40.0, num_steps=None, depart_s=7200.0),
        arrival("b", 60.0, 40.0, num_steps=None, submit_s=3600.0, depart_s=10800.0, slo=1.0),
    ]
    result = simulate(workload(*pair), Solo())
    rate = 8 * (1.76 + 5.28)
    assert result.cost_usd == pytest.approx(rate * (2 + 2))
    assert [round(sample.usd_per_hour / rate) for sample in result.samples] == [1, 2, 1, 0]


@pytest.mark.slow
def test_other_names_change_nothing():
    made = catalog.build("mixed", seed=6, num_pipelines=16)
    renamed = replace(
        made,
        arrivals=tuple(
            replace(one, pipeline=replace(one.pipeline, id=PipelineId(f"z{997 - i}")))
            for i, one in enumerate(made.arrivals)
        ),
    )
    for name in ("rollmux", "most-idle", "gavel", "gavel-steps", "rlmux"):
        before, after = simulate(made, make_policy(name)), simulate(renamed, make_policy(name))
        assert before.cost_usd == after.cost_usd, name
        assert [p.step_slowdown for p in before.pipelines] == [p.step_slowdown for p in after.pipelines], name


def test_replaying_the_events_gives_the_same_orders():
    made = catalog.build("bl-m", seed=3, num_pipelines=6)
    for name in ("rollmux", "rlmux"):
        seen = []
        simulate(
            made, make_policy(name), observer=lambda event, actions, seen=seen: seen.append((event, list(actions)))
        )
        again = Scheduler(made.cluster, make_policy(name))
        assert all(again.handle(event) == actions for event, actions in seen), name


@pytest.mark.parametrize("name", POLICIES)
def test_without_moves_a_policy_keeps_its_other_abilities(name):
    made = without_moves(make_policy(name))
    assert (made.name, made.rebalance(None)) == (make_policy(name).name, ())
    assert isinstance(made, type(make_policy(name)))
    assert with_sharing(made, SharingTable()).rebalance(None) == ()


def test_what_moves_saved_is_the_bill_without_them_less_the_bill():
    made = catalog.build("bl-m", seed=3, num_pipelines=6)
    moved = simulate(made, make_policy("rlmux"))
    unmoved = simulate(made, without_moves(make_policy("rlmux")), checks=True)
    assert moved.num_moves > unmoved.num_moves == 0
    known = api.simulate(made, policies=["rlmux", "solo"], prices_moves=True, num_processes=1)["policies"]
    assert known["rlmux"]["moves_saved_usd"] == unmoved.paid_usd - moved.paid_usd
    assert known["solo"]["moves_saved_usd"] == 0.0
    unknown = api.simulate(made, policies=["rlmux"], num_processes=1)["policies"]["rlmux"]
    assert (unknown["moves_saved_usd"], unknown["moves_expected_usd"]) == (None, None)
    assert known["rlmux"]["cost_usd"] == unknown["cost_usd"]
