"""Sums of groups of pipelines: their figures, and the device time that is put down to them.

rows that match ─┐
intervals        ├─ GroupSums.add, a lane at a time ──▶ items   a sum for each project, user, day, ...
prices           ┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmux.report.timeline.intervals import Cause, Kind
from rlmux.report.timeline.run_clock import RunClock, unix_of, utc_text
from rlmux.report.usage import IdleStretch, UsageSums, UsedTime
from rlmux.service.index.columns import CAUSES, KIND_BY_CAUSE, KINDS, NO_PIPELINE, Array
from rlmux.service.index.selection import NO_VALUE, Row, values_of
from rlmux.service.index.store import IndexReader
from rlmux.service.index.tiles import without_overlaps

DAY = "day"
_DAY_S = 86400.0
_CONTROL = CAUSES.index(Cause.CONTROL)
_BUSY, _SWITCH, _BUBBLE = (KINDS.index(kind) for kind in (Kind.BUSY, Kind.SWITCH, Kind.BUBBLE))


@dataclass(slots=True)
class Sum:
    """Figures of one group."""

    pipelines: int = 0
    running: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: Array = field(default_factory=lambda: np.zeros(len(KINDS)))
    """Device-seconds by kind."""
    usd: float = 0.0

    def count(self, row: Row) -> None:
        self.pipelines += 1
        self.running += row["status"] == "running"
        self.steps += row["step"] or 0
        self.tokens += row["tokens"] or 0

    def spend(self, seconds: Array, usd: float) -> None:
        self.seconds = self.seconds + seconds
        self.usd += usd

    def to_json(self, key: str, *, is_priced: bool) -> dict[str, Any]:
        hours = self.seconds / 3600.0
        return {
            "key": key,
            **{name: getattr(self, name) for name in ("pipelines", "running", "steps", "tokens")},
            "device_hours": float(hours.sum()),
            "busy_hours": float(hours[_BUSY]),
            "switch_hours": float(hours[_SWITCH]),
            "wait_hours": float(hours[_BUBBLE]),
            "usd": self.usd if is_priced else None,
        }


class GroupSums:
    """Sums by one key over lanes. A pipeline with two labels counts for each, and once in the total."""

    def __init__(self, by: str) -> None:
        """`by`: a filter or `day`. A pipeline's day is that of its submission; device time has the day it was spent."""
        self.by = by
        self.total = Sum()
        self.others = Sum()
        """Device time of no pipeline that matches."""
        self._sums: dict[str, Sum] = {}

    def add(self, rows: Sequence[Row], reader: IndexReader, prices: Array) -> None:
        """One lane's matching rows. `prices`: dollars per hour of each device."""
        keys: dict[str, Iterable[str]] = {}
        for row in rows:
            keys[row["name"]] = self._keys_of(row)
            for key in keys[row["name"]]:
                self._of(key).count(row)
            self.total.count(row)
        clock = RunClock.of_json(reader.facts["lane"]["clock"]) if self.by == DAY else None
        names = [*reader.facts["pipelines"], None]
        days, seconds, usd = spent(reader, len(names) - 1, prices, clock)
        for place, at in zip(*np.nonzero(seconds.sum(axis=2)), strict=True):
            its = (seconds[place, at], float(usd[place, at]))
            if names[place] not in keys:
                self.others.spend(*its)
                continue
            self.total.spend(*its)
            for key in [days[at]] if clock is not None else keys[str(names[place])]:
                self._of(key).spend(*its)

    def items(self) -> list[tuple[str, Sum]]:
        """Days newest first, else the group with most device time first."""
        if self.by == DAY:
            return sorted(self._sums.items(), reverse=True)
        return sorted(self._sums.items(), key=lambda each: (-float(each[1].seconds.sum()), each[0]))

    def _keys_of(self, row: Row) -> Iterable[str]:
        if self.by != DAY:
            return values_of(row, self.by)
        return ((row["submitted_at"] or NO_VALUE)[:10],)

    def _of(self, key: str) -> Sum:
        return self._sums.setdefault(key, Sum())


