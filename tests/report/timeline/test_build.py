"""Every second of every device has a name, and it is the right one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from rlmux.core.actions import MigrateShard, Release, RunStage, Switch
from rlmux.core.events import (
    ChunkFinished,
    NodeJoined,
    PipelineFailed,
    PipelineRestarted,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkerLost,
)
from rlmux.core.model import DeviceId, NodeId, Stage
from rlmux.report.mechanisms import mechanisms
from rlmux.report.timeline.build import Timeline
from rlmux.report.timeline.intervals import Interval, Kind

ROLLOUT = DeviceId("rollout", 0, 0)
TRAIN = DeviceId("train", 0, 0)
NODE = NodeId("rollout", 9)
GENERATE, UPDATE, PUBLISH, REWARD = Stage.GENERATE, Stage.UPDATE, Stage.PUBLISH, Stage.REWARD

Order = Callable[..., RunStage]


def named(timeline: Timeline, device: DeviceId) -> list[tuple[float, float, str, str]]:
    """(start, end, kind, label) in milliseconds' precision."""
    return [(round(i.start_s, 3), round(i.end_s, 3), str(i.kind), i.label) for i in timeline.devices[device].intervals]


def assert_adds_up(timeline: Timeline) -> None:
    for device in timeline.devices.values():
        assert sum(device.seconds_by_kind.values()) == pytest.approx(timeline.makespan_s, abs=1e-6)
        assert sum(charge.seconds for charge in device.charges) == pytest.approx(timeline.makespan_s, abs=1e-6)
        for lane in range(device.num_lanes):
            lined = [i for i in device.intervals if i.lane == lane]
            for before, after in itertools.pairwise(lined):
                assert after.start_s >= before.end_s - 1e-6


def finished(time_s: float, number: int, seconds: float, **fields: Any) -> StageFinished:
    return StageFinished(time_s=time_s, order=number, seconds=seconds, **fields)


def test_one_pipeline_alone_waits_for_its_own_other_phase(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    script.event(finished(2.0, 1, 2.0), make_order(2, "a", REWARD))
    script.event(finished(2.5, 2, 0.5), make_order(3, "a", UPDATE, TRAIN))
    script.event(finished(3.5, 3, 1.0), make_order(4, "a", PUBLISH))
    script.event(finished(3.75, 4, 0.25), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT) == [
        (0.0, 2.0, "busy", "compute"),
        (2.0, 2.5, "bubble", "waiting for rewards of a"),
        (2.5, 3.5, "bubble", "waiting for training of a"),
        (3.5, 3.75, "bubble", "sync of a"),
    ]
    assert named(timeline, TRAIN) == [
        (0.0, 2.0, "bubble", "waiting for rollout of a"),
        (2.0, 2.5, "bubble", "waiting for rewards of a"),
        (2.5, 3.5, "busy", "compute"),
        (3.5, 3.75, "bubble", "sync of a"),
    ]
    assert timeline.is_over
    assert_adds_up(timeline)


def test_held_time_splits_into_lead_switch_and_compute(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT, switch=Switch.COLD), num_steps=1)
    script.event(StagePaused(time_s=3.0, order=1, seconds=1.5, switch_s=0.5))
    script.event(NodeJoined(time_s=3.0, node=NODE), make_order(2, "a", GENERATE, ROLLOUT, switch=Switch.WARM))
    script.event(finished(4.0, 2, 0.7, switch_s=0.25), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT) == [
        (0.0, 1.0, "switch", "starting"),
        (1.0, 1.5, "switch", "switch"),
        (1.5, 3.0, "busy", "compute"),
        (3.0, 3.05, "bubble", "control"),
        (3.05, 3.3, "switch", "switch"),
        (3.3, 4.0, "busy", "compute"),
    ]
    assert_adds_up(timeline)


def test_milliseconds_between_chunks_add_up_to_control_without_cutting_the_picture(
    script: Any, make_order: Order
) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    for number in range(1, 10):
        script.event(ChunkFinished(time_s=0.1 * number, order=1, num_active=8, num_waiting=4, seconds=0.09 * number))
    script.event(finished(1.0, 1, 0.9), Release(pipeline="a"))
    assert named(script.timeline(), ROLLOUT) == [
        (0.0, 0.1, "bubble", "control"),
        (0.1, 1.0, "busy", "compute"),
    ]


