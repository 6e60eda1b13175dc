"""What each device did in each bucket of time: six bytes, at thirteen widths of bucket.

    level            0     1   2   3   ...   12          a bucket lasts 0.25 s x 4^level
    of each bucket   busy  switch  bubble    parts of 255; idle is the rest
                     top                     the pipeline that computed or switched most; 65535: none did
                     cause                   the cause with most of the seconds that are neither; 255: none has

Each moment of a device counts once, as in the report. Buckets are counted from second 0 of the run's clock, so that a
bucket has the same number in every answer.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from rlmux.report.timeline.build import exposed
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.service.index.columns import KINDS, NO_PIPELINE, Array

LEVELS = tuple(0.25 * 4**level for level in range(13))
"""Seconds of a bucket, by level."""
NO_CAUSE = 255
_BUSY, _SWITCH, _BUBBLE = (KINDS.index(kind) for kind in (Kind.BUSY, Kind.SWITCH, Kind.BUBBLE))


class Planes(NamedTuple):
    """One array each of shape (devices, buckets)."""

    busy: Array
    switch: Array
    bubble: Array
    cause: Array
    top: Array

    def to_bytes(self) -> bytes:
        return b"".join(np.ascontiguousarray(plane).tobytes() for plane in self)

    @classmethod
    def from_bytes(cls, data: bytes, num_devices: int, num_buckets: int) -> Planes:
        num, shape = num_devices * num_buckets, (num_devices, num_buckets)
        busy, switch, bubble, cause = (np.frombuffer(data, "u1", num, plane * num).reshape(shape) for plane in range(4))
        return cls(busy, switch, bubble, cause, np.frombuffer(data, "<u2", num, 4 * num).reshape(shape))


def without_overlaps(intervals: Array) -> Array:
    """The same time with each moment of a device once: where orders run beside each other, the most useful counts.

    `intervals` by device, then start.
    """
    shared = np.unique(intervals["device"][intervals["lane"] > 0])
    if not len(shared):
        return intervals
    is_shared = np.isin(intervals["device"], shared)
    parts = [intervals[~is_shared]]
    for device in shared:
        own = intervals[intervals["device"] == device]
        named = [
            Interval(start_s, end_s, KINDS[kind], Cause.COMPUTE, lane=place)
            for place, (start_s, end_s, kind) in enumerate(own[["start_s", "end_s", "kind"]].tolist())
        ]
        pieces = exposed(named)
        part = own[[piece.lane for piece in pieces]]
        part["start_s"] = [piece.start_s for piece in pieces]
        part["end_s"] = [piece.end_s for piece in pieces]
        parts.append(part)
    return np.concatenate(parts)


def planes(intervals: Array, level: int, first_bucket: int, num_buckets: int, num_devices: int) -> Planes:
    """`intervals`: all that touch these buckets, without overlaps."""
    width_s, num_cells = LEVELS[level], num_devices * num_buckets
    shape = (num_devices, num_buckets)
    cell, seconds, origin = _cut_at_buckets(intervals, width_s, first_bucket, num_buckets)
    kind = intervals["kind"][origin]
    by_kind = [
        np.bincount(cell[kind == counted], seconds[kind == counted], num_cells)[:num_cells]
        for counted in (_BUSY, _SWITCH, _BUBBLE)
    ]
    up_to = [np.minimum(255, np.floor(255 * each / width_s + 0.5)).astype(np.int64) for each in np.cumsum(by_kind, 0)]
    parts = [up_to[0], up_to[1] - up_to[0], up_to[2] - up_to[1]]
    is_own = (kind == _BUSY) | (kind == _SWITCH)
    top = _most(cell[is_own], intervals["pipeline"][origin[is_own]], seconds[is_own], num_cells, NO_PIPELINE)
    cause = _most(cell[~is_own], intervals["cause"][origin[~is_own]], seconds[~is_own], num_cells, NO_CAUSE)
    busy, switch, bubble, causes = (part.astype("u1").reshape(shape) for part in (*parts, cause))
    return Planes(busy, switch, bubble, causes, top.astype("<u2").reshape(shape))


def _cut_at_buckets(
    intervals: Array, width_s: float, first_bucket: int, num_buckets: int
) -> tuple[Array, Array, Array]:
    """(cell, seconds, place in `intervals`) of each interval's part in each bucket that it touches."""
    begin_s, over_s = first_bucket * width_s, (first_bucket + num_buckets) * width_s
    start_s, end_s = np.maximum(intervals["start_s"], begin_s), np.minimum(intervals["end_s"], over_s)
    is_here = end_s > start_s
    places = np.flatnonzero(is_here)
    start_s, end_s = start_s[is_here], end_s[is_here]
    first = np.floor(start_s / width_s).astype(np.int64)
    last = np.maximum(first, np.ceil(end_s / width_s).astype(np.int64) - 1)
    num = last - first + 1
    origin = np.repeat(np.arange(len(places)), num)
    bucket = np.arange(len(origin)) - np.repeat(np.cumsum(num) - num, num) + first[origin]
    seconds = np.minimum(end_s[origin], (bucket + 1) * width_s) - np.maximum(start_s[origin], bucket * width_s)
    bucket = np.minimum(bucket - first_bucket, num_buckets - 1)
    devices = intervals["device"][places].astype(np.int64)
    return devices[origin] * num_buckets + bucket, np.maximum(seconds, 0.0), places[origin]


def _most(cell: Array, name: Array, seconds: Array, num_cells: int, none: int) -> Array:
    """The name with most seconds in each cell; of equals the smallest."""
    key = cell * 65536 + name
    keys, place = np.unique(key, return_inverse=True)
    sums = np.bincount(place, seconds, len(keys)) if len(keys) else np.zeros(0)
    found = np.full(num_cells, none, np.int64)
    order = np.lexsort((-keys, sums))  # the last write to a cell stays: most seconds, then the smallest name
    found[keys[order] // 65536] = keys[order] % 65536
    return cast("Array", found)
