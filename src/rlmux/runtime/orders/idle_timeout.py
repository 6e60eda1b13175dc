"""Adaptive wait before a request batch releases its device, learned from the client's recent gaps.

    no request is left ─▶ wait seconds(limit_s) ─▶ the next request, or none ─▶ observe(gap)

A client that returns at once (an environment's next turn, an update behind its loss) keeps its device. One that thinks
for longer than a switch costs releases it at once.

A module of its own: it is tested without workers.
"""

from __future__ import annotations

from collections import deque

_WINDOW = 16
_MIN_OBSERVED = 4
"""Fewest gaps for an estimate."""
_MARGIN = 1.5
_SHORT_FRACTION = 0.25
"""Fraction of the gaps that must be short for waiting to pay."""


class IdleTimeout:
    """The last gaps between the end of work of one kind and the next request for it."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, gap_s: float) -> None:
        """The next request came `gap_s` seconds after the work before it was done."""
        self._gaps_s.append(gap_s)

    def seconds(self, limit_s: float) -> float:
        """Seconds to wait for the next request, at most `limit_s`; `limit_s` until enough gaps were observed."""
        if len(self._gaps_s) < _MIN_OBSERVED:
            return limit_s
        short = [gap for gap in self._gaps_s if gap <= limit_s]
        if len(short) < _SHORT_FRACTION * len(self._gaps_s):
            return 0.0
        return min(limit_s, _MARGIN * max(short))
