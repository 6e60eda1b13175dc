"""Answers of the addresses, made of sampled tokens."""

from __future__ import annotations

from rlmux.service.rollouts.replies import ReplySequence, chat_choice


def test_log_probs_of_a_chat_have_the_bytes_of_each_token_or_null() -> None:
    sampled = ReplySequence(tokens=[7, 8, 9], logprobs=[-1.0, -2.0, -3.0], finish_reason="stop")
    tokens = [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), ("\ufffd", None)]
    content = chat_choice(0, sampled, "é", tokens, is_chunk=False)["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [[0xC3], [0xA9], None]
