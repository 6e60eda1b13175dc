"""A pipeline that states a probability is planned with means, and keeps in hand what its steps may vary."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from rlmux.core.actions import ExpectSteps
from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.core.placement.step_bounds import (
    WINDOW_STEPS,
    StepBounds,
    deviation_of,
    mean_bound,
    member_level,
    student_t,
)
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.sim.results.result import SimResult
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import Drifting, TrueSeconds

MEAN = PhaseSeconds(rollout_s=2.0, train_s=1.0)
LIMIT = PhaseSeconds(rollout_s=4.0, train_s=2.0)


def bounded(name: str = "a", **fields) -> Pipeline:
    given = {"num_steps": 40, "estimate": MEAN, "limit": LIMIT, "slo_slowdown": 2.0, "slo_probability": 0.95}
    return Pipeline(id=PipelineId(name), **{**given, **fields})


def times(factor: float) -> PhaseSeconds:
    return PhaseSeconds(rollout_s=factor * MEAN.rollout_s, train_s=factor * MEAN.train_s)


def planned_after(bounds: StepBounds, *factors: float) -> Pipeline:
    now = bounds.first_plan()
    for factor in factors:
        bounds.add(times(factor), MEAN)
        now = bounds.plan(now, num_left=40) or now
    return now


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [(0.95, 1, 6.3138), (0.95, 2, 2.9200), (0.975, 3, 3.1824), (0.99, 7, 2.9980), (0.995, 15, 2.9467)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(level, degrees, expected):
    assert student_t(level, degrees) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("deviation", "num_seen", "num_ahead"),
    [(0.05, 4, 4), (0.1, 4, 4), (0.1, 8, 16), (0.3, 8, 16), (0.3, 16, 64)],
)
def test_the_mean_of_the_coming_steps_is_within_its_bound_as_often_as_is_stated_or_more(deviation, num_seen, num_ahead):
    """Also where steps vary six times as much as the prior's. What they vary is known from few of them."""
    generator = random.Random(5)
    probability, num_tries, within = 0.95, 2000, 0
    for _ in range(num_tries):
        seen = [math.exp(generator.gauss(0.0, deviation)) for _ in range(num_seen)]
        ahead = [math.exp(generator.gauss(0.0, deviation)) for _ in range(num_ahead)]
        bound = mean_bound(deviation_of(seen), num_seen, num_ahead, member_level(probability))
        within += math.fsum(ahead) / num_ahead <= bound * math.fsum(seen) / num_seen
    assert within / num_tries >= probability


def test_all_members_of_a_full_group_are_within_their_bounds_with_the_stated_probability():
    assert 1.0 - MAX_PIPELINES_PER_GROUP * (1.0 - member_level(0.95)) == pytest.approx(0.95)


def test_before_any_step_the_phases_are_in_proportion_as_at_the_token_limit():
    limit = PhaseSeconds(rollout_s=9.0, train_s=3.0)
    planned = StepBounds(bounded(limit=limit)).first_plan()
    assert planned.estimate == MEAN
    assert (planned.held.rollout_s, planned.held.train_s) == (2.25, 0.75)


def test_two_pipelines_with_a_limit_of_many_times_the_mean_share_nodes_as_soon_as_they_come():
    """A step at the limit is longer on both sides of the ratio that an SLO binds."""
    for limit in (1.5, 10.0):
        pair = [bounded(name, limit=times(limit), slo_slowdown=1.5) for name in "ab"]
        arrivals = tuple(Arrival(submit_s=0.0, pipeline=one, world=TrueSeconds.of_phases(MEAN)) for one in pair)
        cluster = h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1)
        result = simulate(Workload(name="pair", cluster=cluster, arrivals=arrivals), make_policy("rlmux"))
        assert result.admissions == {"direct": 1, "scaled": 0, "new": 1}
        assert result.slo_attainment == 1.0


def test_a_pipeline_with_few_steps_keeps_more_in_hand_before_they_are_seen():
    few, many = (StepBounds(bounded(num_steps=number)).first_plan().spread for number in (4, 64))
    assert 1.0 < many < 1.05 < few < 1.2
    assert StepBounds(bounded(num_steps=64, first_step=61)).first_plan().spread == few


