"""A log that is followed row by row gives the timeline, the steps and the sums of the report, at every moment."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rlmux.core.actions import RunStage, Switch
from rlmux.core.events import ChunkFinished, PipelineRestarted, StageFinished
from rlmux.core.model import DeviceId, Stage
from rlmux.log.run_log import Entry
from rlmux.report.slos import StepTime
from rlmux.report.summary import step_times
from rlmux.report.timeline.build import build_timeline
from rlmux.report.timeline.history import History
from rlmux.report.timeline.intervals import Interval
from rlmux.report.timeline.live_timeline import Follower, Look

ROLLOUT = DeviceId("rollout", 0, 0)


def batches(rows: Sequence[Entry], seed: int) -> Iterator[list[Entry]]:
    """Rows in transactions, as many at once as chance has it: an event is never apart from its orders."""
    chance = random.Random(seed)
    batch: list[Entry] = []
    for row in rows:
        if row.kind != "action" and batch and chance.random() < 0.3:
            yield batch
            batch = []
        batch.append(row)
    yield batch


class Told:
    """What a reader of looks knows."""

    def __init__(self) -> None:
        self.settled: dict[DeviceId, list[Interval]] = {}
        self.steps: dict[str, dict[int, StepTime]] = {}
        self.num_redone = 0
        self.num_settled = 0

    def hear(self, look: Look) -> dict[DeviceId, list[Interval]]:
        if look.is_redone:
            self.settled, self.num_redone = {}, self.num_redone + 1
        for device, interval in look.settled:
            self.settled.setdefault(device, []).append(interval)
        self.num_settled += len(look.settled)
        known = {device: list(intervals) for device, intervals in self.settled.items()}
        for device, interval in look.open:
            known.setdefault(device, []).append(interval)
        for name, steps in look.steps.items():
            its_steps = self.steps.setdefault(name, {})
            for step, published in steps.items():
                its_steps.pop(step, None)
                if published is not None:
                    its_steps[step] = published.time
        return known


def assert_follows(header: dict, rows: Sequence[Entry], seed: int) -> Told:
    follower, told, done = Follower(header), Told(), []
    for batch in batches(rows, seed):
        for row in batch:
            follower.add(row)
        done += batch
        known = told.hear(follower.look())
        timeline = build_timeline(History.of(header, done))
        expected = {device: list(each.intervals) for device, each in timeline.devices.items() if each.intervals}
        assert known == expected, f"after row {done[-1].seq}"
        for device, each in timeline.devices.items():
            sums = {(charge.kind, charge.cause, charge.pipeline): charge.seconds for charge in each.charges}
            assert follower.seconds()[device] == pytest.approx(sums, rel=1e-12, abs=1e-12)
        steps = step_times(timeline)
        assert {name: list(times) for name, times in follower.steps.times.items()} == steps
        assert {name: list(its.values()) for name, its in told.steps.items() if its} == {
            name: its for name, its in steps.items() if its
        }
    return told


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("failing", [None, "sums"])
def test_settled_and_open_together_are_the_reports_timeline(alternating_run, seed, failing):
    script = alternating_run(num_steps=6, failing=failing, seed=seed)
    told = assert_follows(script.header, script.rows, seed)
    assert told.num_settled > 0.7 * sum(len(its) for its in told.settled.values())
    assert told.num_redone <= 3, "once at the start, and where a rollout got wider"


def test_almost_everything_settles_while_a_run_goes_on(alternating_run):
    script = alternating_run(num_steps=20)
    follower, num_open = Follower(script.header), []
    for batch in batches(script.rows, 1):
        for row in batch:
            follower.add(row)
        num_open.append(len(follower.look().open))
    assert max(num_open[:-1]) < 40


def test_steps_that_are_done_again_are_told_again(script, make_order):
    script.submit(0.0, "sort", make_order(1, "sort", Stage.GENERATE, ROLLOUT, switch=Switch.COLD))
    number = 1
    for step in (1, 2, 2, 3):
        for stage in (Stage.GENERATE, Stage.PUBLISH):
            if number > 1:
                devices = (ROLLOUT,) if stage is Stage.GENERATE else ()
                again = PipelineRestarted(time_s=10.0 * number, pipeline="sort", restored_step=1)
                orders = [make_order(number, "sort", stage, *devices, step=step)]
                if number == 5:
                    script.event(again, *orders)
                else:
                    script.event(_chunk(10.0 * number, number), *orders)
            ended = StageFinished(time_s=10.0 * number + 8, order=number, seconds=7.0, switch_s=0.5, tokens=10)
            script.event(ended)
            script.note(10.0 * number + 8, "step", pipeline="sort", step=step, metrics={"reward_mean": 0.5})
            number += 1
    for seed in range(3):
        assert_follows(script.header, script.rows, seed)


def _chunk(time_s: float, order: int) -> ChunkFinished:
    return ChunkFinished(
        time_s=time_s, order=order, num_active=4, num_waiting=0, num_waiting_for_env=0, tokens=4, seconds=1.0
    )


def test_orders_beside_each_other_count_each_moment_once(script, make_order):
    def begin(time_s: float, number: int, name: str, step: int) -> RunStage:
        return replace(make_order(number, name, Stage.GENERATE, ROLLOUT, step=step), device_fraction=0.5)

    script.submit(0.0, "sort", begin(0.0, 1, "sort", 1))
    script.submit(1.0, "sums", begin(1.0, 2, "sums", 1))
    for number in range(3, 30):
        time_s, name = 3.0 * (number - 2), ("sort", "sums")[number % 2]
        ended = StageFinished(time_s=time_s, order=number - 2, seconds=1.5, switch_s=0.0, tokens=5)
        script.event(ended, begin(time_s, number, name, number // 2))
    for number, time_s in ((28, 90.0), (29, 91.0)):
        script.event(StageFinished(time_s=time_s, order=number, seconds=1.5, switch_s=0.0, tokens=5))
    script.event(_chunk(95.0, 30), make_order(30, "sort", Stage.GENERATE, ROLLOUT, step=16))
    script.event(StageFinished(time_s=99.0, order=30, seconds=1.5, switch_s=0.0, tokens=5))
    script.event(_chunk(100.0, 31), make_order(31, "sums", Stage.GENERATE, ROLLOUT, step=16))
    script.event(_chunk(101.0, 31))
    told = assert_follows(script.header, script.rows, 0)
    assert {interval.lane for interval in told.settled[ROLLOUT]} == {0, 1}
