from __future__ import annotations

import numpy as np
import pytest
import torch

from rlmux.engines.rollout.sampling import sample, trajectory_uniforms
from rlmux.rl.types import TrajectoryId

HERE = TrajectoryId(3, 2, 1)


def test_uniforms_differ_between_seeds_and_each_part_of_the_id() -> None:
    others = [(6, HERE), (5, TrajectoryId(4, 2, 1)), (5, TrajectoryId(3, 3, 1)), (5, TrajectoryId(3, 2, 2))]
    rows = [trajectory_uniforms(5, HERE, 16)] + [trajectory_uniforms(seed, i, 16) for seed, i in others]
    assert len({number for row in rows for number in row.tolist()}) == 5 * 16


def test_a_longer_budget_leaves_earlier_uniforms_alone() -> None:
    assert np.array_equal(trajectory_uniforms(5, HERE, 100)[:7], trajectory_uniforms(5, HERE, 7))


def test_uniforms_are_the_same_on_every_machine() -> None:
    words = [int(number * 2**32) for number in trajectory_uniforms(5, HERE, 3)]
    assert words == [699188766, 2411852313, 2509801611]


def test_uniforms_are_even_and_below_one() -> None:
    numbers = np.concatenate([trajectory_uniforms(0, TrajectoryId(1, p, 0), 500) for p in range(40)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts - 1000).max() < 150


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    uniforms = torch.linspace(0, 1, 40_001, dtype=torch.float64)[:-1, None]
    tokens, _ = sample(logits.repeat(40_000, 1), uniforms, torch.tensor([[0.7]]))
    share = torch.bincount(tokens.squeeze(1), minlength=4) / 40_000
    assert torch.allclose(share, torch.softmax(logits / 0.7, dim=0), atol=1e-4)


def test_a_logprob_is_that_of_the_distribution_sampled_from() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits.double() / 0.5, dim=-1)
    tokens, logprobs = sample(logits, torch.full((50, 1), 0.3, dtype=torch.float64), torch.tensor([[0.5]]))
    assert (logprobs - expected.gather(1, tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-32])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]])
    tokens, logprobs = sample(logits, torch.tensor([[uniform]], dtype=torch.float64), None)
    assert tokens.item() in (1, 3)
    assert logprobs.item() == pytest.approx(np.log(0.5))
