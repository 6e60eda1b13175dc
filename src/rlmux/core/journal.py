"""One event at a time: the actions decided for it so far, and the recent events that an error shows.

Scheduler.handle ── begin(event) ─▶ Journal ◀─ act(action) ── Orders, Scheduler
                                       └─ illegal(what) ─▶ IllegalTransitionError with the recent events
"""

from __future__ import annotations

from collections import deque

from rlmux.core.actions import Action
from rlmux.core.errors import IllegalTransitionError, PolicyError
from rlmux.core.events import Event

_NUM_RECENT_EVENTS = 12


class Journal:
    """Shared by the parts of one scheduler; see the module."""

    def __init__(self, policy_name: str) -> None:
        self.policy_name = policy_name
        self._recent_events: deque[Event] = deque(maxlen=_NUM_RECENT_EVENTS)
        self._actions: list[Action] = []

    def begin(self, event: Event) -> list[Action]:
        """Start on an event; returns the list that its actions will be in."""
        self._recent_events.append(event)
        self._actions = []
        return self._actions

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def illegal(self, what: str) -> IllegalTransitionError:
        """The error to raise for an event that does not fit the state."""
        return IllegalTransitionError(self._with_recent_events(what))

    def illegal_choice(self, what: str) -> PolicyError:
        """The error to raise for a policy's choice that is not allowed; `what` continues "policy NAME ..."."""
        return PolicyError(self._with_recent_events(f"policy {self.policy_name} {what}"))

    def _with_recent_events(self, what: str) -> str:
        events = "\n  ".join(str(event) for event in self._recent_events)
        return f"{what}\nrecent events, newest last:\n  {events}"
