"""What goes forward and backward together."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.engines.micro_batches import TrainingSequence, cut


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
