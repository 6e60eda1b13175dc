"""Tokens of a session's messages: all of them where it begins, and behind an answer what came after it.

    begin      [system, user]             ──chat template──▶ tokens
    go on      the tokens as they are  +  [tool, user] ──chat template behind a stand-in──▶ tokens

What the model sampled is never made of text again: a tokenizer may write it with other tokens, and a template may
leave out what it thought.

A module of its own: what a template does is tested without a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.agents.chat_messages import Message
from rlmux.rl.vocabulary import Vocabulary

_STAND_IN: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
"""A chat that ends with an answer, in place of the one whose tokens are there."""


class ChatTokens:
    """The chat template of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def whole(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> tuple[int, ...]:
        """Tokens of a chat that the model is to answer. Raises UserError for what its template does not know."""
        if not self._vocabulary.has_chat_template:
            self._refuse_tools(tools)
            return self._encode(self._vocabulary.render_chat(messages))
        return self._rendered(messages, tools)

    def behind_answer(
        self, later: Sequence[Message], tools: Sequence[Message] | None, *, is_stopped: bool
    ) -> tuple[int, ...]:
        """Tokens between an answer and the next one. `is_stopped`: the answer has the token that ends it.

        Raises UserError as `whole`, and for a template that closes no answers and writes them anew.
        """
        vocabulary = self._vocabulary
        if not vocabulary.has_chat_template:
            self._refuse_tools(tools)
            return (() if is_stopped else (vocabulary.eos_token,)) + self._encode(vocabulary.render_chat(later))
        prompt = self._rendered(_STAND_IN[:1], tools)
        before = self._rendered(_STAND_IN, tools, is_answered=True)
        after = self._rendered((*_STAND_IN, *later), tools)
        if self._end_of_answer(prompt, before) is not None:  # which may stand elsewhere there: a template for thoughts
            end = self._end_of_answer(prompt, after)
            if end is not None:
                return after[end + is_stopped :]
        if after[: len(before)] != before:
            raise UserError(
                "messages: the chat template of the model writes an earlier answer anew for what follows it"
            )
        return after[len(before) :]

    def _end_of_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Where the answer to a prompt is closed."""
        ours = [place for place, (one, other) in enumerate(zip(prompt, tokens, strict=False)) if one != other]
        begin = ours[0] if ours else len(prompt)
        ends = (place for place in range(begin, len(tokens)) if tokens[place] in self._vocabulary.stop_tokens)
        return next(ends, None)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, is_answered: bool = False
    ) -> tuple[int, ...]:
        """Tokens of a chat with an answer due, or (`is_answered`) with its last answer closed."""
        render = partial(self._vocabulary.render_chat, tools=tools, is_answered=is_answered)
        text = render(messages)
        if tools and text == self._vocabulary.render_chat(messages, is_answered=is_answered):
            raise UserError("tools: the chat template of the model leaves them out; accepted: no tools")
        if self._vocabulary.has_control_names(messages):
            return self._vocabulary.encode_chat(messages, text, render=render)
        return self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return self._vocabulary.encode(text)
        except PipelineError as error:
            raise UserError(f"messages: {error}") from None

    def _refuse_tools(self, tools: Sequence[Message] | None) -> None:
        if tools:
            raise UserError("tools: the model has no chat template that shows them to it; accepted: no tools")


def beginning_of_call(tool_choice: Any, tools: Sequence[Message] | None) -> str:
    """The text that an answer begins with where a call is asked for; empty where the model chooses.

    Raises UserError for a choice that is none of the tools.
    """
    if isinstance(tool_choice, Mapping):  # Anthropic's {"type": "any" | "tool", "name"}, or OpenAI's with "function"
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")
        kind = tool_choice.get("type")
    else:
        name, kind = None, tool_choice
    if kind in (None, "auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools or ()]
    is_known = name in names if kind in ("function", "tool") else kind in ("required", "any")
    if not names or not is_known:
        raise UserError(f"tool_choice: {name or kind!r}; accepted: auto, none, required, or one of the tools")
    return "<tool_call>\n" if name is None else f'<tool_call>\n{{"name": "{name}", "arguments": '
