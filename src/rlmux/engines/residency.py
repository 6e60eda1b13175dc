"""Between device and host: what both engines need to leave a device and come back.

    offload:  Offloaded(tensors) ─▶ their device storage to size 0 ─▶ give_back
    load:     device storage back ─▶ copy each tensor of the Offloaded, bit for bit

    HOST   copies in host memory
    DISK   one file, readable by its owner alone. It loses its name as soon as it is written, so it goes with the
           process, however that ends, and holds no host memory but what the system has to spare for its cache

On a CPU both sides are the same memory, and only the storage counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class Offloaded:
    """Tensors that are off their device, in their order."""

    def __init__(self, tensors: Sequence[Tensor], *, spill_to: Path | None = None) -> None:
        """`spill_to`: a name for the file while it is written; None keeps them in host memory."""
        self._num_tensors = len(tensors)
        self._copies = [host_copy(tensor) for tensor in tensors] if spill_to is None else None
        self._file = None if spill_to is None else _nameless_file(spill_to, tensors)

    @property
    def is_on_disk(self) -> bool:
        return self._copies is None

    def recall(self) -> None:
        """From disk to host memory."""
        self._copies, self._file = list(self), None

    def __iter__(self) -> Iterator[Tensor]:
        """Each in host memory, one at a time: what was spilled never needs room for all of it."""
        if self._copies is not None:
            yield from self._copies
            return
        assert self._file is not None
        for number in range(self._num_tensors):
            tensor: Tensor = self._file.get_tensor(str(number))  # type: ignore[no-untyped-call]
            yield tensor.clone()


def _nameless_file(path: Path, tensors: Sequence[Tensor]) -> safe_open:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        save_file({str(number): tensor.detach().cpu().contiguous() for number, tensor in enumerate(tensors)}, path)
        return safe_open(path, framework="pt")
    finally:
        path.unlink()


def host_copy(tensor: Tensor) -> Tensor:
    """In host memory; pinned where the tensor is on a GPU, so that the way back is a direct transfer."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


def give_back(device: torch.device) -> None:
    """Free storage is kept for this process by default: hand it to the others on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
