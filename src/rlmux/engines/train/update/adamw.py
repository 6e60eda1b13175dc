"""AdamW over one buffer, or several together. (arXiv 1711.05101, algorithm 2; the same numbers as torch.optim.AdamW)

Two moments of each weight (moments.py) and a count are all its state.

Kernels run over lists of tensors: 8 launches for as many buffers as are together no larger than the largest one. How
buffers are grouped changes no bit and no peak of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmux.engines.train.update.moments import Moments, make_moments


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
        update_together([self], [weights], [gradients], learning_rate, numbers)


def update_together(
    optimizers: Sequence[AdamW],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    learning_rate: float,
    numbers: AdamWNumbers,
) -> None:
    """`AdamW.update` of several buffers, which have had as many updates."""
    for optimizer in optimizers:
        optimizer.num_updates += 1
    parts = [
        _PartOfBuffer(optimizer.moments, place, weight.view(-1)[place], gradient.view(-1)[place])
        for optimizer, weight, gradient in zip(optimizers, weights, gradients, strict=True)
        for place in optimizer.moments.parts()
    ]
    for group in _groups(parts):
        pairs = [part.moments.load(part.place) for part in group]
        _update(
            group, [list(each) for each in zip(*pairs, strict=True)], optimizers[0].num_updates, learning_rate, numbers
        )
        for part, pair in zip(group, pairs, strict=True):
            part.moments.store(part.place, pair)


@dataclass(frozen=True, slots=True)
class _PartOfBuffer:
    """Weights of one buffer that are updated at once, and their gradients."""

    moments: Moments
    place: slice
    weights: Tensor
    gradients: Tensor


def _groups(parts: Sequence[_PartOfBuffer]) -> Iterator[list[_PartOfBuffer]]:
    """Parts that are together no larger than the largest."""
    most = max((len(part.weights) for part in parts), default=0)
    group: list[_PartOfBuffer] = []
    size = 0
    for part in parts:
        if group and size + len(part.weights) > most:
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part.weights)
    if group:
        yield group


def _update(
    group: Sequence[_PartOfBuffer],
    moments: list[list[Tensor]],
    num_updates: int,
    learning_rate: float,
    numbers: AdamWNumbers,
) -> None:
    weights, gradients = [part.weights for part in group], [part.gradients for part in group]
    first_moments, second_moments = moments
    beta1, beta2 = numbers.betas
    torch._foreach_lerp_(first_moments, gradients, 1 - beta1)
    torch._foreach_mul_(second_moments, beta2)
    torch._foreach_addcmul_(second_moments, gradients, gradients, value=1 - beta2)
    denominators = torch._foreach_sqrt(second_moments)
    torch._foreach_div_(denominators, (1 - beta2**num_updates) ** 0.5)
    torch._foreach_add_(denominators, numbers.epsilon)
    torch._foreach_mul_(weights, 1 - learning_rate * numbers.weight_decay)
    torch._foreach_addcdiv_(weights, first_moments, denominators, value=-learning_rate / (1 - beta1**num_updates))
