"""What a stretch of time took of the devices, over any number of runs: device-hours and dollars.

    intervals of each run, cut to the window ── UsageSums.add ──▶ rows by project, user, pipeline, cause, lane, pool
                                             ── add_gap ────────▶ idle stretches of devices, the longest first

A second counts for the pipeline that computes, switches or is waited for, as on a timeline; what nothing is waited for
in is no pipeline's. The time between two processes of a run has no seconds: nothing held its devices then.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.errors import LogError, UserError
from rlmux.log.run_log import LOG_NAME, NOT_SHOWN, LogReader
from rlmux.report.timeline.build import DeviceTimeline, Timeline, build_timeline, exposed
from rlmux.report.timeline.history import History, without_collector
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.run_clock import RunClock, unix_from, utc_text

NO_VALUE = "-"
"""Key of what is no pipeline's, or a pipeline's without a project or a user."""
KEYS = ("project", "user", "pipeline", "cause", "lane", "pool")
_HOURS_BY_UNIT = {"h": 1.0, "d": 24.0, "w": 168.0}
_MAX_GAPS = 20
_LEAST_GAP_S = 60.0


class Window(NamedTuple):
    """A stretch of time, in Unix seconds."""

    since: float
    until: float


def window_of(since: str, until: str | None, now: float) -> Window:
    """The window of two texts: periods before `now` such as `30d`, dates, or ISO times (UTC without a zone).

    A date as an end includes its day. Raises UserError for other texts, and for an end before its beginning.
    """
    window = Window(_moment_of("--since", since, now), now if until is None else _moment_of("--until", until, now))
    if window.until <= window.since:
        raise UserError(f"--until {until or 'now'}: is not after --since {since}; accepted: a later time")
    return window


def _moment_of(option: str, text: str, now: float) -> float:
    period = re.fullmatch(r"([0-9]{1,6})([hdw])", text)
    if period:
        return now - int(period[1]) * _HOURS_BY_UNIT[period[2]] * 3600.0
    found = unix_from(text, is_end=option == "--until")
    if found is None:
        raise UserError(f"{option} {text!r}: accepted: a period such as 30d, 12h or 4w, a date, or an ISO time")
    return found


class UsedTime(NamedTuple):
    """Device time of one name."""

    lane: str
    pool: str
    kind: Kind
    cause: Cause
    pipeline: str | None
    project: str
    user: str
    seconds: float
    usd: float


class IdleStretch(NamedTuple):
    """A stretch in which a device was idle. The longest sorts last."""

    seconds: float
    device: str
    lane: str
    begin: float
    """Unix time."""
    cause: Cause
    usd: float

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "lane": self.lane,
            "begins": utc_text(self.begin),
            "hours": self.seconds / 3600.0,
            "cause": self.cause.value,
            "usd": self.usd,
        }


@dataclass(slots=True)
class _Sum:
    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    usd: float = 0.0
    project: str = ""
    """Of a pipeline."""

    def add(self, kind: Kind, seconds: float, usd: float) -> None:
        self.seconds[kind] += seconds
        self.usd += usd

    def to_json(self) -> dict[str, Any]:
        hours = {f"{kind.value}_hours": seconds / 3600.0 for kind, seconds in self.seconds.items()}
        return {"device_hours": sum(hours.values()), **hours, "usd": self.usd}


class UsageSums:
    """See the module."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.total = _Sum()
        self.left_out: dict[str, str] = {}
        """Why runs could not be read, by lane."""
        self._sums: dict[str, dict[str, _Sum]] = {key: {} for key in KEYS}
        self._gaps: list[IdleStretch] = []

    def add(self, part: UsedTime) -> None:
        name = None if part.pipeline is None else f"{part.lane}/{part.pipeline}"
        values = (part.project, part.user, name, part.cause.value, part.lane, f"{part.lane}/{part.pool}")
        self.total.add(part.kind, part.seconds, part.usd)
        for key, value in zip(KEYS, values, strict=True):
            found = self._sums[key].setdefault(value or NO_VALUE, _Sum())
            found.add(part.kind, part.seconds, part.usd)
        if name is not None:
            self._sums["pipeline"][name].project = part.project

    def add_gap(self, gap: IdleStretch) -> None:
        if gap.seconds < _LEAST_GAP_S:
            return
        if len(self._gaps) < _MAX_GAPS:
            heapq.heappush(self._gaps, gap)
        else:
            heapq.heappushpop(self._gaps, gap)

    def to_json(self) -> dict[str, Any]:
        """What `rlmux usage --since --json` prints. Rows with most device time first."""
        return {
            "since": utc_text(self.window.since),
            "until": utc_text(self.window.until),
            "total": self.total.to_json(),
            "by": {key: [self._row(key, value, its) for value, its in self._in_order(key)] for key in KEYS},
            "idle_gaps": [gap.to_json() for gap in sorted(self._gaps, reverse=True)],
            "left_out": self.left_out,
        }

    def _in_order(self, key: str) -> list[tuple[str, _Sum]]:
        return sorted(self._sums[key].items(), key=lambda each: (-sum(each[1].seconds.values()), each[0]))

    def _row(self, key: str, value: str, its: _Sum) -> dict[str, Any]:
        return {key: value, **({"of_project": its.project or NO_VALUE} if key == "pipeline" else {}), **its.to_json()}


