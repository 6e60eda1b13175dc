"""`file`: rows of a JSONL or parquet file, in a new shuffled order each epoch.

Keys may be dotted (`reward_model.ground_truth`), so that verl's parquet files work as they are. A prompt is a
text, or a list of messages with `role` and `content`, which the vocabulary renders; nulls in them are as absent, since
parquet fills what a message lacks with them. All columns go to the reward function, the answer as the row has it.

With `environment`, a class of the user's, a trajectory has several turns. `MyEnv(row)` is made for one trajectory, from
a copy of the row, and has the interface of `Environment`: `reply(turn)` gives a text, or None when it is over.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json
from rlmux.rl.loading import load_callable
from rlmux.rl.tasks.base import Environment, SingleTurnTask
from rlmux.rl.types import Prompt

RenderChat = Callable[[Sequence[Mapping[str, Any]]], str]


class FileTask(SingleTurnTask):
    """Without a reward function of its own, a response scores 1.0 when it equals the answer, else 0.0."""

    def __init__(
        self,
        path: str,
        *,
        prompt_key: str,
        answer_key: str | None,
        is_answer_needed: bool,
        seed: int,
        render_chat: RenderChat,
        environment: str | None = None,
        is_of_programs: bool = False,
    ) -> None:
        """`environment`: `module:Class`, imported where one is made first. `is_of_programs`: rows are for programs,
        which ask the model what they like."""
        self._path = path
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._seed = seed
        self._render_chat = render_chat
        self._environment = environment
        self.is_single_turn = environment is None and not is_of_programs
        self._rows = _read_rows(Path(path))
        self._order_by_epoch: dict[int, list[int]] = {}
        for row in range(len(self._rows)):
            if self.prompt_of(row).answer is None and is_answer_needed:
                raise UserError(
                    f"{path} row {row + 1}: no {answer_key!r} to compare answers with; its columns: "
                    f"{', '.join(self._rows[row])}; set task.answer_key or task.reward"
                )

    def prompt(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._rows))
        if epoch not in self._order_by_epoch:
            order = list(range(len(self._rows)))
            Random(f"file/{self._seed}/{epoch}").shuffle(order)
            self._order_by_epoch = {epoch: order}
        return self.prompt_of(self._order_by_epoch[epoch][position])

    def score(self, prompt: Prompt, response: str) -> float:
        return float(prompt.answer is not None and response.strip() == prompt.answer.strip())

    def environment(self, prompt: Prompt) -> Environment | None:
        """Make an environment. Raises UserError for a class that makes none from a row."""
        if self._environment is None:
            return None
        environment = self._environment_class(deepcopy(dict(prompt.data or {})))
        if not callable(getattr(environment, "reply", None)):
            raise UserError(f"task.environment: {self._environment!r} has no reply; accepted: a class with reply(turn)")
        return environment  # type: ignore[no-any-return]

    @cached_property
    def _environment_class(self) -> Callable[[dict[str, Any]], Any]:
        assert self._environment is not None
        found = load_callable("task.environment", self._environment, "class")
        try:
            inspect.signature(found).bind({})
        except TypeError:
            taken = ", ".join(inspect.signature(found).parameters)
            raise UserError(
                f"task.environment: {self._environment!r} is made from ({taken}); accepted: a class made from one "
                "argument, the row as a dict"
            ) from None
        return found

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def place_of(self, row: int) -> str:
        """File and row as complaints name them; `row` counts from 0."""
        return f"{self._path} row {row + 1}"

    def prompt_of(self, row: int) -> Prompt:
        """The prompt of a row of the file; `row` counts from 0."""
        columns = self._rows[row]
        where = self.place_of(row)
        found = _lookup(columns, self._prompt_key)
        if found is _ABSENT:
            raise UserError(f"{where}: no {self._prompt_key!r}; its columns: {', '.join(columns) or 'none'}")
        answer = _ABSENT if self._answer_key is None else _lookup(columns, self._answer_key)
        answer = None if answer is _ABSENT else answer
        of_answer: dict[str, Any] = {"answer": _text_of(answer), "ground_truth": answer}
        if isinstance(found, str):
            return Prompt(text=found, data=columns, **of_answer)
        messages = self._messages_of(found, where)
        try:
            text = self._render_chat(messages)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        return Prompt(text=text, data=columns, messages=messages, **of_answer)

    def _messages_of(self, found: Any, where: str) -> list[dict[str, Any]]:
        """Messages whose content is a text. Raises UserError for what is no list of messages."""

        def refuse(what: str, accepted: str) -> NoReturn:
            raise UserError(f"{where}: {what} of {self._prompt_key!r} {accepted}")

        if not isinstance(found, list) or not found:
            raise UserError(
                f"{where}: {self._prompt_key!r} is {_shown(found)}; "
                "accepted: a text, or a list of messages with role and content"
            )
        messages = []
        for number, message in enumerate(found, start=1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                refuse(f"message {number}", f"is {_shown(message)}; accepted: an object with role and content")
            shown = _without_nulls(message)
            content = shown.setdefault("content", "") if "tool_calls" in shown else shown.get("content")
            if not isinstance(content, str):
                refuse(f"message {number}", f"has content {_shown(content)}; accepted: a text, or null with tool_calls")
            messages.append(shown)
        return messages


def _shown(found: Any) -> str:
    return "null" if found is None else f"{type(found).__name__} {str(found)[:40]!r}"


def _text_of(answer: Any) -> str | None:
    """Text of an answer, for warm-up and comparison: JSON for an answer that is no text."""
    if answer is None or isinstance(answer, str):
        return answer
    return json.dumps(answer, ensure_ascii=False, default=str)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_ABSENT = object()
"""Lookup result for a missing column, as opposed to null."""


def _lookup(columns: Mapping[str, Any], dotted_key: str) -> Any:
    found: Any = columns
    for key in [dotted_key] if dotted_key in columns else dotted_key.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return _ABSENT
        found = found[key]
    return found


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"task.path: no file {path}; accepted: .jsonl or .parquet")
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = _read_jsonl(path)
    else:
        raise UserError(f"task.path: {path} ends in {path.suffix!r}; accepted: .jsonl or .parquet")
    if not rows:
        raise UserError(f"task.path: {path} has no rows")
    return rows


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"task.path: {path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path} line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number}: {type(row).__name__}; accepted: an object with columns")
        rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"task.path: {path} needs the package pyarrow; install it with: pip install 'rlmux[parquet]'"
        ) from None
    try:
        return list(parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"task.path: {path} is not a readable parquet file: {error}") from error
