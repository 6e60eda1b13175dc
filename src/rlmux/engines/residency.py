"""Moves an engine's tensors between device and host.

    offload:   Offloaded(tensors) ─▶ their device storage to size 0 ─▶ release_storage
    load:      device storage back ─▶ Offloaded.copy_to(tensors), bit for bit

    HOST   copies in host memory, pinned where the device is a GPU
    DISK   one file, readable only by its owner. It is unlinked on creation, so it disappears with the process, and
           takes no host memory except spare memory for the system's cache

On a CPU both sides are the same memory, and only the storage counts.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None)
_STAGING_BYTES = 32 * 2**20
"""Bytes of pinned host memory between a file and a GPU."""
_LARGE_BYTES = 2**20


class Offloaded:
    """Tensors off their device, in their order."""

    def __init__(self, tensors: Sequence[Tensor], *, spill_to: Path | None = None) -> None:
        """`spill_to`: name of the file while it is made; None keeps the tensors in host memory."""
        self._forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._copies = [host_copy(tensor) for tensor in tensors] if spill_to is None else None
        self._file = None if spill_to is None else _SpillFile(spill_to, tensors)

    @property
    def is_on_disk(self) -> bool:
        """Whether the tensors are spilled and not in host memory."""
        return self._copies is None

    def copy_to(self, tensors: Sequence[Tensor], *, num_skipped: int = 0) -> None:
        """Copy the first `len(tensors)` of them into contiguous tensors, but for the first `num_skipped`; spilled ones
        need no host memory on the way.

        Raises OSError for a spilled file that is too short.
        """
        if self._file is not None:
            self._file.read_into(tensors[num_skipped:], sum(tensor.nbytes for tensor in tensors[:num_skipped]))
            return
        for tensor, copy in islice(zip(tensors, self, strict=False), num_skipped, None):
            tensor.copy_(copy, non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors):
            torch.cuda.synchronize()

    def leave_cache(self) -> None:
        """Drop the system's cache of the file, so that a measured load reads the disk."""
        if self._file is not None:
            self._file.leave_cache()

    def recall(self) -> None:
        """Bring spilled tensors from disk to host memory."""
        self._copies, self._file = list(self), None

    def copy_of(self, tensor: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The copy in host memory of one of the first `tensors`."""
        return next(copy for original, copy in zip(tensors, self, strict=False) if original is tensor)

    def __iter__(self) -> Iterator[Tensor]:
        """Each tensor in host memory, one at a time: spilled ones never need room for all of them."""
        if self._file is None:
            yield from self._copies or ()
            return
        at = 0
        for shape, dtype in self._forms:
            tensor = torch.empty(shape, dtype=dtype)
            self._file.read_into([tensor], at)
            at += tensor.nbytes
            yield tensor


class _SpillFile:
    """The tensors' bytes, one after another."""

    def __init__(self, path: Path, tensors: Sequence[Tensor]) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        path.unlink()
        for tensor in tensors:
            on_host = tensor.detach().cpu().contiguous()
            content = bytes_of(on_host)
            while len(content):
                content = content[os.write(self._descriptor, content) :]

    def read_into(self, tensors: Sequence[Tensor], at: int = 0) -> None:
        for tensor in tensors:
            assert tensor.is_contiguous()
            if tensor.device.type == "cpu":
                self._fill(bytes_of(tensor), at)
            else:
                self._stage(tensor, at)
            at += tensor.nbytes

    def leave_cache(self) -> None:
        os.fsync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _fill(self, content: memoryview, at: int) -> None:
        while len(content):
            num_read = os.preadv(self._descriptor, [content], at)
            if not num_read:
                raise OSError(f"what was spilled ends {len(content)} bytes too soon")
            content, at = content[num_read:], at + num_read

    def _stage(self, tensor: Tensor, at: int) -> None:
        target = tensor.reshape(-1).view(torch.uint8)
        staging = torch.empty(min(_STAGING_BYTES, len(target)), dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(target), _STAGING_BYTES):
            part = staging[: len(target) - start]
            self._fill(bytes_of(part), at + start)
            target[start : start + len(part)].copy_(part)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor that the caller keeps alive.

    Not through `numpy()`: a storage that was lent to numpy cannot be resized any more.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where the tensor is on a GPU, so that the way back is a direct transfer."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor itself in host memory, or its `host_copy`."""
    return tensor if tensor.device.type == "cpu" else host_copy(tensor)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages, each counted once; None counts nothing."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def release_storage(device: torch.device) -> None:
    """Give free device memory back to the device; torch, or on a CPU the C library, keeps it for this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif hasattr(_LIBC, "malloc_trim"):  # glibc's
        _LIBC.malloc_trim(0)


def return_freed_memory() -> None:
    """Make the C library return every large block when it is freed, instead of keeping it in its heap.

    Layers that are gathered and freed leave holes of many sizes there, which came to half of a process's memory.
    """
    if hasattr(_LIBC, "mallopt"):  # glibc's; -3 is M_MMAP_THRESHOLD
        _LIBC.mallopt(-3, _LARGE_BYTES)
