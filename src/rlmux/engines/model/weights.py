"""Weights as files, with checksums that prove their integrity.

    train engine ──write_tensors──▶ NAME.tmp-PID ──rename──▶ NAME ──read_weights──▶ rollout engine
                                    a checksum in every one; SHA-256 in those of checkpoints

Invariant: a file that can be seen under its own name is whole. Tied parameters are written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlmux.core.errors import PipelineError
from rlmux.engines.model.mapped_file import part_of_file, version_file, whole_file
from rlmux.engines.model.weight_checksum import CHECKSUM, Sample, weights_checksum
from rlmux.engines.residency import bytes_of, host_copy
from rlmux.engines.spare_files import opened_to_read
from rlmux.rl.origin import Origin

MODEL_FILE = "model.safetensors"
"""Name of the weights in a checkpoint."""
SHA256 = "weights_sha256"
"""Key of the weights' hash in a file's metadata, checkpoints and logs."""


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, shapes and bytes in name order."""
    digest = WeightsSha256()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest()


class WeightsSha256:
    """`weights_sha256` of tensors that are there one at a time."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor in name order."""
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        host = tensor.detach().cpu().contiguous()
        self._digest.update(bytes_of(host))

    def hexdigest(self) -> str:
        """The hash of the tensors so far."""
        return self._digest.hexdigest()


_SUMS: Mapping[str, Callable[[Mapping[str, Tensor], str], str]] = {
    CHECKSUM: lambda tensors, written: weights_checksum(tensors, Sample.of_checksum(written)),
    SHA256: lambda tensors, _: weights_sha256(tensors),
}
"""What computes a sum of tensors to compare it with one that was written, by key in a file's metadata."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file aside, then rename it into place. One tensor at a time is copied."""
    ordered = {name: tensors[name].detach() for name in sorted(tensors)}
    stream_tensors(path, ordered, ordered.values(), lambda: metadata)


def publish_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """`write_tensors` into shared memory, over the file of a version that was given up.

    Raises OSError where there is no room.
    """
    ordered = {name: tensors[name].detach() for name in sorted(tensors)}
    publish_pieces(path, ordered, ordered.values(), lambda: metadata)


def publish_pieces(
    path: Path, forms: Mapping[str, Tensor], pieces: Iterable[Tensor], metadata: Callable[[], Mapping[str, str]]
) -> None:
    """`stream_tensors` into shared memory, over the file of a version that was given up (`mapped_file.retire`).

    Raises OSError where there is no room.
    """
    header = _header(forms, metadata())
    at, num_bytes = len(header), len(header) + sum(form.numel() * form.element_size() for form in forms.values())
    with version_file(path, num_bytes) as target:
        for piece in pieces:
            content = piece.detach().contiguous().flatten().view(torch.uint8)
            target[at : at + len(content)].copy_(content, non_blocking=True)
            at += len(content)
        target[: len(header)] = torch.frombuffer(bytearray(_header(forms, metadata())), dtype=torch.uint8)


def own_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Independent copies in host memory."""
    return {name: host_copy(tensor.detach()) for name, tensor in tensors.items()}


def write_copies(path: Path, copies: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """`write_tensors` for the output of `own_copies`, by safetensors itself."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    save_file(dict(copies), aside, metadata={"format": "pt", **metadata})
    _sort_metadata(aside)
    aside.replace(path)


def stream_tensors(
    path: Path, forms: Mapping[str, Tensor], pieces: Iterable[Tensor], metadata: Callable[[], Mapping[str, str]]
) -> None:
    """`write_tensors` without whole copies: piece by piece, with the bytes of `write_copies` for tensors of one type.

    forms     the file's tensors in name order: shapes and types alone count
    pieces    their content in that order, cut anywhere
    metadata  called before the first piece and after the last: values of the same lengths
    """
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with aside.open("wb") as file:
        file.write(_header(forms, metadata()))
        for piece in pieces:
            host = piece.detach().cpu().contiguous()
            file.write(bytes_of(host))
        file.seek(0)
        file.write(_header(forms, metadata()))
    aside.replace(path)


