"""The numbers are what their definitions say, on runs small enough to add up by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlmux.core.actions import Action, Admit, ExpectSteps, Queue, Release, Relocate, RunStage, Switch
from rlmux.core.events import PipelineCancelled, PipelineRestarted, PipelineSubmitted, StageFinished, StagePaused
from rlmux.core.model import (
    AdmissionKind,
    BoundedSteps,
    DeviceId,
    MeasuredSeconds,
    PhaseSeconds,
    Pipeline,
    Stage,
)
from rlmux.report.slos import NOT_ESTIMATED, move_words, slo_attainment, slo_words
from rlmux.report.status import status
from rlmux.report.summary import summarize

ROLLOUT = DeviceId("rollout", 0, 0)
TRAIN = DeviceId("train", 0, 0)
GENERATE, UPDATE, PUBLISH, REWARD = Stage.GENERATE, Stage.UPDATE, Stage.PUBLISH, Stage.REWARD

Order = Callable[..., RunStage]

KEYS = {
    "policy", "backend", "makespan_s", "tokens_per_s", "pipelines", "devices",
    "num_migrations", "mechanisms", "num_switches", "control_overhead", "slo_attainment", "num_moves",
    "moves_expected_usd", "moves_saved_usd",
}  # fmt: skip
PIPELINE_KEYS = {
    "steps", "tokens", "trajectories", "reward_first", "reward_last", "step_s_mean", "step_slowdown",
    "slo_slowdown", "weights_sha256", "status", "keeps_slo", "expected_slowdown", "estimate", "slo_reason", "promise",
    "queue_s", "moves", "slo_probability", "bound", "delivery",
}  # fmt: skip
DEVICE_KEYS = {"pool", "busy_s", "switch_s", "bubble_s", "idle_s", "utilization"}


def done(time_s: float, number: int, seconds: float, **fields: Any) -> StageFinished:
    return StageFinished(time_s=time_s, order=number, seconds=seconds, **fields)


def two_steps(script: Any, make_order: Order, *then: Action) -> Any:
    """Twice 2 s of rollout, 1 s of update and 0.5 s of publishing; 1.5 s pass before the second rollout. `then`: what
    is ordered between the two."""
    start = make_order(1, "a", GENERATE, ROLLOUT, switch=Switch.COLD)
    script.submit(0.0, "a", start, num_steps=2, slo_slowdown=1.4)
    script.event(done(3.0, 1, 2.0, tokens=100), make_order(2, "a", UPDATE, TRAIN))
    script.event(done(4.0, 2, 1.0, tokens=100), make_order(3, "a", PUBLISH))
    script.note(4.5, "step", pipeline="a", step=1, metrics={"reward_mean": 0.25, "trajectories": 8})
    script.event(done(4.5, 3, 0.0))
    script.event(StagePaused(time_s=4.5, order=99, seconds=0.0), *then)
    script.submit(6.0, "other", make_order(4, "a", GENERATE, ROLLOUT, step=2), num_steps=1)
    script.event(done(8.0, 4, 2.0, tokens=140), make_order(5, "a", UPDATE, TRAIN, step=2))
    script.event(done(9.0, 5, 1.0), make_order(6, "a", PUBLISH, step=2))
    script.note(9.5, "step", pipeline="a", step=2, metrics={"reward_mean": 0.5, "trajectories": 8})
    script.event(done(9.5, 6, 0.0), Release(pipeline="a"))
    return script


def test_keys_are_the_stable_ones(alternating_run: Callable[..., Any]) -> None:
    summary = summarize(alternating_run().timeline())
    assert set(summary) == KEYS
    assert list(summary["pipelines"]) == ["sort", "tools"]
    assert all(set(pipeline) == PIPELINE_KEYS for pipeline in summary["pipelines"].values())
    assert list(summary["devices"]) == ["rollout-0.0", "train-0.0"]
    assert all(set(device) == DEVICE_KEYS for device in summary["devices"].values())
    json.dumps(summary, allow_nan=False)


def test_numbers_of_two_steps(script: Any, make_order: Order) -> None:
    summary = summarize(two_steps(script, make_order).timeline())
    a = summary["pipelines"]["a"]
    assert a["steps"] == 2
    assert a["tokens"] == 240
    assert a["trajectories"] == 16
    assert (a["reward_first"], a["reward_last"]) == (0.25, 0.5)
    assert a["step_s_mean"] == pytest.approx(9.5 - 4.5)
    assert a["step_slowdown"] == pytest.approx((9.5 - 4.5) / 3.5)
    assert a["slo_slowdown"] == 1.4
    assert a["status"] == "finished"
    assert summary["makespan_s"] == 9.5
    assert summary["tokens_per_s"] == pytest.approx(240 / 9.5)
    assert summary["num_switches"] == 1
    rollout = summary["devices"]["rollout-0.0"]
    assert (rollout["busy_s"], rollout["switch_s"], rollout["idle_s"]) == (4.0, 1.0, 0.0)
    assert rollout["bubble_s"] == pytest.approx(4.5)
    assert rollout["utilization"] == pytest.approx(4.0 / 9.5)


def test_alone_the_slowdown_is_one(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    script.event(done(2.0, 1, 2.0), make_order(2, "a", REWARD))
    script.event(done(2.5, 2, 0.0), make_order(3, "a", UPDATE, TRAIN))
    script.event(done(3.5, 3, 1.0), make_order(4, "a", PUBLISH))
    script.event(done(3.75, 4, 0.0), Release(pipeline="a"))
    assert summarize(script.timeline())["pipelines"]["a"]["step_slowdown"] == pytest.approx(1.0)


def test_solo_estimate_takes_the_slowest_rollout_worker(script: Any, make_order: Order) -> None:
    script.num_rollout = 2
    other = DeviceId("rollout", 1, 0)
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), make_order(2, "a", GENERATE, other), num_steps=1)
    script.event(done(1.0, 1, 1.0))
    script.event(done(3.0, 2, 3.0), make_order(3, "a", UPDATE, TRAIN))
    script.event(done(4.0, 3, 1.0), make_order(4, "a", PUBLISH))
    script.event(done(4.0, 4, 0.0), Release(pipeline="a"))
    assert summarize(script.timeline())["pipelines"]["a"]["step_slowdown"] == pytest.approx(4.0 / 4.0)


def test_solo_estimate_of_a_stale_pipeline_overlaps_its_phases(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1, staleness=1)
    script.event(done(3.0, 1, 3.0), make_order(3, "a", UPDATE, TRAIN))
    script.event(done(4.0, 3, 1.0), make_order(4, "a", PUBLISH))
    script.event(done(4.0, 4, 0.0), Release(pipeline="a"))
    assert summarize(script.timeline())["pipelines"]["a"]["step_slowdown"] == pytest.approx(4.0 / 3.0)


def test_control_overhead_is_control_over_all_devices(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    script.event(done(2.0, 1, 1.9), make_order(2, "a", UPDATE, TRAIN))
    script.event(done(4.0, 2, 1.7), Release(pipeline="a"))
    assert summarize(script.timeline())["control_overhead"] == pytest.approx(0.4 / (4.0 * 2))


def test_work_done_twice_counts_once(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    script.event(done(2.0, 1, 2.0, tokens=50), make_order(2, "a", UPDATE, TRAIN))
    again = make_order(3, "a", GENERATE, ROLLOUT)
    script.event(PipelineRestarted(time_s=3.0, pipeline="a", restored_step=0), again)
    script.event(done(5.0, 3, 2.0, tokens=50), make_order(4, "a", UPDATE, TRAIN))
    script.event(done(6.0, 4, 1.0), make_order(5, "a", PUBLISH))
    script.event(done(6.0, 5, 0.0), Release(pipeline="a"))
    a = summarize(script.timeline())["pipelines"]["a"]
    assert a["tokens"] == 50
    assert a["step_slowdown"] == pytest.approx(6.0 / 3.0)


def test_nothing_known_is_null(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.note(0.0, "step", pipeline="a", step=1, metrics={"reward_mean": math.nan})
    summary = summarize(script.timeline())
    a = summary["pipelines"]["a"]
    assert (a["steps"], a["tokens"], a["status"]) == (0, 0, "running")
    for key in (
        "reward_first",
        "reward_last",
        "step_s_mean",
        "step_slowdown",
        "slo_slowdown",
        "weights_sha256",
    ):
        assert a[key] is None
    assert summary["tokens_per_s"] is None


def test_stopped_run_can_be_told_from_one_that_was_cut_off(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    assert summarize(script.timeline())["pipelines"]["a"]["status"] == "running"
    script.note(1.0, "end", control_s=0.1)
    assert summarize(script.timeline())["pipelines"]["a"]["status"] == "stopped"


def test_resumed_run_adds_up_over_both_parts(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=2)
    script.event(done(2.0, 1, 2.0, tokens=10), make_order(2, "a", UPDATE, TRAIN))
    script.event(done(3.0, 2, 1.0), make_order(3, "a", PUBLISH))
    script.note(3.0, "step", pipeline="a", step=1, metrics={"reward_mean": 0.25, "trajectories": 8})
    script.event(done(3.0, 3, 0.0), make_order(4, "a", GENERATE, ROLLOUT, step=2))
    script.note(5.0, "end", control_s=0.1)
    script.note(5.0, "resumed")
    script.submit(5.0, "a", make_order(1, "a", GENERATE, ROLLOUT, step=2), num_steps=2, first_step=2)
    script.event(done(7.0, 1, 2.0, tokens=20), make_order(2, "a", UPDATE, TRAIN, step=2))
    script.event(done(8.0, 2, 1.0), make_order(3, "a", PUBLISH, step=2))
    script.note(8.0, "step", pipeline="a", step=2, metrics={"reward_mean": 0.5, "trajectories": 8})
    script.event(done(8.0, 3, 0.0), Release(pipeline="a"))
    script.note(8.0, "pipeline_end", pipeline="a", status="finished", weights_sha256="sha")
    script.note(8.0, "end", control_s=0.2)
    timeline = script.timeline()
    assert len({order.id for order in timeline.orders}) == len(timeline.orders)
    assert timeline.control_s == pytest.approx(0.3)
    a = summarize(timeline)["pipelines"]["a"]
    assert (a["steps"], a["tokens"], a["trajectories"]) == (2, 30, 16)
    assert (a["reward_first"], a["reward_last"], a["status"]) == (0.25, 0.5, "finished")
    assert a["step_s_mean"] == pytest.approx(8.0 - 3.0)
    assert a["step_slowdown"] == pytest.approx(5.0 / 3.0)


def test_resume_from_an_older_checkpoint_counts_its_steps_once(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", PUBLISH, step=1))
    script.event(done(1.0, 1, 1.0), make_order(2, "a", PUBLISH, step=2))
    script.event(done(2.0, 2, 1.0))
    script.note(2.0, "resumed")
    script.submit(2.0, "a", make_order(1, "a", PUBLISH, step=2), first_step=2)
    history = script.history()
    assert history.pipelines["a"].published == {1: 1.0}
    assert [order.counts for order in history.orders] == [True, False, True]


def test_end_note_brings_hashes_and_status(alternating_run: Callable[..., Any]) -> None:
    pipelines = summarize(alternating_run(failing="tools").timeline())["pipelines"]
    assert (pipelines["sort"]["status"], pipelines["sort"]["weights_sha256"]) == ("finished", "sort-sha")
    assert (pipelines["tools"]["status"], pipelines["tools"]["weights_sha256"]) == ("failed", None)


def test_sharing_costs_a_pipeline_something_but_not_everything(alternating_run: Callable[..., Any]) -> None:
    pipelines = summarize(alternating_run().timeline())["pipelines"]
    assert all(1.0 < pipeline["step_slowdown"] < 2.0 for pipeline in pipelines.values())


def expect(name: str, slowdown: float, reason: str = "") -> ExpectSteps:
    seconds = PhaseSeconds(rollout_s=2.0, train_s=1.0)
    measured = MeasuredSeconds(num_steps=3, low=seconds, median=seconds, high=seconds, held=seconds)
    return ExpectSteps(pipeline=name, measured=measured, step_slowdown=slowdown, reason=reason)


def test_the_slo_is_kept_or_missed_by_what_steps_took(script: Any, make_order: Order) -> None:
    a = summarize(two_steps(script, make_order).timeline())["pipelines"]["a"]
    assert a["step_slowdown"] > a["slo_slowdown"]
    assert a["keeps_slo"] is False
    assert a["estimate"] is None
    assert a["slo_reason"] == ""


def test_a_move_shows_the_step_that_was_expected_and_the_steps_that_came(script: Any, make_order: Order) -> None:
    move = Relocate(pipeline="a", placement=script.whole(), expected_step_s=3.5)
    a = summarize(two_steps(script, make_order, move).timeline())["pipelines"]["a"]
    (shown,) = a["moves"]
    assert {key: shown[key] for key in ("time_s", "expected_step_s", "step_s", "num_steps")} == {
        "time_s": 4.5, "expected_step_s": 3.5, "step_s": 5.0, "num_steps": 1
    }  # fmt: skip


def test_what_moves_saved_is_not_estimated_and_its_keys_stay(script: Any, make_order: Order) -> None:
    moves = [Relocate(pipeline="a", placement=script.whole()) for _ in range(2)]
    summary = summarize(two_steps(script, make_order, *moves).timeline())
    for move in summary["pipelines"]["a"]["moves"]:
        assert {key: move[key] for key in NOT_ESTIMATED} == dict.fromkeys(NOT_ESTIMATED)
    assert (summary["num_moves"], summary["moves_expected_usd"], summary["moves_saved_usd"]) == (2, None, None)
    assert (move_words(2), move_words(0)) == ("moves: 2", "")


def test_attainment_is_a_share_of_the_pipelines_with_an_slo(script: Any, make_order: Order) -> None:
    summary = summarize(two_steps(script, make_order).timeline())
    assert {name: one["keeps_slo"] for name, one in summary["pipelines"].items()} == {"a": False, "other": None}
    assert summary["slo_attainment"] == 0.0
    none = [{"slo_slowdown": None, "keeps_slo": None}]
    kept, broken, unknown = ([{"slo_slowdown": 2.0, "keeps_slo": keeps}] for keeps in (True, False, None))
    shares = [slo_attainment(each) for each in (none, none + kept, kept + broken, kept + unknown)]
    assert shares == [None, 1.0, 0.5, None]


def test_what_was_learned_and_expected_last_is_shown(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", expect("a", 1.0), expect("a", 2.5, "cannot be promised"), slo_slowdown=2.0)
    a = summarize(script.timeline())["pipelines"]["a"]
    seconds = {"rollout_s": 2.0, "train_s": 1.0}
    assert a["estimate"] == {"source": "learned", **seconds, "low": seconds, "high": seconds, "num_steps": 3}
    assert (a["expected_slowdown"], a["slo_reason"]) == (2.5, "cannot be promised")
    assert [instant.text for instant in script.timeline().instants] == ["cannot be promised"]
    assert a["keeps_slo"] is None, "nothing is known yet"


def test_a_stated_probability_is_shown_with_the_bound_beside_the_mean(script: Any, make_order: Order) -> None:
    bounded = BoundedSteps(bound=PhaseSeconds(rollout_s=3.0, train_s=1.25))
    script.submit(0.0, "a", replace(expect("a", 1.0), probability=0.9, bounded=bounded), slo_slowdown=2.0)
    a = summarize(script.timeline())["pipelines"]["a"]
    assert (a["slo_probability"], a["bound"]) == (0.9, {"rollout_s": 3.0, "train_s": 1.25})
    assert slo_words(a) == (
        "keeps its SLO over the steps that are left, with a probability of 0.9; "
        "mean of its coming steps: at most 3 s of rollout and 1.25 s of training (estimate: 2 s and 1 s)"
    )


def test_nothing_is_said_of_bounds_where_no_probability_was_asked_for(script: Any, make_order: Order) -> None:
    a = summarize(two_steps(script, make_order).timeline())["pipelines"]["a"]
    assert (a["bound"], slo_words(a)) == (None, "")


def test_a_pipeline_that_ended_without_a_step_missed_its_slo(script: Any) -> None:
    script.submit(0.0, "a", slo_slowdown=9.0)
    script.event(PipelineCancelled(time_s=5.0, pipeline="a"), Release(pipeline="a"))
    summary = summarize(script.timeline())
    assert summary["pipelines"]["a"]["keeps_slo"] is False
    assert summary["slo_attainment"] == 0.0


def test_seconds_in_the_queue_count_as_they_do_in_the_simulator(script: Any, make_order: Order) -> None:
    """Two steps as fast as alone, after a wait for admission of so many seconds."""

    def after(queue_s: float) -> Any:
        script.rows.clear()
        waiting = Pipeline(id="a", num_steps=2, stages=(GENERATE, UPDATE, PUBLISH), slo_slowdown=2.0)
        script.event(PipelineSubmitted(time_s=0.0, pipeline=waiting), Queue(pipeline="a", reason="no node is free"))
        start = make_order(1, "a", GENERATE, ROLLOUT)
        script.submit(queue_s, "other", Admit(pipeline="a", placement=script.whole(), kind=AdmissionKind.NEW), start)
        for step, order in ((1, 1), (2, 4)):
            begin_s = queue_s + 3.0 * (step - 1)
            script.event(done(begin_s + 2.0, order, 2.0), make_order(order + 1, "a", UPDATE, TRAIN, step=step))
            script.event(done(begin_s + 3.0, order + 1, 1.0), make_order(order + 2, "a", PUBLISH, step=step))
            following = make_order(4, "a", GENERATE, ROLLOUT, step=2) if step == 1 else Release(pipeline="a")
            script.event(done(begin_s + 3.0, order + 2, 0.0), following)
        return summarize(script.timeline())["pipelines"]["a"]

    assert (after(2.5)["queue_s"], after(2.5)["keeps_slo"]) == (2.5, True)
    assert (after(3.5)["queue_s"], after(3.5)["keeps_slo"]) == (3.5, False)


def test_a_step_that_does_not_end_misses_the_slo_while_it_lasts(script: Any, make_order: Order) -> None:
    def steps(end_s: float) -> Any:
        script.rows.clear()
        script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=3, slo_slowdown=2.0)
        script.event(done(2.0, 1, 2.0), make_order(2, "a", UPDATE, TRAIN))
        script.event(done(3.0, 2, 1.0), make_order(3, "a", PUBLISH))
        script.event(done(3.0, 3, 0.0), make_order(4, "a", GENERATE, ROLLOUT, step=2))
        script.event(done(5.0, 4, 2.0))
        script.note(end_s, "step", pipeline="b")
        return summarize(script.timeline())["pipelines"]["a"]

    assert steps(8.0)["keeps_slo"] is True
    assert steps(30.0)["keeps_slo"] is False


def test_a_status_has_the_same_slowdown_as_the_summary(alternating_run: Callable[..., Any]) -> None:
    run = alternating_run()
    shown, summary = status(run.history(), is_going_on=False), summarize(run.timeline())
    for name, one in shown["pipelines"].items():
        assert one["step_slowdown"] == pytest.approx(summary["pipelines"][name]["step_slowdown"], rel=1e-9)


def test_a_status_says_why_a_pipeline_waits_until_it_is_placed(script: Any) -> None:
    queued = Queue(pipeline="a", reason="no room")
    script.event(PipelineSubmitted(time_s=0.0, pipeline=Pipeline(id="a", num_steps=1)), queued)
    shown = status(script.history(), is_going_on=True)["pipelines"]["a"]
    assert (shown["status"], shown["reason"]) == ("waiting", "no room")
    script.event(
        PipelineCancelled(time_s=1.0, pipeline="b"),
        Admit(pipeline="a", placement=script.whole(), kind=AdmissionKind.NEW),
    )
    shown = status(script.history(), is_going_on=True)["pipelines"]["a"]
    assert (shown["status"], shown["reason"]) == ("running", "")


def test_status_says_how_many_adapters_of_a_base_are_on_a_device_and_how_many_more_fit(script: Any) -> None:
    for name in ("a", "b"):
        script.submit(0.0, name, rollout_base="base")
    room = {"device": str(ROLLOUT), "phase": "rollout", "state_bytes": 30, "free_bytes": 100}
    script.note(1.0, "adapter_room", pipeline="b", **room)
    shown = status(script.history(), is_going_on=True)["devices"]
    assert shown[str(ROLLOUT)]["adapters"] == {"rollout": {"here": 2, "more": 3}}
    assert shown[str(TRAIN)]["adapters"] == {}
