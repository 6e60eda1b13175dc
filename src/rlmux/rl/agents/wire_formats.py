"""Bodies of the OpenAI and Anthropic addresses: questions out of requests, answers into responses and events.

    POST /v1/chat/completions    OpenAI, chat       ─┐
    POST /v1/completions         OpenAI, text        ├─▶ Ask ──▶ Answer ──▶ a body, or server-sent events
    POST /v1/messages            Anthropic          ─┘

A sampled answer is whole before it is sent, so a stream has it in one piece. Sampling is the pipeline's: temperature
and the like, which programs like to set, have no effect; what would change the form of the answer is refused.

A module of its own: formats are pure functions, tested without a server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmux.core.errors import UserError
from rlmux.rl.agents.chat_messages import from_anthropic, from_openai, tools_of
from rlmux.rl.agents.chat_tokens import beginning_of_call
from rlmux.rl.agents.session import Answer, Ask

Body = Mapping[str, Any]


def chat_ask(body: Body) -> Ask:
    """The question of /v1/chat/completions. Raises UserError for what is not served."""
    _refuse_many(body)
    form = body.get("response_format")
    if form and not (isinstance(form, Mapping) and form.get("type") == "text"):
        raise UserError("response_format: is not served; accepted: text")
    choice = body.get("tool_choice")
    tools = None if choice == "none" else tools_of(body.get("tools"))
    return Ask(
        messages=from_openai(body.get("messages")),
        tools=tools,
        begins_with=beginning_of_call(choice, tools),
        max_tokens=_count(body, "max_completion_tokens", "max_tokens"),
        stop=_stop(body.get("stop")),
    )


def text_ask(body: Body) -> Ask:
    """The question of /v1/completions. Raises UserError for what is not served."""
    _refuse_many(body)
    if not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise UserError("prompt: accepted: a text that is not empty")
    return Ask(text=body["prompt"], max_tokens=_count(body, "max_tokens") or 16, stop=_stop(body.get("stop")))


def messages_ask(body: Body) -> Ask:
    """The question of /v1/messages. Raises UserError for what is not served."""
    choice = body.get("tool_choice")
    is_none = isinstance(choice, Mapping) and choice.get("type") == "none"
    tools = None if is_none else tools_of(body.get("tools"))
    return Ask(
        messages=from_anthropic(body.get("system"), body.get("messages")),
        tools=tools,
        begins_with=beginning_of_call(choice, tools),
        max_tokens=_count(body, "max_tokens"),
        stop=_stop(body.get("stop_sequences")),
    )


def _refuse_many(body: Body) -> None:
    if body.get("n") not in (None, 1):
        raise UserError(f"n: {body['n']!r}; accepted: 1, as a session has one answer to each question")


def _count(body: Body, *names: str) -> int | None:
    for name in names:
        found = body.get(name)
        if found is None:
            continue
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise UserError(f"{name}: {found!r}; accepted: 1 or more")
        return found
    return None


def _stop(found: Any) -> Sequence[str]:
    texts = [found] if isinstance(found, str) else found or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise UserError("stop: accepted: a text, or a list of texts that are not empty")
    return texts


# --- OpenAI ---------------------------------------------------------------------------------------------------


def chat_body(id: str, model: str, answer: Answer) -> Body:
    """Response of /v1/chat/completions."""
    message = {"role": "assistant", "content": answer.message["content"] or None, **_openai_calls(answer)}
    if "tool_calls" not in message:
        message["content"] = answer.message["content"]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    return {**_head("chat.completion", id, model), "choices": [choice], "usage": _usage(answer)}


def chat_events(id: str, model: str, answer: Answer, *, includes_usage: bool) -> Iterator[str]:
    """Events of a streamed /v1/chat/completions."""
    head = _head("chat.completion.chunk", id, model)
    delta: dict[str, Any] = {"role": "assistant", "content": answer.message["content"], **_openai_calls(answer)}
    for place, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = place
    empty = {"usage": None} if includes_usage else {}
    yield _event({**head, **empty, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, **empty, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]})
    if includes_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def text_body(id: str, model: str, answer: Answer) -> Body:
    """Response of /v1/completions, and its only event."""
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish_reason, "logprobs": None}
    return {**_head("text_completion", id, model), "choices": [choice], "usage": _usage(answer)}


def text_events(id: str, model: str, answer: Answer) -> Iterator[str]:
    """Events of a streamed /v1/completions."""
    yield _event(text_body(id, model, answer))
    yield "data: [DONE]\n\n"


def openai_error(text: str, code: str) -> Body:
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


def _openai_calls(answer: Answer) -> dict[str, Any]:
    calls = answer.message.get("tool_calls", ())
    made = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]
    return {"tool_calls": made} if made else {}


def _head(kind: str, id: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": 0, "model": model}


def _usage(answer: Answer) -> dict[str, int]:
    made = len(answer.tokens)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": made,
        "total_tokens": answer.num_prompt_tokens + made,
    }


def _event(value: Body, name: str | None = None) -> str:
    return f"{'' if name is None else f'event: {name}' + chr(10)}data: {json.dumps(value)}\n\n"


# --- Anthropic ------------------------------------------------------------------------------------------------


def messages_body(id: str, model: str, answer: Answer) -> Body:
    """Response of /v1/messages."""
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answer),
        "stop_reason": reasons.get(answer.finish_reason, "end_turn"),
        "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.tokens)},
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    calls = answer.message.get("tool_calls", ())
    text = answer.message["content"]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def messages_events(id: str, model: str, answer: Answer) -> Iterator[str]:
    """Events of a streamed /v1/messages."""
    body = messages_body(id, model, answer)
    begun = {**body, "content": [], "stop_reason": None}
    yield _event({"type": "message_start", "message": begun}, "message_start")
    for place, block in enumerate(body["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield _event({"type": "content_block_start", "index": place, "content_block": empty}, "content_block_start")
        yield _event({"type": "content_block_delta", "index": place, "delta": delta}, "content_block_delta")
        yield _event({"type": "content_block_stop", "index": place}, "content_block_stop")
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": ended, "usage": body["usage"]}, "message_delta")
    yield _event({"type": "message_stop"}, "message_stop")


def anthropic_error(text: str, code: str) -> Body:
    return {"type": "error", "error": {"type": code, "message": text}}
