"""What goes forward and backward together."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmux.engines.train.update.micro_batches import TrainingSequence, cut


def sequence(num_tokens: int, *, weight: float = 1.0) -> TrainingSequence:
    return TrainingSequence(
        prompt_tokens=(1, 2), tokens=(3,) * num_tokens, is_sampled=(True,) * num_tokens, weight=weight
    )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 6))
def test_every_sampled_token_is_in_exactly_one_micro_batch(lengths: list[int], size: int) -> None:
    batches = cut([sequence(n, weight=n) for n in lengths], size)
    assert sorted(float(w) for batch in batches for w in batch.weights) == sorted(
        float(n) for n in lengths for _ in range(n)
    )
    assert all(sum(count for count, _ in batch.runs) <= size for batch in batches)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 150))
def test_a_micro_batch_has_no_more_tokens_than_it_may_unless_it_is_one_sequence(
    lengths: list[int], max_tokens: int
) -> None:
    batches = cut([sequence(n) for n in lengths], 4, max_tokens)
    assert sum(batch.num_tokens for batch in batches) == sum(n + 2 for n in lengths)
    assert sum(batch.token_share for batch in batches) == pytest.approx(1.0)
    sizes = [sum(count for count, _ in batch.runs) for batch in batches]
    assert all(batch.num_tokens <= max_tokens or size == 1 for batch, size in zip(batches, sizes, strict=True))
    longest = [length for batch in batches for _, length in batch.runs]
    assert longest == sorted(longest)
    for batch, after in itertools.pairwise(batches):
        assert batch.num_tokens + after.runs[0][1] + 1 > max_tokens  # its first sequence found no room before


def test_nothing_is_computed_for_padding_or_for_last_tokens() -> None:
    lengths = [4] * 6 + [300] * 2 + [7]
    random.Random(0).shuffle(lengths)
    batches = cut([sequence(n) for n in lengths], 8)
    assert [batch.runs for batch in batches] == [[(6, 5), (1, 8), (1, 301)], [(1, 301)]]
    for batch in batches:
        expected = [place for count, length in batch.runs for _ in range(count) for place in range(length)]
        assert batch.positions.tolist() == expected
        assert len(batch.input_tokens) == len(expected)
        assert batch.num_tokens == len(expected) + sum(count for count, _ in batch.runs)


def test_sequences_of_one_length_keep_their_order() -> None:
    batches = cut([sequence(3, weight=w) for w in (0.5, 0.25, 0.125)], 2)
    assert [[float(w) for w in batch.weights[::3]] for batch in batches] == [[0.5, 0.25], [0.125]]


@st.composite
def any_sequence(draw: st.DrawFn) -> TrainingSequence:
    """Some tokens are the environment's, some are stale; demonstrations have neither log-probs nor staleness."""
    num_tokens = draw(st.integers(1, 9))
    flags = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    tokens = draw(st.lists(st.integers(0, 99), min_size=num_tokens + 3, max_size=num_tokens + 3))
    num_prompt = draw(st.integers(1, 3))
    return TrainingSequence(
        prompt_tokens=tokens[:num_prompt],
        tokens=tokens[3:],
        is_sampled=draw(flags),
        weight=draw(st.floats(-2, 2, width=32)),
        advantage=draw(st.floats(-2, 2, width=32)),
        logprobs=draw(st.sampled_from([(), [-0.25 * place for place in range(num_tokens)]])),
        is_stale=draw(st.one_of(st.just(()), flags)),
    )


@given(st.lists(any_sequence(), min_size=1, max_size=12), st.integers(1, 5))
def test_a_micro_batch_holds_its_sequences_token_by_token(sequences: list[TrainingSequence], size: int) -> None:
    ordered = sorted(sequences, key=lambda one: one.num_tokens)
    for number, batch in enumerate(cut(sequences, size)):
        expected = []
        inputs: list[int] = []
        for one in ordered[number * size : (number + 1) * size]:
            before = len(inputs) + len(one.prompt_tokens) - 1
            inputs += [*one.prompt_tokens, *one.tokens][:-1]
            for place in [place for place, is_sampled in enumerate(one.is_sampled) if is_sampled]:
                logprob = one.logprobs[place] if one.logprobs else 0.0
                is_stale = bool(one.is_stale) and one.is_stale[place]
                expected.append((before + place, one.tokens[place], one.weight, one.advantage, logprob, is_stale))
        fields = (batch.sources, batch.targets, batch.weights, batch.advantages, batch.sampled_logprobs, batch.is_stale)
        assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
        assert batch.input_tokens.tolist() == inputs


def test_tensors_are_made_of_all_micro_batches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device waits while a step's batch is cut: whatever the number of micro-batches, lists are read once."""
    made: list[str] = []
    for module, name in [(torch, "tensor"), (np, "array"), (np, "fromiter")]:
        make = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, make=make, name=name, **named: made.append(name) or make(*args, **named)
        )
    counts = []
    for size in (64, 1):
        made.clear()
        assert len(cut([sequence(3)] * 64, size)) == 64 // size
        counts.append(len(made))
    assert counts[0] == counts[1]
