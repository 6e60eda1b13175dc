"""Messages of a chat in one form, whatever address they came to; compared by what a model reads of them.

    OpenAI     {"role": "assistant", "content": null, "tool_calls": [{"function": {"name", "arguments": "{…}"}}]}
    Anthropic  {"role": "assistant", "content": [{"type": "tool_use", "name", "input": {…}}]}
    here       {"role": "assistant", "content": "", "tool_calls": [{"id", "function": {"name", "arguments": {…}}}]}

A module of its own: pure functions over JSON, which sessions and both addresses share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json

Message = Mapping[str, Any]

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""Calls as Hermes and Qwen write them."""
_CALL_KEYS = ({"name", "arguments"}, {"name", "parameters"})
"""Keys of a call that stands alone, as Qwen and Llama write them."""


def from_openai(messages: Any) -> list[Message]:
    """Raises UserError for messages that are none, or of another kind than text."""
    if not isinstance(messages, list) or not messages:
        raise UserError("messages: is empty; accepted: a list of messages with role and content")
    return [_from_openai(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _from_openai(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: accepted: an object with role and content")
    role = "system" if message["role"] == "developer" else message["role"]
    made: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), where)}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        made["tool_calls"] = [_call(each, where) for each in (calls if isinstance(calls, list) else [calls])]
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            made[key] = message[key]
    return made


def _call(call: Any, where: str) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}.tool_calls: accepted: calls of a function with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            raise UserError(f"{where}.tool_calls: the arguments of {function['name']!r} are no JSON") from None
    return tool_call(str(call.get("id", "")), function["name"], arguments)


def tool_call(id: str, name: str, arguments: Any) -> Mapping[str, Any]:
    """A call as chat templates take it."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def from_anthropic(system: Any, messages: Any) -> list[Message]:
    """Raises UserError as `from_openai` does."""
    if not isinstance(messages, list) or not messages:
        raise UserError("messages: is empty; accepted: a list of messages with role and content")
    made: list[Message] = []
    if system:
        made.append({"role": "system", "content": text_of(system, "system")})
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise UserError(f"{where}: accepted: role user or assistant, and content")
        made += _from_blocks(message["role"], message.get("content"), where)
    return made


def _from_blocks(role: str, content: Any, where: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise UserError(f"{where}.content: accepted: a text, or a list of blocks")
    made: list[Message] = []
    texts: list[Any] = []
    calls = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(tool_call(str(block.get("id", "")), str(block.get("name", "")), block.get("input") or {}))
        elif kind == "tool_result":
            text = text_of(block.get("content"), where)
            made.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    if texts or calls or not made:
        made.append({"role": role, "content": text_of(texts, where), **({"tool_calls": calls} if calls else {})})
    return made


def text_of(content: Any, where: str) -> str:
    """Text of a message's content. Raises UserError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise UserError(f"{where}: content that is no text is not served; accepted: parts of type text")
    return "".join(part["text"] for part in parts)


def tools_of(tools: Any) -> list[Message] | None:
    """Functions as chat templates take them, from either address; None without any. Raises UserError for others."""
    if not tools:
        return None
    made: list[Message] = []
    for place, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(tool, Mapping) and "input_schema" in tool:
            function = {"name": tool.get("name"), "description": tool.get("description", "")}
            function["parameters"] = tool["input_schema"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"tools[{place}]: accepted: a function with name and parameters")
        made.append({"type": "function", "function": dict(function)})
    return made


def answer_of(text: str, *, has_tools: bool, call_ids: str) -> Message:
    """The assistant's message that a sampled text is. Calls that are no JSON stay text.

    `call_ids`: what the ids of its calls begin with.
    """
    calls: list[tuple[str, Any]] = []
    rest = text
    if has_tools:
        found = [(match, _parsed(match[1])) for match in _TAGGED.finditer(text)]
        if found and all(call is not None for _, call in found):
            calls = [call for _, call in found if call is not None]
            rest = _TAGGED.sub("", text)
        elif (alone := _parsed(text.strip())) is not None:
            calls, rest = [alone], ""
    if not calls:
        return {"role": "assistant", "content": text}
    made = [tool_call(f"{call_ids}{place}", *call) for place, call in enumerate(calls)]
    return {"role": "assistant", "content": rest.strip(), "tool_calls": made}


def _parsed(text: str) -> tuple[str, Any] | None:
    """Name and arguments of a call; None for a text that is none."""
    try:
        call = parse_json(text)
    except ValueError:
        return None
    if not isinstance(call, Mapping) or set(call) not in _CALL_KEYS or not isinstance(call["name"], str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    return (call["name"], arguments) if isinstance(arguments, Mapping) else None


def is_same(one: Message, other: Message) -> bool:
    """Whether a model reads the same of both. Programs drop blanks around an answer, and name calls anew."""
    return _read(one) == _read(other)


def _read(message: Message) -> tuple[Any, ...]:
    content = message["content"]
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], content.strip() if message["role"] == "assistant" else content, calls


def goes_on_from(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """Whether a chat begins with all of an earlier one, and has more."""
    return len(messages) > len(earlier) and all(map(is_same, messages, earlier))
