"""State that is off its device comes back as it was, and nobody else can read it meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from rlmux.engines import residency
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


def test_what_is_spilled_is_its_owners_alone_and_leaves_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def look(path: Path, **words: object) -> object:
        modes.append(stat.S_IMODE(os.stat(path).st_mode))
        return safe_open(path, **words)

    safe_open = residency.safe_open
    monkeypatch.setattr(residency, "safe_open", look)
    offloaded = Offloaded(tensors(), spill_to=tmp_path / "spilled")
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []
    assert len(list(offloaded)) == 4


def test_a_file_of_that_name_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "spilled").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Offloaded(tensors(), spill_to=tmp_path / "spilled")
