"""A pipeline is planned with what its steps took: at once without an estimate, else where they drift from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlmux.core.actions import ExpectSteps, Relocate, RunStage
from rlmux.core.estimation.measured_steps import MeasuredSteps
from rlmux.core.events import PipelineSubmitted, StageFinished
from rlmux.core.model import DeviceId, Phase, PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.core.steps.expected_steps import drifted
from rlmux.policies import make_policy
from rlmux.sim.results.result import SimResult
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import Drifting, TrueSeconds

SECONDS = {Stage.GENERATE: 2.0, Stage.UPDATE: 1.0}


def unknown(name: str, *, num_steps: int = 40, **fields) -> Pipeline:
    """A pipeline of which nothing is known before it runs."""
    return Pipeline(id=PipelineId(name), num_steps=num_steps, **fields)


def seconds_of(action: RunStage) -> float:
    return SECONDS[action.stage]


@pytest.fixture
def driver(builders):
    def make(*, policy: str = "rollmux", seconds=seconds_of, **nodes):
        return builders.Driver(Scheduler(builders.cluster(**nodes), make_policy(policy)), seconds)

    return make


def step_ends(driver, name: str) -> list[float]:
    """Times at which the pipeline's updates ended."""
    ends = {event.order: event.time_s for event in driver.events if isinstance(event, StageFinished)}
    return [
        ends[action.order]
        for action in driver.actions(RunStage)
        if action.pipeline == name and action.stage is Stage.UPDATE
    ]


def mean_step_s(driver, name: str, *, first: int = 10) -> float:
    """Mean seconds from one step's end to the next, from the given step on."""
    ends = step_ends(driver, name)[first - 1 :]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def expectations(driver, name: str) -> list[ExpectSteps]:
    return [action for action in driver.actions(ExpectSteps) if action.pipeline == name]


# --- measuring


def test_what_was_measured_before_a_resume_is_planned_with_at_once_and_learned_anew(driver):
    before = PhaseSeconds(rollout_s=20.0, train_s=1.0)
    run = driver()
    run.submit(replace(unknown("a", slo_slowdown=1.5), first_step=11, estimate=before, held=before))
    assert run.scheduler.query.pipeline(PipelineId("a")).pipeline.estimate == before
    run.run()
    assert expectations(run, "a")[-1].measured.median == PhaseSeconds(rollout_s=2.0, train_s=1.0)


def test_the_first_three_steps_make_the_estimate_by_their_median(driver):
    run = driver(seconds=lambda action: SECONDS[action.stage] + (10.0 if action.step == 1 else 0.0))
    run.submit(unknown("a"))
    while not expectations(run, "a"):
        assert run.step()
    assert len(step_ends(run, "a")) == 3
    [told] = expectations(run, "a")
    assert told.measured is not None
    assert told.measured.median == PhaseSeconds(rollout_s=2.0, train_s=1.0)
    assert told.measured.high.rollout_s > told.measured.median.rollout_s
    assert run.scheduler.query.pipeline(PipelineId("a")).pipeline.estimate == told.measured.median


def test_solo_seconds_leave_out_what_a_neighbour_makes_it_wait(driver):
    run = driver()
    run.submit(unknown("a"), unknown("b"), unknown("c"))
    run.run()
    for name in "abc":
        assert {told.measured.median for told in expectations(run, name)} == {PhaseSeconds(rollout_s=2.0, train_s=1.0)}
    assert mean_step_s(run, "a") == pytest.approx(6.0)


def test_a_paused_training_counts_whole():
    measured, device = MeasuredSteps(), DeviceId("rollout", 0, 0)
    for step in (1, 2, 3):
        measured.open_rollout(step, [device])
        measured.add_rollout(step, device, 2.0, 2.0)
        measured.add_train(step, 0.4, 0.4)
        measured.add_train(step, 0.6, 0.6)
        measured.end_step(step)
    seconds = measured.seconds()
    assert seconds is not None
    assert seconds.median == PhaseSeconds(rollout_s=2.0, train_s=1.0)


def test_hand_overs_are_a_load_on_neighbours_and_no_part_of_the_budget(builders):
    """Each order holds its device for a quarter longer than it computes."""
    run = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux")), seconds_of)
    run.submit(unknown("a", slo_slowdown=2.0))
    while not expectations(run, "a"):
        [order] = run.scheduler.query.orders()
        computing_s = SECONDS[order.stage]
        run.send(StageFinished(time_s=run.now_s + 1.25 * computing_s, order=order.id, seconds=computing_s))
    pipeline = run.scheduler.query.pipeline(PipelineId("a")).pipeline
    assert pipeline.estimate == PhaseSeconds(rollout_s=2.0, train_s=1.0)
    assert pipeline.held == PhaseSeconds(rollout_s=2.5, train_s=1.25)
    placed = run.scheduler.query.placement
    group = placed.group(placed.placement(PipelineId("a")).group)
    assert (group.budget_s, group.period_s) == (6.0, 3.75)
    assert expectations(run, "a")[0].step_slowdown == pytest.approx(1.25)


