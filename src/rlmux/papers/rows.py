"""One row of a paper's table: published, ours, deviation, cause.

A row never hides a miss: `is_reached` says whether ours is within the tolerance, `cause` says what stands between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure beside ours."""

    section: str
    figure: str
    published: float
    ours: float
    low: float | None = None
    """Least of our values over seeds or workloads; None where there is one value."""
    high: float | None = None
    """Largest of them."""
    tolerance: float = 0.0
    """Deviation that counts as reached: relative, or absolute for a fraction."""
    is_fraction: bool = False
    """Whether the figure is a fraction of something, whose deviation is given in percentage points."""
    accepted: tuple[float, float] | None = None
    """Range of ours that counts as reached, instead of a tolerance."""
    cause: str = ""
    """What stands between the two where they differ."""

    @property
    def deviation(self) -> float:
        """Deviation of ours in percent, or in percentage points for a fraction."""
        return 100 * (self.ours - self.published) if self.is_fraction else 100 * (self.ours / self.published - 1)

    @property
    def is_reached(self) -> bool:
        if self.accepted is not None:
            return self.accepted[0] <= self.ours <= self.accepted[1]
        return abs(self.deviation) <= 100 * self.tolerance

    def as_dict(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "figure": self.figure,
            "published": self.published,
            "ours": round(self.ours, 4),
            "min": None if self.low is None else round(self.low, 4),
            "max": None if self.high is None else round(self.high, 4),
            "deviation": f"{self.deviation:+.1f} {'points' if self.is_fraction else '%'}",
            "reached": self.is_reached,
            "cause": self.cause,
        }


def row_over(
    values: Sequence[float], *, section: str, figure: str, published: float, ours: float | None = None, **more: Any
) -> Row:
    """A row whose `ours` is the mean of these values unless given, between the least and the largest of them."""
    return Row(
        section=section,
        figure=figure,
        published=published,
        ours=mean(values) if ours is None else ours,
        low=min(values),
        high=max(values),
        **more,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
