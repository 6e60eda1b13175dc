"""Files of weights in shared memory, written and read through mappings.

    tensors ─▶ version_file, over a spare's memory (spare_files.py) ─▶ whole_file ─▶ fused weights

A process keeps its mappings from version to version: the next version has the same memory, and page faults take longer
than the copy. Where weights are on a GPU, the mappings are registered with it besides, so that copies run at the bus's
rate and without the host. Registering was never run.

A module of its own: it has addresses and the driver, `weights.py` the files' content.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlmux.engines.spare_files import opened_over_spare, unlock

SHARED_MEMORY = Path("/dev/shm")
_READ_ONLY = 8
"""cudaHostRegisterReadOnly."""


@contextlib.contextmanager
def version_file(path: Path, num_bytes: int) -> Iterator[Tensor]:
    """The bytes of a file to come, which gets its name once all are written.

    Raises OSError where there is no room for them.
    """
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with contextlib.ExitStack() as undo:
        descriptor = opened_over_spare(aside)
        undo.callback(aside.unlink, missing_ok=True)
        undo.callback(os.close, descriptor)
        os.ftruncate(descriptor, num_bytes)
        os.posix_fallocate(descriptor, 0, num_bytes)  # a mapping without memory behind it would kill the process
        yield _KEPT.of(descriptor, is_written=True)
        if _has_gpu():
            torch.cuda.synchronize()
        unlock(descriptor)
        aside.rename(path)


def whole_file(descriptor: int) -> Tensor | None:
    """The bytes of a file in shared memory that `opened_to_read` opened, for as long as the descriptor is open; None
    elsewhere. They must not be written."""
    if SHARED_MEMORY.exists() and os.fstat(descriptor).st_dev == SHARED_MEMORY.stat().st_dev:
        return _KEPT.of(descriptor)
    return None


def part_of_file(descriptor: int, begin: int, end: int) -> Tensor:
    """Bytes of a file for as long as the tensor lives, with memory for these alone."""
    skew = begin % mmap.ALLOCATIONGRANULARITY
    return _tensor_over(mmap.mmap(descriptor, skew + end - begin, access=mmap.ACCESS_COPY, offset=begin - skew))[skew:]


def _tensor_over(mapped: mmap.mmap) -> Tensor:
    """All bytes of a mapping, which lives as long as the tensor. torch would warn of one that is only read."""
    held = (ctypes.c_ubyte * len(mapped)).from_address(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    held.mapped = mapped  # type: ignore[attr-defined]  # keeps it
    return torch.frombuffer(held, dtype=torch.uint8)


class _Kept(NamedTuple):
    descriptor: int
    mapped: Tensor
    is_registered: bool


class KeptMappings:
    """Mappings of whole files, until the file is removed."""

    def __init__(self) -> None:
        self._by_file: dict[tuple[int, int, bool], _Kept] = {}
        """By file system, number of the file there, which no other file gets while this one is open, and whether it is
        written."""

    def of(self, descriptor: int, *, is_written: bool = False) -> Tensor:
        """The file's bytes. Where the driver registers none, a GPU's copies are those of any host memory."""
        for key, kept in list(self._by_file.items()):
            if os.fstat(kept.descriptor).st_nlink == 0:
                self._drop(key)
        found = os.fstat(descriptor)
        key = (found.st_dev, found.st_ino, is_written)
        if key in self._by_file and len(self._by_file[key].mapped) != found.st_size:
            self._drop(key)
        if key not in self._by_file:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR if is_written else os.O_RDONLY)  # without the lock
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all page faults in one call
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0)
            mapped = _tensor_over(mmap.mmap(own, found.st_size, flags=flags, prot=prot))
            self._by_file[key] = _Kept(own, mapped, _has_gpu() and _register(mapped, is_written=is_written))
        return self._by_file[key].mapped

    def _drop(self, key: tuple[int, int, bool]) -> None:
        kept = self._by_file.pop(key)
        if kept.is_registered:
            torch.cuda.cudart().cudaHostUnregister(kept.mapped.data_ptr())  # type: ignore[no-untyped-call]
        os.close(kept.descriptor)


def _has_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _register(mapped: Tensor, *, is_written: bool) -> bool:
    flags = 0 if is_written else _READ_ONLY
    error = torch.cuda.cudart().cudaHostRegister(mapped.data_ptr(), len(mapped), flags)  # type: ignore[no-untyped-call]
    return int(error) == 0


_KEPT = KeptMappings()
