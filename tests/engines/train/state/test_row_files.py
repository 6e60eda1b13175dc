"""Ranks of one machine fill the files of a checkpoint together, and the first waits for the rows of all."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmux.engines.model.weights import SHA256, read_metadata, weights_sha256, write_tensors
from rlmux.engines.train.state.row_files import NO_SHA256, FileForm, KeptCopies, RankRows, RowFiles, begin_files

WEIGHTS = {"bias": torch.arange(2.0), "matrix": torch.arange(12.0).view(4, 3)}
FILE = "model.safetensors"


def form() -> FileForm:
    return FileForm(tensors=WEIGHTS, metadata={"version": "1", SHA256: NO_SHA256})


def rows_of(rank: int) -> list[RankRows]:
    """A row of the bias and two of the matrix."""
    return [
        RankRows(file=FILE, tensor="bias", first=rank, content=WEIGHTS["bias"][rank : rank + 1]),
        RankRows(file=FILE, tensor="matrix", first=6 * rank, content=WEIGHTS["matrix"][2 * rank : 2 * rank + 2]),
    ]


def begun(folder: Path) -> tuple[Path, list[RowFiles]]:
    """A folder aside, and the parts of two ranks in it."""
    aside = begin_files(folder / "run" / "step_1", {FILE: form()})
    return aside, [RowFiles(aside, rank, 2).take(rows_of(rank), FILE, form()) for rank in range(2)]


def test_the_first_rank_waits_for_the_rows_of_the_others(tmp_path: Path) -> None:
    aside, (first, second) = begun(tmp_path)
    order: list[str] = []
    has_written = threading.Event()

    def end() -> None:
        first.write()
        has_written.set()
        first.join()
        order.append("joined")

    ending = threading.Thread(target=end)
    ending.start()
    assert has_written.wait(timeout=120)
    order.append("second")
    second.write()
    ending.join()
    assert order == ["second", "joined"]
    assert [path.name for path in aside.iterdir()] == [FILE]


def test_rows_in_any_order_give_the_bytes_of_one_writer(tmp_path: Path) -> None:
    aside, (first, second) = begun(tmp_path)
    second.write()
    first.write()
    first.join()
    sha256 = weights_sha256(WEIGHTS)
    write_tensors(tmp_path / FILE, WEIGHTS, {"version": "1", SHA256: sha256})
    assert (aside / FILE).read_bytes() == (tmp_path / FILE).read_bytes()
    assert read_metadata(aside / FILE)[SHA256] == sha256


def test_what_no_rank_writes_is_zero(tmp_path: Path) -> None:
    aside, (first, _) = begun(tmp_path)
    first.write()
    found: Mapping[str, torch.Tensor] = load_file(aside / FILE)
    assert found["bias"].tolist() == [0.0, 0.0]
    assert found["matrix"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [0.0] * 3, [0.0] * 3]


def test_a_rank_that_leaves_without_a_word_is_not_waited_for(tmp_path: Path) -> None:
    _, (first, second) = begun(tmp_path)
    first.write()
    second.leave()
    with pytest.raises(OSError, match="rank 1 did not write its rows: it left no word"):
        first.join()


def test_copies_are_those_of_the_moment_and_their_memory_is_kept() -> None:
    copies, rows = KeptCopies(), rows_of(0)
    first = [each.content for each in copies.of(rows)]
    assert [each.tolist() for each in first] == [each.content.tolist() for each in rows]
    later = copies.of([RankRows(file=FILE, tensor="bias", first=0, content=torch.tensor([7.0])), rows[1]])
    assert [each.content.data_ptr() for each in later] == [each.data_ptr() for each in first]
    assert later[0].content.tolist() == [7.0]
    assert later[1].content.data_ptr() != rows[1].content.data_ptr()
