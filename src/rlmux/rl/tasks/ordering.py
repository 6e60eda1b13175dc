"""Putting symbols in order: `sort` digits, `reverse` letters. Partial credit by position.

s:52913=12359          r:hello=olleh
"""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase, digits
from typing import Any

from rlmux.rl.tasks.base import SingleTurnTask, random_at
from rlmux.rl.tasks.options import Options
from rlmux.rl.types import Prompt


class SortTask(SingleTurnTask):
    """Write the digits in ascending order. Options: `digits`, or `min_digits` and `max_digits`."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        options = Options("sort", params)
        self._length = options.take_length("digits", 5, at_least=1, at_most=256)
        options.finish()
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        random = random_at("sort", self._seed, index)
        symbols = random.choices(digits, k=self._length.draw(random))
        return Prompt(text=f"s:{''.join(symbols)}=", answer="".join(sorted(symbols)))


class ReverseTask(SingleTurnTask):
    """Write the letters backwards. Options: `letters`, `min_letters`, `max_letters`, `alphabet` (size)."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        options = Options("reverse", params)
        self._length = options.take_length("letters", 5, at_least=1, at_most=256)
        self._alphabet = ascii_lowercase[: options.take_int("alphabet", 26, at_least=2, at_most=26)]
        options.finish()
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        random = random_at("reverse", self._seed, index)
        letters = "".join(random.choices(self._alphabet, k=self._length.draw(random)))
        return Prompt(text=f"r:{letters}=", answer=letters[::-1])