_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
_DTYPES = {name: dtype for dtype, name in _TYPE_NAMES.items()}


def _header(forms: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted({"format": "pt", **metadata}.items()))}
    end = 0
    for name, form in forms.items():
        begin, end = end, end + form.numel() * form.element_size()
        header[name] = {"dtype": _TYPE_NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [begin, end]}
    written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-len(written) // 8) * 8
    return struct.pack("<Q", length) + written.ljust(length)


def _sort_metadata(path: Path) -> None:
    """Sort a file's metadata, which the library writes in random order, so that equal contents give equal bytes."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(written) <= length, "another order takes no more room"
        file.seek(8)
        file.write(written.ljust(length))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in a file's header."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def check_weights(path: Path, version: int, origin: Origin, published: str | None = None) -> str | None:
    """Check a file's header against what was published; returns its checksum, which `read_weights` verifies.

    `published`: checksum that the trainer published for the version; None: not known. Raises PipelineError for a file
    of another run or plan, of another version, or with another checksum.
    """
    written = read_metadata(path)
    complaint = origin.complaint_about(written)
    if complaint is None and written.get("version") != str(version):
        complaint = f"of version {written.get('version', 'unnamed')}"
    if complaint is None and not _SUMS.keys() & written.keys():
        complaint = "without a checksum"
    if complaint is None and published is not None and written.get(CHECKSUM) != published:
        complaint = f"other weights: their checksum is {written.get(CHECKSUM)}, and the trainer published {published}"
    if complaint is not None:
        raise PipelineError(f"weights of version {version} in {path} are {complaint}")
    return written.get(CHECKSUM)


def read_weights(path: Path, version: int) -> Mapping[str, Tensor]:
    """The tensors of a file of weights, verified by every checksum in the file; each is mapped when it is read.

    Raises PipelineError, with both sums, for a mismatch. A file without checksums is accepted.
    """
    tensors = WeightFile(path)
    for key, compute in _SUMS.items():
        written = tensors.metadata.get(key)
        if written is not None and (found := compute(tensors, written)) != written:
            raise PipelineError(
                f"weights of version {version} in {path} are damaged: their {key.removeprefix('weights_')} is {found}, "
                f"and {written} was written"
            )
    return tensors


class WeightFile(Mapping[str, Tensor]):
    """A safetensors file whose tensors take memory one at a time: each lookup maps one, until its last reference ends.

    The file stays open, so whatever happens to its name meanwhile does not matter.
    """

    def __init__(self, path: Path) -> None:
        """Raises SafetensorError for a file that is not whole."""
        read_metadata(path)
        self._descriptor = opened_to_read(path)
        weakref.finalize(self, os.close, self._descriptor)
        (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
        self._entries: dict[str, Any] = json.loads(os.pread(self._descriptor, length, 8))
        self.metadata: dict[str, str] = self._entries.pop("__metadata__", {})
        self._begin = 8 + length
        self._whole = whole_file(self._descriptor)

    @property
    def is_float(self) -> bool:
        """Whether all tensors are of dtypes that `refresh` reads."""
        dtypes = [_DTYPES.get(entry["dtype"]) for entry in self._entries.values()]
        return all(dtype is not None and dtype.is_floating_point for dtype in dtypes)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = self.begin_of(name), self._begin + entry["data_offsets"][1]
        found = part_of_file(self._descriptor, begin, end) if self._whole is None else self._whole[begin:end]
        return found.view(_DTYPES[entry["dtype"]]).view(entry["shape"])

    def begin_of(self, name: str) -> int:
        """Bytes of the file before those of the tensor."""
        begin: int = self._begin + self._entries[name]["data_offsets"][0]
        return begin

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Rounded(Mapping[str, Tensor]):
    """Tensors of another dtype: each lookup rounds one."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, and the file's metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
