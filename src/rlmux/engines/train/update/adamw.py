"""AdamW over one buffer. (arXiv 1711.05101, algorithm 2; the same numbers as torch.optim.AdamW)

Two moments of each weight (moments.py) and a count are all its state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmux.engines.train.update.moments import make_moments


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

    def __init__(self, weights: Tensor, kind: str = "device") -> None:
        """`kind`: where the moments lie, `train.optimizer_state`."""
        self.moments = make_moments(weights, kind)
        self.num_updates = 0

    def reset(self) -> None:
        """Zero the moments and the count of updates."""
        self.moments.reset()
        self.num_updates = 0

    def update(self, weights: Tensor, gradients: Tensor, learning_rate: float, numbers: AdamWNumbers) -> None:
        """One step with these gradients, in place. Both tensors are contiguous and of one shape."""
        self.num_updates += 1
        flat_weights, flat_gradients = weights.view(-1), gradients.view(-1)
        for part in self.moments.parts():
            first, second = self.moments.load(part)
            self._update(flat_weights[part], flat_gradients[part], first, second, learning_rate, numbers)
            self.moments.store(part, (first, second))

    def _update(
        self,
        weights: Tensor,
        gradients: Tensor,
        first_moment: Tensor,
        second_moment: Tensor,
        learning_rate: float,
        numbers: AdamWNumbers,
    ) -> None:
        beta1, beta2 = numbers.betas
        first_moment.lerp_(gradients, 1 - beta1)
        second_moment.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        first_correction = 1 - beta1**self.num_updates
        second_correction = 1 - beta2**self.num_updates
        denominator = second_moment.sqrt().div_(second_correction**0.5).add_(numbers.epsilon)
        weights.mul_(1 - learning_rate * numbers.weight_decay)
        weights.addcdiv_(first_moment, denominator, value=-learning_rate / first_correction)