def test_steps_that_are_alike_have_no_spread():
    planned = planned_after(StepBounds(bounded()), 9.0, 1.0, 1.0, 1.0)
    assert (planned.estimate, planned.held, planned.spread) == (MEAN, None, 1.0)


def test_the_spread_tightens_as_steps_are_done_and_the_limit_caps_it():
    varying = [1.0, 0.9, 1.1, 1.0, 0.9, 1.1, 1.0, 0.9, 1.1, 1.0, 0.9, 1.1]
    early, late = (planned_after(StepBounds(bounded(limit=None)), *varying[:count]).spread for count in (4, 12))
    assert 1.02 < late < early
    assert planned_after(StepBounds(bounded(limit=times(1.02))), *varying[:4]).spread == early  # a step was above it
    capped = StepBounds(bounded(limit=times(1.2)))
    assert planned_after(capped, *varying[:4]).spread <= 1.2


def test_the_mean_follows_within_eight_steps_after_lengths_have_doubled():
    bounds = StepBounds(bounded())
    now = bounds.first_plan()
    for step in range(1, 61):
        bounds.add(times(2.0 if step > 30 else 1.0), MEAN)
        now = bounds.plan(now, num_left=60 - step) or now
        if step == 38:
            assert now.estimate.rollout_s == pytest.approx(2.0 * MEAN.rollout_s, rel=0.06)
    assert now.estimate.rollout_s == pytest.approx(2.0 * MEAN.rollout_s, rel=0.03)
    assert now.spread == 1.0


def test_a_mean_within_two_standard_errors_is_not_news():
    bounds = StepBounds(bounded())
    planned = planned_after(bounds, 1.0, 0.8, 1.2, 0.9, 1.3)
    assert planned.estimate == MEAN
    assert planned.spread > 1.1


def test_a_limit_that_a_step_exceeds_counts_no_more():
    bounds = StepBounds(bounded(limit=times(1.5)))
    planned = planned_after(bounds, *[1.0] * 10, *[2.0] * WINDOW_STEPS)
    assert planned.estimate.rollout_s == pytest.approx(2.0 * MEAN.rollout_s, rel=0.03)


def test_a_later_part_of_the_run_goes_on_with_the_bounds_of_the_one_before():
    before = StepBounds(bounded())
    planned = planned_after(before, 1.0, 0.9, 1.1, 1.2, 1.0, 1.4)
    known = before.known(planned)
    assert known.bound.rollout_s == pytest.approx(planned.spread * planned.estimate.rollout_s)
    later = StepBounds(bounded(bounded=known))
    resumed = later.first_plan()
    assert resumed.estimate == planned.estimate
    assert resumed.spread == pytest.approx(planned.spread, abs=0.02)
    later.add(times(9.0), MEAN)  # processes start in it
    assert later.plan(resumed, num_left=40) is None


def test_steps_without_an_estimate_are_known_to_a_later_part_of_the_run_too():
    before = StepBounds(bounded(estimate=None, limit=None))
    now = before.first_plan()
    for factor in (1.0, 0.9, 1.1, 1.2):
        before.forget(1)
        before.add(times(factor), None)
        now = before.plan(now, num_left=40) or now
    given = bounded(estimate=now.estimate, held=now.estimate, limit=None, bounded=before.known(now))
    assert StepBounds(given).first_plan().estimate == now.estimate


def test_a_limit_that_a_step_exceeded_bounds_nothing_in_a_later_part_of_the_run():
    before = StepBounds(bounded(limit=times(1.2)))
    known = before.known(planned_after(before, 1.0, 1.5, *[1.0, 1.1] * 10))
    assert known.is_limit_exceeded
    assert not StepBounds(bounded(limit=times(1.2), bounded=replace(known, seen=()))).is_known


@pytest.mark.parametrize("probability", [0.0, 1.0, 1.5, math.nan])
def test_a_probability_is_above_0_and_below_1(probability):
    with pytest.raises(ValueError, match="slo_probability"):
        bounded(slo_probability=probability)


