"""`harbor`: tasks in the layout of Harbor's suites, in a new shuffled order each epoch.

A program solves each in a sandbox (rl/agents/programs.py); the task's own tests give the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from rlmux.core.errors import UserError
from rlmux.rl.sandboxes.harbor_suite import read_suite
from rlmux.rl.tasks.base import Environment, Segment
from rlmux.rl.types import Prompt


class HarborSuite:
    """The tasks of a folder."""

    stop: tuple[str, ...] = ()
    is_single_turn = False

    def __init__(self, path: str | None, seed: int) -> None:
        """Raises UserError for a folder that holds no suite."""
        if path is None:
            raise UserError("task.path: the task 'harbor' needs one; accepted: a folder of tasks in Harbor's layout")
        self._tasks = read_suite(Path(path))
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._tasks))
        order = list(range(len(self._tasks)))
        Random(f"harbor/{self._seed}/{epoch}").shuffle(order)
        task = self._tasks[order[position]]
        return Prompt(text=task.instruction, data={"name": task.name, "instruction": task.instruction})

    def demonstration(self, prompt: Prompt) -> Sequence[Segment]:
        raise UserError("sft_warmup: does not go with the task 'harbor', which has no answers; accepted: updates: 0")

    def score(self, prompt: Prompt, response: str) -> float:
        return 0.0  # the tests in the sandbox score

    def environment(self, prompt: Prompt) -> Environment | None:
        return None
