"""Events and notes of the workers' side, collected until the controller's next poll; and the run's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlmux.core.events import Event
from rlmux.log.notes import Note


class Outbox:
    """Events, not dated yet, and notes, oldest first. Time is in seconds since the run began."""

    def __init__(self, start_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._zero_s = clock() - start_s
        self._events: list[Event] = []
        self._notes: list[Note] = []

    def now_s(self) -> float:
        """Whole microseconds: the log keeps these in a third of the bytes."""
        return round(self._clock() - self._zero_s, 6)

    def add(self, event: Event) -> None:
        self._events.append(event)

    def add_note(self, note: Note) -> None:
        self._notes.append(note)

    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> tuple[Sequence[Event], Sequence[Note]]:
        events, notes = self._events, self._notes
        self._events, self._notes = [], []
        return events, notes
