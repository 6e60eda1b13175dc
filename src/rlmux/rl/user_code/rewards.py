"""The user's reward function, in either of the two signatures the field uses, behind one object.

    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}
    TRL    reward(prompts, completions, **columns) -> list[float | None]        (None: not to be judged)

Parameter names distinguish the two. verl's is called once per trajectory. TRL's is called once
per prompt group, in sample order, when the group is complete: the config decides its calls, not the order in which
trajectories finish. Either may be `async def`. A completion that TRL's gives None has the advantage 0
and is left out of its group's mean and deviation, as in TRL.

TRL's gets what its GRPOTrainer passes (`_calculate_rewards`), by the kind of the row:

    prompts         the text, or the row's list of messages without a last one of the assistant (which is prefilled)
    completions     the response's text, or its list of messages: the model's and, after its first, the environment's
    completion_ids  tokens of the response, stop token included
    columns         all others of the row, and `answer`; not `prompt`, `completion` and `completion_ids`
    trainer_state   global_step (optimizer steps made), max_steps
    log_metric      (name, number): its mean over the step's calls is the step's metric `reward/NAME`
    log_extra       (name, values): a value for each completion; the mean of numbers likewise, other values are dropped
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.config import TaskConfig
from rlmux.rl.loading import call_and_await, load_callable
from rlmux.rl.tasks.base import Task
from rlmux.rl.types import Prompt

_ACCEPTED = (
    "accepted: verl's (data_source, solution_str, ground_truth, extra_info) or TRL's (prompts, completions, **columns)"
)

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a row that TRL keeps for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response to a prompt: the model's turns, and the environment's between them."""

    text: str
    """All of it, special tokens left out."""
    token_ids: tuple[int, ...]
    """All of it, special tokens included."""
    turns: tuple[tuple[bool, str], ...]
    """Its parts in order: whether the model made it, and its text."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat of a program's session; None for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """One call of a reward: a response, or all responses of a prompt group where the reward is grouped."""

    prompt: Prompt
    responses: Sequence[Response]
    step: int
    places: Sequence[str]
    """Name of each response in errors, such as `at step 1 prompt 0 sample 2`."""


Scored = list[float | None] | PipelineError
"""A finite number for each response of a call, None where TRL's signature gives none; or the call's failure."""


class LoggedNumbers:
    """Numbers that a reward function has logged, by step and metric."""

    def __init__(self) -> None:
        self._numbers: dict[int, dict[str, list[float]]] = {}

    def add(self, step: int, metric: str, numbers: Iterable[float]) -> None:
        self._numbers.setdefault(step, {}).setdefault(metric, []).extend(numbers)

    def take(self, step: int) -> dict[str, list[float]]:
        """Remove and return the numbers of a step, by metric."""
        return self._numbers.pop(step, {})

    def take_means(self, steps: Iterable[int]) -> dict[str, float]:
        """Remove the numbers of these steps and return their means, by metric, sorted.

        Sums run over sorted numbers: the order of the calls does not reach the last bits.
        """
        logged: dict[str, list[float]] = {}
        for step in steps:
            for metric, numbers in self.take(step).items():
                logged.setdefault(metric, []).extend(numbers)
        return {metric: sum(sorted(all_)) / len(all_) for metric, all_ in sorted(logged.items())}


def reward_name(config: TaskConfig) -> str:
    """Name of a task's reward in errors."""
    return f"reward {config.reward}" if config.reward else f"the reward of task {config.name!r}"


