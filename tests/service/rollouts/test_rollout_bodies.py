"""What the rollout addresses serve, and refuse by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlmux.core.errors import UserError
from rlmux.service.rollouts import replies
from rlmux.service.rollouts.rollout_bodies import Chat, Completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages: tool_calls"),
    ],
)
def test_what_would_change_an_answer_and_is_not_served_is_refused_by_name(asked: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is not served: leave it out"):
        Chat(**{**CHAT, **asked}).check()


def test_what_changes_nothing_is_taken() -> None:
    Chat(**CHAT, tool_choice="none", reasoning_effort="none", modalities=["text"], parallel_tool_calls=True).check()


def test_options_of_a_stream_need_one() -> None:
    with pytest.raises(UserError, match="stream_options: accepted with stream: true"):
        Completion(model="m", prompt="a", stream_options={"include_usage": True}).check()
    assert Completion(model="m", prompt="a", stream=True, stream_options={"include_usage": True}).includes_usage
    assert not Chat(**CHAT, stream=True).includes_usage


def test_a_stream_ends_with_the_tokens_where_they_are_asked_for() -> None:
    answer = replies.envelope("chat.completion.chunk", "r", "m", [{"index": 0}, {"index": 1}])
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}

    def told(asked: dict[str, int] | None) -> list[tuple[int, Any]]:
        *events, done = [event.removeprefix("data: ").strip() for event in replies.stream(answer, asked)]
        assert done == "[DONE]"
        return [(len(each["choices"]), each.get("usage", "absent")) for each in map(json.loads, events)]

    assert told(None) == [(1, "absent")] * 2
    assert told(usage) == [(1, None), (1, None), (0, usage)]
