"""One row of a paper's table: published, replay, ours, and the cause of a miss.

    published   what the paper prints, with the place where it does
    replay      the published trace played by the published rules, outside rlmux
    ours        what rlmux gets

A row has one accepted range, which contains the published figure. `is_reached` is true if ours is within. A cause is
computed (ours without it is there to compare) or a conjecture, and is named as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCause:
    """What stands between ours and the published figure."""

    text: str
    ours_without: float | None = None
    """Our figure with the cause taken away; None for a conjecture."""

    def kind(self, ours: float, published: float, accepted: Range) -> str:
        """`conjecture`, `computed`, `computed in part`, or `refuted`: taken away, ours is no nearer."""
        without = self.ours_without
        if without is None:
            return "conjecture"
        if accepted[0] <= without <= accepted[1]:
            return "computed"
        is_beyond = (ours - published) * (without - published) < 0
        return "computed in part" if is_beyond or abs(without - published) < abs(ours - published) else "refuted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One figure. Raises ValueError where the accepted range does not contain what it is compared with."""

    section: str
    figure: str
    published: float | None = None
    """Figure that the paper prints; None where it prints none."""
    source: str = ""
    """Section, table or drawing of the paper with the published figure."""
    replay: float | None = None
    """Figure of a replay of the published trace by the published rules, outside rlmux; None without one."""
    ours: float
    low: float | None = None
    """Least of our values over seeds or workloads; None where there is one value."""
    high: float | None = None
    """Largest of them."""
    accepted: Range
    """Range of ours that counts as reached."""
    is_fraction: bool = False
    """Whether the figure is a fraction of something, whose deviation is given in percentage points."""
    cause: MissCause | None = None
    """What stands between the two where ours is not within the range."""

    def __post_init__(self) -> None:
        aim = self.aim
        if aim is not None and not self.accepted[0] <= aim <= self.accepted[1]:
            raise ValueError(f"{self.figure}: accepted {self.accepted} does not contain {aim}")

    @property
    def aim(self) -> float | None:
        """What ours is compared with: the published figure, else the replay's."""
        return self.replay if self.published is None else self.published

    @property
    def deviation(self) -> float | None:
        """Deviation of ours in percent, or in percentage points for a fraction; None with nothing to compare."""
        if self.aim is None:
            return None
        return 100 * (self.ours - self.aim) if self.is_fraction else 100 * (self.ours / self.aim - 1)

    @property
    def is_reached(self) -> bool:
        return self.accepted[0] <= self.ours <= self.accepted[1]

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON. A reached row has no cause; a missed one without a cause is marked."""
        missed: dict[str, Any] = {"cause": "", "cause_is": "", "ours_without_cause": None}
        if not self.is_reached:
            cause = self.cause or MissCause(text="not known")
            aim = self.ours if self.aim is None else self.aim
            kind = "unknown" if self.cause is None else cause.kind(self.ours, aim, self.accepted)
            missed = {"cause": cause.text, "cause_is": kind, "ours_without_cause": _rounded(cause.ours_without)}
        unit = "points" if self.is_fraction else "%"
        return {
            "section": self.section,
            "figure": self.figure,
            "published": self.published,
            "source": self.source,
            "replay": self.replay,
            "ours": round(self.ours, 4),
            "min": _rounded(self.low),
            "max": _rounded(self.high),
            "deviation": "" if self.deviation is None else f"{self.deviation:+.1f} {unit}",
            "accepted": [round(bound, 4) for bound in self.accepted],
            "reached": self.is_reached,
            **missed,
        }


def row_over(values: Sequence[float], *, ours: float | None = None, **more: Any) -> PaperRow:
    """A row whose `ours` is the mean of these values unless given, between the least and the largest of them."""
    return PaperRow(ours=mean(values) if ours is None else ours, low=min(values), high=max(values), **more)


def within(figure: float, part: float) -> Range:
    """The range from `part` (a fraction) below a figure to `part` above it."""
    return figure * (1 - part), figure * (1 + part)


def within_points(fraction: float, points: float) -> Range:
    """The range of percentage points around a fraction, within 0 and 1."""
    return max(0.0, fraction - points / 100), min(1.0, fraction + points / 100)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
