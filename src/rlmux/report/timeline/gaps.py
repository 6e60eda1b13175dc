"""Why nothing runs on a device that pipelines hold: each gap between orders gets a cause, piece by piece.

A gap belongs to N, the pipeline whose order comes next on the device. Between any two moments at which
something changes for a pipeline that is pinned there:

    no pipeline is pinned                                   nothing admitted   (idle)
    every pinned pipeline has a client without a request  client of N        (idle)
    the run's process was not there                        down               (idle)
    N could start: everything before its order is done
        but another device of that order is still taken    waiting for the other devices of N
        and the scheduler decided meanwhile                held back          the policy's choice
        and handled no event meanwhile                     control
    another pipeline could start here, yet N goes first    waiting for cycle slot of N
    otherwise, by what N does or needs next elsewhere      waiting for rollout | rewards | training of N,
                                                           sync of N, migration of N

"Could start" is read off what happened: a pipeline that does nothing, and whose next order is the one on this
device. After the last order on a device, the gap belongs to the first pinned pipeline that does anything.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Protocol

from rlmux.core.model import DeviceId, Phase, PipelineId
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.records import OrderRecord, Pin, PipelineRecord

_BUBBLE = Kind.BUBBLE
_DEVICES, _CYCLE_SLOT, _CONTROL, _HELD_BACK = Cause.DEVICES, Cause.CYCLE_SLOT, Cause.CONTROL, Cause.HELD_BACK
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""

_ROUNDING_S = 1e-9

_CAUSE_BY_PHASE = {
    Phase.ROLLOUT: Cause.ROLLOUT,
    Phase.TRAIN: Cause.TRAINING,
    Phase.ENV: Cause.REWARD,
    Phase.SYNC: Cause.SYNC,
}


class Facts(Protocol):
    """What the names of gaps are read off: a `History`, or all of one that touches a stretch of time."""

    @property
    def orders(self) -> Sequence[OrderRecord]: ...
    @property
    def pins(self) -> Sequence[Pin]: ...
    @property
    def pipelines(self) -> Mapping[PipelineId, PipelineRecord]: ...
    @property
    def down(self) -> Sequence[tuple[float, float]]: ...
    @property
    def decisions_s(self) -> Sequence[float]: ...


class GapNamer:
    """Names gaps of one finished layout."""

    def __init__(
        self,
        history: Facts,
        orders_by_device: Mapping[DeviceId, Sequence[OrderRecord]],
        start_s: float,
        end_s: float,
    ) -> None:
        self._start_s, self._end_s = start_s, end_s
        self._down = history.down
        self._decisions_s = sorted(
            itertools.chain(history.decisions_s, *(order.chunks.column("time_s") for order in history.orders))
        )
        self._device = {device: _Track(orders) for device, orders in orders_by_device.items()}
        by_pipeline: dict[PipelineId, list[OrderRecord]] = {}
        for order in history.orders:
            by_pipeline.setdefault(order.pipeline, []).append(order)
        self._pipeline = {pipeline: _Track(orders) for pipeline, orders in by_pipeline.items()}
        devices_by_node: dict[tuple[str, int], list[DeviceId]] = {}
        for device in orders_by_device:
            devices_by_node.setdefault(device.node_id, []).append(device)
        self._clients = frozenset(name for name, record in history.pipelines.items() if record.pipeline.work_arrives)
        """Pipelines whose work arrives."""
        self._pins: dict[DeviceId, list[tuple[float, float, PipelineId]]] = {device: [] for device in orders_by_device}
        for pin in history.pins:
            for node in pin.placement.nodes:
                for device in devices_by_node.get(node, ()):
                    self._pins[device].append((pin.start_s, pin.end_s, pin.pipeline))

    def name_gaps(self, device: DeviceId, held: Sequence[Interval], start_s: float | None = None) -> list[Interval]:
        """Intervals for everything that `held` leaves open between `start_s`, or the run's start, and its end."""
        gaps: list[Interval] = []
        at_s = self._start_s if start_s is None else start_s
        for interval in sorted(held, key=itemgetter(0)):
            if interval.start_s > at_s + _ROUNDING_S:
                self._name_gap(gaps, device, at_s, interval.start_s)
            at_s = max(at_s, interval.end_s)
        if self._end_s > at_s + _ROUNDING_S:
            self._name_gap(gaps, device, at_s, self._end_s)
        return gaps

    def _name_gap(self, gaps: list[Interval], device: DeviceId, start_s: float, end_s: float) -> None:
        cuts = {start_s, end_s}
        pins = [pin for pin in self._pins[device] if pin[0] < end_s and pin[1] > start_s]
        for pin_start_s, pin_end_s, pipeline in pins:
            cuts.update((pin_start_s, pin_end_s))
            if pipeline in self._pipeline:
                self._pipeline[pipeline].add_edges(cuts, start_s, end_s)
        for down_start_s, down_end_s in self._down:
            cuts.update((down_start_s, down_end_s))
        edges = sorted(cut for cut in cuts if start_s <= cut <= end_s)
        first = len(gaps)
        for piece_start_s, piece_end_s in itertools.pairwise(edges):
            middle_s = (piece_start_s + piece_end_s) / 2
            pinned = [pin[2] for pin in pins if pin[0] <= middle_s < pin[1]]
            kind, cause, awaited = self._cause(device, middle_s, (start_s, end_s), pinned)
            last = gaps[-1] if len(gaps) > first else None
            if last is not None and (last.cause, last.pipeline) == (cause, awaited):
                piece_start_s = gaps.pop().start_s
            gaps.append(Interval(piece_start_s, piece_end_s, kind, cause, awaited))

    def _cause(
        self, device: DeviceId, at_s: float, gap: tuple[float, float], pinned: list[PipelineId]
    ) -> tuple[Kind, Cause, PipelineId | None]:
        if any(start_s <= at_s < end_s for start_s, end_s in self._down):
            return Kind.IDLE, Cause.DOWN, None
        if not pinned:
            return Kind.IDLE, Cause.NOTHING_ADMITTED, None
        waiting = (
            [pipeline for pipeline in pinned if not self._is_thinking(pipeline, at_s)] if self._clients else pinned
        )
        following = self._device[device].next_of(at_s, waiting or pinned)
        if not waiting:
            return Kind.IDLE, Cause.CLIENT, pinned[0] if following is None else following.pipeline
        pinned = waiting
        if following is None:
            return (_BUBBLE, *self._last_cause(at_s, gap, pinned))
        pipeline = following.pipeline
        if self._is_ready(following, at_s):
            if self._waits_for_devices(following, at_s):
                return _BUBBLE, _DEVICES, pipeline
            return _BUBBLE, self._unordered(at_s, gap, self._pipeline[pipeline]), None
        if any(self._could_start(other, device, at_s) for other in pinned if other != pipeline):
            return _BUBBLE, _CYCLE_SLOT, pipeline
        return _BUBBLE, self._needs(pipeline, at_s) or _CONTROL, pipeline

    def _is_thinking(self, pipeline: PipelineId, at_s: float) -> bool:
        """Its client has no request under way, and sends the next one only later."""
        if pipeline not in self._clients:
            return False
        track = self._pipeline.get(pipeline)
        if track is None or track.running(at_s) is not None:
            return track is None
        following = track.next(at_s)
        return following is None or (following.arrived_s is not None and at_s < following.arrived_s)

    def _last_cause(
        self, at_s: float, gap: tuple[float, float], pinned: list[PipelineId]
    ) -> tuple[Cause, PipelineId | None]:
        for pipeline in pinned:
            cause = self._needs(pipeline, at_s)
            if cause is not None:
                return cause, pipeline
        return self._unordered(at_s, gap, None), None

    def _unordered(self, at_s: float, gap: tuple[float, float], track: _Track | None) -> Cause:
        """Whether work that was ready in a gap had to wait for the policy or for the controller.

        Ready work was held back if the scheduler decided something between the time it became ready and its start.
        """
        ready_s = gap[0] if track is None else max(gap[0], track.last_end(at_s))
        position = bisect_right(self._decisions_s, ready_s + _ROUNDING_S)
        is_decided = position < len(self._decisions_s) and self._decisions_s[position] < gap[1] - _ROUNDING_S
        return _HELD_BACK if is_decided else _CONTROL

    def _is_ready(self, order: OrderRecord, at_s: float) -> bool:
        """The pipeline does nothing else, and this is what it does next."""
        track = self._pipeline[order.pipeline]
        if track.running(at_s) is not None:
            return False
        following = track.next(at_s)
        return following is not None and following.start_s == order.start_s

    def _could_start(self, pipeline: PipelineId, device: DeviceId, at_s: float) -> bool:
        order = self._device[device].next_of(at_s, [pipeline])
        return order is not None and self._is_ready(order, at_s) and not self._waits_for_devices(order, at_s)

    def _waits_for_devices(self, order: OrderRecord, at_s: float) -> bool:
        return any(self._device[device].running(at_s) is not None for device in order.devices)

    def _needs(self, pipeline: PipelineId, at_s: float) -> Cause | None:
        """What the pipeline does now, or has to do next."""
        track = self._pipeline.get(pipeline)
        if track is None:
            return None
        order = track.running(at_s) or track.next(at_s)
        if order is None:
            return None
        return Cause.MIGRATION if order.is_migration else _CAUSE_BY_PHASE[order.phase]