# --- in the scheduler


@pytest.fixture
def driver(builders):
    def make(*pipelines: Pipeline, policy: str = "rollmux", varies: float = 0.0, **nodes):
        """`varies`: part by which odd steps are longer, and even ones shorter."""
        made = builders.Driver(
            Scheduler(builders.cluster(**nodes), make_policy(policy)),
            lambda action: (
                {Stage.GENERATE: 2.0, Stage.UPDATE: 1.0}[action.stage] * (1.0 + varies * (-1.0) ** (action.step + 1))
            ),
        )
        made.submit(*pipelines)
        return made

    return make


def stated(driver, name: str) -> list[float | None]:
    return [action.probability for action in driver.actions(ExpectSteps) if action.pipeline == name]


def test_an_admission_states_its_probability_and_alone_it_is_certain(driver):
    assert stated(driver(bounded()), "a") == [1.0]


def test_two_that_fit_at_the_token_limit_share_from_the_start_and_state_what_was_asked_for(driver):
    run = driver(bounded("a", slo_slowdown=3.0), bounded("b", slo_slowdown=3.0))
    assert run.scheduler.query.placement.num_groups == 1
    assert [stated(run, name)[-1] for name in "ab"] == [0.95, 0.95]


def test_no_probability_is_stated_while_the_plan_keeps_an_slo_by_means_alone(driver):
    """Two rollouts of 2 s are a cycle of 4 s, 1.33 times a step alone."""
    tight = [bounded(name, slo_slowdown=1.42) for name in "ab"]
    steady, varying = driver(*tight), driver(*tight, varies=0.2)
    for run in (steady, varying):
        assert run.scheduler.query.placement.num_groups == 1
        run.run()
    assert set(stated(steady, "b")) == {0.95}
    assert {None, 0.95} <= set(stated(varying, "b"))


def test_two_that_fit_by_their_means_alone_share_once_their_steps_were_seen(driver):
    run = driver(bounded("a"), bounded("b"), policy="rlmux", rollout=None, train=None)
    placement = run.scheduler.query.placement
    assert placement.num_groups == 2
    both = driver(bounded("a", slo_probability=None), bounded("b", slo_probability=None), rollout=None, train=None)
    assert both.scheduler.query.placement.num_groups == 1


def test_beside_a_pipeline_without_bounds_no_probability_is_stated(driver):
    run = driver(bounded("a", slo_slowdown=9.0), replace(bounded("b", slo_slowdown=9.0), slo_probability=None))
    assert run.scheduler.query.placement.num_groups == 1
    assert stated(run, "a")[-1] is None


# --- drift, in the simulator


def doubling(probability: float | None) -> SimResult:
    """Two pipelines of 100 s a step; those of `a` take twice as long from step 21 on."""
    phases = PhaseSeconds(rollout_s=60.0, train_s=40.0)
    steady = TrueSeconds.of_phases(phases)
    twice = replace(steady, variation=Drifting(ratios=(1.0, 2.0), steps_per_value=20))
    arrivals = tuple(
        Arrival(
            submit_s=0.0,
            pipeline=bounded(
                name, num_steps=60, estimate=phases, limit=None, slo_slowdown=slo, slo_probability=probability
            ),
            world=world,
        )
        for name, world, slo in (("a", twice, 1.5), ("b", steady, 1.25))
    )
    workload = Workload(name="doubling", cluster=h20_h800_cluster(), arrivals=arrivals)
    return simulate(workload, make_policy("rlmux"), checks=True)


def test_no_slo_is_missed_beside_a_pipeline_whose_lengths_double_in_mid_run():
    assert all(one.keeps_slo for one in doubling(0.95).pipelines)


@pytest.mark.slow  # a simulated production trace: a minute
def test_at_least_as_many_slos_as_stated_are_kept_while_steps_drift():
    result = simulate(catalog.build("drift-mixed", seed=20, slo_probability=0.95), make_policy("rlmux"))
    assert result.slo_attainment >= 0.95
