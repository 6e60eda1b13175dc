"""A pipeline that states a probability is planned with bounds: the token limit first, then what its steps were like."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from rlmux.core.actions import ExpectSteps
from rlmux.core.estimation.step_bounds import WINDOW_STEPS, StepBounds, mean_bound, member_level, student_t
from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP
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
        now = bounds.plan(now) or now
    return now


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [(0.95, 1, 6.3138), (0.95, 2, 2.9200), (0.975, 3, 3.1824), (0.99, 7, 2.9980), (0.995, 15, 2.9467)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(level, degrees, expected):
    assert student_t(level, degrees) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("probability", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("num_steps", [3, 16])
def test_the_next_step_is_within_its_bound_as_often_as_is_stated(probability, num_steps):
    generator = random.Random(5)
    num_tries = 4000
    within = 0
    for _ in range(num_tries):
        *seen, later = [math.exp(generator.gauss(0.0, 0.3)) for _ in range(num_steps + 1)]
        within += later <= prediction_bound(seen, probability)
    assert within / num_tries == pytest.approx(probability, abs=4.0 * math.sqrt(probability * 0.2 / num_tries))


def test_all_members_of_a_full_group_are_within_their_bounds_with_the_stated_probability():
    assert 1.0 - MAX_PIPELINES_PER_GROUP * (1.0 - phase_level(0.95)) == pytest.approx(0.95)


def test_before_its_first_steps_a_pipeline_is_planned_at_the_token_limit():
    bounds = StepBounds(bounded())
    assert bounds.first_plan().held == LIMIT
    assert bounds.first_plan().estimate == MEAN
    assert bounds.is_known


def test_steps_that_are_alike_are_their_own_bound():
    planned = planned_after(StepBounds(bounded()), 9.0, 1.0, 1.0, 1.0)
    assert (planned.estimate, planned.held) == (MEAN, MEAN)


def test_steps_that_vary_have_a_bound_above_them_which_the_limit_caps():
    planned = planned_after(StepBounds(bounded(limit=None)), 1.0, 0.9, 1.1, 1.0, 0.9, 1.1)
    assert planned.held.rollout_s > 1.1 * MEAN.rollout_s
    capped = planned_after(StepBounds(bounded(limit=times(1.2))), 1.0, 0.9, 1.1, 1.0, 0.9, 1.1)
    assert 1.2 <= capped.held.rollout_s / MEAN.rollout_s <= 1.2 * 1.05


def test_the_bound_is_above_every_step_soon_after_lengths_have_doubled():
    bounds = StepBounds(bounded())
    now, late = bounds.first_plan(), []
    for step in range(1, 61):
        factor = 2.0 if step > 30 else 1.0
        if factor > now.held.rollout_s / MEAN.rollout_s * (1 + 1e-9):
            late.append(step)
        bounds.add(times(factor), MEAN)
        now = bounds.plan(now) or now
    assert late == sorted({31, *late})
    assert late[-1] <= 33
    assert now.held.rollout_s == pytest.approx(2.0 * MEAN.rollout_s, rel=0.1)


def test_a_limit_that_a_step_exceeds_counts_no_more():
    bounds = StepBounds(bounded(limit=times(1.5)))
    planned = planned_after(bounds, *[1.0] * 10, *[2.0] * WINDOW_STEPS)
    assert planned.held.rollout_s >= 2.0 * MEAN.rollout_s * (1 - 1e-9)


def test_a_later_part_of_the_run_goes_on_with_the_bounds_of_the_one_before():
    before = StepBounds(bounded())
    planned = planned_after(before, 1.0, 0.9, 1.1, 1.2, 1.0, 1.4)
    later = StepBounds(bounded(bounded=before.known(planned)))
    resumed = later.first_plan()
    assert (resumed.estimate, resumed.held) == (planned.estimate, planned.held)
    assert planned.held != LIMIT
    later.add(times(9.0), MEAN)  # processes start in it
    assert later.plan(resumed) is None


def test_steps_without_an_estimate_are_known_to_a_later_part_of_the_run_too():
    before = StepBounds(bounded(estimate=None, limit=None))
    now = before.first_plan()
    for factor in (1.0, 0.9, 1.1, 1.2):
        before.forget(1)
        before.add(times(factor), None)
        now = before.plan(now) or now
    given = bounded(estimate=now.estimate, held=now.estimate, limit=None, bounded=before.known(now))
    assert StepBounds(given).first_plan().held == now.held


def test_a_limit_that_a_step_exceeded_bounds_nothing_in_a_later_part_of_the_run():
    before = StepBounds(bounded(limit=times(1.2)))
    known = before.known(planned_after(before, 1.0, 1.5, *[1.0, 1.1] * 10))
    assert known.is_limit_exceeded
    assert StepBounds(bounded(limit=times(1.2), bounded=known)).first_plan().held.rollout_s > 1.2 * MEAN.rollout_s


@pytest.mark.parametrize("probability", [0.0, 1.0, 1.5, math.nan])
def test_a_probability_is_above_0_and_below_1(probability):
    with pytest.raises(ValueError, match="slo_probability"):
        bounded(slo_probability=probability)


# --- in the scheduler


@pytest.fixture
def driver(builders):
    def make(*pipelines: Pipeline, policy: str = "rollmux", **nodes):
        made = builders.Driver(
            Scheduler(builders.cluster(**nodes), make_policy(policy)),
            lambda action: {Stage.GENERATE: 2.0, Stage.UPDATE: 1.0}[action.stage],
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
