"""What a decode iteration costs by its width, learned from a pipeline's own rollouts.

    seconds of an iteration  =  a  +  b * rows        a: reading the weights, launches; b: what each row computes

On a GPU within its roofline b is next to nothing, and a shard takes a sibling's trajectories over almost for free; on a
core a is, and it takes as long as both. Which of them holds decides whether trajectories should migrate at all.

A module of its own: rates are learned from iterations, curves (`estimates.py`) from reports of trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlmux.core.events import DecodeSpan

_KEPT = 0.7
"""Weight of what was seen before, with each order that ended since."""
_LEAST_SPREAD = 1.25
"""Rows of the widest iterations over those of the narrowest, below which the two parts cannot be told apart."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What a pipeline's rollouts spent their decode iterations on."""

    row_part: float
    """Part of their seconds that grows with rows, 0 to 1: what each trajectory more costs."""
    peak_rows: float
    """Rows of the widest iterations."""

    def growth(self, part: float, slots: int | None) -> float:
        """Part of its own seconds by which a shard lasts longer with this part of a sibling's trajectories besides.

        Those that find a free slot cost their rows alone, all others whole iterations. `slots`: those of each worker;
        None: as many as are needed.
        """
        free_rows = part * self.peak_rows if slots is None else max(0.0, slots - self.peak_rows)
        seated = min(part, free_rows / max(self.peak_rows, 1.0))
        return seated * self.row_part + (part - seated)


@dataclass(slots=True)
class DecodeRate:
    """Sums of the last decode iterations by width, older ones counting less."""

    _spans: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """(iterations, rows of all of them, seconds) by the binary digits of their rows."""

    def add(self, spans: Iterable[DecodeSpan]) -> None:
        """Take in the iterations of an order that ended, as it reported them."""
        spans = [span for span in spans if span.num_iterations > 0 and span.num_rows > 0]
        if not spans:
            return
        self._spans = {key: (_KEPT * n, _KEPT * rows, _KEPT * s) for key, (n, rows, s) in self._spans.items()}
        for span in spans:
            key = (span.num_rows // span.num_iterations).bit_length()
            n, rows, seconds = self._spans.get(key, (0.0, 0.0, 0.0))
            self._spans[key] = (n + span.num_iterations, rows + span.num_rows, seconds + span.seconds)

    def cost(self) -> DecodeCost | None:
        """What iterations cost by their rows; None until some of different widths were seen."""
        widths = [rows / n for n, rows, _ in self._spans.values()]
        if not widths or max(widths) < _LEAST_SPREAD * min(widths):
            return None
        n, rows, seconds = (sum(column) for column in zip(*self._spans.values(), strict=True))
        mean = rows / n
        # Least squares over iterations, each of its width's mean seconds.
        square = sum(each_n * (each_rows / each_n - mean) ** 2 for each_n, each_rows, _ in self._spans.values())
        slope = sum((each_rows / each_n - mean) * each_s for each_n, each_rows, each_s in self._spans.values()) / square
        row_part = slope * rows / seconds if seconds > 0.0 else 1.0
        return DecodeCost(row_part=min(max(row_part, 0.0), 1.0), peak_rows=max(widths))
