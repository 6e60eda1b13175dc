"""Messages of both addresses have one form; what a model reads alike is the same."""

from __future__ import annotations

from typing import Any

import pytest

from rlmux.core.errors import UserError
from rlmux.rl.agents.chat_messages import answer_of, from_anthropic, from_openai, goes_on_from, is_same, tools_of

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"of": "fox"}'}}
PARSED = {"type": "function", "id": "c1", "function": {"name": "find", "arguments": {"of": "fox"}}}
USE = {"type": "tool_use", "id": "c1", "name": "find", "input": {"of": "fox"}}


def test_both_addresses_give_the_same_messages() -> None:
    openai = from_openai(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Find "}, {"type": "text", "text": "it."}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "here"},
        ]
    )
    anthropic = from_anthropic(
        [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        [
            {"role": "user", "content": "Find it."},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "here"}]},
        ],
    )
    assert openai == anthropic
    assert openai[2] == {"role": "assistant", "content": "", "tool_calls": [PARSED]}


def test_results_of_tools_come_before_the_text_beside_them() -> None:
    blocks = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]},
        {"type": "tool_result", "tool_use_id": "c2"},
    ]
    made = from_anthropic(None, [{"role": "user", "content": blocks}])
    assert [(each["role"], each["content"]) for each in made] == [("tool", "one"), ("tool", ""), ("user", "Go on.")]


def test_thoughts_of_an_anthropic_answer_are_left_out() -> None:
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"}]
    blocks = [*thoughts, {"type": "text", "text": "Yes."}]
    assert from_anthropic("", [{"role": "assistant", "content": blocks}]) == [{"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "messages: is empty; accepted: a list"),
        ([], "messages: is empty; accepted: a list"),
        (["hello"], "messages[0]: accepted: an object with role and content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]: content that is no text"),
        ([{"role": "user", "content": 5}], "messages[0]: content that is no text"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls: accepted: calls of a function"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls: accepted: calls of a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": "{"}}]}],
            "messages[0].tool_calls: the arguments of 'find' are no JSON",
        ),
    ],
)
def test_messages_of_openai_that_are_none_are_refused(messages: Any, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        from_openai(messages)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages: is empty"),
        ([{"role": "system", "content": "a"}], "messages[0]: accepted: role user or assistant"),
        ([{"role": "user", "content": 5}], "messages[0].content: accepted: a text, or a list of blocks"),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0]: content that is no text"),
        ([{"role": "user", "content": ["a"]}], "messages[0]: content that is no text"),
    ],
)
def test_messages_of_anthropic_that_are_none_are_refused(messages: Any, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        from_anthropic(None, messages)
    assert str(caught.value).startswith(complaint)


def test_tools_of_both_addresses_are_the_same() -> None:
    schema = {"type": "object", "properties": {"of": {"type": "string"}}}
    function = {"name": "find", "description": "Finds.", "parameters": schema}
    made = [{"type": "function", "function": function}]
    assert tools_of([{"type": "function", "function": function}]) == made
    assert tools_of([{"name": "find", "description": "Finds.", "input_schema": schema}]) == made
    assert tools_of([]) is None
    assert tools_of(None) is None
    with pytest.raises(UserError, match=r"^tools\[0\]: accepted: a function with name and parameters"):
        tools_of([{"type": "web_search"}])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Yes.", "Yes.", []),
        ('<tool_call>\n{"name": "find", "arguments": {"of": 1}}\n</tool_call>', "", [("find", {"of": 1})]),
        (
            'Both.\n<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b", "arguments": {}}'
            "</tool_call>",
            "Both.",
            [("a", {}), ("b", {})],
        ),
        ('{"name": "find", "parameters": {"of": 1}}', "", [("find", {"of": 1})]),
        ("<tool_call>{no JSON}</tool_call>", "<tool_call>{no JSON}</tool_call>", []),
        ('<tool_call>{"name": "find", "arguments": 5}</tool_call>', None, []),
        ('<tool_call>{"name": "find", "arguments": {}}', None, []),
        ('{"name": "find", "age": 5}', None, []),
    ],
)
def test_calls_in_an_answer_are_found_where_they_are_json(text: str, content: str | None, calls: list[Any]) -> None:
    message = answer_of(text, has_tools=True, call_ids="call_1_")
    found = message.get("tool_calls", [])
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in found] == calls
    assert [each["id"] for each in found] == [f"call_1_{place}" for place in range(len(calls))]
    assert message["content"] == (text if content is None else content)


def test_without_tools_an_answer_is_text() -> None:
    text = '{"name": "find", "arguments": {}}'
    assert answer_of(text, has_tools=False, call_ids="") == {"role": "assistant", "content": text}


def test_what_a_model_reads_alike_is_the_same_message() -> None:
    said = {"role": "assistant", "content": " Yes.\n"}
    assert is_same(said, {"role": "assistant", "content": "Yes."}), "programs drop blanks around an answer"
    assert not is_same({"role": "user", "content": "Yes. "}, {"role": "user", "content": "Yes."})
    called = {"role": "assistant", "content": "", "tool_calls": [PARSED]}
    assert is_same(called, {**called, "tool_calls": [{**PARSED, "id": "other"}]}), "and name calls anew"
    assert not is_same(called, {"role": "assistant", "content": ""})
    swapped = {**PARSED, "function": {"name": "find", "arguments": {"b": 1, "a": 2}}}
    other = {**PARSED, "function": {"name": "find", "arguments": {"a": 2, "b": 1}}}
    assert is_same({**called, "tool_calls": [swapped]}, {**called, "tool_calls": [other]})


def test_a_chat_goes_on_only_from_a_shorter_one_that_it_begins_with() -> None:
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert goes_on_from([user, said, user], [user, said])
    assert not goes_on_from([user, said], [user, said])
    assert not goes_on_from([user, user, user], [user, said])
