"""Bodies that are no questions are refused by name; answers have the forms that clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlmux.core.errors import UserError
from rlmux.rl.agents import wire_formats as wire
from rlmux.rl.agents.chat_messages import answer_of
from rlmux.rl.agents.session import Answer

CHAT = {"messages": [{"role": "user", "content": "a"}]}
FUNCTION = {"name": "find", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL_TEXT = 'Look.\n<tool_call>\n{"name": "find", "arguments": {"of": "é"}}\n</tool_call>'


def answer(text: str = "Yes.", finish_reason: str = "stop") -> Answer:
    message = answer_of(text, has_tools=True, call_ids="call_1_")
    return Answer(
        message=message,
        text=text,
        tokens=[5, 6],
        logprobs=[-1.0, -1.0],
        finish_reason=finish_reason,
        num_prompt_tokens=3,
    )


def events_of(lines: Any) -> list[Any]:
    """(event's name, its data) of a stream."""
    made = []
    for event in "".join(lines).strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        data = fields["data"]
        made.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return made


def test_a_question_has_what_changes_the_answer_and_leaves_the_rest() -> None:
    ask = wire.chat_ask(
        {**CHAT, "temperature": 0.1, "top_p": 0.5, "seed": 3, "n": 1, "stop": "END", "max_tokens": 9, "tools": TOOLS,
         "tool_choice": "required", "response_format": {"type": "text"}}
    )  # fmt: skip
    assert (ask.stop, ask.max_tokens, ask.tools, ask.begins_with) == (["END"], 9, TOOLS, "<tool_call>\n")
    assert ask.messages == [{"role": "user", "content": "a"}]
    assert wire.chat_ask({**CHAT, "max_tokens": 9, "max_completion_tokens": 4}).max_tokens == 4
    assert wire.chat_ask({**CHAT, "tools": TOOLS, "tool_choice": "none"}).tools is None
    assert wire.chat_ask(CHAT).max_tokens is None
    assert wire.text_ask({"prompt": "a"}).max_tokens == 16, "as the API has it"
    anthropic = wire.messages_ask({**CHAT, "system": "b", "max_tokens": 5, "stop_sequences": ["x", "y"]})
    assert ([each["role"] for each in anthropic.messages], anthropic.max_tokens) == (["system", "user"], 5)
    assert anthropic.stop == ["x", "y"]
    assert wire.messages_ask({**CHAT, "tools": TOOLS, "tool_choice": {"type": "none"}}).tools is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n": 2}, "n: 2; accepted: 1"),
        ({"response_format": {"type": "json_object"}}, "response_format: is not served; accepted: text"),
        ({"response_format": "json"}, "response_format: is not served; accepted: text"),
        ({"max_tokens": 0}, "max_tokens: 0; accepted: 1 or more"),
        ({"max_tokens": True}, "max_tokens: True; accepted: 1 or more"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens: '9'; accepted: 1 or more"),
        ({"stop": [""]}, "stop: accepted: a text"),
        ({"stop": 5}, "stop: accepted: a text"),
        ({"messages": None}, "messages: is empty"),
        ({"tools": [5]}, "tools[0]: accepted: a function"),
        ({"tool_choice": "required"}, "tool_choice: 'required'; accepted"),
    ],
)
def test_what_would_change_the_form_of_an_answer_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        wire.chat_ask({**CHAT, **changes})
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize("prompt", [None, "", ["a"], [1, 2]])
def test_a_prompt_that_is_no_text_is_refused(prompt: Any) -> None:
    with pytest.raises(UserError, match=r"^prompt: accepted: a text that is not empty"):
        wire.text_ask({"prompt": prompt})


def test_a_call_is_one_in_both_forms() -> None:
    made = answer(CALL_TEXT, "tool_calls")
    message = wire.chat_body("id", "m", made)["choices"][0]["message"]
    assert message["content"] == "Look."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"of": "é"}
    body = wire.messages_body("id", "m", made)
    assert [block["type"] for block in body["content"]] == ["text", "tool_use"]
    assert (body["content"][1]["input"], body["stop_reason"]) == ({"of": "é"}, "tool_use")


def test_a_call_without_text_has_no_content() -> None:
    made = answer(CALL_TEXT.removeprefix("Look.\n"), "tool_calls")
    assert wire.chat_body("id", "m", made)["choices"][0]["message"]["content"] is None
    assert [block["type"] for block in wire.messages_body("id", "m", made)["content"]] == ["tool_use"]


def test_an_answer_without_text_is_an_empty_one() -> None:
    assert wire.chat_body("id", "m", answer(""))["choices"][0]["message"]["content"] == ""
    assert wire.messages_body("id", "m", answer(""))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("finish_reason", "expected"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")]
)
def test_reasons_of_an_end_have_the_words_of_their_api(finish_reason: str, expected: str) -> None:
    assert wire.messages_body("id", "m", answer(finish_reason=finish_reason))["stop_reason"] == expected
    assert (
        wire.chat_body("id", "m", answer(finish_reason=finish_reason))["choices"][0]["finish_reason"] == finish_reason
    )


def test_a_stream_has_the_answer_in_one_piece() -> None:
    made = answer(CALL_TEXT, "tool_calls")
    events = events_of(wire.chat_events("id", "m", made, includes_usage=True))
    assert events[-1] == (None, "[DONE]")
    assert events[0][1]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert events[1][1]["choices"][0]["finish_reason"] == "tool_calls"
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (events[2][1]["choices"], events[2][1]["usage"]) == ([], usage)
    assert len(events_of(wire.chat_events("id", "m", made, includes_usage=False))) == 3


def test_events_of_anthropic_are_named_and_in_order() -> None:
    events = events_of(wire.messages_events("id", "m", answer(CALL_TEXT, "tool_calls")))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    assert events[0][1]["message"]["content"] == []
    assert json.loads(events[5][1]["delta"]["partial_json"]) == {"of": "é"}
    assert events[7][1]["delta"]["stop_reason"] == "tool_use"


def test_texts_have_a_body_and_one_event() -> None:
    assert wire.text_body("id", "m", answer())["choices"][0]["text"] == "Yes."
    assert [data for _, data in events_of(wire.text_events("id", "m", answer()))][1] == "[DONE]"
