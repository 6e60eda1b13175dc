"""Multi-turn with a tool: the model calls, the calculator answers, the model writes the result.

    k:47+85=   model <47+85>   tool 132|   model 132

The `>` ends the model's turn. Half the reward is for the call, half for the result, both by
right positions. `wait_s` makes the tool slow, as real ones are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.rl.tasks.base import Environment, Segment, random_at, share_of_right_positions
from rlmux.rl.tasks.options import Options
from rlmux.rl.types import Prompt

_CALL = re.compile(r"<(\d{1,9})([+*-])(\d{1,9})>$")


class CalculatorTask:
    """Options: `digits`, `min_digits`, `max_digits`, `operator` (+ - *), `max_calls`, `wait_s`."""

    stop: tuple[str, ...] = (">",)
    is_single_turn = False

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        options = Options("calculator", params)
        self._length = options.take_length("digits", 2, at_least=1, at_most=9)
        self._operator = options.take_choice("operator", "+", ("+", "-", "*"))
        self._max_calls = options.take_int("max_calls", 2, at_least=1, at_most=64)
        self._wait_s = options.take_seconds("wait_s")
        options.finish()
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        random = random_at("calculator", self._seed, index)
        num_digits = self._length.draw(random)
        first, second = (random.randint(10 ** (num_digits - 1), 10**num_digits - 1) for _ in range(2))
        call = f"<{first}{self._operator}{second}>"
        return Prompt(text=f"k:{call[1:-1]}=", answer=calculate(call), data={"call": call})

    def demonstration(self, prompt: Prompt) -> Sequence[Segment]:
        answer = prompt.answer or ""
        return (
            Segment(text=_call_of(prompt), is_sampled=True),
            Segment(text=f"{answer}|", is_sampled=False),
            Segment(text=answer, is_sampled=True),
        )

    def score(self, prompt: Prompt, response: str) -> float:
        first_turn, separator, _ = response.partition(">")
        _, was_answered, last_word = response.rpartition("|")
        call = share_of_right_positions(_call_of(prompt), first_turn + separator)
        result = share_of_right_positions(prompt.answer or "", last_word) if was_answered else 0.0
        return 0.5 * call + 0.5 * result

    def environment(self, prompt: Prompt) -> Environment | None:
        return Calculator(max_calls=self._max_calls, wait_s=self._wait_s)


class Calculator:
    """Answers `<12+34>` with `46|`, and anything else that ends in `>` with `?|`."""

    def __init__(self, *, max_calls: int, wait_s: float) -> None:
        self._calls_left = max_calls
        self._wait_s = wait_s

    async def reply(self, turn: str) -> str | None:
        if not turn.endswith(">") or self._calls_left == 0:
            return None
        self._calls_left -= 1
        await asyncio.sleep(self._wait_s)
        return f"{calculate(turn)}|"


def calculate(turn: str) -> str:
    """The result of the call at the end of a turn, `?` without a call."""
    match = _CALL.search(turn)
    if match is None:
        return "?"
    first, operator, second = int(match[1]), match[2], int(match[3])
    if operator == "+":
        return str(first + second)
    return str(first - second if operator == "-" else first * second)


def _call_of(prompt: Prompt) -> str:
    return str((prompt.data or {})["call"])
