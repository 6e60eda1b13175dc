import os
from pathlib import Path

import pytest
import torch

from rlmux.core.errors import CheckpointError
from rlmux.engines.model.weights import read_tensors, weights_sha256, write_tensors
from rlmux.engines.train.state import checkpoint
from rlmux.engines.train.state.checkpoint import begin_checkpoint, end_checkpoint, read_checkpoint


def write_one(folder: Path, text: str = "content", number: int = 7) -> None:
    (begin_checkpoint(folder) / "part.txt").write_text(text)
    end_checkpoint(folder, {"number": number})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_one(tmp_path / "step_1")
    assert read_checkpoint(tmp_path / "step_1")["number"] == 7


def test_writing_again_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    write_one(tmp_path / "step_1", "old", 1)
    write_one(tmp_path / "step_1", "new", 2)
    assert read_checkpoint(tmp_path / "step_1")["number"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_writer_that_dies_leaves_the_old_one(tmp_path: Path) -> None:
    write_one(tmp_path / "step_1")
    (begin_checkpoint(tmp_path / "step_1") / "part.txt").write_text("half")
    assert read_checkpoint(tmp_path / "step_1")["number"] == 7


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    write_one(tmp_path / "step_1")
    damaged = tmp_path / "step_1" / "part.txt"
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"part.txt is damaged"):
        read_checkpoint(tmp_path / "step_1")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"files": 3, "format": 1}'])
def test_a_damaged_state_is_found(tmp_path: Path, text: str) -> None:
    write_one(tmp_path / "step_1")
    (tmp_path / "step_1" / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state.json is damaged"):
        read_checkpoint(tmp_path / "step_1")


def test_a_changed_number_in_the_state_is_found(tmp_path: Path) -> None:
    write_one(tmp_path / "step_1")
    state = tmp_path / "step_1" / "state.json"
    state.write_text(state.read_text().replace('"number": 7', '"number": 8'))
    with pytest.raises(CheckpointError, match=r"state.json is damaged"):
        read_checkpoint(tmp_path / "step_1")


def test_a_missing_file_and_a_newer_format_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"no state.json"):
        read_checkpoint(tmp_path)
    write_one(tmp_path / "step_1")
    os.remove(tmp_path / "step_1" / "part.txt")
    with pytest.raises(CheckpointError, match=r"no part.txt"):
        read_checkpoint(tmp_path / "step_1")
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    write_one(tmp_path / "step_1")
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    with pytest.raises(CheckpointError, match="format 99; this rlmux reads up to 1"):
        read_checkpoint(tmp_path / "step_1")


def test_tensors_come_back_with_their_metadata(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path / "w.safetensors", {"a": whole, "b": whole[:, 1]}, {"version": "3"})
    tensors, metadata = read_tensors(tmp_path / "w.safetensors")
    assert torch.equal(tensors["a"], whole)
    assert tensors["b"].tolist() == [1.0, 5.0, 9.0]
    assert metadata["version"] == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_the_hash_sees_names_values_and_shapes_but_not_order() -> None:
    one, two = torch.ones(4), torch.zeros(4)
    same = {weights_sha256({"a": one, "b": two}), weights_sha256({"b": two, "a": one})}
    others = {
        weights_sha256({"a": two, "b": one}),
        weights_sha256({"a": one, "b": -two}),
        weights_sha256({"a": one.view(2, 2), "b": two}),
    }
    assert len(same) == 1
    assert len(same | others) == 4
