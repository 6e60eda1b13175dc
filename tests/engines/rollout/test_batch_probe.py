"""Smaller batches are used only where they give the bits of the full one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlmux.engines.rollout import batch_probe
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import ModelConfig, RolloutConfig

_MM = torch.mm


def few_rows_in_another_order(left: torch.Tensor, right: torch.Tensor, **more: Any) -> torch.Tensor:
    """A matrix product as some libraries have it: few rows are summed in another order, and rounded as all are."""
    if left.shape[0] < 16:
        left, right = left.flip(1), right.flip(0)
    return _MM(left, right, **more)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> batch_probe.BatchProbe:
    monkeypatch.setattr(batch_probe, "is_exact_by_shape", {})
    rollout = RolloutConfig(num_slots=16, max_new_tokens=40, max_prompt_tokens=24, dtype="bfloat16")
    return SlotRolloutEngine(ModelConfig(), rollout, vocab_size=41, seed=0)._probe


def test_sums_in_another_order_are_seen_though_bfloat16_rounds_them_away(
    probe: batch_probe.BatchProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", few_rows_in_another_order)
    with torch.inference_mode():
        assert probe._are_products_exact(16, 16)
        assert not probe._are_products_exact(8, 16)
        assert not probe.is_decode_exact(8, 64, 64)
        monkeypatch.setattr(probe, "_are_products_exact", lambda *sizes: True)
        assert probe.is_decode_exact(8, 64, 64)  # what rounding hides


def test_float32_is_compared_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_probe, "is_exact_by_shape", {})
    rollout = RolloutConfig(num_slots=16, max_new_tokens=40, max_prompt_tokens=24)
    probe = SlotRolloutEngine(ModelConfig(), rollout, vocab_size=41, seed=0)._probe
    monkeypatch.setattr(torch, "mm", few_rows_in_another_order)
    with torch.inference_mode():
        assert probe._are_products_exact(8, 16)
        assert not probe.is_decode_exact(8, 64, 64)
