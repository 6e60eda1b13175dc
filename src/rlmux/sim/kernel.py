"""The clock of a simulation: virtual time, and a total order of what happens at one instant.

    schedule(time_s, priority, what) ──▶ heap of (time_s, priority, number, what) ──pop──▶ what, number; now_s moves on

At one instant, work ends before pipelines depart, these before nodes fail or return, these before pipelines arrive.
What is still equal goes in the order in which it was scheduled. An entry cannot be taken back: its owner keeps the
number of the entry that counts and drops the others as stale.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

WORK_ENDS, DEPARTURE, NODE_CHANGE, ARRIVAL = range(4)
"""Priorities at one instant."""


class Kernel:
    """Virtual time and what is scheduled."""

    __slots__ = ("_heap", "_number", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds since the simulation began."""
        self._number = 0
        self._heap: list[tuple[float, int, int, Any]] = []

    def __bool__(self) -> bool:
        """Whether anything is scheduled."""
        return bool(self._heap)

    def schedule(self, time_s: float, priority: int, what: Any) -> int:
        """Let `what` happen at that time; returns the number of its entry, 1 or more."""
        number = self._number = self._number + 1
        heappush(self._heap, (time_s, priority, number, what))
        return number

    def pop(self) -> tuple[Any, int]:
        """Move the clock to the next entry and return what happens then, with the number of the entry."""
        self.now_s, _, number, what = heappop(self._heap)
        return what, number
