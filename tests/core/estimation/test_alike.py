"""A pipeline that comes without an estimate is placed with what steps of pipelines alike took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.actions import ExpectSteps, Relocate, RunStage
from rlmux.core.estimation.alike_seconds import MAX_KEPT, KeptSeconds
from rlmux.core.events import AlikeRestored, StageFinished
from rlmux.core.model import AlikeSeconds, MeasuredSeconds, NodeId, PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

SECONDS = {Stage.GENERATE: 2.0, Stage.UPDATE: 1.0}
STEP = PhaseSeconds(rollout_s=2.0, train_s=1.0)
KEPT = AlikeSeconds(
    alike="sort",
    num_rollout_nodes=1,
    num_train_nodes=1,
    is_colocated=False,
    measured=MeasuredSeconds(num_steps=3, low=STEP, median=STEP, high=STEP, held=STEP),
)


def unknown(name: str, **fields) -> Pipeline:
    """A pipeline that its user gave no estimate."""
    return Pipeline(id=PipelineId(name), **{"num_steps": 40, "alike": "sort", **fields})


@pytest.fixture
def make_driver(builders):
    def make(seconds=lambda action: SECONDS[action.stage], policy="rollmux", nodes=2, **fields):
        return builders.Driver(Scheduler(builders.cluster(rollout=nodes, train=nodes), make_policy(policy)), seconds)

    return make


@pytest.fixture
def driver(make_driver):
    """A scheduler under which one pipeline has been measured, in a group of its own, and runs on."""
    run = make_driver()
    run.submit(unknown("first"))
    while not said(run, "first"):
        assert run.step()
    return run


def said(driver, name: str) -> list[ExpectSteps]:
    return [action for action in driver.actions(ExpectSteps) if action.pipeline == name]


def estimate(driver, name: str) -> PhaseSeconds | None:
    return driver.scheduler.query.pipeline(PipelineId(name)).pipeline.estimate


def neighbours(driver, name: str) -> list[str]:
    placed = driver.scheduler.query.placement
    members = placed.group(placed.placement(PipelineId(name)).group).members
    return [member.pipeline.id for member in members if member.pipeline.id != name]


def rollout_nodes(driver, name: str) -> tuple[NodeId, ...]:
    return driver.scheduler.query.placement.placement(PipelineId(name)).rollout_nodes


# --- at arrival


@pytest.mark.parametrize(("policy", "slo_slowdown"), [("rollmux", 1.5), ("rlmux", 2.0), ("jigsaw", 2.0)])
def test_it_joins_a_group_at_arrival_that_keeps_its_slo_and_no_other(make_driver, policy, slo_slowdown):
    """Two of 2 and 1 s make a cycle of 4 s, three one of 6 s; on nodes that serve both phases, of 6 s and 9 s."""
    run = make_driver(policy=policy, nodes=1)
    run.submit(unknown("first"))
    while not said(run, "first"):
        assert run.step()
    run.submit(unknown("second", slo_slowdown=slo_slowdown))
    assert neighbours(run, "second") == ["first"]
    run.submit(unknown("third", slo_slowdown=slo_slowdown))
    assert run.scheduler.query.status(PipelineId("third")) == "waiting"


def test_it_gets_a_node_of_its_own_at_arrival_where_sharing_one_would_break_its_slo(driver):
    driver.submit(unknown("second", slo_slowdown=1.2))
    assert rollout_nodes(driver, "second") != rollout_nodes(driver, "first")
    driver.run()
    assert driver.actions(Relocate) == []


@pytest.mark.parametrize("fields", [{"alike": "other"}, {"alike": ""}])
def test_another_key_is_not_known_and_is_placed_again_when_it_is(driver, fields):
    driver.submit(unknown("second", slo_slowdown=1.2, **fields))
    assert estimate(driver, "second") is None
    assert rollout_nodes(driver, "second") == rollout_nodes(driver, "first")
    driver.run()
    assert driver.actions(Relocate)


@pytest.mark.parametrize("fields", [{"num_rollout_nodes": 2}, {"num_train_nodes": 2}])
def test_on_other_numbers_of_nodes_it_is_not_known(driver, fields):
    driver.submit(unknown("second", **fields))
    assert estimate(driver, "second") is None


def test_an_estimate_of_its_own_stands(driver, builders):
    driver.submit(builders.pipeline("second", rollout_s=2.2, alike="sort"))
    assert estimate(driver, "second") == PhaseSeconds(rollout_s=2.2, train_s=1.0)


def test_what_it_is_planned_with_is_emitted_when_it_is_placed(driver):
    driver.submit(unknown("second", slo_slowdown=1.5))
    [first], [second] = said(driver, "first"), said(driver, "second")
    assert first.alike == KEPT
    assert (second.measured, second.step_slowdown, second.alike) == (first.measured, pytest.approx(4 / 3), None)


def test_hand_overs_of_pipelines_alike_are_a_load_on_its_neighbours(make_driver):
    run = make_driver()
    run.submit(unknown("first"))
    while not said(run, "first"):
        [order] = run.scheduler.query.orders()
        run.send(
            StageFinished(time_s=run.now_s + 1.25 * SECONDS[order.stage], order=order.id, seconds=SECONDS[order.stage])
        )
    run.submit(unknown("second"))
    second = run.scheduler.query.pipeline(PipelineId("second")).pipeline
    assert (second.estimate, second.held) == (STEP, PhaseSeconds(rollout_s=2.5, train_s=1.25))


# --- its own steps


def test_near_what_was_expected_it_stays_planned_with_that(driver):
    driver.submit(unknown("second"))
    driver.run()
    assert len(said(driver, "second")) == 1


@pytest.mark.parametrize("fields", [{}, {"slo_probability": 0.95}])
def test_a_pipeline_whose_steps_are_unlike_is_planned_anew_after_its_first(make_driver, fields):
    """After three steps, or with a probability after three beside the first."""
    run = make_driver(lambda action: SECONDS[action.stage] * (3.0 if action.pipeline == "second" else 1.0))
    run.submit(unknown("first", **fields))
    while not said(run, "first") or said(run, "first")[-1].alike is None:
        assert run.step()
    run.submit(unknown("second", slo_slowdown=1.5, **fields))
    assert neighbours(run, "second") == ["first"]
    assert estimate(run, "second").rollout_s == pytest.approx(2.0, rel=0.03)
    run.run()
    anew = next(one for one in said(run, "second") if one.alike is not None)
    assert anew.measured.median == PhaseSeconds(rollout_s=6.0, train_s=3.0)
    ends = [one for one in run.log if one[1] is anew or (isinstance(one[1], RunStage) and one[1].pipeline == "second")]
    steps = {one.step for _, one in ends[: [one for _, one in ends].index(anew)]}
    assert max(steps) == (4 if fields else 3)


def test_before_its_own_steps_are_seen_it_keeps_the_priors_spread_in_hand(driver):
    driver.submit(unknown("second", slo_slowdown=1.5, slo_probability=0.95))
    planned = driver.scheduler.query.pipeline(PipelineId("second")).pipeline
    assert (planned.estimate, planned.held) == (STEP, STEP)
    assert 1.0 < planned.spread < 1.1


def test_the_newest_seconds_count(make_driver):
    run = make_driver(lambda action: SECONDS[action.stage] * (1.0 if action.step <= 10 else 2.0))
    run.submit(unknown("first"))
    run.run()
    run.submit(unknown("second"))
    assert estimate(run, "second") == PhaseSeconds(rollout_s=4.0, train_s=2.0)


def test_seconds_on_nodes_that_serve_both_phases_are_no_others(make_driver):
    run = make_driver(policy="rlmux", nodes=1)
    run.submit(unknown("first"))
    run.run()
    assert said(run, "first")[0].alike.is_colocated
    run.submit(unknown("second"))
    assert estimate(run, "second") is None


# --- the history


def test_replaying_the_events_gives_the_same_actions(driver):
    driver.submit(unknown("second", slo_slowdown=1.2), unknown("third", slo_slowdown=1.5, slo_probability=0.9))
    driver.run()
    again = Scheduler(driver.scheduler.cluster, make_policy("rollmux"))
    assert [action for event in driver.events for action in again.handle(event)] == driver.actions()


def test_what_an_earlier_part_of_the_run_measured_is_known_once_it_is_restored(make_driver):
    run = make_driver()
    run.send(AlikeRestored(time_s=0.0, seconds=(KEPT,)))
    run.submit(unknown("second"))
    assert estimate(run, "second") == STEP


def test_the_keys_that_were_not_renewed_for_longest_are_dropped():
    kept = KeptSeconds()
    for number in range(MAX_KEPT):
        kept.keep(replace(KEPT, alike=str(number)))
    kept.keep(replace(KEPT, alike="0"))
    kept.keep(replace(KEPT, alike="one more"))
    known = [number for number in range(MAX_KEPT) if kept.of(unknown("a", alike=str(number)), num_shared=None)]
    assert known == [0, *range(2, MAX_KEPT)]
