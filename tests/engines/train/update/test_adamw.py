"""AdamW over many buffers: the bits of one buffer after another, by the formula's plain operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlmux.engines.train.update import adamw, moments
from rlmux.engines.train.update.adamw import AdamW, AdamWNumbers, update_together

NUMBERS = AdamWNumbers(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
SHAPES = [(40, 16), (7,), (3000,), (0,), (33, 5), (1,), (0, 4)]
"""Of parameters, and of one whose rows other ranks have."""
NUM_UPDATES, RATE = 4, 1e-2


def randoms(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_plain_operations() -> list[Tensor]:
    """One operation after another, one buffer after another."""
    beta1, beta2 = NUMBERS.betas
    weights = randoms(0)
    first, second = ([torch.zeros_like(each) for each in weights] for _ in range(2))
    for update in range(1, NUM_UPDATES + 1):
        for weight, gradient, one, two in zip(weights, randoms(update), first, second, strict=True):
            one.lerp_(gradient, 1 - beta1)
            two.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = two.sqrt().div_((1 - beta2**update) ** 0.5).add_(NUMBERS.epsilon)
            weight.mul_(1 - RATE * NUMBERS.weight_decay)
            weight.addcdiv_(one, denominator, value=-RATE / (1 - beta1**update))
    return weights


@pytest.mark.parametrize("kind", ["device", "cpu"])
@pytest.mark.parametrize("is_together", [True, False])
def test_buffers_updated_together_have_the_bits_of_plain_operations(
    kind: str, is_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "PART_SIZE", 1024)
    weights = randoms(0)
    optimizers = [AdamW(each, kind) for each in weights]
    for update in range(1, NUM_UPDATES + 1):
        gradients = randoms(update)
        if is_together:
            update_together(optimizers, weights, gradients, RATE, NUMBERS)
        else:
            for optimizer, weight, gradient in zip(optimizers, weights, gradients, strict=True):
                optimizer.update(weight, gradient, RATE, NUMBERS)
    assert [each.num_updates for each in optimizers] == [NUM_UPDATES] * len(SHAPES)
    for found, expected in zip(weights, by_plain_operations(), strict=True):
        assert torch.equal(found, expected)


def test_a_group_of_buffers_is_no_larger_than_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []
    update = adamw._update

    def seen(group: Any, *rest: Any) -> None:
        sizes.append([len(part.weights) for part in group])
        update(group, *rest)

    monkeypatch.setattr(adamw, "_update", seen)
    weights = randoms(0)
    update_together([AdamW(each) for each in weights], weights, randoms(1), RATE, NUMBERS)
    assert sizes == [[640, 7], [3000, 0], [165, 1, 0]]


def test_norms_of_several_buffers_have_the_bits_of_one_after_another() -> None:
    together = torch.stack(torch._foreach_norm(randoms(3))).tolist()
    assert together == [float(torch.linalg.vector_norm(each)) for each in randoms(3)]
