"""The memory of a version that nobody needs goes to the next one, and never from under a reader."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from rlmux.engines.spare_files import opened_over_spare, opened_to_read, retire, unlock


def version(folder: Path, number: int, content: bytes = b"weights") -> Path:
    path = folder / f"{number}.safetensors"
    path.write_bytes(content)
    return path


def test_a_retired_version_is_the_file_that_the_next_one_is_written_over(tmp_path: Path) -> None:
    first = version(tmp_path, 1)
    number = first.stat().st_ino
    retire(first)
    descriptor = opened_over_spare(tmp_path / "3.safetensors.tmp-1")
    assert os.fstat(descriptor).st_ino == number
    os.close(descriptor)
    assert [path.name for path in tmp_path.iterdir()] == ["3.safetensors.tmp-1"]


def test_a_folder_has_one_spare(tmp_path: Path) -> None:
    for number in (1, 2):
        retire(version(tmp_path, number))
    retire(tmp_path / "never-there.safetensors")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_spare_that_is_still_read_is_left_to_its_reader(tmp_path: Path) -> None:
    path = version(tmp_path, 1, b"still needed")
    reader = opened_to_read(path)
    retire(path)
    descriptor = opened_over_spare(tmp_path / "3.safetensors.tmp-1")
    os.write(descriptor, b"written over")
    assert os.pread(reader, 100, 0) == b"still needed"
    for each in (reader, descriptor):
        os.close(each)


def test_without_a_spare_the_file_is_new_whatever_a_killed_writer_left(tmp_path: Path) -> None:
    (tmp_path / "1.tmp").write_bytes(b"half")
    descriptor = opened_over_spare(tmp_path / "1.tmp")
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


def test_a_file_system_without_locks_has_no_spares_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    os.close(opened_to_read(path := version(tmp_path, 1)))
    number = path.stat().st_ino
    retire(path)
    with path.open("wb"):  # keeps the number from being given again
        descriptor = opened_over_spare(tmp_path / "2.tmp")
        assert os.fstat(descriptor).st_ino != number or os.fstat(descriptor).st_size == 0
    unlock(descriptor)
    os.close(descriptor)


def test_a_version_that_was_given_up_while_it_was_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = version(tmp_path, 1)
    lock = fcntl.flock

    def give_up_first(descriptor: int, operation: int) -> None:
        path.rename(tmp_path / "elsewhere")
        version(tmp_path, 1, b"another file under its name")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", give_up_first)
    with pytest.raises(FileNotFoundError, match=r"1\.safetensors"):
        opened_to_read(path)
