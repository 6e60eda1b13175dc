"""Sequences in one row: what each of them gives alone."""

from __future__ import annotations

import random

import pytest
import torch
from tests.engines.conftest import VOCAB_SIZE, make_lively

from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.packed_attention import pack_attention
from rlmux.engines.train.update.micro_batches import TrainingSequence, cut
from rlmux.engines.train.update.training_forward import score_tokens
from rlmux.rl.config import ModelConfig


def sequences(lengths: list[int]) -> list[TrainingSequence]:
    rng = random.Random(3)
    return [
        TrainingSequence(
            prompt_tokens=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))],
            tokens=[rng.randrange(VOCAB_SIZE) for _ in range(length)],
            is_sampled=[True] * length,
            weight=1.0,
        )
        for length in lengths
    ]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_packed_sequence_has_the_log_probs_and_gradients_of_a_plain_forward(architecture: str) -> None:
    plain, packed = (make_lively(build_model(ModelConfig(architecture=architecture), VOCAB_SIZE, 0)) for _ in range(2))
    pack_attention(packed)
    rows = sequences([9, 1, 5, 5, 30, 2])
    (batch,) = cut(rows, 8)
    logprobs = score_tokens(packed, batch, 0.7).logprobs
    by_length = sorted(rows, key=lambda row: row.num_tokens)
    expected = []
    for row in by_length:
        tokens = torch.tensor([[*row.prompt_tokens, *row.tokens]])
        logits = plain(tokens).logits[0, len(row.prompt_tokens) - 1 : -1] / 0.7
        expected.append(torch.log_softmax(logits, -1)[range(len(row.tokens)), tokens[0, len(row.prompt_tokens) :]])
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-4, atol=1e-5)
    logprobs.sum().backward()
    torch.cat(expected).sum().backward()
    for ours, theirs in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_a_sequence_does_not_see_the_one_before_it() -> None:
    model = make_lively(build_model(ModelConfig(), VOCAB_SIZE, 0))
    pack_attention(model)
    rows = sequences([12, 12, 12])
    rows = [TrainingSequence(prompt_tokens=[1], tokens=row.tokens, is_sampled=[True] * 12, weight=1.0) for row in rows]
    with torch.no_grad():
        together = score_tokens(model, cut(rows, 3)[0], 1.0).logprobs
        alone = torch.cat([score_tokens(model, cut([row], 1)[0], 1.0).logprobs for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
