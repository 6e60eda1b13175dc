"""Checkpoints are written beside other work: one at a time, reported once they are durable, failures reported too."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.waiting import until

from rlmux.core.errors import StorageError
from rlmux.runtime.weights import checkpoints
from rlmux.runtime.weights.checkpoints import CheckpointStore, CheckpointWriter, prune


def writes_at(signal: threading.Event, made: list[Path]):
    def write(folder: Path) -> str:
        assert signal.wait(timeout=120)
        made.append(folder)
        return f"hash of {folder.name}"

    return lambda: write


def test_a_checkpoint_is_told_of_once_and_not_before_it_is_there(tmp_path):
    writer, may_write, made = CheckpointWriter(), threading.Event(), []
    writer.begin(tmp_path / "step_1", writes_at(may_write, made))
    assert writer.written() == []
    may_write.set()
    writer.wait()
    (written,) = writer.written()
    assert [written.folder] == made == [tmp_path / "step_1"]
    assert written.weights_sha256 == "hash of step_1"
    assert writer.written() == []


def test_the_next_one_is_begun_when_the_one_before_is_there(tmp_path, monkeypatch):
    writer, may_write, made, now_s = CheckpointWriter(), threading.Event(), [], [0.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    writer.begin(tmp_path / "step_1", writes_at(may_write, made))
    seen_at_snapshot = []
    wait = writer.wait

    def ten_seconds_later() -> None:
        now_s[0] = 10.0
        may_write.set()
        wait()

    def snapshot():
        seen_at_snapshot.append(list(made))
        return writes_at(may_write, made)()

    monkeypatch.setattr(writer, "wait", ten_seconds_later)
    writer.begin(tmp_path / "step_2", snapshot)
    writer.wait()
    assert seen_at_snapshot == [[tmp_path / "step_1"]]
    written = writer.written()
    assert [each.folder.name for each in written] == ["step_1", "step_2"]
    assert [each.stall_s for each in written] == [0.0, 10.0], "it waited for the first"


@pytest.mark.parametrize("ask", ["wait", "begin", "written"])
def test_what_writing_raises_is_raised_by_the_next_call_once(tmp_path, ask):
    writer = CheckpointWriter()

    def fail(folder: Path) -> str:
        raise StorageError(f"{folder}: no space left")

    writer.begin(tmp_path / "step_1", lambda: fail)
    with pytest.raises(StorageError, match="step_1: no space"):
        {
            "wait": writer.wait,
            "begin": lambda: writer.begin(tmp_path / "step_2", lambda: fail),
            "written": lambda: until(writer.written, "the error of a write"),
        }[ask]()
    writer.wait()
    assert writer.written() == []


def test_ranks_hear_of_each_other_what_the_one_before_came_to(tmp_path):
    """A rank that failed alone would leave the others waiting for it in the next snapshot."""
    writer, said = CheckpointWriter(), []

    def fail(folder: Path) -> str:
        raise StorageError(f"{folder}: no space left")

    def begin() -> None:
        writer.begin(tmp_path / "step_2", lambda: fail, is_well_everywhere=said.append)

    writer.begin(tmp_path / "step_1", lambda: fail)
    with pytest.raises(StorageError, match="step_1: no space"):
        begin()
    with pytest.raises(StorageError, match="another rank could not write"):
        begin()
    assert said == [False, True]


def test_a_rank_that_writes_its_rows_alone_reports_no_checkpoint(tmp_path):
    writer = CheckpointWriter()
    writer.begin(tmp_path / "step_1", lambda: lambda folder: None)
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


def test_one_that_a_worker_completes_while_leftovers_are_removed_is_let_be(tmp_path, monkeypatch):
    """The worker was killed and has not died yet."""
    names = ("step_3.tmp-7", ".latest.tmp-7", "step_2.old-7")
    for name in names:
        (tmp_path / name).mkdir() if name.startswith("step") else (tmp_path / name).touch()
    (tmp_path / "step_2").mkdir()
    is_dir = Path.is_dir

    def is_dir_and_completed(path: Path) -> bool:
        was_dir = is_dir(path)
        if path.name in names[:2]:
            path.rename(tmp_path / ("step_3" if was_dir else "latest"))
        return was_dir

    monkeypatch.setattr(Path, "is_dir", is_dir_and_completed)
    CheckpointStore(tmp_path).remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_2", "step_3"]


def test_pruning_what_another_has_pruned_is_no_failure(tmp_path, monkeypatch):
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
    rename = Path.rename

    def after_another(path: Path, to: Path) -> Path:
        path.rmdir()
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", after_another)
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
