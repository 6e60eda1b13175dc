"""The published steps of a log that grows: only those that new rows touch are worked out again.

orders, intervals ──▶ FollowedSteps.look ──▶ steps with new figures        figures: those of `summary.step_times`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmux.core.model import DeviceId, OrderId, PipelineId, Stage
from rlmux.report.slos import StepTime
from rlmux.report.timeline.history import History
from rlmux.report.timeline.intervals import Interval
from rlmux.report.timeline.records import OrderRecord, PipelineRecord
from rlmux.report.timeline.step_work import StepWork, is_own_time

_SecondsByOrder = dict[OrderId, dict[DeviceId, float]]


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A step that is published, and what it spent."""

    time: StepTime
    stages: Mapping[str, float]
    """Seconds by stage, of the device that had most of it."""


class FollowedSteps:
    """Add a look's orders and intervals, then `look`."""

    def __init__(self) -> None:
        self._orders: dict[PipelineId, dict[int, list[OrderRecord]]] = {}
        self._settled: _SecondsByOrder = {}
        self._open: _SecondsByOrder = {}
        self._begin_s: dict[PipelineId, float] = {}
        """Time at which each pipeline's first rollout began to compute."""
        self._touched: dict[PipelineId, set[int]] = {}
        self._published: dict[PipelineId, dict[int, float]] = {}
        """What was emitted: the time at which each step was published."""
        self._times: dict[PipelineId, list[StepTime]] = {}
        self._tokens: dict[PipelineId, dict[int, int]] = {}

    @property
    def times(self) -> Mapping[PipelineId, Sequence[StepTime]]:
        """Every published step of every pipeline, in order, as of the last look."""
        return self._times

    def tokens(self, pipeline: PipelineId) -> int:
        """Tokens sampled in rollouts whose result counts, as of the last look."""
        return sum(self._tokens.get(pipeline, {}).values())

    def restart(self) -> None:
        """Forget intervals and orders: all are added again."""
        self._orders, self._settled, self._open = {}, {}, {}
        self._published = {pipeline: {} for pipeline in self._published}

    def touch(self, pipeline: PipelineId, step: int) -> None:
        self._touched.setdefault(pipeline, set()).add(step)

    def touch_after(self, pipeline: PipelineId, step: int) -> None:
        """The steps after this one are to be done again."""
        for later in self._orders.get(pipeline, ()):
            if later > step:
                self.touch(pipeline, later)

    def add_orders(self, new: Iterable[OrderRecord], recent: Iterable[OrderRecord]) -> None:
        """`recent`: orders that may have changed since the last look, the new ones among them."""
        for order in new:
            self._orders.setdefault(order.pipeline, {}).setdefault(order.step, []).append(order)
        for order in recent:
            self.touch(order.pipeline, order.step)
        self._open = {}

    def add_intervals(self, device: DeviceId, intervals: Iterable[Interval], *, is_settled: bool) -> None:
        seconds = self._settled if is_settled else self._open
        for interval in intervals:
            if interval.order is None or interval.pipeline is None or not is_own_time(interval):
                continue
            if interval.stage is Stage.GENERATE:
                before_s = self._begin_s.get(interval.pipeline, math.inf)
                self._begin_s[interval.pipeline] = min(before_s, interval.start_s)
            by_device = seconds.setdefault(interval.order, {})
            by_device[device] = by_device.get(device, 0.0) + interval.seconds

    def look(self, history: History) -> dict[PipelineId, dict[int, PublishedStep | None]]:
        """Steps whose figures are new; None for a published one that is to be done again."""
        found = {}
        for name, record in history.pipelines.items():
            steps = self._touched.pop(name, set()) | self._changed(name, record)
            if steps:
                found[name] = self._work_out(record, steps)
            self._times.setdefault(name, [])
        self._touched = {}
        return found

    def _changed(self, name: PipelineId, record: PipelineRecord) -> set[int]:
        """Steps that were published, or forgotten, since the last look; and those after them, which begin there."""
        published = self._published.get(name, {})
        if published == record.published:
            return set()
        steps = {*published, *record.published}
        changed = {step for step in steps if published.get(step) != record.published.get(step)}
        return changed | {step + 1 for step in changed if step + 1 in record.published}

    def _work_out(self, record: PipelineRecord, steps: set[int]) -> dict[int, PublishedStep | None]:
        name = record.pipeline.id
        by_step, work = self._orders.get(name, {}), StepWork()
        work.begin_s = self._begin_s.get(name, math.inf)
        for step in sorted(steps):
            for order in by_step.get(step, ()):
                work.add_seconds(order.id, {**self._settled.get(order.id, {}), **self._open.get(order.id, {})})
                work.add_order(order)
            rollouts = (order for order in by_step.get(step, ()) if order.stage is Stage.GENERATE and order.counts)
            self._tokens.setdefault(name, {})[step] = sum(order.tokens for order in rollouts)
        published = self._published.get(name, {})
        self._published[name] = dict(record.published)
        known = {time.step: time for time in self._times.get(name, ())}
        known |= {time.step: time for time in work.steps(record) if time.step in steps}
        self._times[name] = [known[step] for step in sorted(record.published)]
        return {
            step: PublishedStep(known[step], work.seconds_by_stage(by_step.get(step, ())))
            if step in record.published
            else None
            for step in sorted(steps)
            if step in record.published or step in published
        }
