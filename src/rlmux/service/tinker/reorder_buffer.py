"""Requests of one channel in the order of their numbers, whatever order they arrive in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class InOrder(Generic[T]):
    """Hands out what was put in by number, without gaps."""

    following: int
    """The number that comes next."""
    _held: dict[int, T] = field(default_factory=dict)

    def is_missing(self, number: int) -> bool:
        """Others wait for this one."""
        return number == self.following and bool(self._held)

    def put(self, number: int, item: T) -> list[T]:
        """Everything that is due now: the item, if nothing before it is missing, and what waited for it."""
        self._held[number] = item
        due = []
        while self.following in self._held:
            due.append(self._held.pop(self.following))
            self.following += 1
        return due