def test_tail_begins_at_an_eighth_of_the_most_that_were_active(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    for time_s, active, waiting in ((1.0, 16, 4), (2.0, 2, 1), (3.0, 3, 0), (4.0, 2, 0), (5.0, 1, 0)):
        script.event(
            ChunkFinished(time_s=time_s, order=1, num_active=active, num_waiting=waiting, seconds=time_s, tokens=9)
        )
    script.event(finished(6.0, 1, 6.0), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT) == [(0.0, 4.0, "busy", "compute"), (4.0, 6.0, "busy", "tail")]
    assert timeline.devices[ROLLOUT].seconds_by_kind[Kind.BUSY] == pytest.approx(6.0)


@pytest.mark.parametrize("counts_waiting", [False, True])
def test_trajectories_that_wait_for_their_environment_make_a_tool_wait(
    script: Any, make_order: Order, counts_waiting: bool
) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    later_s = 1.0 if counts_waiting else 0.0
    script.event(
        ChunkFinished(time_s=1.0, order=1, num_active=0, num_waiting=0, num_waiting_for_env=5, seconds=1.0, tokens=50)
    )
    script.event(
        ChunkFinished(
            time_s=2.0, order=1, num_active=0, num_waiting=0, num_waiting_for_env=5, seconds=1.0 + later_s, tokens=50
        )
    )
    script.event(ChunkFinished(time_s=2.5, order=1, num_active=5, num_waiting=0, seconds=1.5 + later_s, tokens=99))
    script.event(finished(3.0, 1, 2.0 + later_s, tokens=120), Release(pipeline="a"))
    kinds = [(start, end, label) for start, end, _, label in named(script.timeline(), ROLLOUT)]
    assert kinds == [
        (0.0, 1.0, "compute"),
        (1.0, 2.0, "tool wait"),
        (2.0, 2.5, "compute"),
        (2.5, 3.0, "compute"),
    ]


def test_a_tool_wait_is_one_even_where_other_trajectories_wait_for_a_slot(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    script.event(
        ChunkFinished(time_s=1.0, order=1, num_active=0, num_waiting=3, num_waiting_for_env=5, seconds=1.0, tokens=50)
    )
    script.event(ChunkFinished(time_s=2.5, order=1, num_active=5, num_waiting=0, seconds=1.5, tokens=99))
    script.event(finished(3.0, 1, 2.0, tokens=120), Release(pipeline="a"))
    assert (1.0, 2.0, "bubble", "tool wait") in named(script.timeline(), ROLLOUT)


def test_strict_order_is_blamed_when_another_could_have_run(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.submit(0.0, "b")
    script.event(finished(1.0, 1, 1.0), make_order(2, "a", UPDATE, TRAIN))
    script.event(finished(3.0, 2, 2.0), make_order(3, "a", GENERATE, ROLLOUT, step=2))
    script.event(finished(4.0, 3, 1.0), make_order(4, "b", GENERATE, ROLLOUT))
    script.event(finished(5.0, 4, 1.0), Release(pipeline="a"), Release(pipeline="b"))
    assert named(script.timeline(), ROLLOUT) == [
        (0.0, 1.0, "busy", "compute"),
        (1.0, 3.0, "bubble", "waiting for cycle slot of a"),
        (3.0, 4.0, "busy", "compute"),
        (4.0, 5.0, "busy", "compute"),
    ]


def test_filled_bubble_is_no_bubble_and_the_rest_names_what_it_waits_for(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.submit(0.0, "b")
    script.event(finished(2.0, 1, 2.0), make_order(2, "a", UPDATE, TRAIN), make_order(3, "b", GENERATE, ROLLOUT))
    script.event(finished(3.0, 2, 1.0))
    script.event(
        finished(5.0, 3, 3.0),
        make_order(4, "b", UPDATE, TRAIN),
        make_order(5, "a", GENERATE, ROLLOUT, step=2),
    )
    script.event(finished(6.0, 4, 1.0), Release(pipeline="b"))
    script.event(finished(7.0, 5, 2.0), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, TRAIN) == [
        (0.0, 2.0, "bubble", "waiting for rollout of a"),
        (2.0, 3.0, "busy", "compute"),
        (3.0, 5.0, "bubble", "waiting for rollout of b"),
        (5.0, 6.0, "busy", "compute"),
        (6.0, 7.0, "bubble", "waiting for rollout of a"),
    ]
    assert timeline.devices[ROLLOUT].seconds_by_kind[Kind.BUBBLE] == 0.0


@pytest.mark.parametrize("gap_s", [0.015, 0.5])
@pytest.mark.parametrize(("is_decided", "label"), [(False, "control"), (True, "held back")])
def test_ready_work_is_held_back_only_if_the_scheduler_could_have_ordered_it(
    script: Any, make_order: Order, gap_s: float, is_decided: bool, label: str
) -> None:
    """However long the gap is: what the scheduler had no chance to order waits for the controller."""
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.event(StagePaused(time_s=1.0, order=1, seconds=1.0))
    if is_decided:
        script.event(NodeJoined(time_s=1.0 + gap_s / 2, node=NODE))
    script.event(NodeJoined(time_s=1.0 + gap_s, node=NODE), make_order(2, "a", GENERATE, ROLLOUT))
    script.event(finished(2.0, 2, 1.0 - gap_s), Release(pipeline="a"))
    assert named(script.timeline(), ROLLOUT)[1] == (1.0, round(1.0 + gap_s, 3), "bubble", label)


def test_waiting_for_the_other_devices_of_one_order(script: Any, make_order: Order) -> None:
    script.num_train = 2
    other = DeviceId("train", 1, 0)
    script.submit(0.0, "a", make_order(1, "a", UPDATE, other))
    script.submit(0.0, "b")
    script.event(finished(2.0, 1, 2.0), make_order(2, "b", UPDATE, TRAIN, other), Release(pipeline="a"))
    script.event(finished(3.0, 2, 1.0), Release(pipeline="b"))
    assert named(script.timeline(), TRAIN)[0] == (0.0, 2.0, "bubble", "waiting for the other devices of b")


def test_time_without_a_pinned_pipeline_is_idle(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.event(finished(1.0, 1, 1.0), Release(pipeline="a"))
    script.submit(3.0, "b", make_order(2, "b", GENERATE, ROLLOUT))
    script.event(finished(4.0, 2, 1.0), Release(pipeline="b"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT)[1] == (1.0, 3.0, "idle", "nothing admitted")
    assert timeline.devices[TRAIN].seconds_by_kind[Kind.IDLE] == pytest.approx(2.0)
    assert_adds_up(timeline)


def test_orders_that_share_a_device_count_once_and_lie_side_by_side(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT, device_fraction=0.5))
    script.submit(0.0, "b")
    script.event(
        NodeJoined(time_s=1.0, node=NODE),
        make_order(2, "b", GENERATE, ROLLOUT, device_fraction=0.5, switch=Switch.WARM),
    )
    script.event(finished(3.0, 1, 3.0))
    script.event(finished(4.0, 2, 2.5, switch_s=0.5), Release(pipeline="a"), Release(pipeline="b"))
    timeline = script.timeline()
    device = timeline.devices[ROLLOUT]
    assert device.num_lanes == 2
    assert {i.lane for i in device.intervals if i.pipeline == "b"} == {1}
    assert device.seconds_by_kind == {Kind.BUSY: 4.0, Kind.SWITCH: 0.0, Kind.BUBBLE: 0.0, Kind.IDLE: 0.0}
    assert_adds_up(timeline)


def test_open_order_reaches_to_the_last_known_time(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.event(ChunkFinished(time_s=1.0, order=1, num_active=4, num_waiting=0, seconds=1.0))
    script.note(2.5, "worker", pipeline="a", pid=1)
    timeline = script.timeline()
    assert not timeline.is_over
    last = timeline.devices[ROLLOUT].intervals[-1]
    assert (last.end_s, last.is_open, last.kind) == (2.5, True, Kind.BUSY)
    assert_adds_up(timeline)


def test_lost_worker_keeps_what_it_reported_and_loses_the_rest(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), num_steps=1)
    script.event(ChunkFinished(time_s=1.0, order=1, num_active=4, num_waiting=0, seconds=1.0))
    script.event(
        WorkerLost(time_s=1.5, pipeline="a", device=ROLLOUT),
        make_order(2, "a", GENERATE, ROLLOUT, switch=Switch.COLD),
    )
    script.event(finished(4.0, 2, 2.0), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT) == [
        (0.0, 1.0, "busy", "compute"),
        (1.0, 1.5, "bubble", "lost work"),
        (1.5, 2.0, "switch", "starting"),
        (2.0, 4.0, "busy", "compute"),
    ]
    assert [instant.what for instant in timeline.instants] == ["loss"]


def test_failure_ends_its_orders_and_frees_its_devices(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.event(PipelineFailed(time_s=1.0, pipeline="a", reason="reward is NaN"), Release(pipeline="a"))
    timeline = script.timeline()
    assert timeline.pipelines["a"].status == "failed"
    assert timeline.pipelines["a"].reason == "reward is NaN"
    assert timeline.is_over
    assert timeline.makespan_s == 1.0


def test_restart_forgets_the_steps_it_does_again(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", PUBLISH, step=1))
    script.event(finished(1.0, 1, 1.0), make_order(2, "a", PUBLISH, step=2))
    script.event(finished(2.0, 2, 1.0), make_order(3, "a", GENERATE, ROLLOUT, step=3))
    script.event(PipelineRestarted(time_s=3.0, pipeline="a", restored_step=1))
    history = script.history()
    assert history.pipelines["a"].published == {1: 1.0}
    assert [order.counts for order in history.orders] == [True, False, False]


def test_resumed_run_shows_the_time_it_was_down(script: Any, make_order: Order) -> None:
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT))
    script.event(ChunkFinished(time_s=1.0, order=1, num_active=4, num_waiting=0, seconds=1.0))
    script.note(5.0, "resumed")
    script.event(NodeJoined(time_s=5.0, node=NODE), make_order(1, "a", GENERATE, ROLLOUT))
    script.event(finished(6.0, 1, 1.0), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT) == [
        (0.0, 1.0, "busy", "compute"),
        (1.0, 5.0, "idle", "down"),
        (5.0, 6.0, "busy", "compute"),
    ]
    assert_adds_up(timeline)


def test_migration_is_an_instant_and_explains_a_wait(script: Any, make_order: Order) -> None:
    script.num_rollout = 2
    other = DeviceId("rollout", 1, 0)
    script.submit(0.0, "a", make_order(1, "a", GENERATE, ROLLOUT), make_order(2, "a", GENERATE, other), num_steps=1)
    move = MigrateShard(order=3, pipeline="a", step=1, source=other, target=ROLLOUT, copies_kv=True)
    script.event(finished(1.0, 1, 1.0))
    script.event(StagePaused(time_s=1.0, order=2, seconds=1.0), move)
    script.event(
        TrajectoriesMigrated(time_s=1.5, order=3, num_trajectories=3, seconds=0.5),
        make_order(4, "a", GENERATE, ROLLOUT),
    )
    script.event(finished(2.0, 4, 0.5), Release(pipeline="a"))
    timeline = script.timeline()
    assert named(timeline, ROLLOUT)[1] == (1.0, 1.5, "bubble", "migration of a")
    (instant,) = timeline.instants
    said = "3 trajectories that had not begun from rollout-1.0 to rollout-0.0"
    assert (instant.what, instant.text) == ("shard migration", said)


def test_a_begun_tail_says_what_it_took_along_and_to_which_devices(script: Any, make_order: Order) -> None:
    script.num_rollout = 3
    left, right = DeviceId("rollout", 1, 0), DeviceId("rollout", 2, 0)
    begun = [make_order(number, "a", GENERATE, device) for number, device in enumerate((ROLLOUT, left, right), 1)]
    script.submit(0.0, "a", *begun, num_steps=1)
    move = MigrateShard(order=4, pipeline="a", step=1, source=ROLLOUT, target=left, copies_kv=True, others=(right,))
    script.event(StagePaused(time_s=1.0, order=1, seconds=1.0), move)
    script.event(
        TrajectoriesMigrated(
            time_s=1.5, order=4, num_trajectories=3, seconds=0.5, num_begun=2, tokens=1500, kv_bytes=2_000_000
        )
    )
    script.event(finished(3.0, 2, 3.0))
    script.event(finished(3.5, 3, 3.5), Release(pipeline="a"))
    timeline = script.timeline()
    (instant,) = timeline.instants
    assert instant.what == "tail migration"
    assert instant.text == (
        "2 begun trajectories, 1,500 tokens, 2 MB of KV, in 0.5 s, from rollout-0.0 to rollout-1.0, rollout-2.0"
    )
    counted = mechanisms(timeline.orders)
    assert counted["tails"] == {
        "migrations": 1, "trajectories": 2, "tokens": 1500, "kv_bytes": 2_000_000, "seconds": 0.5, "freed_s": 2.0,
    }  # fmt: skip
    assert counted["shards"]["migrations"] == 0


@pytest.mark.parametrize("failing", [None, "tools"])
def test_whole_run_adds_up_at_every_moment_of_it(alternating_run: Callable[..., Any], failing: str | None) -> None:
    whole = alternating_run(failing=failing)
    for num_rows in range(3, len(whole.rows) + 1, 17):
        part = type(whole)(rows=whole.rows[:num_rows])
        assert_adds_up(part.timeline())
    timeline = whole.timeline()
    labels = {charge.label for device in timeline.devices.values() for charge in device.charges}
    assert {"compute", "tail", "switch", "starting", "control", "waiting for rollout of sort"} <= labels
    if failing:
        assert "lost work" in labels
        assert timeline.pipelines["tools"].status == "failed"
    else:
        assert "tool wait" in labels


def test_intervals_are_finite(alternating_run: Callable[..., Any]) -> None:
    intervals: list[Interval] = [
        i for device in alternating_run().timeline().devices.values() for i in device.intervals
    ]
    assert all(math.isfinite(i.start_s) and math.isfinite(i.end_s) and i.seconds > 0 for i in intervals)
