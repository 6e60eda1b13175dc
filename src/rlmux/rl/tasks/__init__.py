"""Tasks by name. A new built-in is a class and a line in `TASKS`; a task of a user's own is a plug-in.

Reading order: base, ordering, arithmetic, guess, calculator, file_rows, harbor, reasoning_gym, options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from rlmux import plugins
from rlmux.core.errors import UserError
from rlmux.rl.config import OF_FILES, TaskConfig
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
_ASKED = ("stop", "is_single_turn", "prompt", "demonstration", "score", "environment")


def is_of_user(name: str) -> bool:
    """Whether a plug-in has this task name. Imports nothing."""
    is_ours = name in TASKS or name in OF_FILES or name.startswith(_GYM_PREFIX)
    return not is_ours and plugins.is_plugin("task", name)


def make_task(config: TaskConfig, *, seed: int, vocabulary: Vocabulary) -> Task:
    """A pipeline's task. Raises UserError, with what is accepted, for a wrong name or option."""
    if config.name.startswith(_GYM_PREFIX):
        return ReasoningGymTask(config.name.removeprefix(_GYM_PREFIX), config.params, seed)
    if config.name == "harbor":
        from rlmux.rl.tasks.harbor import HarborSuite  # with all that sandboxes import

        return HarborSuite(config.path, seed)
    if config.name in ("file", "agent"):
        if config.path is None:
            raise UserError(f"task.path: the task {config.name!r} needs one; accepted: a .jsonl or .parquet file")
        if config.environment is not None and config.reward is None:
            raise UserError(
                "task.environment: needs task.reward, since a response has several turns; accepted: both, or neither"
            )
        return FileTask(
            config.path,
            prompt_key=config.prompt_key,
            answer_key=config.answer_key,
            is_answer_needed=config.name == "file" and config.reward is None and config.answer_key is not None,
            seed=seed,
            render_chat=vocabulary.render_chat,
            environment=config.environment,
            is_of_programs=config.name == "agent",
        )
    if is_of_user(config.name):
        return _of_user(config, seed)
    if config.name not in TASKS:
        close = get_close_matches(config.name, [*TASKS, *OF_FILES], n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"task.name: unknown task {config.name!r}; {hint}accepted: {', '.join((*TASKS, *OF_FILES))}, "
            "reasoning-gym:NAME, or module:Class of your own"
        )
    return TASKS[config.name](config.params, seed)


def _of_user(config: TaskConfig, seed: int) -> Task:
    """The user's task, made from (params, seed) as ours are."""
    make = plugins.find("task", config.name, (*TASKS, *OF_FILES))
    try:
        made: Task = make(config.params, seed)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"task.name: {config.name!r} made from (params, seed) raised {plugins.described(error)}"
        ) from error
    absent = [name for name in _ASKED if not hasattr(made, name)]
    if absent:
        raise UserError(f"task.name: {config.name!r} has no {absent[0]!r}; accepted: a class with {', '.join(_ASKED)}")
    return made
