"""LoRA in training: the base stays as it is, and the adapter's tensors are all that is trained, moved and kept."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.engines.test_training_loop import Loop
from tests.engines.test_training_loop import config as loop_config

from rlmux.core.errors import CheckpointError
from rlmux.core.model import Stage
from rlmux.engines.adapters.lora import ADAPTER_FILE, trained_parameters
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weight_checksum import weights_checksum
from rlmux.engines.model.weights import read_tensors
from rlmux.engines.train.train_engine import RL_STAGES, TorchTrainEngine
from rlmux.rl.config import (
    ADAPTER_TARGETS,
    AdapterConfig,
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.rl.types import TrainingBatch, Trajectory, TrajectoryId
from rlmux.rl.vocabulary import CharVocabulary

ADAPTER = AdapterConfig(rank=4, alpha=8.0, targets=ADAPTER_TARGETS)


def config(adapter: AdapterConfig | None = ADAPTER, seed: int = 7, **algorithm: Any) -> TrainingConfig:
    return TrainingConfig(
        name="p",
        seed=seed,
        model=ModelConfig(seed=3),
        adapter=adapter,
        sft_warmup=SftWarmupConfig(num_updates=2, batch_size=4),
        algorithm=AlgorithmConfig(
            **{
                "prompts_per_step": 2,
                "group_size": 2,
                "micro_batch_size": 2,
                "learning_rate": 1e-2,
                "max_mismatch_kl": 100.0,
                **algorithm,
            }
        ),
        rollout=RolloutConfig(max_new_tokens=16),
    )


def batch(step: int) -> TrainingBatch:
    trajectories = []
    for prompt in range(2):
        for sample in range(2):
            random = Random(f"{step}/{prompt}/{sample}")
            tokens = tuple(random.randrange(2, 90) for _ in range(random.randint(3, 16)))
            trajectories.append(
                Trajectory(
                    id=TrajectoryId(step, prompt, sample),
                    prompt_tokens=(5, 6, 7),
                    tokens=tokens,
                    is_sampled=(True,) * len(tokens),
                    logprobs=(-4.0,) * len(tokens),
                    versions=(step - 1,) * len(tokens),
                    reward=random.random(),
                    stop_reason="stop",
                    num_turns=1,
                )
            )
    return TrainingBatch(step=step, trajectories=trajectories, advantages=[1.0, -1.0, 1.0, -1.0])


def warm_engine(training_config: TrainingConfig) -> TorchTrainEngine:
    engine = TorchTrainEngine(training_config)
    engine.run_stage(Stage.SFT_WARMUP, max_seconds=math.inf)
    return engine


def run_step(engine: TorchTrainEngine, step: int, *, leave_before_update: Path | None = None) -> None:
    engine.begin_step(batch(step))
    for stage in RL_STAGES:
        while not engine.run_stage(stage, max_seconds=0.0).is_done:
            if leave_before_update is not None:
                engine.offload(spill_to=leave_before_update)
                engine.load()


def test_training_changes_the_adapter_and_leaves_the_base_as_it_was():
    engine = warm_engine(config())
    run_step(engine, 1)
    base = build_model(ModelConfig(), CharVocabulary().vocab_size, 3).state_dict()
    after = {name.replace(".base_layer.", "."): each for name, each in engine.model.state_dict().items()}
    assert all(torch.equal(after[name], each) for name, each in base.items())
    trained = trained_parameters(engine.model)
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 2 * 7 * 2 + 2  # A and B of seven targets in two blocks, and of the head
    assert all(each.abs().sum() > 0 for name, each in trained.items() if "lora_B" in name)


def test_an_adapter_beside_the_attention_of_a_mixture_of_experts_is_trained():
    adapter = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj", "o_proj"))
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    engine = warm_engine(replace(config(adapter), model=ModelConfig(architecture="qwen3_moe", seed=3, **experts)))
    run_step(engine, 1)
    trained = trained_parameters(engine.model)
    assert len(trained) == 2 * 2 * 2
    assert all(each.abs().sum() > 0 for name, each in trained.items() if "lora_B" in name)


def test_an_adapter_begins_with_b_zero_and_an_a_of_the_pipelines_seed():
    first, again, other = (TorchTrainEngine(config(seed=seed)) for seed in (7, 7, 8))
    assert first.weights_sha256() == again.weights_sha256() != other.weights_sha256()
    parameters = trained_parameters(first.model)
    assert all(not each.any() for name, each in parameters.items() if "lora_B" in name)
    bases = [one.model.get_parameter("model.embed_tokens.weight") for one in (first, other)]
    assert torch.equal(*bases), "model.seed decides the base, whatever the pipeline's seed"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pauses_offloads_and_a_restore_change_no_bit_of_an_adapter(tmp_path, dtype):
    given = replace(config(kl_coef=0.01), train=TrainConfig(dtype=dtype))
    straight = warm_engine(given)
    for step in (1, 2):
        run_step(straight, step)
    moved = warm_engine(given)
    run_step(moved, 1, leave_before_update=tmp_path / "spilled")
    moved.save(tmp_path / "step_1")
    restored = TorchTrainEngine(given)
    restored.restore(tmp_path / "step_1")
    run_step(restored, 2)
    assert restored.weights_sha256() == straight.weights_sha256()


def test_an_adapter_in_bfloat16_has_a_base_of_half_the_bytes_and_float32_weights(tmp_path):
    rounded, exact = (warm_engine(replace(config(), train=TrainConfig(dtype=each))) for each in ("bfloat16", "float32"))
    for engine in (rounded, exact):
        run_step(engine, 1)
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}
    frozen = [
        sum(each.nbytes for each in engine.model.parameters() if not each.requires_grad) for engine in (rounded, exact)
    ]
    assert frozen[0] == frozen[1] / 2
    kept, expected = (engine.snapshot().tensors[ADAPTER_FILE] for engine in (rounded, exact))
    assert any(not torch.equal(tensor, tensor.to(torch.bfloat16).float()) for tensor in kept.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(kept[name], tensor, rtol=0.0, atol=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_with_a_published_adapter_agree_with_its_trainer(tmp_path, dtype):
    given = replace(loop_config(), adapter=ADAPTER, train=TrainConfig(dtype=dtype))
    loop = Loop(given, tmp_path)
    loop.run(2)
    assert loop.metrics["logprob_gap"] < {"float32": 1e-3, "bfloat16": 0.2}[dtype]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # in peft itself
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_peft_loads_a_checkpoint_and_gives_the_trainers_log_probs(tmp_path):
    engine = warm_engine(config())
    run_step(engine, 1)
    engine.save(tmp_path / "step_1")
    base = build_model(ModelConfig(), CharVocabulary().vocab_size, 3)
    loaded = PeftModel.from_pretrained(base, tmp_path / "step_1")
    tokens = torch.tensor([[5, 6, 7, 30, 31, 40, 22]])
    with torch.no_grad():
        theirs = torch.log_softmax(loaded(input_ids=tokens).logits, dim=-1)
        hidden = engine.model.model(
            input_ids=tokens, position_ids=torch.arange(7)[None], runs=[(1, 7)], use_cache=False
        ).last_hidden_state
        ours = torch.log_softmax(engine.model.lm_head(hidden), dim=-1)
    assert torch.allclose(theirs, ours, atol=1e-5)
    plain = torch.log_softmax(build_model(ModelConfig(), CharVocabulary().vocab_size, 3)(tokens).logits, dim=-1)
    assert not torch.allclose(theirs, plain, atol=1e-3), "an adapter that does nothing would prove nothing"


def test_checkpoints_and_published_weights_carry_the_adapter_alone(tmp_path):
    engine = warm_engine(config())
    engine.export_weights(tmp_path / "v0.safetensors")
    engine.save(tmp_path / "step_0")
    tensors, metadata = read_tensors(tmp_path / "v0.safetensors")
    assert set(tensors) == set(trained_parameters(engine.model))
    assert metadata["weights_checksum"] == weights_checksum(tensors) == engine.weights_checksum()
    names = {path.name for path in (tmp_path / "step_0").iterdir()}
    assert {ADAPTER_FILE, "adapter_config.json", "optimizer.safetensors"} <= names
    assert not names & {"model.safetensors", "config.json"}
    full = warm_engine(config(adapter=None))
    full.save(tmp_path / "full")
    sizes = [sum(path.stat().st_size for path in (tmp_path / one).iterdir()) for one in ("step_0", "full")]
    assert sizes[0] < sizes[1] / 2
    fields = json.loads((tmp_path / "step_0" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["peft_type"]) == (4, 8, "LORA")


def test_a_checkpoint_of_the_whole_model_is_refused_by_an_adapter_and_the_other_way_round(tmp_path):
    for adapter, other in ((ADAPTER, None), (None, ADAPTER)):
        folder = tmp_path / f"of-{adapter is not None}"
        warm_engine(config(adapter)).save(folder)
        with pytest.raises(CheckpointError, match=r"safetensors, which pipeline p trains"):
            TorchTrainEngine(config(other)).restore(folder)


def test_a_checkpoint_of_another_rank_is_refused(tmp_path):
    warm_engine(config()).save(tmp_path / "step_0")
    with pytest.raises(CheckpointError, match="holds another model than pipeline p trains"):
        TorchTrainEngine(config(AdapterConfig(rank=2, alpha=8.0))).restore(tmp_path / "step_0")
