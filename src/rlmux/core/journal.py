"""The recent events, which every error of the scheduler shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from rlmux.core.errors import IllegalTransitionError, PolicyError
from rlmux.core.events import Event

_NUM_RECENT_EVENTS = 12
_NUM_RECENT_MARKS = 12


class Journal:
    """Shared by the parts of one scheduler, which raise its errors."""

    def __init__(self, policy_name: str) -> None:
        self.policy_name = policy_name
        self._recent_events: deque[Event] = deque(maxlen=_NUM_RECENT_EVENTS)

    def add(self, event: Event) -> None:
        self._recent_events.append(event)

    def rounds(self, limit: int, marked: Callable[[], str]) -> Iterator[int]:
        """Numbers of the rounds of one settling. Raises IllegalTransitionError after `limit`, with the last marks."""
        last: deque[str] = deque(maxlen=_NUM_RECENT_MARKS)
        for number in range(limit):
            if number >= limit - _NUM_RECENT_MARKS:
                last.append(marked())
            yield number
        raise self.illegal(f"settling has not ended after {limit} rounds; marked in the last: {'; '.join(last)}")

    def illegal(self, what: str) -> IllegalTransitionError:
        """The error to raise for an event that does not fit the state."""
        return IllegalTransitionError(self._with_recent_events(what))

    def illegal_choice(self, what: str) -> PolicyError:
        """The error to raise for a policy's choice that is not allowed; `what` continues "policy NAME ..."."""
        return PolicyError(self._with_recent_events(f"policy {self.policy_name} {what}"))

    def _with_recent_events(self, what: str) -> str:
        events = "\n  ".join(str(event) for event in self._recent_events)
        return f"{what}\nrecent events, newest last:\n  {events}"
