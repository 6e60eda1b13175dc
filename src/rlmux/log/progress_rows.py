"""Progress reports by the thousand: what most of a log's rows are.

    Progress        those of one order in a block                                     log ──▶ History
    Reports         all reports of one order, as its record keeps them in columns     History ──▶ pictures
    Report          one of them

A report takes some 50 bytes in `Reports`, and no object of its own until it is read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

from rlmux.core.events import ChunkFinished
from rlmux.core.model import OrderId


class Progress(NamedTuple):
    """Progress reports of one order within a block: rows of the log, and a column for each field of a report."""

    order: OrderId
    seqs: Sequence[int]
    """Ascending."""
    time_s: Sequence[float]
    num_active: Sequence[int]
    num_waiting: Sequence[int]
    num_waiting_for_env: Sequence[int]
    tokens: Sequence[int]
    seconds: Sequence[float]

    @property
    def seq(self) -> int:
        """The last row."""
        return self.seqs[-1]


class Report(NamedTuple):
    """One progress report, with the fields of `ChunkFinished`."""

    time_s: float
    num_active: int
    num_waiting: int
    num_waiting_for_env: int
    tokens: int
    seconds: float


_KINDS = "dqqqqd"
"""Types of `array` for the fields of a report."""


class Reports(Sequence[Report]):
    """One order's progress reports, oldest first."""

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns: tuple[array[Any], ...] | None = None

    def extend(self, progress: Progress) -> None:
        if self._columns is None:
            self._columns = tuple(map(array, _KINDS))
        for column, values in zip(self._columns, progress[2:], strict=True):
            column.extend(values)

    def append(self, report: ChunkFinished | Report) -> None:
        if self._columns is None:
            self._columns = tuple(map(array, _KINDS))
        time_s, num_active, num_waiting, num_waiting_for_env, tokens, seconds = self._columns
        time_s.append(report.time_s)
        num_active.append(report.num_active)
        num_waiting.append(report.num_waiting)
        num_waiting_for_env.append(report.num_waiting_for_env)
        tokens.append(report.tokens)
        seconds.append(report.seconds)

    def drawn(self) -> Iterator[Report]:
        """What a picture shows of it: the first, the last, and where a count has changed by a hundredth of the peak."""
        if self._columns is None:
            return
        least = max(1, max(max(self.column("num_active")), max(self.column("num_waiting_for_env"))) // 100)
        active = waiting = -least
        report = None
        for report in self:
            if abs(report[1] - active) >= least or abs(report[3] - waiting) >= least:
                active, waiting = report[1], report[3]
                yield report
        if report is not None and (report[1], report[3]) != (active, waiting):
            yield report

    def spaced(self, least_s: float) -> Iterator[Report]:
        """The first report, and after each the next that is at least so many seconds later."""
        if self._columns is None:
            return
        times_s, at = self._columns[0], 0
        num_reports = len(times_s)
        while at < num_reports:
            yield Report._make([column[at] for column in self._columns])
            at = bisect_left(times_s, times_s[at] + least_s, at + 1)

    def values(self) -> Iterator[tuple[float, int, int, int, int, float]]:
        """The fields of each report, without an object for it."""
        return iter(()) if self._columns is None else zip(*self._columns, strict=True)

    def column(self, name: str) -> Sequence[Any]:
        """One field of all reports."""
        return () if self._columns is None else self._columns[Report._fields.index(name)]

    def __len__(self) -> int:
        return 0 if self._columns is None else len(self._columns[0])

    def __iter__(self) -> Iterator[Report]:
        return iter(()) if self._columns is None else map(Report._make, zip(*self._columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> list[Report]: ...
    def __getitem__(self, index: int | slice) -> Report | list[Report]:
        columns = self._columns or tuple(array("d") for _ in Report._fields)
        if isinstance(index, slice):
            return list(map(Report._make, zip(*(column[index] for column in columns), strict=True)))
        return Report._make(column[index] for column in columns)
