"""Takes a built-in task's options out of `task.params`, and refuses unknown ones."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from random import Random
from typing import Any

from rlmux.core.errors import UserError


class Options:
    """`take` each option by name and kind, then `finish`: whatever is left over is an error."""

    def __init__(self, task: str, params: Mapping[str, Any]) -> None:
        self._task = task
        self._left = dict(params)
        self._names: list[str] = []

    def take_int(self, name: str, default: int, *, at_least: int, at_most: int = 10**9) -> int:
        """A whole number within bounds; UserError for anything else, as in all of these."""
        self._names.append(name)
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise UserError(
                f"task.params.{name} of task {self._task!r}: {value!r}; "
                f"accepted: a whole number from {at_least} to {at_most}"
            )
        return value

    def take_seconds(self, name: str) -> float:
        """Seconds, 0 by default and less than an hour."""
        self._names.append(name)
        value = self._left.pop(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 3600:
            raise UserError(f"task.params.{name} of task {self._task!r}: {value!r}; accepted: seconds from 0 to 3600")
        return float(value)

    def take_choice(self, name: str, default: str, accepted: tuple[str, ...]) -> str:
        """One of the accepted texts."""
        self._names.append(name)
        value = self._left.pop(name, default)
        if value not in accepted:
            raise UserError(f"task.params.{name} of task {self._task!r}: {value!r}; accepted: {', '.join(accepted)}")
        return str(value)

    def take_bool(self, name: str, default: bool) -> bool:
        """True or false."""
        self._names.append(name)
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise UserError(f"task.params.{name} of task {self._task!r}: {value!r}; accepted: true or false")
        return value

    def take_length(self, unit: str, default: int, *, at_least: int, at_most: int) -> LengthRange:
        """`unit` alone fixes the length, `min_unit` and `max_unit` make it vary, `mean_unit` adds a long tail."""
        fixed = self.take_int(unit, default, at_least=at_least, at_most=at_most)
        shortest = self.take_int(f"min_{unit}", fixed, at_least=at_least, at_most=at_most)
        longest = self.take_int(f"max_{unit}", max(fixed, shortest), at_least=at_least, at_most=at_most)
        if shortest > longest:
            raise UserError(
                f"task.params.min_{unit} of task {self._task!r}: {shortest} is more than max_{unit} {longest}"
            )
        has_tail = f"mean_{unit}" in self._left
        mean = self.take_int(f"mean_{unit}", shortest, at_least=shortest, at_most=longest)
        return LengthRange(shortest, longest, mean if has_tail else None)

    def finish(self) -> None:
        """Raise UserError for an option that was not taken, with the nearest that is accepted."""
        for name in self._left:
            close = get_close_matches(name, self._names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            accepted = ", ".join(self._names) or "none"
            raise UserError(f"task.params.{name}: task {self._task!r} has no such option; {hint}accepted: {accepted}")


class LengthRange:
    """Lengths from `shortest` to `longest`: evenly drawn, or with a geometric tail when given a mean.

    The mean is that of the tail before it is cut at `longest`.
    """

    def __init__(self, shortest: int, longest: int, mean: int | None) -> None:
        self._shortest = shortest
        self._longest = longest
        # One more extra symbol follows with probability extra / (extra + 1), which makes `extra` their mean.
        self._extra_probability = None if mean is None else (mean - shortest) / (mean - shortest + 1)

    def draw(self, random: Random) -> int:
        """One length."""
        if self._extra_probability is None:
            return random.randint(self._shortest, self._longest)
        length = self._shortest
        while length < self._longest and random.random() < self._extra_probability:
            length += 1
        return length
