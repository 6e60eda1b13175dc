"""Checkpoints are written beside other work: one at a time, told of when they are there, failures told too."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlmux.core.errors import StorageError
from rlmux.runtime.checkpoints import CheckpointWriter, prune


def writes_at(signal: threading.Event, made: list[Path]):
    def write(folder: Path) -> None:
        assert signal.wait(timeout=30)
        made.append(folder)

    return lambda: write


def test_a_checkpoint_is_told_of_once_and_not_before_it_is_there(tmp_path):
    writer, may_write, made = CheckpointWriter(), threading.Event(), []
    writer.begin(tmp_path / "step_1", writes_at(may_write, made))
    assert writer.written() == []
    may_write.set()
    writer.wait()
    assert [each.folder for each in writer.written()] == made == [tmp_path / "step_1"]
    assert writer.written() == []


def test_the_next_one_is_begun_when_the_one_before_is_there(tmp_path):
    writer, may_write, made = CheckpointWriter(), threading.Event(), []
    writer.begin(tmp_path / "step_1", writes_at(may_write, made))
    seen_at_snapshot = []

    def snapshot():
        seen_at_snapshot.append(list(made))
        return writes_at(may_write, made)()

    threading.Timer(0.05, may_write.set).start()
    writer.begin(tmp_path / "step_2", snapshot)
    writer.wait()
    assert seen_at_snapshot == [[tmp_path / "step_1"]]
    written = writer.written()
    assert [each.folder.name for each in written] == ["step_1", "step_2"]
    assert written[1].stall_s > written[0].stall_s, "it waited for the first"


@pytest.mark.parametrize("ask", ["wait", "begin", "written"])
def test_what_writing_raises_is_raised_by_the_next_call_once(tmp_path, ask):
    writer = CheckpointWriter()

    def fail(folder: Path) -> None:
        raise StorageError(f"{folder}: no space left")

    writer.begin(tmp_path / "step_1", lambda: fail)
    writer._pool.submit(int).result()  # comes after it
    with pytest.raises(StorageError, match="step_1: no space"):
        writer.begin(tmp_path / "step_2", lambda: fail) if ask == "begin" else getattr(writer, ask)()
    writer.wait()
    assert writer.written() == []


def test_pruning_keeps_the_newest_and_never_the_last_one(tmp_path):
    for step in (2, 9, 10, 11):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "state.json").touch()
    (tmp_path / "latest").touch()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_10", "step_11"]
    prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_11"]
