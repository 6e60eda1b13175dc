"""Weights in shared memory: the same bytes as on disk, in memory that is mapped once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlmux.engines.model import mapped_file
from rlmux.engines.model.mapped_file import KeptMappings
from rlmux.engines.model.weights import WeightFile, publish_pieces, publish_tensors, write_tensors
from rlmux.engines.spare_files import retire

TENSORS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.arange(10, dtype=torch.float32).to(torch.bfloat16),
    "turned": torch.arange(12.0).view(3, 4).t(),
}


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as shared memory."""
    monkeypatch.setattr(mapped_file, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(mapped_file, "_KEPT", KeptMappings())
    return tmp_path


def test_a_version_has_the_bytes_of_any_other_file_of_weights(shared_memory: Path) -> None:
    publish_tensors(shared_memory / "1", TENSORS, {"version": "1"})
    write_tensors(shared_memory / "written", TENSORS, {"version": "1"})
    assert (shared_memory / "1").read_bytes() == (shared_memory / "written").read_bytes()
    found = WeightFile(shared_memory / "1")
    assert {name: found[name].tolist() for name in found} == {name: each.tolist() for name, each in TENSORS.items()}


def test_a_version_over_a_larger_spare_has_its_own_bytes_alone(shared_memory: Path) -> None:
    publish_tensors(shared_memory / "1", {**TENSORS, "more": torch.ones(10_000)}, {"version": "1"})
    assert WeightFile(shared_memory / "1")["more"].sum() == 10_000  # mapped, and given up
    retire(shared_memory / "1")
    publish_tensors(shared_memory / "2", TENSORS, {"version": "2"})
    write_tensors(shared_memory / "written", TENSORS, {"version": "2"})
    assert (shared_memory / "2").read_bytes() == (shared_memory / "written").read_bytes()
    assert WeightFile(shared_memory / "2")["b"].tolist() == TENSORS["b"].tolist()


def test_versions_in_turn_are_read_from_mappings_that_stay(shared_memory: Path) -> None:
    places: dict[int, set[int]] = {}
    for version in range(1, 6):
        publish_tensors(shared_memory / str(version), {"a": torch.full((5000,), float(version))}, {})
        read = WeightFile(shared_memory / str(version))["a"]
        assert read.unique().tolist() == [version]
        places.setdefault((shared_memory / str(version)).stat().st_ino, set()).add(read.data_ptr())
        retire(shared_memory / str(version - 1))
    assert list(map(len, places.values())) == [1, 1]  # two files in turn, each in its place


def test_a_mapping_ends_once_nobody_has_its_file(shared_memory: Path) -> None:
    kept = KeptMappings()
    (shared_memory / "1").write_bytes(b"a" * 5000)
    (shared_memory / "2").write_bytes(b"b" * 5000)
    first, second = (os.open(shared_memory / name, os.O_RDWR) for name in "12")
    assert kept.of(first).data_ptr() == kept.of(first).data_ptr()
    (shared_memory / "1").unlink()
    kept.of(second)
    assert len(kept._by_file) == 1
    for each in (first, second):
        os.close(each)


def test_what_cannot_be_written_leaves_nothing(shared_memory: Path) -> None:
    def pieces() -> Iterator[torch.Tensor]:
        yield torch.ones(4)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        publish_pieces(shared_memory / "1", {"a": torch.ones(25)}, pieces(), dict)
    assert list(shared_memory.iterdir()) == []


def test_no_room_is_an_error_and_no_signal(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, begin: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        publish_tensors(shared_memory / "1", TENSORS, {"version": "1"})
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("error", [0, 1])
def test_on_a_gpu_mappings_are_registered_once_or_used_as_they_are(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """With a driver of ours: what it returns decides."""
    calls: list[str] = []
    driver = SimpleNamespace(
        cudaHostRegister=lambda address, length, flags: calls.append(f"register {length} {flags}") or error,
        cudaHostUnregister=lambda address: calls.append("unregister"),
    )
    monkeypatch.setattr(mapped_file, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    publish_tensors(shared_memory / "1", {"a": torch.ones(100)}, {})
    for _ in range(2):
        assert WeightFile(shared_memory / "1")["a"].sum() == 100
    num_bytes = (shared_memory / "1").stat().st_size
    assert calls == [f"register {num_bytes} 0", "synchronize", f"register {num_bytes} 8"]
    (shared_memory / "1").unlink()
    publish_tensors(shared_memory / "2", {"a": torch.ones(100)}, {})
    assert calls.count("unregister") == (0 if error else 2)