def test_of_a_step_that_is_done_again_only_the_last_time_counts():
    measured, device = MeasuredSteps(), DeviceId("rollout", 0, 0)
    for step, is_lost in ((1, False), (2, True), (2, False), (3, False)):
        measured.open_rollout(step, [device])
        measured.add_rollout(step, device, 2.0, 2.0)
        measured.add_train(step, 1.0, 1.0)
        if not is_lost:
            measured.end_step(step)
    seconds = measured.seconds()
    assert seconds is not None
    assert (seconds.num_steps, seconds.high) == (3, PhaseSeconds(rollout_s=2.0, train_s=1.0))


def test_other_numbers_of_devices_are_other_seconds():
    measured = MeasuredSteps()
    one, two = DeviceId("rollout", 0, 0), DeviceId("rollout", 1, 0)
    for step, devices in ((1, [one]), (2, [one]), (3, [one, two])):
        measured.open_rollout(step, devices)
        for device in devices:
            measured.add_rollout(step, device, 4.0 / len(devices), 0.0)
        measured.add_train(step, 1.0, 1.0)
        measured.end_step(step)
    assert measured.seconds() is None


def test_an_estimate_that_the_user_gave_stands_while_steps_are_near_it(driver, builders):
    run = driver(seconds=lambda action: 1.2 * SECONDS[action.stage])
    run.submit(builders.pipeline("a", num_steps=20, slo_slowdown=2.0))
    run.run()
    assert run.actions(ExpectSteps) == []


def test_a_pipeline_that_drifts_is_planned_anew(driver):
    run = driver(seconds=lambda action: SECONDS[action.stage] * (1.0 if action.step <= 10 else 2.0))
    run.submit(unknown("a"))
    run.run()
    medians_s = [told.measured.median.rollout_s for told in expectations(run, "a")]
    assert (medians_s[0], medians_s[-1]) == (2.0, 4.0)


# --- what it changes


def test_a_pipeline_whose_slo_breaks_where_it_was_put_gets_nodes_of_its_own(driver):
    run = driver(rollout=2, train=2)
    run.submit(unknown("a"), unknown("b", slo_slowdown=1.2), unknown("c"))
    run.run()
    assert [action.pipeline for action in run.actions(Relocate)]
    assert mean_step_s(run, "b") <= 1.2 * 3.0
    assert all(not told.reason for told in expectations(run, "b")[1:])


def test_where_no_node_is_free_it_makes_several_steps_in_a_cycle(driver):
    def mean(slo_slowdown: float) -> float:
        run = driver()
        run.submit(unknown("a"), unknown("b", slo_slowdown=slo_slowdown), unknown("c"))
        run.run()
        return mean_step_s(run, "b")

    assert mean(math.inf) == pytest.approx(6.0)
    assert mean(2.0) == pytest.approx(6.0)
    assert mean(1.6) <= 1.6 * 3.0


def test_steps_per_cycle_are_the_fewest_that_keep_the_slo_with_a_margin(driver):
    """Three alike, solo 3 s: one of them with k steps in a cycle takes 3 + 3 / k seconds a step."""

    def steps_per_cycle(slo_slowdown: float) -> int:
        run = driver()
        run.submit(unknown("a"), unknown("b", slo_slowdown=slo_slowdown), unknown("c"))
        while len(expectations(run, "a")) * len(expectations(run, "b")) * len(expectations(run, "c")) == 0:
            assert run.step()
        return run.scheduler.query.placement.member(PipelineId("b")).steps_per_cycle

    assert [steps_per_cycle(slo) for slo in (1.6, 1.7, 1.95, 2.0)] == [4, 3, 2, 1]


def test_pipelines_without_an_slo_go_on_beside_it(driver):
    run = driver()
    run.submit(unknown("a"), unknown("b", slo_slowdown=1.6, num_steps=200), unknown("c"))
    run.run()
    assert len(step_ends(run, "a")) == len(step_ends(run, "c")) == 40


