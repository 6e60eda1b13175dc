"""Sampled tokens as the answers of each address.

A module of its own: response formats are pure functions, tested without a server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmux.rl.vocabulary import Vocabulary
from rlmux.service.tinker import wire_pb2 as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySequence:
    """One sequence."""

    tokens: Sequence[int]
    """What was sampled, the token that ended it included."""
    logprobs: Sequence[float]
    """One for each token, of the distribution that it was drawn from."""
    finish_reason: str
    """`stop` or `length`."""


def read_sampled(body: bytes) -> list[ReplySequence]:
    """The sequences of a SampleResponse."""
    message = wire.SampleResponse.FromString(body)
    return [
        ReplySequence(
            tokens=np.frombuffer(each.tokens, "<i4").tolist(),
            logprobs=np.frombuffer(each.logprobs, "<f4").tolist(),
            finish_reason="stop" if each.stop_reason == wire.STOP_REASON_STOP else "length",
        )
        for each in message.sequences
    ]


def text_of(sampled: ReplySequence, vocabulary: Vocabulary, stop: Sequence[str]) -> str:
    """Its text, without the stop text that ended it."""
    text = vocabulary.decode(sampled.tokens)
    ends = [place for each in stop if (place := text.find(each)) >= 0]
    return text[: min(ends)] if ends and sampled.finish_reason == "stop" else text


def generated(request_id: str, sampled: Sequence[ReplySequence], texts: Sequence[str] | None) -> dict[str, Any]:
    """Response of /inference/v1/generate. `texts`: if requested."""
    choices = [
        {
            "index": index,
            "token_ids": each.tokens,
            "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": p} for t, p in _pairs(each)]},
            "finish_reason": each.finish_reason,
            **({} if texts is None else {"text": texts[index]}),
        }
        for index, each in enumerate(sampled)
    ]
    return {"request_id": request_id, "choices": choices, "prompt_logprobs": None}


def completion_choice(index: int, sampled: ReplySequence, text: str, tokens: Sequence[str] | None) -> dict[str, Any]:
    """A choice of /v1/completions. `tokens`: text of each token, if log-probs were requested."""
    logprobs = None
    if tokens is not None:
        offsets = [0, *np.cumsum([len(each) for each in tokens]).tolist()][: len(tokens)]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": sampled.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {"index": index, "text": text, "finish_reason": sampled.finish_reason, "logprobs": logprobs}


def chat_choice(
    index: int,
    sampled: ReplySequence,
    text: str,
    tokens: Sequence[tuple[str, bytes | None]] | None,
    *,
    is_chunk: bool,
) -> dict[str, Any]:
    """A choice of /v1/chat/completions, whole or as the one chunk of a stream.

    `tokens`: text and bytes of each token, if log-probs were requested; None for bytes that are not known.
    """
    message = {"role": "assistant", "content": text}
    logprobs = None
    if tokens is not None:
        content = [
            {
                "token": token,
                "logprob": logprob,
                "bytes": None if its_bytes is None else list(its_bytes),
                "top_logprobs": [],
            }
            for (token, its_bytes), logprob in zip(tokens, sampled.logprobs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    choice = {"delta" if is_chunk else "message": message}
    return {"index": index, **choice, "finish_reason": sampled.finish_reason, "logprobs": logprobs}


def envelope(kind: str, request_id: str, model: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the answers of the OpenAI API share."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def usage(num_prompt_tokens: int, sampled: Sequence[ReplySequence]) -> dict[str, int]:
    """Tokens that were read and written."""
    written = sum(len(each.tokens) for each in sampled)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": written,
        "total_tokens": num_prompt_tokens + written,
    }


def stream(answer: Mapping[str, Any], usage: Mapping[str, int] | None) -> Iterator[str]:
    """Server-sent events: each choice in one piece, as sequences are kept whole. `usage`: a last event, if any."""
    usage_field = {} if usage is None else {"usage": None}
    for choice in answer["choices"]:
        yield f"data: {json.dumps({**answer, **usage_field, 'choices': [choice]})}\n\n"
    if usage is not None:
        yield f"data: {json.dumps({**answer, 'usage': usage, 'choices': []})}\n\n"
    yield "data: [DONE]\n\n"


def _pairs(sampled: ReplySequence) -> Iterator[tuple[int, float]]:
    return zip(sampled.tokens, sampled.logprobs, strict=True)
