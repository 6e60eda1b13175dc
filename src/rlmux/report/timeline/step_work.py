"""What one pipeline did, step by step: the seconds that its steps took, and would take alone.

intervals, orders ──▶ StepWork ──▶ StepTime of each published step        (definitions: summary.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlmux.core.model import DeviceId, OrderId, Stage
from rlmux.report.slos import StepTime
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.order_layout import lay_out_order
from rlmux.report.timeline.records import Ending, OrderRecord, PipelineRecord, Standstill

_GENERATE = Stage.GENERATE
_FINISHED = Ending.FINISHED
_BUSY = Kind.BUSY
_TOOL_WAIT = Cause.TOOL_WAIT
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""


class StepWork:
    """What one pipeline did, step by step: first its intervals are added, then its orders."""

    def __init__(self) -> None:
        self._seconds_by_order: dict[OrderId, dict[DeviceId, float]] = {}
        self._rollout_s: dict[int, dict[DeviceId, float]] = {}
        self._rest_s: dict[int, float] = {}
        self.begin_s = math.inf
        """Time at which its first rollout began to compute; infinite before."""

    def add_interval(self, device: DeviceId, interval: Interval) -> None:
        """Add one that is its own time, of an order."""
        start_s, end_s, _, _, _, _, stage, order, *_ = interval
        if stage is _GENERATE and start_s < self.begin_s:
            self.begin_s = start_s
        assert order is not None
        by_device = self._seconds_by_order.get(order)
        if by_device is None:
            by_device = self._seconds_by_order[order] = {}
        by_device[device] = by_device.get(device, 0.0) + (end_s - start_s)

    def add_seconds(self, order: OrderId, seconds_by_device: Mapping[DeviceId, float]) -> None:
        """The same as all intervals of one order."""
        self._seconds_by_order[order] = dict(seconds_by_device)

    def seconds_by_stage(self, orders: Iterable[OrderRecord]) -> dict[str, float]:
        """Seconds of each stage of one step: of the device that had most of it, or of the order that used none."""
        by_device: dict[str, dict[DeviceId | None, float]] = {}
        for order in orders:
            if order.counts and not order.is_migration and math.isfinite(order.end_s):
                spent: Mapping[DeviceId | None, float] = (
                    self._seconds_by_order.get(order.id, {}) if order.devices else {None: order.end_s - order.start_s}  # type: ignore[assignment]
                )
                of_stage = by_device.setdefault(order.stage.value, {})
                for device, device_s in spent.items():
                    of_stage[device] = of_stage.get(device, 0.0) + device_s
        return {stage: max(spent.values(), default=0.0) for stage, spent in by_device.items()}

    def add_whole_order(self, order: OrderRecord, standstills: Iterable[Standstill]) -> None:
        """Add one that is over, with the intervals that a timeline shows of it. `standstills`: of the whole run."""
        its = [standstill for standstill in standstills if standstill.pipeline == order.pipeline]
        own: dict[tuple[Standstill, ...], list[Interval]] = {}
        for device in () if order.is_migration else order.devices:
            stood = tuple(standstill for standstill in its if device in standstill.devices)
            if stood not in own:  # most often it is one layout for all devices
                own[stood] = list(filter(is_own_time, lay_out_order(order, 0, order.end_s, stood)))
            for interval in own[stood]:
                self.add_interval(device, interval)
        self.add_order(order)

    def add_order(self, order: OrderRecord) -> None:
        if not order.counts or order.is_migration:
            return
        seconds = self._seconds_by_order.get(order.id, {})
        if order.stage is _GENERATE:
            by_device = self._rollout_s.setdefault(order.step, {})
            for device, device_s in seconds.items():
                by_device[device] = by_device.get(device, 0.0) + device_s
        elif order.ending is _FINISHED or order.devices:
            spent_s = max(seconds.values(), default=0.0) if order.devices else order.end_s - order.start_s
            self._rest_s[order.step] = self._rest_s.get(order.step, 0.0) + spent_s

    def forget_orders(self) -> None:
        """Keep the seconds of steps alone: the orders are not needed any more."""
        self._seconds_by_order = {}

    def forget_steps_after(self, last_step: int) -> None:
        """Drop what was spent on steps that are done again."""
        for by_step in (self._rollout_s, self._rest_s):
            for step in [step for step in by_step if step > last_step]:
                del by_step[step]

    def copy(self) -> StepWork:
        """The same, to be added to."""
        other = StepWork()
        other.begin_s, other._rest_s = self.begin_s, dict(self._rest_s)
        other._rollout_s = {step: dict(by_device) for step, by_device in self._rollout_s.items()}
        return other

    def as_json(self) -> list[Any]:
        """The seconds of steps."""
        rollout_s = [[step, list(by_device.items())] for step, by_device in self._rollout_s.items()]
        return [self.begin_s, list(self._rest_s.items()), rollout_s]

    @classmethod
    def of_json(cls, values: list[Any]) -> StepWork:
        """From the value of `as_json`."""
        work = cls()
        begin_s, rest_s, rollout_s = values
        work.begin_s, work._rest_s = float(begin_s), {step: float(seconds) for step, seconds in rest_s}
        for step, by_device in rollout_s:
            work._rollout_s[step] = {DeviceId(*device): float(seconds) for device, seconds in by_device}
        return work

    def steps(self, record: PipelineRecord) -> list[StepTime]:
        steps, previous_s = [], self.begin_s
        for step, end_s in sorted(record.published.items()):
            rollout_s = max(self._rollout_s.get(step, {}).values(), default=0.0)
            rest_s = self._rest_s.get(step, 0.0)
            solo_s = max(rollout_s, rest_s) if record.pipeline.staleness else rollout_s + rest_s
            client_s = record.client_s(previous_s, end_s) if record.thinking else 0.0  # its own program's, not ours
            steps.append(StepTime(step, end_s, max(0.0, end_s - min(previous_s, end_s) - client_s), solo_s))
            previous_s = end_s
        return steps


def is_own_time(interval: Interval) -> bool:
    """Whether a step has the interval when its pipeline is alone: it computes, or waits for its environment."""
    return interval.kind is _BUSY or interval.cause is _TOOL_WAIT
