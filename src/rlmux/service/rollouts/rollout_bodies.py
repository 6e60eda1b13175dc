"""Request bodies of the rollout API. Keys without an effect are ignored, unsupported ones refused.

A module of its own: request formats are data types, without handlers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rlmux.core.errors import UserError
from rlmux.service.tinker.bodies import Body


class Params(Body):
    """How to sample."""

    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=1, ge=1, le=512)
    temperature: float | None = Field(default=1.0, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    top_p: float | None = 1.0
    top_k: int | None = -1
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: Mapping[str, float] | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False

    def check(self) -> None:
        """Raises UserError for unsupported fields that would change the answer."""
        refused = {
            "top_p": self.top_p not in (None, 1.0),
            "top_k": self.top_k not in (None, -1, 0),
            "min_p": bool(self.min_p),
            "frequency_penalty": bool(self.frequency_penalty),
            "presence_penalty": bool(self.presence_penalty),
            "repetition_penalty": self.repetition_penalty not in (None, 1.0),
            "logit_bias": bool(self.logit_bias),
            "min_tokens": bool(self.min_tokens),
            "ignore_eos": bool(self.ignore_eos),
        }
        refuse(refused)


class Generate(Body):
    """Tokens in, tokens out."""

    token_ids: Sequence[int]
    sampling_params: Params = Params()
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    output_mode: Literal["tokens", "text"] = "tokens"


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = False


class Streamed(Params):
    """What can be answered in pieces."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options: accepted with stream: true")

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the tokens that were read and written."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Completion(Streamed):
    """A text or tokens to go on with, or several."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    return_token_ids: bool | None = False

    def check(self) -> None:
        super().check()
        is_other = self.best_of is not None and self.best_of != (self.n or 1)
        refuse({"echo": bool(self.echo), "suffix": bool(self.suffix), "best_of": is_other})
        refuse({"logprobs above 1": (self.logprobs or 0) > 1})

    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Each prompt alone. Raises UserError where there is none."""
        if not self.prompt:
            raise UserError("prompt: is empty; accepted: a text, tokens, or a list of either")
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [each for each in self.prompt if isinstance(each, int)]
        return [tokens] if tokens else [each for each in self.prompt if not isinstance(each, int)]


class Part(Body):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Any = None

    def text(self) -> str:
        """Its text. Raises UserError for content of another kind."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        if any(part.type != "text" for part in self.content):
            raise UserError("messages: content that is no text is not served; accepted: parts of type text")
        return "".join(part.text or "" for part in self.content)


class Chat(Streamed):
    """Messages to answer."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    web_search_options: Any = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    return_token_ids: bool | None = False

    def check(self) -> None:
        super().check()
        is_other = self.response_format is not None and self.response_format.get("type") != "text"
        refused = {
            "tools": bool(self.tools),
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
            "functions": bool(self.functions),
            "function_call": self.function_call not in (None, "none", "auto"),
            "messages: tool_calls": any(message.tool_calls for message in self.messages),
            "reasoning_effort": self.reasoning_effort not in (None, "none"),
            "verbosity": self.verbosity is not None,
            "modalities": self.modalities not in (None, ["text"]),
            "web_search_options": self.web_search_options is not None,
            "chat_template_kwargs": bool(self.chat_template_kwargs),
            "response_format": is_other,
            "top_logprobs": bool(self.top_logprobs),
        }
        refuse(refused)


def refuse(is_requested_by_name: Mapping[str, bool]) -> None:
    """Raises UserError for the first requested option."""
    for name, is_requested in is_requested_by_name.items():
        if is_requested:
            raise UserError(f"{name} is not served: leave it out")
