"""All parameters of a model in one buffer, and their gradients in another.

    weights    [ embed_tokens | layers.0.q_proj | ... | norm ]   each parameter is a view, so is its gradient
    gradients  [      "       |       "         | ... |  "   ]

One buffer is copied, summed, clipped, optimized and moved in one go. Parameters begin at multiples of
64 bytes, so that kernels see the same alignment whatever happened to the buffer. The gaps stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_ALIGNMENT = 16
"""Float32 elements to a multiple of which each parameter begins."""


class FlatParameters:
    """Takes over the parameters of a float32 model; tied ones count once."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._offset_by_name: dict[str, int] = {}
        size = 0
        for name, parameter in self._parameters.items():
            self._offset_by_name[name] = size
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(self._parameters.values())).device
        self.weights = torch.zeros(size, device=device)
        self.gradients = torch.zeros(size, device=device)
        for name, parameter in self._parameters.items():
            self._view(self.weights, name).copy_(parameter.data)
            parameter.grad = self._view(self.gradients, name)
        self._point_at(self.weights)

    def named(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """The tensor of each parameter in `buffer`, the weights by default; views, Hugging Face names."""
        chosen = self.weights if buffer is None else buffer
        return {name: self._view(chosen, name) for name in self._parameters}

    def copy_from(self, tensors: dict[str, Tensor], buffer: Tensor | None = None) -> None:
        """Overwrite every parameter in `buffer`, the weights by default."""
        for name, view in self.named(buffer).items():
            view.copy_(tensors[name])

    @contextmanager
    def using(self, buffer: Tensor) -> Iterator[None]:
        """The model computes with the weights in `buffer` inside."""
        self._point_at(buffer)
        try:
            yield
        finally:
            self._point_at(self.weights)

    def _point_at(self, buffer: Tensor) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._view(buffer, name)

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        parameter = self._parameters[name]
        offset = self._offset_by_name[name]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)
