"""All parameters of a model that are trained in one buffer, and their gradients in another.

    weights    [ embed_tokens | layers.0.q_proj | ... | norm ]   each parameter is a view, so is its gradient
    gradients  [      "       |       "         | ... |  "   ]

One buffer is copied, summed, clipped, optimized and moved in one go. Parameters begin at multiples of
64 bytes, so that kernels see the same alignment whatever happened to the buffer. The gaps stay zero.

A model that computes in bfloat16 has a copy of the weights to compute with, and its gradients are bfloat16, too:

    weights    float32, updated ──round──▶ working    bfloat16, views of it are the model's parameters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlmux.engines.adapters.lora import trained_parameters

_ALIGNMENT_BYTES = 64


class FlatParameters:
    """Owns the trained parameters of a float32 model, only the adapter's if there is one; tied ones count once."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of the model's computation from now on."""
        self._parameters = trained_parameters(model)
        self._offset_by_name, size = offsets_of(self._parameters, dtype)
        device = next(iter(self._parameters.values())).device
        self.weights = torch.zeros(size, device=device)
        self.working = self.weights if dtype == torch.float32 else torch.zeros(size, device=device, dtype=dtype)
        """Weights that the model computes with, the same tensor in float32."""
        self.gradients = torch.zeros(size, device=device, dtype=dtype)
        for name, parameter in self._parameters.items():
            self._view(self.weights, name).copy_(parameter.data)
        self.round()
        self._point_at(self.working)
        for name, parameter in self._parameters.items():
            parameter.grad = self._view(self.gradients, name)

    @property
    def num_parameters(self) -> int:
        """Trained parameters, without the gaps."""
        return sum(each.numel() for each in self._parameters.values())

    @property
    def is_rounded(self) -> bool:
        """Whether the model computes with a copy of the weights in fewer bits."""
        return self.working is not self.weights

    def round(self) -> None:
        """Copy the present weights to the model's working weights."""
        if self.is_rounded:
            self.working.copy_(self.weights)

    def named(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """The tensor of each parameter in `buffer`, the weights by default; views, by their names in a file."""
        chosen = self.weights if buffer is None else buffer
        return {name: self._view(chosen, name) for name in self._parameters}

    def copy_from(self, tensors: dict[str, Tensor], buffer: Tensor | None = None) -> None:
        """Overwrite every parameter in `buffer`, the weights by default."""
        for name, view in self.named(buffer).items():
            view.copy_(tensors[name])

    @contextmanager
    def using(self, buffer: Tensor) -> Iterator[None]:
        """Let the model compute with the weights in `buffer`."""
        self._point_at(buffer)
        try:
            yield
        finally:
            self._point_at(self.working)

    def _point_at(self, buffer: Tensor) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._view(buffer, name)

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        parameter = self._parameters[name]
        offset = self._offset_by_name[name]
        return buffer[offset : offset + parameter.numel()].view(parameter.shape)


def offsets_of(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """(first element of each parameter in the buffer, elements of the buffer). `dtype`: what the model computes in."""
    offset_by_name: dict[str, int] = {}
    size, alignment = 0, _ALIGNMENT_BYTES // dtype.itemsize
    for name, parameter in parameters.items():
        offset_by_name[name] = size
        size += -(-parameter.numel() // alignment) * alignment
    return offset_by_name, size
