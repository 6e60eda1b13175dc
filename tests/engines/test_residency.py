"""State that is off its device comes back as it was, and nobody else can read it meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from rlmux.engines.residency import Offloaded


def tensors() -> list[torch.Tensor]:
    awkward = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45])
    return [awkward, torch.arange(12.0).view(3, 4).t(), torch.zeros(0, 3), torch.ones(2, dtype=torch.int64)]


@pytest.mark.parametrize("is_spilled", [False, True])
def test_every_bit_comes_back_and_is_no_longer_the_original(is_spilled: bool, tmp_path: Path) -> None:
    originals = tensors()
    offloaded = Offloaded(originals, spill_to=tmp_path / "spilled" if is_spilled else None)
    assert offloaded.is_on_disk == is_spilled
    for original in originals:
        original.zero_()
    for _ in range(2):
        for copy, expected in zip(offloaded, tensors(), strict=True):
            assert copy.dtype == expected.dtype
            assert copy.contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes()
        offloaded.recall()
    assert not offloaded.is_on_disk


@pytest.mark.parametrize("is_spilled", [False, True])
def test_the_first_of_them_come_back_where_they_were(is_spilled: bool, tmp_path: Path) -> None:
    originals = [tensor.contiguous() for tensor in tensors()]
    offloaded = Offloaded(originals, spill_to=tmp_path / "spilled" if is_spilled else None)
    targets = [torch.full_like(tensor, 7) for tensor in originals[:2]]
    offloaded.copy_to(targets)
    for target, expected in zip(targets, originals, strict=False):
        assert target.numpy().tobytes() == expected.numpy().tobytes()


def test_what_is_spilled_is_its_owners_alone_and_leaves_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def look(path: Path) -> None:
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        unlink(path)

    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", look)
    offloaded = Offloaded(tensors(), spill_to=tmp_path / "spilled")
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []
    assert len(list(offloaded)) == 4


def test_a_file_that_was_cut_short_is_told(tmp_path: Path) -> None:
    offloaded = Offloaded([torch.ones(8)], spill_to=tmp_path / "spilled")
    with pytest.raises(OSError, match="68 bytes too soon"):
        offloaded.copy_to([torch.zeros(25)])


def test_a_file_of_that_name_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "spilled").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Offloaded(tensors(), spill_to=tmp_path / "spilled")
