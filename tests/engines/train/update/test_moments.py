"""Moments that lie in host memory or have 8 bits: what is learned with them, and where they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engines.train.test_train_engine import batch, config, run_step

from rlmux.core.errors import CheckpointError
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update import moments
from rlmux.engines.train.update.adamw import AdamW, AdamWNumbers
from rlmux.rl.config import TrainConfig
from rlmux.rl.memory import memory_parts

NUMBERS = AdamWNumbers(betas=(0.9, 0.99), weight_decay=0.1)


def trained(kind: str, num_updates: int = 5, *, size: int = 3000) -> tuple[torch.Tensor, AdamW]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(size, generator=generator)
    optimizer = AdamW(weights, kind)
    for _ in range(num_updates):
        optimizer.update(weights, torch.randn(size, generator=generator), 1e-2, NUMBERS)
    return weights, optimizer


def engine(kind: str) -> TorchTrainEngine:
    return TorchTrainEngine(replace(config(), train=TrainConfig(optimizer_state=kind)))


def test_sizes_are_counted_as_they_are() -> None:
    assert (memory_parts.PART_SIZE, memory_parts.BLOCK_SIZE) == (moments.PART_SIZE, moments.BLOCK_SIZE)


def test_moments_in_host_memory_give_the_bits_of_those_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = trained("device")
    monkeypatch.setattr(moments, "PART_SIZE", 1024)
    found, optimizer = trained("cpu")
    assert len(optimizer.moments.parts()) == 3
    assert torch.equal(found, expected)


@pytest.mark.parametrize("is_spilled", [False, True])
def test_moments_in_host_memory_stay_there_unless_they_are_spilled(is_spilled: bool, tmp_path: Path) -> None:
    one, other = engine("cpu"), engine("device")
    run_step(one, batch(1))
    run_step(other, batch(1))
    num_bytes = sum(each.nbytes for each in one._state._host_tensors())
    assert one.resident_bytes() == other.resident_bytes() - num_bytes
    one.offload(spill_to=tmp_path / "spilled" if is_spilled else None)
    held = sum(each.untyped_storage().nbytes() for each in one._state._host_tensors())
    assert held == (0 if is_spilled else num_bytes)
    one.load()
    run_step(one, batch(2))
    run_step(other, batch(2))
    assert one.weights_sha256() == other.weights_sha256()


def test_moments_of_8_bits_learn_nearly_the_same_and_go_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs the 8bit extra: pip install 'rlmux[8bit]'")
    expected, full = trained("device")
    found, optimizer = trained("8bit")
    assert (found - expected).abs().mean() < 0.1 * 5 * 1e-2
    held = sum(each.nbytes for each in optimizer.moments.named().values())
    assert held < 0.27 * sum(each.nbytes for each in full.moments.named().values())
    undisturbed, stopped = engine("8bit"), engine("8bit")
    for one in (undisturbed, stopped):
        run_step(one, batch(1))
    stopped.save(tmp_path / "step_1")
    again = engine("8bit")
    again.restore(tmp_path / "step_1")
    for one in (undisturbed, again):
        run_step(one, batch(2))
    assert again.weights_sha256() == undisturbed.weights_sha256()
    with pytest.raises(CheckpointError, match=r"another train.optimizer_state"):
        engine("device").restore(tmp_path / "step_1")


def test_an_engine_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from rlmux.core.errors import UserError

    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(UserError, match=r"pip install 'rlmux\[8bit\]'"):
        engine("8bit")