# ---------------------------------------------------------------------- folders


def runs_in(folder: Path) -> dict[str, Path]:
    """Folders of runs by name: the folder itself, its runs, and those of the services in it. Raises UserError without
    one."""
    if (folder / LOG_NAME).is_file():
        return {folder.absolute().name: folder}
    found = sorted({path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{LOG_NAME}")})
    if not found:
        raise UserError(f"{folder}: no run in it; accepted: the folder of a run or a service, or one with such folders")
    return {str(path.relative_to(folder)): path for path in found}


def add_run(sums: UsageSums, lane: str, folder: Path) -> None:
    """Add what a run used in the window. A log that cannot be read is named in `left_out`."""
    try:
        with LogReader(folder) as log, without_collector():
            history = History.of(log.header, log.parts(bare=NOT_SHOWN))
    except LogError as error:
        sums.left_out[lane] = str(error)
        return
    timeline = build_timeline(history)
    prices = prices_of(timeline.header)
    for device in timeline.devices.values():
        price = prices.get(device.pool, 0.0) / 3600.0
        for part, gap in _parts_of(device, timeline, history.clock, lane, price, sums.window):
            sums.add(part)
            if gap is not None:
                sums.add_gap(gap)


def prices_of(header: Mapping[str, Any]) -> dict[str, float]:
    """Dollars per hour of a device by pool; 0 for one without a price."""
    prices = {}
    for name, pool in (header.get("pools") or {}).items():
        devices = pool.get("devices") or ()
        nodes = {tuple(device[:2]) for device in devices}
        per_node = float(pool.get("usd_per_node_hour") or 0.0)
        prices[name] = per_node * len(nodes) / len(devices) if devices else 0.0
    return prices


def _parts_of(
    device: DeviceTimeline, timeline: Timeline, clock: RunClock, lane: str, usd_per_s: float, window: Window
) -> Iterator[tuple[UsedTime, IdleStretch | None]]:
    intervals = exposed(device.intervals) if device.num_lanes > 1 else device.intervals
    for interval in intervals:
        begin = clock.unix_s(interval.start_s)
        if begin is None:
            continue
        shift = begin - interval.start_s  # a sum of Unix times would lose a part of each interval
        since_s = max(interval.start_s, window.since - shift)
        seconds = min(interval.end_s, window.until - shift) - since_s
        if seconds <= 0.0:
            continue
        yield (
            _part(interval, device.pool, timeline, lane, seconds, usd_per_s * seconds),
            IdleStretch(seconds, str(device.id), lane, since_s + shift, interval.cause, usd_per_s * seconds)
            if interval.kind is Kind.IDLE
            else None,
        )


def _part(interval: Interval, pool: str, timeline: Timeline, lane: str, seconds: float, usd: float) -> UsedTime:
    name = None if interval.cause is Cause.CONTROL else interval.pipeline
    record = None if name is None else timeline.pipelines.get(name)
    account = None if record is None else record.pipeline.account
    return UsedTime(
        lane=lane,
        pool=pool,
        kind=interval.kind,
        cause=interval.cause,
        pipeline=None if name is None else str(name),
        project=account.project if account else "",
        user=account.user if account else "",
        seconds=seconds,
        usd=usd,
    )
