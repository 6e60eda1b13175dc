"""Time of day of a run's seconds: the start of its first process, and of each process that resumed it."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, date, datetime, timedelta
from typing import Any


class RunClock:
    """Marks of (run second, Unix time), ascending. Down time lies before a mark and has no run seconds."""

    def __init__(self, created: str | None) -> None:
        """`created`: UTC time of second 0 in ISO form; None or unreadable: no time of day is known."""
        begun = unix_of(created)
        self._marks: list[tuple[float, float | None]] = [] if begun is None else [(0.0, begun)]

    def resume(self, at_s: float, utc: str | None) -> None:
        """A process continues the run from this second. None: a log that does not have the time."""
        if self._marks:
            self._marks.append((at_s, unix_of(utc)))

    def unix_s(self, at_s: float | None) -> float | None:
        """Unix time of a run second; after a resume without a time, as if there had been no down time."""
        if at_s is None or not self._marks:
            return None
        known = [
            mark for mark in self._marks[: max(1, bisect_right(self._marks, at_s, key=_at_s))] if mark[1] is not None
        ]
        begin_s, begun = known[-1]
        return at_s - begin_s + (begun or 0.0)

    def utc(self, at_s: float | None) -> str | None:
        """`2026-11-29T14:03:22Z`."""
        unix_s = self.unix_s(at_s)
        return None if unix_s is None else utc_text(unix_s)

    def to_json(self) -> list[dict[str, Any]]:
        return [{"at_s": at_s, "utc": None if unix is None else utc_text(unix)} for at_s, unix in self._marks]

    @classmethod
    def of_json(cls, marks: list[dict[str, Any]]) -> RunClock:
        clock = cls(marks[0]["utc"] if marks else None)
        for mark in marks[1:]:
            clock.resume(mark["at_s"], mark["utc"])
        return clock


def _at_s(mark: tuple[float, float | None]) -> float:
    return mark[0]


def unix_of(utc: str | None) -> float | None:
    """Unix time of an ISO time, in UTC where it has no zone; None for none and for text that is no time."""
    try:
        found = datetime.fromisoformat(utc or "")
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def unix_from(text: str, *, is_end: bool) -> float | None:
    """Unix time of a date or an ISO time, in UTC where it has no zone; a date as an end includes its day.

    None for other text.
    """
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return unix_of(text)
    try:
        return unix_of(datetime.combine(day + timedelta(days=int(is_end)), datetime.min.time()).isoformat())
    except OverflowError:
        return None


def utc_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
