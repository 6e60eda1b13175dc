"""The timeline of a log that grows: settled rows are emitted once, the rest again at each poll.

    rows ──add──▶ History ──look──▶ settled   intervals that no later row changes
                                    open      intervals that may get another end, name or place
                                    steps     published steps whose figures are new

    device   ├── settled ──────────────┤├── order ──┤  gap  ├── order ──▶ now
                                  settled_s ▲

Settled and open intervals together are those of `build_timeline` at every moment: the same functions make them.
A device's time is settled up to a point that no order and no gap spans. An order is settled once it has ended; a gap,
once the order behind it has begun and every pipeline that was pinned during it is known to have done nothing else: it
ran, it began another order since, or it is over.

Rarely a later row changes what was settled: a rollout with more sequences moves the border of the tail, a worker's
standstill is noted late, a pipeline that was over comes back. Then everything is emitted again, and `is_redone` is set.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from rlmux.core.events import PipelineRestarted, PipelineSubmitted
from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.log.notes import StepNote
from rlmux.log.progress_rows import Progress
from rlmux.log.run_log import Entry
from rlmux.report.timeline.build import Name, devices_of, end_of, exposed, lay_out_orders, name_of, note_peak, take_lane
from rlmux.report.timeline.gaps import GapNamer
from rlmux.report.timeline.history import History
from rlmux.report.timeline.intervals import Interval
from rlmux.report.timeline.live_steps import FollowedSteps, PublishedStep
from rlmux.report.timeline.order_layout import TAIL_PART
from rlmux.report.timeline.records import OrderRecord, Pin, PipelineRecord, Standstill

Placed = tuple[DeviceId, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is new since the last look."""

    start_s: float
    end_s: float
    settled: Sequence[Placed]
    """Intervals that are settled since, each device's in the order of their start."""
    open: Sequence[Placed]
    """All intervals that are not settled."""
    is_redone: bool
    """True where `settled` begins at the run's start, and replaces what was emitted before."""
    changed_from_s: float
    """Time before which every interval is as it was at the last look."""
    steps: Mapping[PipelineId, Mapping[int, PublishedStep | None]]
    """Steps whose figures are new; None for one that is to be done again."""


