"""What one order did with the time it held its device.

    given ├─ lead ─┼─ switch ─┼─ compute ─┼ wait ┼─ compute ─┤ ended
                                          ▲
                              a ChunkFinished, with the seconds computed since the order began

The lengths of compute and switch are the events' own measurements. Only the rest is inferred: *starting* in front of a
cold start's computing, *tool wait* after a chunk whose trajectories all wait for their environment, else *control*.
A standstill in the middle of a call is neither: the log has its time.

*Tail*: the time after a chunk at which a rollout decodes at most an eighth of the most sequences that its pipeline ever
had active on this device, while none waits for a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmux.core.actions import Switch
from rlmux.core.model import Stage
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.records import Ending, OrderRecord, Standstill

_CONTROL, _COMPUTE, _TOOL_WAIT, _TAIL, _STARTING, _STANDSTILL, _LOST = (
    Cause.CONTROL,
    Cause.COMPUTE,
    Cause.TOOL_WAIT,
    Cause.TAIL,
    Cause.STARTING,
    Cause.STANDSTILL,
    Cause.LOST,
)
_GENERATE = Stage.GENERATE
_BUSY, _BUBBLE, _SWITCHES = Kind.BUSY, Kind.BUBBLE, Kind.SWITCH
_SWITCH, _COLD = Cause.SWITCH, Switch.COLD
_IS_OPEN, _IS_LOST = Ending.OPEN, Ending.LOST
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""

_new = tuple.__new__
"""Makes a named tuple in half the time that `_make` takes."""

TAIL_PART = 1 / 8
"""Part of the most active sequences at or below which a rollout is in its tail."""


def lay_out_order(
    order: OrderRecord, peak_active: int, now_s: float, standstills: Sequence[Standstill] = (), *, lane: int = 0
) -> list[Interval]:
    """What one order did with the time it held its device, without gaps or overlaps.

    `standstills`: those of its pipeline's workers on that device, oldest first.
    """
    end_s = min(order.end_s, now_s)
    pieces = _Pieces(order, standstills, lane)
    at_s, seconds, tokens = order.start_s, 0.0, 0
    wait, label = (_STARTING if order.switch is _COLD else _CONTROL), _COMPUTE
    switch_s = order.switch_s
    is_rollout = order.stage is _GENERATE
    add = pieces.add if pieces.has_standstills else pieces.add_window
    tail_active = max(1, peak_active * TAIL_PART) if peak_active > 1 else 0
    for time_s, num_active, num_waiting, num_waiting_for_env, num_tokens, so_far_s in order.chunks.values():
        if time_s > end_s:
            break
        computed_s = so_far_s - seconds
        if wait is _TOOL_WAIT and num_tokens == tokens:
            computed_s = 0.0  # the driver counts waiting as computing
        add(at_s, time_s, wait, switch_s, label, computed_s)
        at_s, seconds, tokens, switch_s = time_s, so_far_s, num_tokens, 0.0
        wait, label = _CONTROL, _COMPUTE
        if is_rollout:
            if num_active == 0 and num_waiting_for_env > 0:
                wait = _TOOL_WAIT
            elif num_waiting == 0 and 1 <= num_active <= tail_active:
                label = _TAIL
    if order.ending is _IS_LOST:
        pieces.add(at_s, end_s, _LOST, 0.0, label, 0.0)
    elif order.ending is _IS_OPEN:
        is_waiting = wait in (_TOOL_WAIT, _STARTING)
        pieces.add(at_s, end_s, wait, 0.0, label, 0.0 if is_waiting else end_s - at_s)
    else:
        pieces.add(at_s, end_s, wait, switch_s, label, order.seconds - seconds)
    return pieces.close()


class _Pieces:
    """Windows between reports, joined while they are alike: each run of windows is drawn as one wait,
    then one computation, so that milliseconds between chunks add up instead of cutting the picture to
    shreds."""

    def __init__(self, order: OrderRecord, standstills: Sequence[Standstill], lane: int) -> None:
        self._order = order
        self._whose = (order.pipeline, order.step, order.stage, order.id, order.device_fraction, lane, False)
        self._standstills = (
            [
                standstill
                for standstill in standstills
                if standstill.end_s > order.start_s and standstill.start_s < order.end_s
            ]
            if standstills
            else ()
        )
        self._done: list[Interval] = []
        self._wait: Cause | None = None
        self._compute = _COMPUTE
        self._start_s = self._end_s = order.start_s
        self._wait_s = self._switch_s = self._compute_s = 0.0

    @property
    def has_standstills(self) -> bool:
        return bool(self._standstills)

    def add(self, start_s: float, end_s: float, wait: Cause, switch_s: float, compute: Cause, compute_s: float) -> None:
        """Add the window between two reports, without what its worker stood still."""
        for standstill in self._standstills:
            begin_s, over_s = max(start_s, standstill.start_s), min(end_s, standstill.end_s)
            if over_s <= begin_s:
                continue
            after_s = min(compute_s, end_s - over_s)  # the worker's own seconds count the standstill as well
            before_s = min(compute_s - after_s, begin_s - start_s)
            self.add_window(start_s, begin_s, wait, switch_s, compute, before_s)
            self._flush()
            self._append(begin_s, over_s, _BUBBLE, _STANDSTILL)
            start_s, switch_s, compute_s = over_s, 0.0, after_s
        self.add_window(start_s, end_s, wait, switch_s, compute, compute_s)

    def add_window(
        self, start_s: float, end_s: float, wait: Cause, switch_s: float, compute: Cause, compute_s: float
    ) -> None:
        """Add the window between two reports of a worker that did not stand still."""
        if end_s < start_s:
            end_s = start_s
        window_s = end_s - start_s
        if compute_s > window_s:
            compute_s = window_s
        elif compute_s < 0.0:
            compute_s = 0.0
        if wait is not self._wait or compute is not self._compute or wait is _TOOL_WAIT:
            if self._wait is not None:
                self._flush()
            self._wait, self._compute, self._start_s = wait, compute, start_s
        if switch_s:
            switch_s = min(switch_s, window_s - compute_s)
            self._switch_s += switch_s
        self._end_s = end_s
        self._wait_s += window_s - compute_s - switch_s
        self._compute_s += compute_s

    def close(self) -> list[Interval]:
        self._flush()
        if self._order.ending is _IS_OPEN and self._done:
            self._done[-1] = self._done[-1]._replace(is_open=True)
        return self._done

    def _flush(self) -> None:
        if self._wait is None:
            return
        switching_s, computing_s = self._start_s + self._wait_s, self._end_s - self._compute_s
        if self._wait_s > 0.0:
            kind = _SWITCHES if self._wait is _STARTING else _BUBBLE
            self._append(self._start_s, switching_s if self._switch_s > 0.0 else computing_s, kind, self._wait)
        if self._switch_s > 0.0:
            self._append(switching_s, computing_s, _SWITCHES, _SWITCH)
        if self._compute_s > 0.0:
            self._append(computing_s, self._end_s, _BUSY, self._compute)
        self._wait = None
        self._wait_s = self._switch_s = self._compute_s = 0.0

    def _append(self, start_s: float, end_s: float, kind: Kind, cause: Cause) -> None:
        if end_s > start_s:
            self._done.append(_new(Interval, (start_s, end_s, kind, cause, *self._whose)))
