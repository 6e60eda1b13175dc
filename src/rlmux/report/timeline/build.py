"""Every second of every device, named: what computed, what was switched, or why nothing ran.

    History ──▶ lay out each order (order_layout.py) ──▶ name the gaps between them (gaps.py) ──▶ Timeline

Over [start, end] of a run (first submission to last release) each device's seconds add up:

    busy + switch + bubble + idle = end - start

    busy    an order computes, a tail included
    switch  the previous state leaves, this one loads; a worker starts
    bubble  a pipeline holds the device (it is pinned there) while nothing runs
    idle    no pipeline is pinned, or the whole run was down

Where orders run beside each other on one device, each moment counts once: busy wins over switch, switch over bubble.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.report.timeline.gaps import GapNamer
from rlmux.report.timeline.history import History
from rlmux.report.timeline.intervals import Cause, Charge, Interval, Kind
from rlmux.report.timeline.order_layout import lay_out_order
from rlmux.report.timeline.records import Instant, OrderRecord, PipelineRecord, Standstill

_CONTROL = Cause.CONTROL
_GENERATE = Stage.GENERATE
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimeline:
    id: DeviceId
    intervals: tuple[Interval, ...]
    """Intervals by start; within a lane they do not overlap."""
    seconds_by_kind: Mapping[Kind, float]
    charges: tuple[Charge, ...]
    """Charges that add up to `seconds_by_kind`: busy, switch, bubble, idle; the largest first within each."""
    num_lanes: int = 1

    @property
    def pool(self) -> str:
        return self.id.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    header: Mapping[str, Any]
    start_s: float
    end_s: float
    """Time of the last release; the last known time of a run that is not over."""
    is_over: bool
    devices: Mapping[DeviceId, DeviceTimeline]
    """Devices in the order of the header's pools."""
    pipelines: Mapping[PipelineId, PipelineRecord]
    orders: Sequence[OrderRecord]
    instants: Sequence[Instant]
    control_s: float | None
    ready_s: Sequence[float] = ()
    """Times at which the first worker process was there, of the run and after each resume; infinite before."""

    @property
    def makespan_s(self) -> float:
        return self.end_s - self.start_s

    def seconds(self, cause: Cause) -> float:
        """Seconds put down to a cause, summed over all devices."""
        return math.fsum(
            charge.seconds for device in self.devices.values() for charge in device.charges if charge.cause is cause
        )


def build_timeline(history: History) -> Timeline:
    start_s = history.start_s or 0.0
    end_s = end_of(history)
    orders_by_device: dict[DeviceId, list[OrderRecord]] = {
        device: [] for device in devices_of(history.header, history.orders)
    }
    for order in history.orders:
        if not order.is_migration:
            for device in order.devices:
                orders_by_device.setdefault(device, []).append(order)
    namer = GapNamer(history, orders_by_device, start_s, end_s)
    standstills: dict[DeviceId, list[Standstill]] = {}
    for standstill in history.standstills:
        for device in standstill.devices:
            standstills.setdefault(device, []).append(standstill)
    devices = {
        device: _lay_out_device(device, orders, namer, start_s, end_s, standstills.get(device, ()))
        for device, orders in orders_by_device.items()
    }
    return Timeline(
        header=history.header,
        start_s=start_s,
        end_s=end_s,
        is_over=history.is_over,
        devices=devices,
        pipelines=dict(history.pipelines),
        orders=tuple(history.orders),
        instants=tuple(history.instants),
        control_s=history.control_s,
        ready_s=tuple(history.ready_s),
    )


def end_of(history: History) -> float:
    """Time of the last release; the last known time of a run that is not over."""
    ended = [record.ended_s for record in history.pipelines.values() if record.ended_s is not None]
    return max(ended) if history.is_over else max(history.last_s, history.start_s or 0.0)


def devices_of(header: Mapping[str, Any], orders: Iterable[OrderRecord]) -> list[DeviceId]:
    """Every device of the header; without one, every device that an order names."""
    listed = [DeviceId(*device) for pool in header.get("pools", {}).values() for device in pool.get("devices", ())]
    seen = {device: None for order in orders for device in order.devices}
    return list(dict.fromkeys(listed + sorted(seen)))


