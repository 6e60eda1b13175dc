"""Log-probs and entropies of sampled tokens, a chunk of logits at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tests.engines.conftest import VOCAB_SIZE, make_lively
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.packed_attention import pack_attention
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.train.update.training_forward import TokenScores, score_tokens
from rlmux.rl.config import ModelConfig, TrainConfig

WHOLE = TrainConfig()


def chunks_of(num_rows: int) -> TrainConfig:
    return TrainConfig(logits_chunk_mb=(num_rows + 0.5) * 4 * VOCAB_SIZE / 1e6)


def a_batch() -> MicroBatch:
    rng = random.Random(5)
    sequences = [
        TrainingSequence(
            prompt_tokens=[rng.randrange(VOCAB_SIZE) for _ in range(3)],
            tokens=[rng.randrange(VOCAB_SIZE) for _ in range(length)],
            is_sampled=[True] * length,
            weight=1.0,
        )
        for length in (4, 9, 9, 15)
    ]
    return cut(sequences, 4)[0]


def a_model() -> PreTrainedModel:
    model = make_lively(build_model(ModelConfig(), VOCAB_SIZE, 0))
    pack_attention(model)
    return model


def test_the_rows_of_a_chunk_are_those_that_fit() -> None:
    assert chunks_of(7).rows_of_chunk(VOCAB_SIZE) == 7
    assert TrainConfig(logits_chunk_mb=1e-9).rows_of_chunk(VOCAB_SIZE) == 1
    assert WHOLE.rows_of_chunk(151_936) == 421


@pytest.mark.parametrize("num_rows", [1, 7, 36])
def test_chunks_give_the_log_probs_entropies_and_gradients_of_the_whole(num_rows: int) -> None:
    models, batch = [a_model(), a_model()], a_batch()
    scores = [
        score_tokens(model, batch, 0.7, train=train)
        for model, train in zip(models, (WHOLE, chunks_of(num_rows)), strict=True)
    ]
    for whole, chunked in zip(_tensors(scores[0]), _tensors(scores[1]), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    for each in scores:
        (each.logprobs * torch.linspace(-1, 1, len(batch.targets))).sum().backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def _tensors(scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.logprobs, scores.entropies


def test_a_chunk_that_holds_all_rows_changes_no_bit() -> None:
    batch = a_batch()
    gradients = []
    for train in (WHOLE, chunks_of(len(batch.targets))):
        model = a_model()
        score_tokens(model, batch, 0.7, train=train).logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_tensor_is_larger_than_one_chunk_of_logits(temperature: float) -> None:
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            for each in made if isinstance(made, tuple | list) else [made]:
                is_matrix = isinstance(each, torch.Tensor) and each.ndim == 2 and each.shape[1] == VOCAB_SIZE
                if is_matrix and len(each) != ModelConfig().hidden_size:  # that is the head's, transposed
                    Largest.size = max(Largest.size, len(each))
            return made

    with Largest():
        score_tokens(a_model(), a_batch(), temperature, train=chunks_of(5)).logprobs.sum().backward()
    assert Largest.size == 5


def test_the_entropy_is_that_of_each_tokens_distribution() -> None:
    model, batch = a_model(), a_batch()
    scores = score_tokens(model, batch, 1.0, train=chunks_of(4))
    row = replace(batch, sources=batch.sources[:1], targets=batch.targets[:1])
    every = [
        score_tokens(model, replace(row, targets=torch.tensor([token])), 1.0).logprobs for token in range(VOCAB_SIZE)
    ]
    logprobs = torch.cat(every).detach()
    assert float(scores.entropies[0]) == pytest.approx(-float((logprobs.exp() * logprobs).sum()), rel=1e-5)
