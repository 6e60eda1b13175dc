"""A checksum of weights for every version: cheap, exact, and computed where the tensors are.

Of large weights a version's checksum covers a sample: names, types and shapes of all tensors, and the bytes of one
tensor in 16, which are others in each version. It names its sample, `16.3-` before the digits, and a reader computes
the same one.

    tensor's bytes ─▶ int64 words [rows, 4096] ─┬─▶ words · odd numbers          mod 2^64 ─┬─▶ blake2b ─▶ 32 hex digits
                                                └─▶ (words >> 32) · odd numbers  mod 2^64 ─┘

Each row of words gives two sums of products with fixed numbers, so a word counts by its value and its place; the
second sum is there for the upper halves, whose upper bits the first one all but loses. Names, types, shapes and the
sums of all rows go into one short hash. Integer sums have no order: the result is the same on every device and with any
number of threads.

It finds what goes wrong by chance: bits that flip, a file cut short, rows or versions mixed up. A change of one word is
always found. It is no proof against a person who wants another model to look like this one: that is SHA-256, which
checkpoints have. A change of this computation takes another key in files and logs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

CHECKSUM = "weights_checksum"
"""Key of the checksum in files' metadata, checkpoints and logs."""
_ROW_WORDS = 4096
_WORD_BYTES = 8
_SMALL_WORDS = 16 * _ROW_WORDS
"""Tensors of fewer words are summed as one, at the end: a norm for itself costs more calls than it has words."""
_ROWS_AT_ONCE = {"cpu": 16, "cuda": 4096}
"""Rows whose upper halves are computed at once: what a core's cache holds, and enough for a GPU to be busy."""
_SAMPLED_ABOVE_BYTES = 64e6
"""Bytes of weights above which a sample is enough: a core sums them in a fifteenth of a second."""
_SAMPLED_ONE_IN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The tensors whose bytes a checksum covers, by their places in name order: `first`, `first + every`, ..."""

    every: int = 1
    first: int = 0

    @classmethod
    def of_version(cls, version: int, tensors: Mapping[str, Tensor]) -> Self:
        """All of small weights and of the first version; else one tensor in 16. Tensors may be on the meta device."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if version <= 1 or num_bytes <= _SAMPLED_ABOVE_BYTES:
            return cls()
        every = min(_SAMPLED_ONE_IN, len(tensors))
        return cls(every=every, first=version % every)

    @classmethod
    def of_checksum(cls, checksum: str) -> Self:
        """The sample that a checksum names."""
        name, is_sampled, _ = checksum.partition("-")
        if not is_sampled:
            return cls()
        every, _, first = name.partition(".")
        return cls(every=int(every), first=int(first))


WHOLE = Sample()


def weights_checksum(tensors: Mapping[str, Tensor], sample: Sample = WHOLE) -> str:
    """Checksum of names, types, shapes and the sample's bytes in name order."""
    checksum = WeightsChecksum(sample)
    for name in sorted(tensors):
        checksum.add(name, tensors[name])
    return checksum.hexdigest()


class WeightsChecksum:
    """`weights_checksum` of tensors that are there one at a time."""

    def __init__(self, sample: Sample = WHOLE) -> None:
        self._sample = sample
        self._num_tensors = 0
        self._names = hashlib.blake2b(digest_size=16)
        self._sums: list[bytes] = []
        """Of each tensor that is not small."""
        self._small: list[Tensor] = []
        self._sums_by_device: dict[torch.device, _Sums] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor in name order. One of at most 512 kB is kept until the end."""
        tensor = tensor.detach()
        self._names.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        self._num_tensors += 1
        if (self._num_tensors - 1) % self._sample.every != self._sample.first:
            return
        words = _words(tensor)
        if len(words) < _SMALL_WORDS:
            self._small.append(words)
        else:
            self._sums.append(self._sums_of(words))

    def hexdigest(self) -> str:
        """The checksum of the tensors so far."""
        digest = self._names.copy()
        for sums in self._sums:
            digest.update(sums)
        if self._small:
            digest.update(self._sums_of(torch.cat([words.to(self._small[0].device) for words in self._small])))
        prefix = "" if self._sample == WHOLE else f"{self._sample.every}.{self._sample.first}-"
        return prefix + digest.hexdigest()

    def _sums_of(self, words: Tensor) -> bytes:
        if words.device not in self._sums_by_device:
            self._sums_by_device[words.device] = _Sums(words.device)
        return self._sums_by_device[words.device].of(words).cpu().numpy().tobytes()


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int64; a copy, filled up with zeros, only where they do not begin or end with a word."""
    flat = tensor.contiguous().flatten()
    begin, num_bytes = flat.storage_offset() * flat.element_size(), flat.numel() * flat.element_size()
    if begin % _WORD_BYTES == 0 and num_bytes % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    filled = torch.zeros(-(-num_bytes // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device=flat.device)
    filled[:num_bytes] = flat.clone().view(torch.uint8)
    return filled.view(torch.int64)


class _Sums:
    """Two sums for each row of words on one device."""

    def __init__(self, device: torch.device) -> None:
        self._numbers, self._upper_numbers = (each.to(device) for each in _numbers())
        num_words = _ROWS_AT_ONCE.get(device.type, _ROWS_AT_ONCE["cpu"]) * _ROW_WORDS
        self._upper = torch.empty(num_words, dtype=torch.int64, device=device)
        """Scratch: memory that is new each time costs more than the sums."""

    def of(self, words: Tensor) -> Tensor:
        """The first sums of all rows, then their second ones; the last row may be shorter."""
        num_whole = len(words) // _ROW_WORDS * _ROW_WORDS
        found = [self._of_rows(some, _ROW_WORDS) for some in torch.split(words[:num_whole], len(self._upper))]
        if num_whole < len(words):
            found.append(self._of_rows(words[num_whole:], len(words) - num_whole))
        return torch.cat([first for first, _ in found] + [second for _, second in found])

    def _of_rows(self, words: Tensor, length: int) -> tuple[Tensor, Tensor]:
        upper = torch.bitwise_right_shift(words, 32, out=self._upper[: len(words)])
        return (
            _products(words.view(-1, length), self._numbers[:length]),
            _products(upper.view(-1, length), self._upper_numbers[:length]),
        )


def _products(rows: Tensor, numbers: Tensor) -> Tensor:
    """The sum of products of each row, which wraps around."""
    if rows.device.type == "cpu":
        return torch.mv(rows, numbers)  # in one pass; other devices have no product of integer matrices
    return (rows * numbers).sum(1)


@cache
def _numbers() -> tuple[Tensor, Tensor]:
    """Odd numbers without a pattern, the same everywhere."""
    drawn = hashlib.shake_128(b"rlmux weights").digest(2 * _ROW_WORDS * _WORD_BYTES)
    both = torch.frombuffer(bytearray(drawn), dtype=torch.int64) | 1
    return both[:_ROW_WORDS], both[_ROW_WORDS:]
