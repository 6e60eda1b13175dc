"""Weights handed to a server on the same GPUs, piece by piece, without a file.

    mapped file ── one tensor after another ──▶ a buffer on each GPU ── its handle, names, shapes ──▶ server
                                                  the next piece comes once the server has read this one

A server opens a buffer by its handle: vLLM's IPC backend and SGLang's `update_weights_from_tensor` take those that
torch makes for other processes (torch.multiprocessing.reductions). Not run on a GPU: tests hand over files.

A module of its own: it has buffers and handles, and the dialects have the requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlmux.engines.residency import release_storage

_PIECE_BYTES = 1 << 29
"""Bytes of a buffer, unless a tensor is larger. After a sleep they are free: the KV cache comes back later."""


class Buffers(Protocol):
    """The same bytes on each GPU of a server."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """[bytes] uint8, one on each GPU."""

    def handles(self) -> dict[str, Any]:
        """What opens the buffers in another process, by the GPU's UUID: new ones at each call, opened once."""

    def release(self) -> None:
        """Give their memory back to the devices, for good."""


class GpuBuffers:
    """Buffers on all GPUs that this process sees."""

    def __init__(self, num_bytes: int) -> None:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        self.tensors = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in devices]

    def handles(self) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        for tensor in self.tensors:
            torch.cuda.synchronize(tensor.device)
        return {
            str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]  # type: ignore[no-untyped-call]
            for tensor in self.tensors
        }

    def release(self) -> None:
        self.tensors.clear()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # those that the server has opened
        release_storage(torch.device("cuda"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """Some tensors, one behind another in the buffers."""

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Sequence[int]]
    sizes: Sequence[int]
    """Bytes of each."""
    buffers: Buffers

    def views(self, index: int) -> list[tuple[str, Tensor]]:
        """The tensors by name, as they lie in the buffer of this GPU."""
        found, at = [], 0
        for name, dtype, shape, size in zip(self.names, self.dtypes, self.shapes, self.sizes, strict=True):
            found.append((name, self.buffers.tensors[index][at : at + size].view(dtype).view(*shape)))
            at += size
        return found


def buffer_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of buffers that these tensors go through."""
    sizes = [_size(tensor) for tensor in tensors.values()]
    return max(*sizes, min(_PIECE_BYTES, sum(sizes)))


def pieces(tensors: Mapping[str, Tensor], buffers: Buffers) -> Iterator[WeightPiece]:
    """The tensors in their order. A piece's bytes are there until the next one is asked for."""
    room = len(buffers.tensors[0])
    waiting: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if waiting and num_bytes + _size(tensor) > room:
            yield _filled(waiting, buffers)
            waiting, num_bytes = [], 0
        waiting.append((name, tensor))
        num_bytes += _size(tensor)
    if waiting:
        yield _filled(waiting, buffers)


def _filled(tensors: Sequence[tuple[str, Tensor]], buffers: Buffers) -> WeightPiece:
    for buffer in buffers.tensors:
        at = 0
        for _, tensor in tensors:
            buffer[at : at + _size(tensor)].copy_(
                tensor.detach().contiguous().flatten().view(torch.uint8), non_blocking=True
            )
            at += _size(tensor)
    return WeightPiece(
        names=[name for name, _ in tensors],
        dtypes=[tensor.dtype for _, tensor in tensors],
        shapes=[list(tensor.shape) for _, tensor in tensors],
        sizes=[_size(tensor) for _, tensor in tensors],
        buffers=buffers,
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
