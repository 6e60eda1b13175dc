"""Figures of an update's micro-batches: computed on the device, copied to the host behind its work, read once.

    micro-batch 1 ─▶ [figures] ─┐
    micro-batch 2 ─▶ [figures] ─┼─ host memory, filled when the device gets there ─▶ read: one wait
    micro-batch 3 ─▶ [figures] ─┘

A number that is read from a device waits for all work before it, and then the device waits for work: one read of each
micro-batch costs more than its figures are worth.

Invariants: `add` does not wait for the device. No figure takes memory on the device once it is copied, so training can
be offloaded between two micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlmux.core.errors import PipelineError


class Figures:
    """Rows of figures, one for each micro-batch of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[tuple[int, Tensor]] = []

    def add(self, leaf: int, figures: Sequence[Tensor]) -> None:
        """Add the figures of a micro-batch, each a tensor of one number; as float32, so counts are below 2^24."""
        row = torch.stack([figure.detach().to(torch.float32) for figure in figures])
        self._rows.append((leaf, copy_to_host(row)))

    def read(self) -> list[tuple[float, ...]]:
        """(leaf, *figures) of each micro-batch since the last call, in order of arrival. Waits for the device."""
        wait_for(self._device)
        rows, self._rows = self._rows, []
        return [(leaf, *row.tolist()) for leaf, row in rows]


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, without its graph; the tensor itself if it is there.

    Work of the same device that is queued later finds the content; the host finds it after `wait_for`.
    """
    return tensor.detach().to("cpu", non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done the work that is queued for it. Does nothing for a core."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def require_finite(losses: Iterable[float], place: str) -> None:
    """Raises PipelineError, beginning with `place`, for the first loss that is not finite."""
    for loss in losses:
        if not math.isfinite(loss):
            raise PipelineError(f"{place}: the loss is {loss}; the weights are left as they were")
