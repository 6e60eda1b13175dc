"""Experts give a row the same bits whatever stands beside it, and a pipeline with them trains as one without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.conftest import VOCAB_SIZE, make_lively
from tests.engines.test_training_loop import Loop, config

from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.model import experts
from rlmux.engines.model.experts import ExpertWeights
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weight_layout import with_hub_names
from rlmux.engines.model.weights import MODEL_FILE, read_tensors
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import ModelConfig, RolloutConfig, TrainConfig

MOE = ModelConfig(architecture="qwen3_moe", num_experts=6, num_experts_per_token=2, moe_intermediate_size=32)


def layer(num_experts: int = 6, *, is_normalized: bool = True) -> ExpertWeights:
    generator = torch.Generator().manual_seed(4)
    hidden, width = 64, 32
    return ExpertWeights(
        router=torch.randn(hidden, num_experts, generator=generator),
        gate_up=torch.randn(num_experts, hidden, 2 * width, generator=generator),
        down=torch.randn(num_experts, width, hidden, generator=generator),
        num_picked=2,
        is_normalized=is_normalized,
    )


def rows(number: int) -> torch.Tensor:
    return torch.randn(number, 64, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("is_normalized", [True, False])
def test_a_row_is_the_weighted_sum_of_its_experts(is_normalized: bool) -> None:
    own, given = layer(is_normalized=is_normalized), rows(5)
    for row, mixed in zip(given, own.mix(given), strict=True):
        weights, picks = torch.softmax(row @ own.router, -1).topk(2)
        weights = weights / weights.sum() if is_normalized else weights
        expected = torch.zeros(64)
        for weight, expert in zip(weights, picks, strict=True):
            gate, up = (row @ own.gate_up[expert]).chunk(2)
            expected += weight * ((torch.nn.functional.silu(gate) * up) @ own.down[expert])
        torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-3)


def test_a_row_has_the_same_bits_whatever_its_neighbours_pick() -> None:
    own, given = layer(), rows(32)
    expected = own.mix(given)
    for crowd in (given[0], given[7], torch.zeros(64)):
        for place in (0, 13, 31):
            others = crowd.expand(32, 64).clone()
            others[place] = given[place]
            assert torch.equal(own.mix(others)[place], expected[place])


def test_more_rows_than_the_largest_batch_are_several_batches() -> None:
    own = layer(num_experts=2)  # every row picks both
    given = rows(3 * experts._SIZES[-1] + 1)
    together = own.mix(given)
    parts = [own.mix(part) for part in torch.split(given, experts._SIZES[-1])]
    torch.testing.assert_close(together, torch.cat(parts), rtol=1e-4, atol=1e-3)


def test_a_size_of_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ExpertWeights._compute

    def rounds(self: ExpertWeights, expert: int, given: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        made = compute(self, expert, given, sizes)
        return made * (1.0 + 1e-6) if sizes == (8,) else made

    monkeypatch.setattr(experts, "_sizes_by_kind", {})
    monkeypatch.setattr(ExpertWeights, "_compute", rounds)
    assert 8 not in layer()._exact_sizes()
    assert layer()._exact_sizes()[-1] == experts._SIZES[-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2", "mistral"])
def test_the_engine_is_exact_with_every_block_that_it_computes(architecture: str, dtype: Any, tmp_path: Path) -> None:
    model = MOE if architecture == "qwen3_moe" else ModelConfig(architecture=architecture)  # type: ignore[arg-type]
    make_lively(build_model(model, VOCAB_SIZE, 0)).save_pretrained(tmp_path)
    engine = SlotRolloutEngine(
        ModelConfig(path=str(tmp_path)),
        RolloutConfig(num_slots=16, max_new_tokens=16, max_prompt_tokens=16, dtype=dtype),
        vocab_size=VOCAB_SIZE,
        seed=0,
    )
    assert {each.name for each in probe_rollout(engine).checks if not each.is_equal} <= {"recomputation"}


def test_engine_and_trainer_of_a_mixture_agree_and_its_gap_is_shown(tmp_path: Path) -> None:
    loop = Loop(replace(config(), model=MOE), tmp_path)
    loop.run(2)
    assert 0.0 < loop.metrics["logprob_gap"] < 1e-3


@pytest.mark.parametrize(
    ("of_training", "of_rollout"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_engine_and_trainer_agree_within_the_rounding_of_bfloat16(
    of_training: Any, of_rollout: Any, tmp_path: Path
) -> None:
    given = config()
    rounded = replace(given, train=TrainConfig(dtype=of_training), rollout=replace(given.rollout, dtype=of_rollout))
    loop = Loop(rounded, tmp_path)
    loop.run(2)
    assert 1e-6 < loop.metrics["logprob_gap"] < 0.2


def test_the_hubs_names_are_those_that_transformers_saves(tmp_path):
    built = build_model(MOE, vocab_size=16, seed=0)
    built.save_pretrained(tmp_path)
    saved, _ = read_tensors(tmp_path / MODEL_FILE)
    named = with_hub_names({name: each.detach() for name, each in built.named_parameters()})
    assert named.keys() == saved.keys()
    assert all(torch.equal(named[name], each) for name, each in saved.items())
