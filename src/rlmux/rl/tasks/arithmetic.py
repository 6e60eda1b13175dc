"""Sums: `add` two numbers, or `chain` many digits with every running sum written down.

    a:47+85=132            c:3527=3807      (3, 3+5=8, 8+2=10 -> 0, 0+7=7: modulus 10)
                           c:3527=3,8,10,17 (modulus 0: plain sums)

A length option such as `terms` comes with `min_terms` and `max_terms`, which make it vary, and `mean_terms`,
which gives it a long tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from rlmux.rl.tasks.base import SingleTurnTask, random_at, share_of_right_positions
from rlmux.rl.tasks.options import Options
from rlmux.rl.types import Prompt


class AddTask(SingleTurnTask):
    """Add two numbers. Options: `digits`, `min_digits`, `max_digits`, `partial_credit` (else 0 or 1)."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        options = Options("add", params)
        self._length = options.take_length("digits", 2, at_least=1, at_most=64)
        self._gives_partial_credit = options.take_bool("partial_credit", True)
        options.finish()
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        random = random_at("add", self._seed, index)
        num_digits = self._length.draw(random)
        first, second = (random.randint(10 ** (num_digits - 1), 10**num_digits - 1) for _ in range(2))
        return Prompt(text=f"a:{first}+{second}=", answer=str(first + second))

    def score(self, prompt: Prompt, response: str) -> float:
        if self._gives_partial_credit:
            return super().score(prompt, response)
        return float(response == prompt.answer)


class ChainTask(SingleTurnTask):
    """Write down every running sum. Options: `terms` (length), `modulus` (0: none)."""

    def __init__(self, params: Mapping[str, Any], seed: int) -> None:
        options = Options("chain", params)
        self._length = options.take_length("terms", 6, at_least=1, at_most=512)
        self._modulus = options.take_int("modulus", 10, at_least=0, at_most=10)
        options.finish()
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        random = random_at("chain", self._seed, index)
        terms = [random.randint(0, 9) for _ in range(self._length.draw(random))]
        sums = list(accumulate(terms))
        if self._modulus:
            answer = "".join(str(total % self._modulus) for total in sums)
        else:
            answer = ",".join(map(str, sums))
        return Prompt(text=f"c:{''.join(map(str, terms))}=", answer=answer)

    def score(self, prompt: Prompt, response: str) -> float:
        if self._modulus:
            return super().score(prompt, response)
        return share_of_right_positions((prompt.answer or "").split(","), response.split(","))
