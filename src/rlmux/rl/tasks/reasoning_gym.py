"""`reasoning-gym:NAME`: any of that package's procedural generators, by its own name and options.

Its scorers sometimes raise on rubbish; rubbish scores 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        try:
            self._dataset = reasoning_gym.create_dataset(name, seed=seed, size=_NUM_ITEMS, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"task.params of 'reasoning-gym:{name}': {error}") from error

    def prompt(self, index: int) -> Prompt:
        entry = self._dataset[index % _NUM_ITEMS]
        return Prompt(text=entry["question"] + self._suffix, answer=str(entry["answer"]), data=entry)

    def score(self, prompt: Prompt, response: str) -> float:
        try:
            return float(self._dataset.score_answer(response.strip(), dict(prompt.data or {})))
        except Exception:  # scorers raise whatever they like on an answer they cannot read: that earns nothing
            return 0.0
