"""What decisions take: the controller handles one event after another, and orders begin when it is done.

    a simulation under a Stopwatch ──▶ mean seconds by kind of event ──▶ Decisions of another simulation

A simulation knows what its policy decides, and by a stopwatch how long that takes here: it is the very code that the
controller of a run goes through. The seconds come from outside, so a simulation stays a function of what it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlmux.core.actions import Action
from rlmux.core.events import Event

Handle = Callable[[Event], list[Action]]


@dataclass(slots=True, kw_only=True)
class Decisions:
    """Of one simulation; make another for each."""

    seconds: Mapping[type[Event], float] = field(default_factory=dict)
    """Of one event of a kind; others take no time."""
    takes_cores: bool = False
    """Devices are the cores that the controller computes on, too: while all are busy, orders lose what it takes. Else
    it has a core of its own."""
    _free_s: float = 0.0
    """When the controller is through with all that it was told of."""

    def decide(self, handle: Handle, event: Event, now_s: float) -> tuple[list[Action], float]:
        """What is decided, and the seconds it takes."""
        seconds = self.seconds.get(type(event), 0.0)
        self._free_s = max(self._free_s, now_s) + seconds
        return handle(event), seconds

    def left_s(self, now_s: float) -> float:
        """Until an order of the present decision begins."""
        return max(0.0, self._free_s - now_s)


@dataclass(slots=True, kw_only=True)
class Stopwatch(Decisions):
    """Decisions take no time in the simulation; how long they took is kept."""

    _spent_s: dict[type[Event], list[float]] = field(default_factory=dict)

    def decide(self, handle: Handle, event: Event, now_s: float) -> tuple[list[Action], float]:
        began_s = time.thread_time()
        actions = handle(event)
        self._spent_s.setdefault(type(event), []).append(time.thread_time() - began_s)
        return actions, 0.0

    def means(self) -> dict[type[Event], float]:
        return {kind: sum(spent_s) / len(spent_s) for kind, spent_s in self._spent_s.items()}
