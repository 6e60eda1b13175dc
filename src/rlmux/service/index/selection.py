"""Choice, order and counts of pipeline rows.

rows of lanes ── select ──▶ rows that match, and for each filter its values with counts ── in_order ──▶ one page of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmux.report.timeline.run_clock import unix_of

Row = Mapping[str, Any]
FILTERS = ("status", "user", "project", "label", "task")
NO_VALUE = "-"
"""Word of a filter for rows without a value."""
STATUSES = ("running", "waiting", "finished", "failed", "cancelled", "refused", "stopped")
SORTS = (
    *("name", "status", "step", "reward_last", "step_slowdown", "submitted_s", "admitted_s", "ended_s", "tokens"),
    *("user", "project", "task", "step_s_mean", "eta_s"),
)
_MOST_VALUES = 200
"""Values of one filter in an answer, the most frequent ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filters of pipeline rows. Empty ones let every row pass."""

    words: Mapping[str, frozenset[str]]
    """Accepted values by filter."""
    name: str = ""
    """Part of the name."""
    since: float | None = None
    """Earliest Unix time of submission."""
    until: float | None = None
    """Unix time of submission from which on rows are left out."""

    def select(self, rows: Iterable[Row]) -> tuple[list[Row], dict[str, Counter[str]]]:
        """(matching rows, counts by filter and value). A filter's counts are of the rows that all others let pass."""
        counts: dict[str, Counter[str]] = {each: Counter() for each in FILTERS}
        matching = []
        wanted = [(each, words) for each, words in self.words.items() if words]
        for row in rows:
            if self.name not in row["name"] or not self._is_in_time(row):
                continue
            missed = [each for each, words in wanted if words.isdisjoint(values_of(row, each))]
            if not missed:
                matching.append(row)
            if len(missed) <= 1:
                for each in missed or FILTERS:
                    counts[each].update(values_of(row, each))
        return matching, counts

    def _is_in_time(self, row: Row) -> bool:
        if self.since is None and self.until is None:
            return True
        at = unix_of(row["submitted_at"])
        return at is not None and (self.since is None or at >= self.since) and (self.until is None or at < self.until)


def values_of(row: Row, key: str) -> Sequence[str]:
    """Values of a row for a filter; `-` for none."""
    if key == "label":
        return row["labels"] or (NO_VALUE,)
    return (row.get(key) or NO_VALUE,)


def most_frequent(counts: Counter[str]) -> list[tuple[str, int]]:
    """(value, rows), by value without regard to case; of many the most frequent ones."""
    return sorted(counts.most_common(_MOST_VALUES), key=lambda each: (each[0].lower(), each[0]))


def in_order(rows: Sequence[Row], sort: str) -> list[Row]:
    """Rows by a key of `SORTS`, with `-` the largest first; rows without it last. Log order without a key.

    `active`: running ones, then waiting ones, then the newest.
    """
    if not sort:
        return list(rows)
    if sort == "active":
        return sorted(rows, key=lambda row: (_rank(row["status"]), -(row["submitted_s"] or 0.0)))
    key, is_turned = sort.removeprefix("-"), sort.startswith("-")
    known = [row for row in rows if row.get(key) not in (None, "")]
    known.sort(key=lambda row: row[key], reverse=is_turned)
    return known + [row for row in rows if row.get(key) in (None, "")]


def _rank(status: str) -> int:
    return 0 if status == "running" else 1