@dataclass(slots=True)
class _Device:
    id: DeviceId
    settled_s: float
    orders: list[OrderRecord] = field(default_factory=list)
    """Orders that are not settled, in the order of the log."""
    lanes: list[float] = field(default_factory=list)
    """Times at which the lanes are free again, as of the settled orders."""
    peaks: dict[PipelineId, int] = field(default_factory=dict)
    """Most sequences that each pipeline ever had active here."""
    tails: dict[PipelineId, int] = field(default_factory=dict)
    """Sequences at or below which the settled rollouts of each pipeline were in their tail."""
    last_start_s: dict[PipelineId, float] = field(default_factory=dict)
    """Time at which each pipeline's last order here began."""
    seconds: dict[Name, float] = field(default_factory=dict)
    """Settled seconds by name."""
    open_seconds: dict[Name, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Window:
    """Unsettled part of a history."""

    orders: Sequence[OrderRecord]
    pins: Sequence[Pin]
    pipelines: Mapping[PipelineId, PipelineRecord]
    down: Sequence[tuple[float, float]]
    decisions_s: Sequence[float]


class _Unit(NamedTuple):
    """An order's time or a gap: settled as a whole or not at all."""

    start_s: float
    end_s: float
    is_settled: bool


class Follower:
    """Add rows in the log's order; look at any time between two transactions of the log."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.history = History(header)
        self.steps = FollowedSteps()
        self._start_s: float | None = None
        self._devices: dict[DeviceId, _Device] = {}
        self._num_orders = self._num_pins = self._num_standstills = 0
        """Orders, pins and standstills that were taken in."""
        self._recent: list[OrderRecord] = []
        """Orders that overlap unsettled time."""
        self._pins: list[Pin] = []
        self._pins_by_node: dict[tuple[str, int], list[Pin]] = {}
        self._last_end_s: dict[PipelineId, float] = {}
        """Time of the last end of an order of each pipeline."""
        self._known_until_s: dict[PipelineId, float] = {}
        """Time up to which it is known what each pipeline did next."""
        self._over: list[PipelineId] = []

    def add(self, part: Entry | Progress) -> None:
        self.history.add(part)
        if not isinstance(part, Entry):
            return
        if part.type == StepNote.type and isinstance(note := part.note, StepNote):
            self.steps.touch(note.pipeline, note.step)
        elif isinstance(part.value, PipelineRestarted):
            self.steps.touch_after(part.value.pipeline, part.value.restored_step)
        elif isinstance(part.value, PipelineSubmitted):
            self.steps.touch_after(part.value.pipeline.id, part.value.pipeline.first_step - 1)

    def look(self) -> Look:
        """What the rows added since the last look have changed."""
        end_s = end_of(self.history)
        is_redone = self._is_past_changed()
        if is_redone:
            self._restart()
        changed_from_s = min((device.settled_s for device in self._devices.values()), default=self._start_s or 0.0)
        self._take_in()
        namer = self._namer(changed_from_s, end_s)
        settled: list[Placed] = []
        still_open: list[Placed] = []
        standstills = _by_device(self.history.standstills)
        for device in self._devices.values():
            lanes = list(device.lanes)
            its_standstills = standstills.get(device.id, ())
            held = lay_out_orders(device.orders, device.peaks, end_s, its_standstills, lanes)
            gaps = namer.name_gaps(device.id, held, start_s=device.settled_s)
            intervals = sorted(held + gaps, key=lambda piece: (piece.start_s, piece.lane))
            num_settled = self._settle(device, intervals, gaps, end_s)
            self._emit(device, intervals[:num_settled], settled, is_settled=True)
            self._emit(device, intervals[num_settled:], still_open, is_settled=False)
        steps = self.steps.look(self.history)
        self._forget_settled()
        return Look(
            start_s=self._start_s or 0.0,
            end_s=end_s,
            settled=settled,
            open=still_open,
            is_redone=is_redone,
            changed_from_s=changed_from_s,
            steps=steps,
        )

    def seconds(self) -> dict[DeviceId, dict[Name, float]]:
        """Seconds of every device by name, as of the last look: its charges in the report."""
        return {
            device.id: _sum(itertools.chain(device.seconds.items(), device.open_seconds.items()))
            for device in self._devices.values()
        }

    def settled_seconds(self) -> dict[DeviceId, dict[Name, float]]:
        """Seconds of the settled intervals alone: from look to look they only grow, but where one is redone."""
        return {device.id: dict(device.seconds) for device in self._devices.values()}

    # ------------------------------------------------------------------ what is new

    def _is_past_changed(self) -> bool:
        """Whether rows since the last look change what was settled."""
        history = self.history
        if self._start_s is None or self._start_s != history.start_s:
            return True
        if any(not history.pipelines[name].is_over for name in self._over):
            return True
        for standstill in history.standstills[self._num_standstills :]:
            for device in standstill.devices:
                if device in self._devices and standstill.start_s < self._devices[device].settled_s:
                    return True
        for order in itertools.chain(self._recent, history.orders[self._num_orders :]):
            for device in () if order.is_migration else order.devices:
                if device in self._devices:
                    note_peak(self._devices[device].peaks, order)
        return any(
            _tail_of(device.peaks.get(name, 0)) != tail
            for device in self._devices.values()
            for name, tail in device.tails.items()
        )

    def _restart(self) -> None:
        self._start_s = self.history.start_s
        self._devices = {}
        self._recent, self._pins, self._num_orders, self._num_pins = [], [], 0, 0
        self.steps.restart()

    def _take_in(self) -> None:
        """Sort new orders, pins and standstills to what they belong to."""
        history, start_s = self.history, self._start_s or 0.0
        new = history.orders[self._num_orders :]
        self._num_orders, self._num_standstills = len(history.orders), len(history.standstills)
        self._recent += new
        self._pins += history.pins[self._num_pins :]
        self._num_pins = len(history.pins)
        for device_id in devices_of(history.header if not self._devices else {}, new):
            self._devices.setdefault(device_id, _Device(device_id, start_s))
        for order in new:
            for device_id in () if order.is_migration else order.devices:
                device = self._devices[device_id]
                device.orders.append(order)
                note_peak(device.peaks, order)
                if order.start_s < history.last_s:
                    device.last_start_s[order.pipeline] = order.start_s
        self._over = [name for name, record in history.pipelines.items() if record.is_over]
        self._note_ends()
        self._pins_by_node = {}
        for pin in self._pins:
            for node in pin.placement.nodes:
                self._pins_by_node.setdefault(node, []).append(pin)
        self.steps.add_orders(new, self._recent)

    def _note_ends(self) -> None:
        running: dict[PipelineId, float] = {}
        for order in self._recent:
            if order.start_s >= self.history.last_s:
                continue  # others may begin at the same moment
            if math.isinf(order.end_s):
                running[order.pipeline] = math.inf
            else:
                self._last_end_s[order.pipeline] = max(self._last_end_s.get(order.pipeline, 0.0), order.end_s)
        self._known_until_s = {**self._last_end_s, **running, **dict.fromkeys(self._over, math.inf)}

    def _namer(self, window_s: float, end_s: float) -> GapNamer:
        history = self.history
        orders_by_device = {device.id: list[OrderRecord]() for device in self._devices.values()}
        for order in self._recent:
            for device in () if order.is_migration else order.devices:
                orders_by_device[device].append(order)
        window = _Window(
            orders=self._recent,
            pins=self._pins,
            pipelines=history.pipelines,
            down=history.down,
            decisions_s=history.decisions_s[bisect_left(history.decisions_s, window_s) :],
        )
        return GapNamer(window, orders_by_device, window_s, end_s)

    # ------------------------------------------------------------------ what is settled

    def _settle(self, device: _Device, intervals: Sequence[Interval], gaps: Sequence[Interval], end_s: float) -> int:
        """The number of the first intervals that are settled; their orders are dropped."""
        limit_s = min(end_s, self.history.last_s)
        units = [_Unit(order.start_s, order.end_s, order.end_s < limit_s) for order in device.orders]
        starts = {order.start_s for order in device.orders}
        for start_s, gap_end_s in _whole(gaps):
            is_known = gap_end_s in starts and gap_end_s < limit_s and self._is_known(device, start_s, gap_end_s)
            units.append(_Unit(start_s, gap_end_s, is_known))
        cut_s = _cut(sorted(units))
        if cut_s is None:
            return 0
        is_done = [order.end_s <= cut_s and order.end_s < limit_s for order in device.orders]
        done = list(itertools.compress(device.orders, is_done))
        for order in done:
            take_lane(device.lanes, order, end_s)
            if order.stage is Stage.GENERATE:
                device.tails[order.pipeline] = _tail_of(device.peaks[order.pipeline])
        device.orders = [order for order, is_one in zip(device.orders, is_done, strict=True) if not is_one]
        num_settled = bisect_left(intervals, cut_s, key=attrgetter("start_s"))
        if num_settled:
            device.settled_s = max(interval.end_s for interval in intervals[:num_settled])
        return num_settled

    def _is_known(self, device: _Device, start_s: float, end_s: float) -> bool:
        """Whether no later row can give a gap other names."""
        held = self._pins_by_node.get(device.id.node_id, ())
        pins = [pin for pin in held if pin.start_s < end_s and pin.end_s > start_s]
        if any(self._known_until_s.get(pin.pipeline, 0.0) < min(end_s, pin.end_s) for pin in pins):
            return False
        edges = {edge for pin in pins for edge in (pin.start_s, pin.end_s) if start_s < edge < end_s}
        for _, piece_end_s in itertools.pairwise(sorted({start_s, end_s, *edges})):
            pinned = [pin.pipeline for pin in pins if pin.start_s < piece_end_s <= pin.end_s]
            is_followed = any(device.last_start_s.get(name, -math.inf) >= piece_end_s for name in pinned)
            if not is_followed and any(name not in self._over for name in pinned):
                return False
        return True

    def _emit(self, device: _Device, intervals: Sequence[Interval], rows: list[Placed], *, is_settled: bool) -> None:
        rows += [(device.id, interval) for interval in intervals]
        self.steps.add_intervals(device.id, intervals, is_settled=is_settled)
        has_lanes = any(interval.lane for interval in intervals)
        named = ((name_of(piece), piece.seconds) for piece in (exposed(intervals) if has_lanes else intervals))
        if is_settled:
            device.seconds = _sum(itertools.chain(device.seconds.items(), named))
        else:
            device.open_seconds = _sum(named)

    def _forget_settled(self) -> None:
        """Drop orders and pins that touch nothing that is still open."""
        window_s = min((device.settled_s for device in self._devices.values()), default=0.0)
        self._recent = [order for order in self._recent if order.end_s >= window_s]
        self._pins = [pin for pin in self._pins if pin.end_s > window_s]


def _tail_of(peak_active: int) -> int:
    """The most active sequences of a rollout that is in its tail."""
    return int(max(1, peak_active * TAIL_PART)) if peak_active > 1 else 0


def _whole(gaps: Sequence[Interval]) -> list[tuple[float, float]]:
    """Begin and end of each gap, of the pieces that have one name each."""
    whole: list[tuple[float, float]] = []
    for piece in gaps:
        if whole and whole[-1][1] == piece.start_s:
            whole[-1] = (whole[-1][0], piece.end_s)
        else:
            whole.append((piece.start_s, piece.end_s))
    return whole


def _cut(units: Sequence[_Unit]) -> float | None:
    """The last time before which everything is settled, and that nothing spans; None where there is none."""
    cut_s, latest_s = None, -math.inf
    for position, unit in enumerate(units):
        if not unit.is_settled:
            break
        latest_s = max(latest_s, unit.end_s)
        if position + 1 == len(units) or units[position + 1].start_s >= latest_s:
            cut_s = latest_s
    return cut_s


def _by_device(standstills: Iterable[Standstill]) -> dict[DeviceId, list[Standstill]]:
    by_device: dict[DeviceId, list[Standstill]] = {}
    for standstill in standstills:
        for device in standstill.devices:
            by_device.setdefault(device, []).append(standstill)
    return by_device


def _sum(named: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    seconds: dict[Name, float] = {}
    for name, its_s in named:
        seconds[name] = seconds.get(name, 0.0) + its_s
    return seconds
