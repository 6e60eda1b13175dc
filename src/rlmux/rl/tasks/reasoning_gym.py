"""`reasoning-gym:NAME`: any of that package's procedural generators, by its own name and options.

Its scorers sometimes raise on rubbish; rubbish scores 0.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from rlmux.core.errors import UserError
from rlmux.rl.tasks.base import SingleTurnTask
from rlmux.rl.types import Prompt

_NUM_ITEMS = 2**30


class ReasoningGymTask(SingleTurnTask):
    """Options go to the generator as they are; `suffix` is added to every question."""

    def __init__(self, name: str, params: Mapping[str, Any], seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise UserError(
                f"task.name: 'reasoning-gym:{name}' needs the package reasoning-gym; "
                "install it with: pip install 'rlmux[envs]'"
            ) from None
        if name not in DATASETS:
            close = ", ".join(get_close_matches(name, DATASETS, n=3, cutoff=0.4))
            hint = f"nearest: {close}" if close else f"there are {len(DATASETS)}, such as chain_sum"
            raise UserError(f"task.name: reasoning-gym has no generator {name!r}; {hint}")
        options = dict(params)
        self._suffix = str(options.pop("suffix", "\n"))
        known = [each.name for each in fields(DATASETS[name][1]) if each.name not in ("seed", "size")]
        _check_names(name, options, known)
        try:
            self._dataset = reasoning_gym.create_dataset(name, seed=seed, size=_NUM_ITEMS, **options)
        except Exception as error:  # generators check their options each in its own way
            raise UserError(f"{_blamed(name, options, str(error))}: {error}") from error

    def prompt(self, index: int) -> Prompt:
        entry = self._dataset[index % _NUM_ITEMS]
        return Prompt(text=entry["question"] + self._suffix, answer=str(entry["answer"]), data=entry)

    def score(self, prompt: Prompt, response: str) -> float:
        try:
            return float(self._dataset.score_answer(response.strip(), dict(prompt.data or {})))
        except Exception:  # scorers raise anything on an unreadable answer, which scores 0
            return 0.0


def _check_names(name: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(
                f"task.params.{option}: 'reasoning-gym:{name}' has no such option; {hint}"
                f"accepted: {', '.join(('suffix', *known))}"
            )


def _blamed(name: str, options: Mapping[str, Any], complaint: str) -> str:
    """The option that a generator complains about: the only one that is given, or one that it names."""
    named = [option for option in options if len(options) == 1 or re.search(rf"\b{option}\b", complaint)]
    if not named:
        return f"task: the options of 'reasoning-gym:{name}'"
    return f"task.params.{named[0]} of 'reasoning-gym:{name}': {options[named[0]]!r}"