class _Track:
    """The orders of one device or pipeline, by time."""

    def __init__(self, orders: Sequence[OrderRecord]) -> None:
        self._orders = sorted(orders, key=attrgetter("start_s"))
        self._starts = [order.start_s for order in self._orders]
        self._arrivals = sorted([order.arrived_s for order in self._orders if order.arrived_s is not None])
        ends = [order.end_s for order in self._orders]
        self._latest_ends = list(itertools.accumulate(ends, max))
        self._ends = sorted(ends)
        while self._ends and math.isinf(self._ends[-1]):
            self._ends.pop()

    @functools.cached_property
    def _by_pipeline(self) -> dict[PipelineId, tuple[list[float], list[OrderRecord]]]:
        """Orders of each pipeline, and their starts."""
        found: dict[PipelineId, tuple[list[float], list[OrderRecord]]] = {}
        for order in self._orders:
            mine = found.get(order.pipeline)
            if mine is None:
                mine = found[order.pipeline] = ([], [])
            mine[0].append(order.start_s)
            mine[1].append(order)
        return found

    def running(self, at_s: float) -> OrderRecord | None:
        """The order given last of those that run at that time."""
        position = bisect_right(self._starts, at_s) - 1
        while position >= 0 and self._latest_ends[position] > at_s:
            if self._orders[position].end_s > at_s:
                return self._orders[position]
            position -= 1
        return None

    def last_end(self, at_s: float) -> float:
        """Time of the last end of an order up to then; minus infinity where there was none."""
        position = bisect_right(self._ends, at_s)
        return self._ends[position - 1] if position else -math.inf

    def next(self, at_s: float) -> OrderRecord | None:
        position = bisect_right(self._starts, at_s)
        return self._orders[position] if position < len(self._orders) else None

    def next_of(self, at_s: float, pipelines: Sequence[PipelineId]) -> OrderRecord | None:
        """The next that belongs to one of these pipelines."""
        first = None
        for pipeline in pipelines:
            order = self._next_by_pipeline(pipeline, at_s)
            if order is not None and (first is None or order.start_s < first.start_s):
                first = order
        return first

    def _next_by_pipeline(self, pipeline: PipelineId, at_s: float) -> OrderRecord | None:
        mine = self._by_pipeline.get(pipeline)
        if mine is None:
            return None
        position = bisect_right(mine[0], at_s)
        return mine[1][position] if position < len(mine[1]) else None

    def add_edges(self, cuts: set[float], start_s: float, end_s: float) -> None:
        """Every start, end and arrival of work strictly between."""
        for edges in (self._starts, self._ends, self._arrivals):
            if edges:
                cuts.update(edges[bisect_right(edges, start_s) : bisect_left(edges, end_s)])
