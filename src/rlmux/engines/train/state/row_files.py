"""A checkpoint's files of whole tensors, which the ranks of one machine fill beside training, each with its own rows.

    order    every rank    KeptCopies      rows ──copy──▶ host memory, the same at each checkpoint
             first rank    begin_files     model.safetensors   [ header |          hole          ]
             every rank    RowFiles        locks a file of its own, `rank_1`
    thread   every rank    RowFiles.write  model.safetensors   [ header | rows of 0 | rows of 1 ]   fsync, unlock
             first rank    RowFiles.join   waits for the locks, hashes the weights, completes the header

A tensor's rows are one range of bytes in its file, and what no rank writes (gaps between parameters, the end of a
shorter part) is zero, as a hole reads: files have the bytes that one rank writes alone.

Invariant: `join` returns once the rows of all ranks are on disk. A rank that dies loses its lock without a word in its
file, so the first neither waits for it for ever nor takes its rows for written.

Only ranks that see one folder through one system's cache do this: two machines that write neighbouring bytes of a file
may undo each other's, as clients of NFS send whole pages.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from rlmux.engines.model.weights import SHA256, WeightFile, WeightsSha256, stream_tensors, weights_sha256
from rlmux.engines.residency import host_copy
from rlmux.engines.train.state.checkpoint import begin_checkpoint

_DONE = b"done"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """A rank's rows of one parameter, its moments or its reference."""

    file: str
    """Name of their file."""
    tensor: str
    """Name of the tensor in it."""
    first: int
    """Elements of that tensor before them."""
    content: Tensor
    """Contiguous, on any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """A file of tensors without its content."""

    tensors: Mapping[str, Tensor]
    """In name order; shapes and types alone count."""
    metadata: Mapping[str, str]
    """Of the weights, with `NO_SHA256` among it."""


class KeptCopies:
    """Copies of rows in host memory that is kept: fresh memory costs a page fault a page, many times the copy."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int], Tensor] = {}

    def of(self, rows: Sequence[RankRows]) -> list[RankRows]:
        """The rows in host memory, until the next call."""
        return [replace(each, content=copy) for each, copy in zip(rows, self._copied(rows), strict=True)]

    def _copied(self, rows: Sequence[RankRows]) -> list[Tensor]:
        kept, self._kept = self._kept, {}
        for each in rows:
            key = each.file, each.tensor, each.first
            copy = kept.get(key)
            if copy is None or (copy.shape, copy.dtype) != (each.content.shape, each.content.dtype):
                self._kept[key] = host_copy(each.content)
            else:
                self._kept[key] = copy.copy_(each.content, non_blocking=True)
        if any(each.content.is_cuda for each in rows):
            torch.cuda.synchronize()
        return list(self._kept.values())


def begin_files(folder: Path, form_by_file: Mapping[str, FileForm]) -> Path:
    """Make the folder aside of a checkpoint, with its files of tensors as holes; returns it. Raises OSError."""
    aside = begin_checkpoint(folder)
    for name, form in form_by_file.items():
        path = aside / name
        stream_tensors(path, form.tensors, (), lambda form=form: form.metadata)  # type: ignore[misc]
        size = sum(each.numel() * each.element_size() for each in form.tensors.values())
        os.truncate(path, path.stat().st_size + size)
    return aside


class RowFiles:
    """One rank's part in the files of a folder aside."""

    def __init__(self, aside: Path, rank: int, count: int) -> None:
        """Takes the rank's lock; the first has none. Raises OSError where the folder is not seen, or has no locks."""
        self._aside = aside
        self._count = count
        self.rows: Sequence[RankRows] = ()
        """In host memory."""
        self._weights: tuple[str, FileForm] | None = None
        self._mark = None if rank == 0 else os.open(_mark_of(aside, rank), os.O_CREAT | os.O_WRONLY, 0o600)
        found = aside.stat()
        self.place = f"{_machine()} {found.st_dev} {found.st_ino}"
        """What ranks have in common that see the folder through one cache."""
        if self._mark is not None:
            fcntl.flock(self._mark, fcntl.LOCK_EX)

    def take(self, rows: Sequence[RankRows], weights_file: str, form: FileForm) -> RowFiles:
        """Take rows in host memory, to be left alone until they are written; `form`: of the file with the weights."""
        self.rows, self._weights = rows, (weights_file, form)
        return self

    def write(self) -> None:
        """Write the rows to their places, durably. Raises OSError, after it told the first rank."""
        try:
            for name, rows in groupby(self.rows, key=lambda each: each.file):
                self._write_into(self._aside / name, list(rows))
            self.leave(_DONE)
        except OSError as error:
            self.leave(str(error).encode())
            raise

    @staticmethod
    def _write_into(path: Path, rows: Sequence[RankRows]) -> None:
        form = WeightFile(path)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            for each in rows:
                at = form.begin_of(each.tensor) + each.first * each.content.element_size()
                _write_at(descriptor, each.content.reshape(-1).view(torch.uint8).numpy().data, at)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def leave(self, word: bytes = b"") -> None:
        """Leave a word to the first rank, and the lock."""
        if self._mark is None:
            return
        mark, self._mark = self._mark, None
        with suppress(OSError):  # on a full disk the word is missing, which says enough
            os.write(mark, word)
        fcntl.flock(mark, fcntl.LOCK_UN)
        os.close(mark)

    def join(self) -> None:
        """Wait for the rows of all ranks, and complete the file of the weights with their SHA-256.

        Raises OSError where a rank could not write its rows, or is gone.
        """
        for rank in range(1, self._count):
            path = _mark_of(self._aside, rank)
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                word = file.read()
            if word != _DONE:
                raise OSError(f"rank {rank} did not write its rows: {word.decode() or 'it left no word'}")
            path.unlink()
        assert self._weights is not None
        weights_file, form = self._weights
        path = self._aside / weights_file
        sha256 = weights_sha256(WeightFile(path))
        header = self._aside / "header"
        stream_tensors(header, form.tensors, (), lambda: {**form.metadata, SHA256: sha256})
        descriptor = os.open(path, os.O_WRONLY)
        try:
            _write_at(descriptor, memoryview(header.read_bytes()), 0)
        finally:
            os.close(descriptor)
        header.unlink()


NO_SHA256 = WeightsSha256().hexdigest()
"""Takes the place of a hash that is not known yet: of the same length."""


def _mark_of(aside: Path, rank: int) -> Path:
    return aside / f"rank_{rank}"


def _machine() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def _write_at(descriptor: int, content: memoryview, at: int) -> None:
    while len(content):
        num_written = os.pwrite(descriptor, content, at)
        content, at = content[num_written:], at + num_written
