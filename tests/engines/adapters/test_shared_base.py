"""The base of several adapters lies once in memory, and what is computed with it is what its own copy gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmux.engines.adapters.lora import inject_adapter
from rlmux.engines.adapters.shared_base import SharedBase
from rlmux.engines.model.model_io import build_model
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.rl.config import AdapterConfig, ModelConfig, RolloutConfig, TrainingConfig

ADAPTER = AdapterConfig(rank=2, alpha=4.0)
VOCAB_SIZE = 41


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_mapped_base_computes_what_a_built_one_computes(tmp_path, architecture):
    model = ModelConfig(architecture=architecture)
    mapped = SharedBase(folder=tmp_path, model=model, vocab_size=VOCAB_SIZE, seed=3).build()
    built = build_model(model, VOCAB_SIZE, 3)
    tokens = torch.arange(20)[None]
    assert torch.equal(mapped(tokens).logits, built(tokens).logits)
    assert mapped.lm_head.weight is mapped.model.embed_tokens.weight
    inject_adapter(mapped, ADAPTER, 1)


def test_a_checkpoint_is_mapped_as_it_is(tmp_path, checkpoint, lively_model):
    model = ModelConfig(path=str(checkpoint))
    mapped = SharedBase(folder=tmp_path, model=model, vocab_size=VOCAB_SIZE, seed=0).build()
    tokens = torch.arange(20)[None]
    assert torch.equal(mapped(tokens).logits, lively_model(tokens).logits)


def test_tenants_of_one_base_make_two_files_and_another_seed_makes_its_own(tmp_path):
    for seed, base_seed in ((1, 5), (2, 5), (3, 6)):
        TorchTrainEngine(config(seed, base_seed), bases=tmp_path)
        rollout_engine(base_seed, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_a_switch_of_tenants_moves_the_adapter_and_leaves_the_base_where_it_is(tmp_path):
    """A base of its own moves with the worker; a mapped one does not, and takes none of what the worker holds."""
    shared, own = TorchTrainEngine(config(1, 5), bases=tmp_path), TorchTrainEngine(config(1, 5))
    assert shared.weights_sha256() == own.weights_sha256()
    assert own.resident_bytes() > 4 * shared.resident_bytes()
    for engine in (shared, own):
        engine.offload()
        assert engine.resident_bytes() == 0
        engine.load()
    assert shared.weights_sha256() == own.weights_sha256()
    for dtype in ("float32", "bfloat16"):
        rollouts = rollout_engine(5, tmp_path, dtype), rollout_engine(5, None, dtype)
        assert rollouts[1].resident_bytes() > 2 * rollouts[0].resident_bytes()
        assert torch.equal(rollouts[0]._weights.flat, rollouts[1]._weights.flat)


def config(seed: int, base_seed: int) -> TrainingConfig:
    return TrainingConfig(name="p", seed=seed, model=ModelConfig(seed=base_seed), adapter=ADAPTER)


def rollout_engine(seed: int, bases: Path | None, dtype: Any = "float32") -> SlotRolloutEngine:
    rollout = RolloutConfig(num_slots=4, max_new_tokens=8, max_prompt_tokens=8, dtype=dtype)
    return SlotRolloutEngine(ModelConfig(), rollout, vocab_size=VOCAB_SIZE, seed=seed, adapter=ADAPTER, bases=bases)
