"""What goes forward and backward together."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rlmux.engines.micro_batches import TrainingSequence, cut


def sequence(num_tokens: int, *, weight: float = 1.0) -> TrainingSequence:
    return TrainingSequence(
        prompt_tokens=(1, 2), tokens=(3,) * num_tokens, is_sampled=(True,) * num_tokens, weight=weight
    )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 6))
def test_every_sampled_token_is_in_exactly_one_micro_batch(lengths: list[int], size: int) -> None:
    batches = cut([sequence(n, weight=n) for n in lengths], size, pad_token=0)
    assert sorted(float(w) for batch in batches for w in batch.weights) == sorted(
        float(n) for n in lengths for _ in range(n)
    )
    assert all(len(batch.input_tokens) <= size for batch in batches)


def test_long_sequences_do_not_pad_the_short_ones() -> None:
    lengths = [4] * 12 + [300] * 4
    random.Random(0).shuffle(lengths)
    widths = [batch.input_tokens.shape[1] for batch in cut([sequence(n) for n in lengths], 4, pad_token=0)]
    assert widths == [8, 8, 8, 304]


def test_sequences_of_one_length_keep_their_order() -> None:
    batches = cut([sequence(3, weight=w) for w in (0.5, 0.25, 0.125)], 2, pad_token=0)
    assert [[float(w) for w in batch.weights[::3]] for batch in batches] == [[0.5, 0.25], [0.125]]
