"""Multi-turn guess-the-number: every guess ends with `?`, the game answers `<` (lower), `>` (higher) or ends.

    g:0-31=   model 15?   game <   model 7?   game >   model 11?   (right: over)

The reward is 1.0 for finding the number within `max_guesses`, else half of how near the best guess came.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.rl.tasks.base import Environment, Segment, random_at
from rlmux.rl.tasks.options import Options
from rlmux.rl.types import Prompt

_GUESS = re.compile(r"(\d{1,6})\?")


class GuessTask:
    """Options: `largest` (numbers are 0 .. largest), `max_guesses`, `wait_s`."""

    stop: tuple[str, ...] = ("?",)
    is_single_turn = False

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        options = Options("guess", params)
        self._largest = options.take_int("largest", 31, at_least=1, at_most=9999)
        num_halvings = self._largest.bit_length()
        self._max_guesses = options.take_int("max_guesses", num_halvings, at_least=1, at_most=64)
        self._wait_s = options.take_seconds("wait_s")
        options.finish()
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        secret = random_at("guess", self._seed, index).randint(0, self._largest)
        return Prompt(text=f"g:0-{self._largest}=", answer=str(secret))

    def demonstration(self, prompt: Prompt) -> Sequence[Segment]:
        """Binary search."""
        secret, low, high = int(prompt.answer or 0), 0, self._largest
        segments = []
        for _ in range(self._max_guesses):
            guess = (low + high) // 2
            segments.append(Segment(text=f"{guess}?", is_sampled=True))
            if guess == secret:
                break
            segments.append(Segment(text=_hint(guess, secret), is_sampled=False))
            low, high = (low, guess - 1) if secret < guess else (guess + 1, high)
        return tuple(segments)

    def score(self, prompt: Prompt, response: str) -> float:
        guesses = [int(text) for text in _GUESS.findall(response)[: self._max_guesses]]
        if not guesses:
            return 0.0
        miss = min(abs(guess - int(prompt.answer or 0)) for guess in guesses)
        return 1.0 if miss == 0 else max(0.0, 0.5 * (1 - miss / self._largest))

    def environment(self, prompt: Prompt) -> Environment | None:
        return Game(secret=int(prompt.answer or 0), max_guesses=self._max_guesses, wait_s=self._wait_s)


class Game:
    """One secret number."""

    def __init__(self, *, secret: int, max_guesses: int, wait_s: float) -> None:
        self._secret = secret
        self._guesses_left = max_guesses
        self._wait_s = wait_s

    async def reply(self, turn: str) -> str | None:
        match = _GUESS.fullmatch(turn)
        self._guesses_left -= 1
        if match is None or int(match[1]) == self._secret or self._guesses_left == 0:
            return None
        await asyncio.sleep(self._wait_s)
        return _hint(int(match[1]), self._secret)


def _hint(guess: int, secret: int) -> str:
    return "<" if secret < guess else ">"
