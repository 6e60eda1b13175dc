"""How long a burst waits for more before it ends: as long as its client was seen to take, where that pays.

    nothing is left ─▶ seconds(most_s) ─▶ more came, or not ─▶ saw(gap)      gaps learned, in seconds

A client that asks again at once (an environment's next turn, an update behind its loss) finds its device held. One that
thinks for longer than a switch costs gives it up at once.
"""

from __future__ import annotations

from collections import deque

_SEEN = 16
_FEWEST = 4
"""Gaps below which nothing is known."""
_MARGIN = 1.5
_QUICK_PART = 0.25
"""Part of the gaps that must be short for waiting to pay."""


class Linger:
    """The last gaps between the end of work of one kind and the next request for it."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_SEEN)

    def saw(self, gap_s: float) -> None:
        """The next request came so many seconds after the work before it was done."""
        self._gaps_s.append(gap_s)

    def seconds(self, most_s: float) -> float:
        """Seconds to wait for more. `most_s`: what it may cost at most; stands while too few gaps were seen."""
        if len(self._gaps_s) < _FEWEST:
            return most_s
        quick = [gap for gap in self._gaps_s if gap <= most_s]
        if len(quick) < _QUICK_PART * len(self._gaps_s):
            return 0.0
        return min(most_s, _MARGIN * max(quick))
