"""Tasks by name. A new built-in is a class and a line in `TASKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from rlmux.core.errors import UserError
from rlmux.rl.config import TaskConfig
from rlmux.rl.tasks.arithmetic import AddTask, ChainTask
from rlmux.rl.tasks.base import Environment, Segment, Task
from rlmux.rl.tasks.calculator import CalculatorTask
from rlmux.rl.tasks.file_rows import FileTask
from rlmux.rl.tasks.guess import GuessTask
from rlmux.rl.tasks.ordering import ReverseTask, SortTask
from rlmux.rl.tasks.reasoning_gym import ReasoningGymTask
from rlmux.rl.vocabulary import Vocabulary

__all__ = ["TASKS", "Environment", "Segment", "Task", "make_task"]

TASKS: dict[str, Callable[[Mapping[str, Any], int], Task]] = {
    "sort": SortTask,
    "reverse": ReverseTask,
    "add": AddTask,
    "chain": ChainTask,
    "calculator": CalculatorTask,
    "guess": GuessTask,
}
"""Built-in tasks: each takes (params, seed)."""

_GYM_PREFIX = "reasoning-gym:"


def make_task(config: TaskConfig, *, seed: int, vocabulary: Vocabulary) -> Task:
    """The task a pipeline names; a wrong name or option is a `UserError` that says what is accepted."""
    if config.name.startswith(_GYM_PREFIX):
        return ReasoningGymTask(config.name.removeprefix(_GYM_PREFIX), config.params, seed)
    if config.name == "file":
        if config.path is None:
            raise UserError("task.path: the task 'file' needs one; accepted: a .jsonl or .parquet file")
        if config.environment is not None and config.reward is None:
            raise UserError(
                "task.environment: needs task.reward, since a response has several turns; accepted: both, or neither"
            )
        return FileTask(
            config.path,
            prompt_key=config.prompt_key,
            answer_key=config.answer_key,
            is_answer_needed=config.reward is None,
            seed=seed,
            render_chat=vocabulary.render_chat,
            environment=config.environment,
        )
    if config.name not in TASKS:
        close = get_close_matches(config.name, [*TASKS, "file"], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"task.name: unknown task {config.name!r}; {hint}accepted: {', '.join(TASKS)}, file, reasoning-gym:NAME"
        )
    return TASKS[config.name](config.params, seed)
