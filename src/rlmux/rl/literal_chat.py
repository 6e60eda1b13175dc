"""Chats whose messages contain the names of control tokens, as text.

    messages ──names to marks──▶ chat template ──▶ the template's names to aliases, marks to names ──▶ tokens
                                                                                                         │
                             a copy of the tokenizer whose control tokens are called by the aliases ◀────┘

A tool that prints `<|im_end|>` must not end its message. The copy has the same tokens and merges, so that the rest of
the text gets the tokens that it always gets. Marks and aliases are random: no text can contain them. They leave no
trace in the tokens.

Messages of the assistant are the model's own text: their control tokens stay.

A module of its own: it needs the tokenizer's own file format, which no other part of the room reads.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from rlmux.core.errors import PipelineError


class LiteralChat:
    """Encodes chats of one tokenizer of transformers."""

    def __init__(self, tokenizer: Any, stop_tokens: Collection[int] = ()) -> None:
        """`stop_tokens`: control tokens as well, where the tokenizer does not mark them as special."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        control = [each.content for token, each in added if each.special or token in stop_tokens]
        names = dict.fromkeys([*tokenizer.all_special_tokens, *control])
        self._names = sorted(filter(None, names), key=len, reverse=True)
        """Names of control tokens, the longest first."""
        self._named = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._salt = secrets.token_hex(8)

    def is_needed(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message that is not the assistant's contains the name of a control token."""
        return any(self._is_in(message) for message in messages if message.get("role") != "assistant")

    def encode(
        self, messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]
    ) -> tuple[int, ...]:
        """Tokens of the messages as `render` makes a text of them.

        Raises PipelineError for a tokenizer that cannot be copied.
        """
        marked = [each if each.get("role") == "assistant" else self._with_marks(each) for each in messages]
        text = self._named.sub(lambda found: self._alias(found[0]), render(marked))
        text = re.sub(f"{self._salt}m([0-9]+)m", lambda found: self._names[int(found[1])], text)
        return tuple(self._copy.encode(text, add_special_tokens=False).ids)

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._named.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self._is_in, value.values()))
        return isinstance(value, list) and any(map(self._is_in, value))

    def _with_marks(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._named.sub(lambda found: f"{self._salt}m{self._names.index(found[0])}m", value)
        if isinstance(value, Mapping):
            return {key: self._with_marks(each) for key, each in value.items()}
        return [self._with_marks(each) for each in value] if isinstance(value, list) else value

    def _alias(self, name: str) -> str:
        return f"<|{self._salt}a{self._names.index(name)}|>"

    @cached_property
    def _copy(self) -> Any:
        """The tokenizer with other names of its control tokens."""
        from tokenizers import Tokenizer

        name = self._names[0]
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise PipelineError(
                f"a message contains the name of a control token, such as {name!r}, which this tokenizer cannot write "
                "as text; accepted: one with a tokenizer.json"
            )
        state = json.loads(backend.to_str())
        state |= {"post_processor": None, "truncation": None, "padding": None}
        aliases = {each: self._alias(each) for each in self._names}
        for added in state["added_tokens"]:
            added["content"] = aliases.get(added["content"], added["content"])
        _rename(state["model"], aliases)
        try:
            copy = Tokenizer.from_str(json.dumps(state))
        except Exception as error:  # tokenizers raises plain Exceptions
            raise PipelineError(f"the control tokens of this tokenizer cannot be told from text: {error}") from error
        if wrong := [each for each in self._names if copy.token_to_id(aliases[each]) != backend.token_to_id(each)]:
            raise PipelineError(f"the control token {wrong[0]!r} of this tokenizer cannot be told from text")
        return copy


def _rename(model: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Rename the entries of a tokenizer's model that are control tokens, so that no text becomes one."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(piece, piece): token for piece, token in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