def add_usage(sums: UsageSums, lane: str, rows: Sequence[Row], reader: IndexReader, prices: Array) -> None:
    """Add what a lane used in the sums' window. `rows`: its pipelines. `prices`: dollars per hour of each device."""
    facts, clock = reader.facts, RunClock.of_json(reader.facts["lane"]["clock"])
    every = without_overlaps(reader.intervals(float(facts["start_s"]), float(facts["end_s"])))
    shift = _shift(every["start_s"], clock)
    since_s = np.maximum(every["start_s"], sums.window.since - shift)
    seconds = np.minimum(every["end_s"], sums.window.until - shift) - since_s
    is_in = (seconds > 0.0) & bool(clock.to_json())
    every, since, seconds = every[is_in], (since_s + shift)[is_in], seconds[is_in]
    accounts = {row["name"]: (row["project"], row["user"]) for row in rows}
    names, devices = facts["pipelines"], facts["devices"]
    keys = np.stack([every["device"], every["pipeline"], every["cause"]], axis=1)
    cells, where = np.unique(keys, axis=0, return_inverse=True)
    for (device, place, number), spent_s in zip(cells, np.bincount(where.ravel(), seconds, len(cells)), strict=True):
        cause = CAUSES[number]
        name = None if place == NO_PIPELINE or cause is Cause.CONTROL else names[place]
        project, user = accounts.get(name, ("", ""))
        pool = devices[device].rpartition("-")[0]
        usd = float(prices[device] * spent_s) / 3600.0
        sums.add(UsedTime(lane, pool, KIND_BY_CAUSE[cause], cause, name, project, user, float(spent_s), usd))
    is_idle = every["kind"] == KINDS.index(Kind.IDLE)
    for at in np.flatnonzero(is_idle):
        device, gap_s = int(every["device"][at]), float(seconds[at])
        usd = float(prices[device]) * gap_s / 3600.0
        sums.add_gap(IdleStretch(gap_s, devices[device], lane, float(since[at]), CAUSES[every["cause"][at]], usd))


def spent(
    reader: IndexReader, num_pipelines: int, prices: Array, clock: RunClock | None
) -> tuple[list[str], Array, Array]:
    """(days, device-seconds by pipeline, day and kind, dollars by pipeline and day); one day without a clock.

    The last pipeline is none, as for idle time and control. Other device time counts for the pipeline that computes,
    switches or is waited for, as in a lane's charges.
    """
    start_s, end_s = float(reader.facts["start_s"]), float(reader.facts["end_s"])
    every = without_overlaps(reader.intervals(start_s, end_s))
    is_of_none = (every["pipeline"] == NO_PIPELINE) | (every["cause"] == _CONTROL)
    pipeline = np.where(is_of_none, num_pipelines, every["pipeline"]).astype(np.int64)
    kind, device = every["kind"].astype(np.int64), every["device"]
    begin, end = every["start_s"].copy(), every["end_s"].copy()
    days, day = [""], np.zeros(len(every), np.int64)
    if clock is not None and len(every):
        begin, end, origin = _cut_at_midnight(begin, end, clock)
        pipeline, kind, device = pipeline[origin], kind[origin], device[origin]
        numbers, day = np.unique(np.floor(begin / _DAY_S).astype(np.int64), return_inverse=True)
        days = [utc_text(float(number) * _DAY_S)[:10] for number in numbers]
    shape = (num_pipelines + 1, len(days), len(KINDS))
    cell = pipeline * len(days) + day
    size = shape[0] * shape[1]
    seconds = np.bincount(cell * len(KINDS) + kind, end - begin, size * len(KINDS)).reshape(shape)
    usd = np.bincount(cell, (end - begin) * prices[device] / 3600.0, size).reshape(shape[:2])
    return days, seconds, usd


def _cut_at_midnight(begin_s: Array, end_s: Array, clock: RunClock) -> tuple[Array, Array, Array]:
    """(begin, end, place) of parts that lie in one UTC day each, as Unix times; a run without a clock began in 1970."""
    shift = _shift(begin_s, clock)
    begin, end, origin = begin_s + shift, end_s + shift, np.arange(len(begin_s))
    parts = []
    while len(begin):
        midnight = (np.floor(begin / _DAY_S) + 1) * _DAY_S
        parts.append((begin, np.minimum(end, midnight), origin))
        is_longer = end > midnight
        begin, end, origin = midnight[is_longer], end[is_longer], origin[is_longer]
    first, last, places = (np.concatenate(each) for each in zip(*parts, strict=True))
    return first, last, places


def _shift(at_s: Array, clock: RunClock) -> Array:
    """Seconds from each run second to its Unix time; a run without a clock began in 1970."""
    marks = [(mark["at_s"], unix_of(mark["utc"])) for mark in clock.to_json() if mark["utc"]] or [(0.0, 0.0)]
    at = np.maximum(np.searchsorted([mark_s for mark_s, _ in marks], at_s, "right") - 1, 0)
    return np.array([float(unix or 0.0) - mark_s for mark_s, unix in marks])[at]
