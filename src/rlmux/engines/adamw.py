"""AdamW over one flat buffer. (arXiv 1711.05101, algorithm 2; the same numbers as torch.optim.AdamW)

Two moment buffers and a count are all its state, so a checkpoint is two tensors and a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWNumbers:
    """The numbers of one update beside its learning rate."""

    betas: tuple[float, float]
    """Decay rates of the two moments."""
    epsilon: float = 1e-8
    """Addend of the denominator."""
    weight_decay: float = 0.0
    """Share of a weight, times the learning rate, that an update takes away."""


class AdamW:
    """Weight decay applies to every parameter, as torch does by default."""

    def __init__(self, weights: Tensor) -> None:
        self.first_moment = torch.zeros_like(weights)
        self.second_moment = torch.zeros_like(weights)
        self.num_updates = 0

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """All tensors of its state."""
        return self.first_moment, self.second_moment

    def reset(self) -> None:
        """Zero the moments and the count of updates."""
        self.first_moment.zero_()
        self.second_moment.zero_()
        self.num_updates = 0

    def update(self, weights: Tensor, gradients: Tensor, learning_rate: float, numbers: AdamWNumbers) -> None:
        """One step with these gradients, in place. All tensors are flat and of one size."""
        self.num_updates += 1
        beta1, beta2 = numbers.betas
        self.first_moment.lerp_(gradients, 1 - beta1)
        self.second_moment.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        first_correction = 1 - beta1**self.num_updates
        second_correction = 1 - beta2**self.num_updates
        denominator = self.second_moment.sqrt().div_(second_correction**0.5).add_(numbers.epsilon)
        weights.mul_(1 - learning_rate * numbers.weight_decay)
        weights.addcdiv_(self.first_moment, denominator, value=-learning_rate / first_correction)