def test_steps_per_cycle_are_taken_back_when_neighbours_leave(driver):
    run = driver()
    run.submit(unknown("a", num_steps=8), unknown("b", slo_slowdown=2.2, num_steps=80))
    run.submit(unknown("c", num_steps=8), unknown("d", num_steps=80))
    counts: dict[int, None] = {}
    while "c" in run.scheduler.query.placement or "a" in run.scheduler.query.placement:
        assert run.step()
        counts[run.scheduler.state.runs[PipelineId("b")].cycle.steps_per_cycle] = None
    assert max(counts) > 1
    members = run.scheduler.query.placement.group(
        run.scheduler.query.placement.placement(PipelineId("b")).group
    ).members
    assert {member.steps_per_cycle for member in members} == {1}


def test_an_slo_that_cannot_hold_is_told_once_in_one_line(driver):
    run = driver()
    run.submit(unknown("a", slo_slowdown=1.1, num_steps=80), unknown("b", slo_slowdown=1.1))
    while not any(told.reason for told in expectations(run, "a")):
        assert run.step()
    run.run()
    broken = [told for told in expectations(run, "a") if told.reason]
    assert len(broken) == 1
    assert broken[0].reason == (
        "slo_slowdown 1.1 cannot be promised here: a step of 3 s alone is expected to take 4 s, 1.33 times as long, "
        "in a group of 2 pipelines, and policy rollmux finds no better place"
    )
    assert expectations(run, "a")[-1].reason == "", "b has left"


def test_due_times_count_every_step_since_the_first(driver):
    run = driver()
    run.submit(unknown("a", slo_slowdown=1.5))
    while not expectations(run, "a"):
        assert run.step()
    history = run.scheduler.state.runs[PipelineId("a")].estimates.history
    assert history.due_s == pytest.approx(4 * 1.5 * 3.0)  # the fourth rollout is open


def test_the_same_events_give_the_same_expectations(driver):
    run = driver(rollout=2, train=2)
    run.submit(unknown("a"), unknown("b", slo_slowdown=1.2), unknown("c"))
    run.run()
    again = Scheduler(run.scheduler.cluster, make_policy("rollmux"))
    assert [action for event in run.events for action in again.handle(event)] == run.actions()


@pytest.mark.parametrize("policy", ["rlmux", "gavel-steps", "jigsaw", "fifo", "solo"])
def test_every_policy_goes_on_with_learned_estimates(driver, policy):
    run = driver(policy=policy, rollout=2, train=2)
    for number, name in enumerate("abc"):
        run.send(PipelineSubmitted(time_s=run.now_s, pipeline=unknown(name, slo_slowdown=1.2 + 0.4 * number)))
        run.step()
    run.run()
    for name in "abc":
        assert run.scheduler.query.status(PipelineId(name)) == "finished"
        assert expectations(run, name)
    assert not run.scheduler.query.has_orders()
    assert run.scheduler.query.placement.num_free_nodes(Phase.ROLLOUT) == 2


# --- estimates that the user gave


def drifting_pair(policy: str) -> tuple[SimResult, list[Relocate]]:
    """Two pipelines of 100 s a step that share a node of each kind; the steps of `a` take twice as long from 21 on."""
    phases = PhaseSeconds(rollout_s=60.0, train_s=40.0)
    steady = TrueSeconds.of_phases(phases)
    twice = replace(steady, variation=Drifting(ratios=(1.0, 2.0), steps_per_value=20))
    arrivals = tuple(
        Arrival(
            submit_s=0.0,
            pipeline=Pipeline(id=PipelineId(name), num_steps=60, estimate=phases, slo_slowdown=1.5),
            world=world,
        )
        for name, world in (("a", twice), ("b", steady))
    )
    moves: list[Relocate] = []
    result = simulate(
        Workload(name="drifting", cluster=h20_h800_cluster(), arrivals=arrivals),
        make_policy(policy),
        observer=lambda _, actions: moves.extend(one for one in actions if isinstance(one, Relocate)),
        checks=True,
    )
    return result, moves


@pytest.mark.parametrize("policy", ["rollmux", "rlmux"])
def test_a_pipeline_whose_steps_double_in_mid_run_is_placed_again_and_no_slo_is_missed(policy):
    result, moves = drifting_pair(policy)
    assert len(moves) == 1
    assert all(one.keeps_slo for one in result.pipelines)


def test_estimates_drift_apart_and_colocated_alike_and_in_steps_of_a_tenth():
    given = Pipeline(
        id=PipelineId("a"),
        num_steps=1,
        estimate=PhaseSeconds(rollout_s=100.0, train_s=50.0),
        colocated_estimate=PhaseSeconds(rollout_s=120.0, train_s=40.0),
    )
    now = drifted(given, given.colocated_estimate, PhaseSeconds(rollout_s=146.0, train_s=40.5))
    assert now.estimate == PhaseSeconds(rollout_s=pytest.approx(121.0), train_s=50.0)
    assert now.colocated_estimate == PhaseSeconds(rollout_s=pytest.approx(145.2), train_s=40.0)