class Reward:
    """Scores responses in this process: the user's function, or the task's own score."""

    def __init__(self, task: Task | None, config: TaskConfig, num_steps: int) -> None:
        """`task`: required where `config` has no reward function. `num_steps`: steps of the pipeline, for rewards that
        use it."""
        self.name = reward_name(config)
        self.logged = LoggedNumbers()
        self._task = task
        self._limit_s = config.reward_timeout_s
        self._task_name = config.name
        self._num_steps = num_steps
        self._function = None if config.reward is None else load_reward(config.reward)
        self.is_grouped = self._function is not None and _is_trl(self._function)
        """All responses of a prompt group must be given at once, in sample order; otherwise one at a time."""

    def outcomes(
        self, calls: Sequence[RewardCall], on_answer: Callable[[], None] = lambda: None
    ) -> Generator[Scored, None, None]:
        """The outcome of each call, in order. `on_answer`: called after each answer of the user's code.

        The calls share a thread: the first that raises or takes too long is the only outcome.
        """
        try:
            results = call_and_await(
                [(f"{self.name} {call.places[0]}", partial(self._call, call)) for call in calls],
                self._limit_s,
                on_answer,
            )
        except PipelineError as error:
            yield error
            return
        for call, result in zip(calls, results, strict=True):
            yield self._checked(result, call.places)

    def _call(self, call: RewardCall) -> Any:
        """What the function returns, perhaps awaitable."""
        if self._function is None:
            assert self._task is not None
            return self._task.score(call.prompt, call.responses[0].text)
        columns = self._grouped(call) if self.is_grouped else self._single(call)
        return self._function(**_arguments(self._function, columns))

    def _checked(self, result: Any, places: Sequence[str]) -> Scored:
        try:
            return self._numbers(result, places)
        except PipelineError as error:
            return error

    def _numbers(self, result: Any, places: Sequence[str]) -> list[float | None]:
        if not self.is_grouped:
            return [self._number(self._score_in(result, places[0]), places[0])]
        if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
            found = _shown(result)
            raise PipelineError(f"{self.name} {places[0]} returned {found}; accepted: a list of numbers")
        if len(result) != len(places):
            raise PipelineError(f"{self.name} {places[0]} returned {len(result)} rewards for {len(places)} completions")
        return [
            None if reward is None else self._number(reward, place)
            for reward, place in zip(result, places, strict=True)
        ]

    def _single(self, call: RewardCall) -> dict[str, Any]:
        columns = dict(call.prompt.data or {})
        return {
            "data_source": columns.get("data_source", self._task_name),
            "solution_str": call.responses[0].text,
            "ground_truth": call.prompt.expected,
            "extra_info": _with_session(columns.get("extra_info", columns), call.responses[0]),
        }

    def _grouped(self, call: RewardCall) -> dict[str, Any]:
        prompt, responses, step = call.prompt, call.responses, call.step
        each = {name: value for name, value in (prompt.data or {}).items() if name not in _NOT_COLUMNS}
        repeated = {name: [value] * len(responses) for name, value in {"answer": prompt.expected, **each}.items()}
        if responses[0].messages is not None:
            repeated["sessions"] = [response.messages for response in responses]
        prompts: list[Any] = [prompt.text] * len(responses)
        completions: list[Any] = [response.text for response in responses]
        if prompt.messages is not None:
            messages, prefilled = _without_prefill(prompt.messages)
            prompts = [[dict(message) for message in messages] for _ in responses]
            completions = [_messages(response, prefilled) for response in responses]
        return {
            **repeated,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": [list(response.token_ids) for response in responses],
            "log_metric": partial(self._log_metric, step),
            "log_extra": partial(self._log_extra, step),
            "trainer_state": SimpleNamespace(global_step=step - 1, max_steps=self._num_steps),
        }

    def _log_metric(self, step: int, name: str, value: Any) -> None:
        try:
            number = self._number(value, f"at step {step}")
        except PipelineError:
            raise PipelineError(f"{self.name} logged {name!r} as {value!r}; accepted: a finite number") from None
        self.logged.add(step, f"reward/{name}", [number])

    def _log_extra(self, step: int, column: str, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, int | float) and math.isfinite(value):
                self._log_metric(step, column, value)

    def _score_in(self, result: Any, place: str) -> Any:
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            keys = ", ".join(sorted(map(str, result)))
            found = f"a dict with {keys or 'no keys'}"
            raise PipelineError(f"{self.name} {place} returned {found}; accepted: one with 'score'")
        return result["score"]

    def _number(self, reward: Any, place: str) -> float:
        try:
            number = math.nan if isinstance(reward, str | bytes | bytearray) else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise PipelineError(f"{self.name} {place} returned {_shown(reward)}; accepted: a finite number")
        return number


def _with_session(extra_info: Any, response: Response) -> Any:
    """verl's `extra_info`, with the chat of a program's session under `session`."""
    if response.messages is None or not isinstance(extra_info, Mapping):
        return extra_info
    return {**extra_info, "session": response.messages}


def _shown(result: Any) -> str:
    """What a function returned, in a few words."""
    try:
        text = " ".join(str(result).split())[:40]
    except ValueError:  # an integer with more digits than Python writes
        return type(result).__name__
    return text if result is None or isinstance(result, float) else f"{type(result).__name__} {text!r}"


def load_reward(spec: str) -> Callable[..., Any]:
    """The function that `module:function` names, from sys.path."""
    function = load_callable("task.reward", spec, "function")
    parameters = inspect.signature(function).parameters
    if "solution_str" not in parameters and not _is_trl(function):
        raise UserError(f"task.reward: {spec!r} takes ({', '.join(parameters)}); {_ACCEPTED}")
    return function


def _without_prefill(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The messages without a last one of the assistant, and that one's text, which the model continues."""
    if messages[-1]["role"] != "assistant":
        return messages, ""
    return messages[:-1], messages[-1]["content"]


def _messages(response: Response, prefilled: str) -> list[dict[str, str]]:
    """A conversational completion: one message for each part."""
    turns = response.turns or ((True, ""),)
    messages = [{"role": "assistant" if is_model else "tool", "content": text} for is_model, text in turns]
    messages[0]["content"] = prefilled + messages[0]["content"]
    return messages


def _is_trl(function: Callable[..., Any]) -> bool:
    return "completions" in inspect.signature(function).parameters


def _arguments(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the function names, or all where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}
