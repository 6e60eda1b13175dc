"""AdamW's two moments of each weight, and their place between two updates.

    device   float32, beside the weights
    cpu      float32, in host memory; a part at a time comes to the device for its update, and goes back
    8bit     on the device, a byte each and a scale for 256 of them, as `torchao` rounds them; a part at a time becomes
             float32 for its update

    for part in moments.parts(): moments.load(part) ─▶ first, second ─▶ updated in place ─▶ moments.store(part, ...)

`device` and `cpu` give the same bits. `cpu` saves nothing where the device is a core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlmux.core.errors import CheckpointError, UserError

PART_SIZE = 2**20
"""Weights per update step if the moments are not on the device in float32; a multiple of a block."""
BLOCK_SIZE = 256
"""Weights that have one scale, with 8 bits."""

Pair = tuple[Tensor, Tensor]
"""First and second moment of some weights, float32, on the device."""


class Moments(ABC):
    """The moments of one flat tensor of weights."""

    def __init__(self, weights: Tensor) -> None:
        self._size = weights.numel()

    def parts(self) -> Sequence[slice]:
        """Weights that are updated one after another."""
        return [slice(start, min(start + PART_SIZE, self._size)) for start in range(0, self._size, PART_SIZE)]

    @abstractmethod
    def load(self, part: slice) -> Pair:
        """Moments of a part, to be changed in place."""

    @abstractmethod
    def store(self, part: slice, pair: Pair) -> None:
        """Store a part's updated moments."""

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """All tensors that hold them, by their names in a file."""

    @property
    def is_on_host(self) -> bool:
        """Whether they are in host memory on any device."""
        return False

    def reset(self) -> None:
        """Back to zero."""
        for tensor in self.named().values():
            tensor.zero_()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of `named`. Raises CheckpointError for moments of another kind."""
        mine = self.named()
        if {name: tensor.shape for name, tensor in tensors.items()} != {
            name: each.shape for name, each in mine.items()
        }:
            raise CheckpointError(
                f"a checkpoint with {', '.join(sorted(tensors)[:4])} is of another train.optimizer_state, sharding or "
                f"model: {', '.join(sorted(mine))} are needed"
            )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


class FloatMoments(Moments):
    """float32, on the device or in host memory."""

    def __init__(self, weights: Tensor, *, is_on_host: bool = False) -> None:
        super().__init__(weights)
        self._device = weights.device
        self._is_on_host = is_on_host
        self.first, self.second = self._zeros(weights), self._zeros(weights)

    def _zeros(self, weights: Tensor) -> Tensor:
        if not self._is_on_host:
            return torch.zeros_like(weights)
        return torch.zeros(weights.shape, pin_memory=weights.device.type == "cuda")

    @property
    def is_on_host(self) -> bool:
        return self._is_on_host

    def parts(self) -> Sequence[slice]:
        return super().parts() if self._is_on_host else [slice(0, self._size)]

    def load(self, part: slice) -> Pair:
        return self._flat(self.first)[part].to(self._device), self._flat(self.second)[part].to(self._device)

    def store(self, part: slice, pair: Pair) -> None:
        if self._is_on_host and self._device.type != "cpu":
            self._flat(self.first)[part].copy_(pair[0])
            self._flat(self.second)[part].copy_(pair[1])

    @staticmethod
    def _flat(tensor: Tensor) -> Tensor:
        return tensor.view(-1)

    def named(self) -> dict[str, Tensor]:
        return {"first_moment": self.first, "second_moment": self.second}


class EightBitMoments(Moments):
    """A byte each, and a scale for each block. (arXiv 2110.02861; torchao.optim)"""

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights)
        self._library = load_torchao()
        num_blocks = -(-self._size // BLOCK_SIZE)
        self._rounded = [
            self._library.zeros((num_blocks * BLOCK_SIZE,), is_signed, BLOCK_SIZE, weights.device)
            for is_signed in (True, False)
        ]

    def load(self, part: slice) -> Pair:
        first, second = (self._of(each, part).dequantize()[: part.stop - part.start] for each in self._rounded)
        return first, second

    def store(self, part: slice, pair: Pair) -> None:
        for rounded, moment in zip(self._rounded, pair, strict=True):
            target = self._of(rounded, part)
            padded = torch.zeros(target.codes.shape, device=moment.device)
            padded[: len(moment)] = moment
            target.copy_(padded)

    def _of(self, rounded: Any, part: slice) -> Any:
        """The blocks of a part; they share memory with all of them."""
        first, end = part.start // BLOCK_SIZE, -(-part.stop // BLOCK_SIZE)
        codes = rounded.codes[first * BLOCK_SIZE : end * BLOCK_SIZE]
        return self._library(codes, rounded.scale[first:end], rounded.qmap, rounded.signed)

    def named(self) -> dict[str, Tensor]:
        names = ("first_moment", "second_moment")
        found = {f"{name}.codes": each.codes for name, each in zip(names, self._rounded, strict=True)}
        return found | {f"{name}.scale": each.scale for name, each in zip(names, self._rounded, strict=True)}


def make_moments(weights: Tensor, kind: str) -> Moments:
    """`kind`: `train.optimizer_state`. Raises UserError for 8bit without its library."""
    if kind == "8bit":
        return EightBitMoments(weights)
    return FloatMoments(weights, is_on_host=kind == "cpu")


def load_torchao() -> Any:
    """torchao's tensor of 8-bit state. Raises UserError where it is not installed."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        text = f"train.optimizer_state: torchao cannot be imported ({error}); accepted: pip install 'rlmux[8bit]'"
        raise UserError(text) from error
    return OptimState8bit
