"""Changes that can be taken back: what a trial of the placement ledger needs instead of a copy of it.

    mark = undo.begin()          changes are noted from here on
    undo.put / undo.remove       one key of a mapping, in place
    undo.take_back(mark)         newest first, all that was noted since; or
    undo.keep()                  they stay, and are taken back with the trial around this one, if there is one

Nothing is noted outside a trial. The cost grows with the number of changes, never with the size of the mappings.
A key that was removed comes back as its mapping's last one.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_ABSENT = object()


class Undo:
    """Notes the changes to some mappings while a trial is open."""

    def __init__(self) -> None:
        self._num_open = 0
        self._changes: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        """Each mapping that was changed, with the key and the value from before."""

    @property
    def is_noting(self) -> bool:
        """Whether a trial is open."""
        return self._num_open > 0

    def begin(self) -> int:
        """Open a trial; returns the mark that `take_back` wants."""
        self._num_open += 1
        return len(self._changes)

    def put(self, mapping: MutableMapping[Key, Value], key: Key, value: Value) -> None:
        """Set the mapping's value for the key."""
        if self._num_open:
            self._changes.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def remove(self, mapping: MutableMapping[Key, Value], key: Key) -> Value:
        """Remove the key, which the mapping has; returns its value."""
        value = mapping.pop(key)
        if self._num_open:
            self._changes.append((mapping, key, value))
        return value

    def take_back(self, mark: int) -> None:
        """Close the trial that began with the mark; everything is as it was then."""
        while len(self._changes) > mark:
            mapping, key, value = self._changes.pop()
            if value is _ABSENT:
                del mapping[key]
            else:
                mapping[key] = value
        self._num_open -= 1

    def keep(self) -> None:
        """Close the innermost trial; what changed in it stays."""
        self._num_open -= 1
        if not self._num_open:
            self._changes.clear()
