"""The seconds that decisions take: the controller handles one event after another, and orders begin when it is done.

    a simulation with a Stopwatch ──▶ mean seconds by type of event ──▶ DecisionCost of another simulation

The simulator runs the scheduler of real runs, so a stopwatch around it shows
what a decision takes on this machine. A simulation gets the seconds from outside and stays a function of its arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlmux.core.actions import Action
from rlmux.core.events import Event

Handle = Callable[[Event], list[Action]]


@dataclass(slots=True, kw_only=True)
class DecisionCost:
    """What decisions take in one simulation; another simulation needs another object."""

    seconds: Mapping[type[Event], float] = field(default_factory=dict)
    """Seconds of one decision, by type of event; types that are missing take none."""
    takes_cores: bool = False
    """Whether the controller computes on the cores that are the devices: while all are busy, orders lose its seconds.
    False: it has a core of its own."""
    _free_s: float = 0.0
    """Time at which the controller has handled all events so far."""

    def decide(self, handle: Handle, event: Event, now_s: float) -> tuple[list[Action], float]:
        """The actions that answer the event, and the seconds that deciding takes."""
        seconds = self.seconds.get(type(event), 0.0)
        self._free_s = max(self._free_s, now_s) + seconds
        return handle(event), seconds

    def delay_s(self, now_s: float) -> float:
        """Seconds until an order of the present decision begins."""
        return max(0.0, self._free_s - now_s)


@dataclass(slots=True, kw_only=True)
class Stopwatch(DecisionCost):
    """Decisions take no time in the simulation; what they took on this machine is kept."""

    measured_s: dict[type[Event], list[float]] = field(default_factory=dict)
    """CPU seconds of every decision, by type of event."""

    def decide(self, handle: Handle, event: Event, now_s: float) -> tuple[list[Action], float]:
        began_s = time.thread_time()
        actions = handle(event)
        self.measured_s.setdefault(type(event), []).append(time.thread_time() - began_s)
        return actions, 0.0

    def means(self) -> dict[type[Event], float]:
        """Mean seconds of a decision, by type of event."""
        return {event: sum(seconds) / len(seconds) for event, seconds in self.measured_s.items()}
