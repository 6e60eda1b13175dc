"""Sequences in one row: what each of them gives alone."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from tests.engines.conftest import VOCAB_SIZE, make_lively
from torch import Tensor

from rlmux.engines.model import packed_attention
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


LENGTHS = [9, 1, 5, 5, 30, 2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Starts of each call of a fake that stands for torch's one call: it computes one run after another."""
    seen: list[list[int]] = []

    def fake(query: Tensor, key: Tensor, value: Tensor, *starts_and_longest: Any, **options: Any) -> Tensor:
        starts, starts_of_keys, longest, longest_of_keys = starts_and_longest
        assert starts is starts_of_keys
        assert starts.dtype == torch.int32
        lengths = starts.diff().tolist()
        assert longest == longest_of_keys == max(lengths)
        assert options.pop("window_size") == (-1, 0), "causal"
        assert options.pop("enable_gqa")
        seen.append(starts.tolist())
        rows = [each.transpose(0, 1)[None] for each in (query, key, value)]
        runs = [(1, length) for length in lengths]
        mixed, _ = packed_attention._attend_within_runs(None, *rows, None, runs=runs, scaling=options.pop("scale"))
        assert not options
        return mixed[0]

    monkeypatch.setattr(packed_attention, "_one_call", lambda: fake)
    monkeypatch.setattr(packed_attention, "_has_one_call", lambda device: True)
    return seen


def gradients(model: Any, dtype: torch.dtype) -> list[Tensor]:
    (batch,) = cut(sequences(LENGTHS), 8)
    logprobs = score_tokens(model.to(dtype), batch, 0.7).logprobs
    logprobs.sum().backward()
    return [logprobs.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def test_one_call_a_layer_gives_what_a_call_a_run_gives(calls: list[list[int]]) -> None:
    found, expected = (make_lively(build_model(ModelConfig(), VOCAB_SIZE, 0)) for _ in range(2))
    pack_attention(found)
    pack_attention(expected.requires_grad_(False))
    expected.requires_grad_(True)
    results = gradients(found, torch.bfloat16)
    (batch,) = cut(sequences(LENGTHS), 8)
    lengths = [length for count, length in batch.runs for _ in range(count)]
    assert calls == [[0, *accumulate(lengths)]] * ModelConfig().num_layers
    for one_call, by_runs in zip(results, gradients(expected, torch.bfloat16), strict=True):
        torch.testing.assert_close(one_call, by_runs, rtol=0.1, atol=0.1)
    assert len(calls) == ModelConfig().num_layers


def test_float32_and_a_base_with_frozen_parameters_take_a_call_a_run(calls: list[list[int]]) -> None:
    whole, frozen = (build_model(ModelConfig(), VOCAB_SIZE, 0) for _ in range(2))
    next(frozen.parameters()).requires_grad_(False)
    for model, dtype in ((whole, torch.float32), (frozen, torch.bfloat16)):
        pack_attention(model)
        gradients(model, dtype)
    assert calls == []


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"window": 20}, True),
        ({"window": 19}, False),
        ({"softcap": 30.0}, False),
        ({"sinks": torch.zeros(4)}, False),
        ({"dtypes": [torch.float16] * 3}, True),
        ({"dtypes": [torch.float32] * 3}, False),
        ({"dtypes": [torch.float32, torch.bfloat16, torch.bfloat16]}, False),
        ({"sizes": [64, 64, 128]}, False),
        ({"sizes": [12] * 3}, False),
        ({"sizes": [320] * 3}, False),
        ({"longest": 1}, False),
    ],
)
def test_one_call_is_for_plain_causal_attention_in_half_precision(change: dict[str, Any], fits: bool) -> None:
    given = {"dtypes": [torch.bfloat16] * 3, "sizes": [64] * 3, "longest": 20, **change}
    dtypes, sizes, longest = (given.pop(name) for name in ("dtypes", "sizes", "longest"))
    qkv = [torch.empty(1, 4, 40, size, dtype=dtype) for dtype, size in zip(dtypes, sizes, strict=True)]
    fields: dict[str, Any] = {"scaling": None, "window": None, "softcap": None, "sinks": None, **given}
    assert packed_attention._fits_one_call(qkv, longest, packed_attention._AttentionKind(**fields)) is fits


def raises(*args: Any, **options: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


def sees_nothing(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return query * 0.5


@pytest.mark.parametrize("broken", [raises, sees_nothing])
def test_one_call_that_fails_or_gives_other_numbers_is_not_used(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    agrees, core = packed_attention._one_call_agrees.__wrapped__, torch.device("cpu")
    assert agrees(core)
    monkeypatch.setattr(packed_attention, "_one_call", lambda: broken)
    assert not agrees(core)
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_call_whose_gradients_are_others_again_is_not_used(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady, noise = packed_attention._one_call(), torch.Generator().manual_seed(0)
    assert steady is not None

    def unsteady(query: Tensor, *args: Any, **options: Any) -> Tensor:
        return steady(query + 1e-3 * torch.randn(query.shape, generator=noise).to(query), *args, **options)

    monkeypatch.setattr(packed_attention, "_one_call", lambda: unsteady)
    assert not packed_attention._one_call_agrees.__wrapped__(torch.device("cpu"))


def test_a_core_has_no_one_call() -> None:
    model = build_model(ModelConfig(), VOCAB_SIZE, 0)
    pack_attention(model)
    given = packed_attention.packed_inputs(model, [(2, 3), (1, 4)], torch.device("cpu"))
    assert given == {"runs": [(2, 3), (1, 4)], "starts": None}
    assert packed_attention.sequence_starts([(2, 3), (1, 4)], torch.device("cpu")).tolist() == [0, 3, 6, 10]
    assert packed_attention._one_call() is not None, "this torch has it for GPUs"
