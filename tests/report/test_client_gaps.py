"""Where a device is idle only because a client asked for nothing, the report says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlmux.core.actions import Release, RunStage
from rlmux.core.events import ClientFinished, PipelineRestarted, StageFinished, WorkArrived, WorkWithdrawn
from rlmux.core.model import DeviceId, Phase, Stage
from rlmux.report.status import status
from rlmux.report.summary import summarize
from rlmux.report.timeline.intervals import Kind

ROLLOUT, TRAIN = DeviceId("rollout", 0, 0), DeviceId("train", 0, 0)
Order = Callable[..., RunStage]
CLIENT = {"num_steps": None, "work_arrives": True, "stages": (Stage.GENERATE, Stage.UPDATE)}


def arrived(time_s: float, *phases: Phase) -> WorkArrived:
    return WorkArrived(time_s=time_s, pipeline="a", phases=phases)


def finished(time_s: float, number: int, seconds: float) -> StageFinished:
    return StageFinished(time_s=time_s, order=number, seconds=seconds)


@pytest.fixture
def run(script: Any, make_order: Order) -> Any:
    """Rolls out from 1 to 3 s, thinks for 2 s, trains from 5 to 6 s, thinks for 1 s and is done."""
    script.submit(0.0, "a", **CLIENT)
    script.event(arrived(1.0, Phase.ROLLOUT), make_order(1, "a", Stage.GENERATE, ROLLOUT))
    script.event(finished(3.0, 1, 2.0))
    script.event(arrived(5.0, Phase.TRAIN), make_order(2, "a", Stage.UPDATE, TRAIN))
    script.event(finished(6.0, 2, 1.0))
    script.event(ClientFinished(time_s=7.0, pipeline="a"), Release(pipeline="a"))
    return script


def named(timeline: Any, device: DeviceId) -> list[tuple[float, float, str, str]]:
    return [(i.start_s, i.end_s, str(i.kind), i.label) for i in timeline.devices[device].intervals]


def test_time_in_which_nothing_was_asked_is_the_clients(run: Any) -> None:
    timeline = run.timeline()
    assert named(timeline, TRAIN) == [
        (0.0, 1.0, "idle", "client of a"),
        (1.0, 3.0, "bubble", "waiting for rollout of a"),
        (3.0, 5.0, "idle", "client of a"),
        (5.0, 6.0, "busy", "compute"),
        (6.0, 7.0, "idle", "client of a"),
    ]
    assert timeline.devices[ROLLOUT].seconds_by_kind[Kind.IDLE] == 4.0


def test_the_summary_has_the_clients_seconds_and_leaves_them_out_of_steps(run: Any) -> None:
    row = summarize(run.timeline())["pipelines"]["a"]
    assert (row["client_s"], row["steps"], row["step_s_mean"], row["status"]) == (4.0, 1, 3.0, "finished")


def test_a_planned_neighbours_own_phases_are_named_before_the_client(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", **CLIENT)
    script.submit(0.0, "b", make_order(1, "b", Stage.GENERATE, ROLLOUT), num_steps=1)
    script.event(finished(2.0, 1, 2.0), make_order(2, "b", Stage.UPDATE, TRAIN))
    script.event(finished(3.0, 2, 1.0), Release(pipeline="b"))
    script.event(arrived(4.0, Phase.TRAIN), make_order(3, "a", Stage.UPDATE, TRAIN))
    script.event(finished(5.0, 3, 1.0), Release(pipeline="a"))
    assert named(script.timeline(), TRAIN) == [
        (0.0, 2.0, "bubble", "waiting for rollout of b"),
        (2.0, 3.0, "busy", "compute"),
        (3.0, 4.0, "idle", "client of a"),
        (4.0, 5.0, "busy", "compute"),
    ]


def test_work_that_waits_for_its_devices_is_not_the_clients_time(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", **CLIENT)
    script.event(arrived(1.0, Phase.TRAIN))
    script.event(WorkWithdrawn(time_s=2.0, pipeline="a", phases=(Phase.TRAIN,)))
    script.event(arrived(3.0, Phase.TRAIN))
    script.event(arrived(4.0, Phase.ROLLOUT), make_order(1, "a", Stage.UPDATE, TRAIN))
    script.event(finished(5.0, 1, 1.0), Release(pipeline="a"))
    (first, second, _) = named(script.timeline(), TRAIN)
    assert first == (0.0, 3.0, "idle", "client of a"), "what was withdrawn was not asked for"
    assert second[:3] == (3.0, 4.0, "bubble")


def test_status_shows_what_a_client_does_and_counts_its_trainings(run: Any) -> None:
    row = status(run.history(), is_going_on=False)["pipelines"]["a"]
    assert (row["step"], row["num_steps"], row["doing"]) == (1, None, "")


@pytest.mark.parametrize("is_submitted", [True, False], ids=["submitted again", "restarted"])
def test_what_a_client_had_done_before_its_server_came_back_counts_as_done(script, make_order, is_submitted) -> None:
    script.submit(0.0, "a", **CLIENT)
    script.event(arrived(1.0, Phase.TRAIN), make_order(1, "a", Stage.UPDATE, TRAIN))
    script.event(finished(3.0, 1, 2.0))
    script.event(arrived(4.0, Phase.TRAIN), make_order(2, "a", Stage.UPDATE, TRAIN))
    if is_submitted:
        script.submit(5.0, "a", **CLIENT)
    else:
        script.event(PipelineRestarted(time_s=5.0, pipeline="a", restored_step=0))
    first, second = script.history().orders
    assert first.counts, "no client asks again for what it has the answer of"
    assert is_submitted or not second.counts