def _lay_out_device(
    device: DeviceId,
    orders: list[OrderRecord],
    namer: GapNamer,
    start_s: float,
    end_s: float,
    standstills: Sequence[Standstill],
) -> DeviceTimeline:
    peaks: dict[PipelineId, int] = {}
    for order in orders:
        note_peak(peaks, order)
    lanes: list[float] = []
    held = lay_out_orders(orders, peaks, end_s, standstills, lanes)
    gaps = namer.name_gaps(device, held)
    in_order = itemgetter(0) if len(lanes) <= 1 else attrgetter("start_s", "lane")
    return _account(device, sorted(held + gaps, key=in_order), max(len(lanes), 1))


def note_peak(peaks: dict[PipelineId, int], order: OrderRecord) -> None:
    """Raise the most sequences that its pipeline ever had active on a device."""
    if order.stage is _GENERATE:
        active = max(order.chunks.column("num_active"), default=0)
        if active >= peaks.get(order.pipeline, 0):
            peaks[order.pipeline] = active


def lay_out_orders(
    orders: Iterable[OrderRecord],
    peaks: Mapping[PipelineId, int],
    end_s: float,
    standstills: Sequence[Standstill],
    lanes: list[float],
) -> list[Interval]:
    """What the orders did with one device's time. `lanes`: times at which its lanes are free, brought up to date."""
    held: list[Interval] = []
    for order in orders:
        lane = take_lane(lanes, order, end_s)
        its_standstills = (
            [standstill for standstill in standstills if standstill.pipeline == order.pipeline] if standstills else ()
        )
        held += lay_out_order(order, peaks.get(order.pipeline, 0), end_s, its_standstills, lane=lane)
    return held


def take_lane(lanes: list[float], order: OrderRecord, end_s: float) -> int:
    """The first lane that is free when the order begins, or a new one; from then on it is taken to the order's end."""
    for lane, free_s in enumerate(lanes):
        if free_s <= order.start_s:
            lanes[lane] = min(order.end_s, end_s)
            return lane
    lanes.append(min(order.end_s, end_s))
    return len(lanes) - 1


Name = tuple[Kind, Cause, PipelineId | None]
"""What a second of a device is put down to."""


def name_of(interval: Interval) -> Name:
    """Control belongs to no pipeline."""
    return interval.kind, interval.cause, None if interval.cause is _CONTROL else interval.pipeline


_RANK = {Kind.BUSY: 0, Kind.SWITCH: 1, Kind.BUBBLE: 2, Kind.IDLE: 3}


def _account(device: DeviceId, intervals: list[Interval], num_lanes: int) -> DeviceTimeline:
    """Add the seconds up; where intervals overlap, the most useful one counts."""
    by_name: dict[Name, float] = {}
    for interval in exposed(intervals) if num_lanes > 1 else intervals:
        start_s, end_s, kind, cause, pipeline, *_ = interval
        name = (kind, cause, None if cause is _CONTROL else pipeline)
        by_name[name] = by_name.get(name, 0.0) + (end_s - start_s)
    charges = [
        Charge(kind=kind, cause=cause, pipeline=pipeline, seconds=seconds)
        for (kind, cause, pipeline), seconds in by_name.items()
    ]
    return DeviceTimeline(
        id=device,
        intervals=tuple(intervals),
        seconds_by_kind={kind: math.fsum(charge.seconds for charge in charges if charge.kind is kind) for kind in Kind},
        charges=tuple(sorted(charges, key=lambda charge: (_RANK[charge.kind], -charge.seconds, charge.label))),
        num_lanes=num_lanes,
    )


def exposed(intervals: Sequence[Interval]) -> list[Interval]:
    """The pieces of the most useful interval of each moment, in their order; `intervals` by their start."""
    edges = sorted({edge for interval in intervals for edge in (interval.start_s, interval.end_s)})
    position = 0
    pieces: list[Interval] = []
    active: list[tuple[int, int]] = []
    """A heap of rank and position: the first is the most useful, those behind it may have ended."""
    for start_s, end_s in itertools.pairwise(edges):
        while position < len(intervals) and intervals[position].start_s <= start_s:
            heapq.heappush(active, (_RANK[intervals[position].kind], position))
            position += 1
        while active and intervals[active[0][1]].end_s <= start_s:
            heapq.heappop(active)
        if active:
            pieces.append(intervals[active[0][1]]._replace(start_s=start_s, end_s=end_s))
    return pieces
