"""Any causal model of transformers trains: each by a tiny random model of its architecture, as a checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engines.conftest import make_lively
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.packed_attention import is_packed
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update import training_forward
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.train.update.training_forward import PACKED, prepare_forward, score_tokens
from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, TrainConfig, TrainingConfig
from rlmux.rl.types import TrainingBatch, Trajectory, TrajectoryId
from rlmux.rl.vocabulary import CharVocabulary

VOCAB_SIZE = CharVocabulary().vocab_size
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 6},
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": 6, "pad_token_id": 0},
    "qwen3_moe": {**_EXPERTS, "output_router_logits": True},
}
_PADDED = ("bloom",)
"""Attention of these cannot be replaced."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """The checkpoint folder of a tiny random model of an architecture, made once."""
    made: dict[str, Path] = {}

    def build(architecture: str) -> Path:
        if architecture not in made:
            torch.manual_seed(0)
            config = AutoConfig.for_model(architecture, **{**_SIZES, **_OWN_OPTIONS.get(architecture, {})})
            folder = tmp_path_factory.mktemp(architecture)
            make_lively(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
            made[architecture] = folder
        return made[architecture]

    return build


def sequences() -> list[TrainingSequence]:
    rng = random.Random(3)
    return [
        TrainingSequence(
            prompt_tokens=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))],
            tokens=[rng.randrange(VOCAB_SIZE) for _ in range(length)],
            is_sampled=[True] * length,
            weight=1.0,
        )
        for length in (9, 1, 5, 5, 20)
    ]


def load(folder: Path) -> PreTrainedModel:
    return build_model(ModelConfig(path=str(folder)), VOCAB_SIZE, 0)


def own_logprobs(model: Any, rows: list[TrainingSequence]) -> torch.Tensor:
    found = []
    for row in sorted(rows, key=lambda row: row.num_tokens):
        tokens = torch.tensor([[*row.prompt_tokens, *row.tokens]])
        logprobs = torch.log_softmax(model(tokens, use_cache=False).logits[0, len(row.prompt_tokens) - 1 : -1], -1)
        found.append(logprobs[range(len(row.tokens)), tokens[0, len(row.prompt_tokens) :]])
    return torch.cat(found)


def batch_of(rows: list[TrainingSequence]) -> MicroBatch:
    (batch,) = cut(rows, len(rows))
    return batch


@pytest.mark.parametrize("architecture", [*PACKED, *_PADDED])
def test_the_training_forward_is_that_of_the_model(architecture: str, folder_of: Any) -> None:
    plain, ours = load(folder_of(architecture)), load(folder_of(architecture))
    prepare_forward(ours, TrainConfig(router_aux_loss_coef=0.0))
    assert is_packed(ours) == (architecture in PACKED)
    rows = sequences()
    logprobs = score_tokens(ours, batch_of(rows), 1.0, train=TrainConfig(router_aux_loss_coef=0.0)).logprobs
    expected = own_logprobs(plain, rows)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=2e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=3e-4)


def config_of(folder: Path, **train: Any) -> TrainingConfig:
    return TrainingConfig(
        name="a",
        model=ModelConfig(path=str(folder)),
        algorithm=AlgorithmConfig(prompts_per_step=2, group_size=2, micro_batch_size=2, max_logprob_gap=100.0),
        rollout=RolloutConfig(max_prompt_tokens=8, max_new_tokens=16),
        train=TrainConfig(**train),
    )


def a_batch(step: int = 1) -> TrainingBatch:
    rng = random.Random(step)
    trajectories = []
    for prompt in range(2):
        for sample in range(2):
            tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 16)))
            trajectories.append(
                Trajectory(
                    id=TrajectoryId(step, prompt, sample),
                    prompt_tokens=(3, 4 + prompt),
                    tokens=tokens,
                    is_sampled=(True,) * len(tokens),
                    logprobs=(-4.0,) * len(tokens),
                    versions=(step - 1,) * len(tokens),
                    reward=float(sample),
                    stop_reason="length",
                    num_turns=1,
                )
            )
    return TrainingBatch(step=step, trajectories=trajectories, advantages=[1.0, -1.0, 0.5, -0.5])


def train(config: TrainingConfig, num_steps: int = 1) -> TorchTrainEngine:
    engine = TorchTrainEngine(config, vocabulary=CharVocabulary())
    for step in range(1, num_steps + 1):
        engine.begin_step(a_batch(step))
        for stage in (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE):
            while not engine.run_stage(stage, max_seconds=100.0).is_done:
                pass
    return engine


@pytest.mark.parametrize("architecture", [*PACKED, *_PADDED])
def test_an_update_step_changes_the_weights_and_is_the_same_twice(
    architecture: str, folder_of: Any, tmp_path: Path
) -> None:
    config = config_of(folder_of(architecture))
    begun_with = TorchTrainEngine(config, vocabulary=CharVocabulary()).weights_sha256()
    once, twice = train(config), train(config)
    assert once.weights_sha256() == twice.weights_sha256() != begun_with
    assert all(torch.isfinite(parameter).all() for parameter in once.model.parameters())
    once.save(tmp_path / "checkpoint")
    loaded = load(tmp_path / "checkpoint")
    for mine, theirs in zip(once.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss", "qwen3_moe", "bloom"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_checkpointing_changes_no_bit(architecture: str, dtype: str, folder_of: Any) -> None:
    plain, checkpointed = (
        train(config_of(folder_of(architecture), dtype=dtype, activation_checkpointing=has)) for has in (False, True)
    )
    assert checkpointed.weights_sha256() == plain.weights_sha256()


@pytest.mark.parametrize("architecture", ["qwen3", "bloom"])
def test_a_checkpointed_layer_keeps_its_input_alone(architecture: str, folder_of: Any) -> None:
    kept = []
    for has in (False, True):
        model = load(folder_of(architecture))
        prepare_forward(model, TrainConfig(activation_checkpointing=has))
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = score_tokens(model, batch_of(sequences()), 1.0)
        assert scores.logprobs.requires_grad
        of_model = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept.append(sum(size for place, size in sizes.items() if place not in of_model))
    assert kept[1] < kept[0] / 2


def test_bfloat16_computes_with_rounded_weights_and_updates_float32_ones(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("qwen3")
    rounded, exact = (train(config_of(folder, dtype=dtype), num_steps=2) for dtype in ("bfloat16", "float32"))
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}
    rounded.export_weights(tmp_path / "published")
    from safetensors.torch import load_file

    published, kept = load_file(tmp_path / "published"), rounded.snapshot().tensors["model.safetensors"]
    for name, tensor in kept.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(published[name], tensor.to(torch.bfloat16))
    assert any(not torch.equal(tensor, tensor.to(torch.bfloat16).float()) for tensor in kept.values())
    for name, tensor in exact.snapshot().tensors["model.safetensors"].items():
        torch.testing.assert_close(kept[name], tensor, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_bfloat16_trainer_is_offloaded_restored_and_repeated_bit_for_bit(
    is_spilled: bool, folder_of: Any, tmp_path: Path
) -> None:
    config = config_of(folder_of("qwen3"), dtype="bfloat16")
    config = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    expected = train(config, num_steps=2).weights_sha256()
    begun = train(config)
    begun.save(tmp_path / "checkpoint")
    engine = TorchTrainEngine(config, vocabulary=CharVocabulary())
    engine.restore(tmp_path / "checkpoint")
    engine.offload(spill_to=tmp_path / "spilled" if is_spilled else None)
    assert engine.resident_bytes() == 0
    engine.load()
    engine.begin_step(a_batch(2))
    for stage in (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE):
        while not engine.run_stage(stage, max_seconds=100.0).is_done:
            pass
    assert engine.weights_sha256() == expected


def test_the_router_loss_is_that_of_transformers_and_reaches_the_gradient(folder_of: Any) -> None:
    plain, ours = load(folder_of("qwen3_moe")), load(folder_of("qwen3_moe"))
    prepare_forward(ours, TrainConfig())
    row = sequences()[-1]
    logprobs = score_tokens(ours, batch_of([row]), 1.0, train=TrainConfig(router_aux_loss_coef=0.5)).logprobs
    (-logprobs.sum()).backward()
    tokens = torch.tensor([[*row.prompt_tokens, *row.tokens]])[:, :-1]
    outputs = plain(tokens, output_router_logits=True, use_cache=False)
    expected = -own_logprobs(plain, [row]).sum() + 0.5 * outputs.aux_loss
    expected.backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-3, atol=3e-4)


@pytest.mark.parametrize("coef", [None, 0.0])
def test_the_router_loss_is_there_where_the_config_asks_for_it(coef: float | None, folder_of: Any) -> None:
    folder = folder_of("qwen3_moe")  # its config.json asks for it
    without = train(config_of(folder, router_aux_loss_coef=0.0)).weights_sha256()
    assert (train(config_of(folder, router_aux_loss_coef=coef)).weights_sha256() == without) == (coef == 0.0)


def test_a_model_that_the_training_forward_does_not_give_is_refused(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("bloom"))
    monkeypatch.setattr(training_forward, "_logits", lambda model, hidden: 2.0 * model.get_output_embeddings()(hidden))
    with pytest.raises(UserError, match=r"model\.path: the training forward does not give .* 'bloom' .*accepted:"):
        prepare_forward(model, TrainConfig())


def test_a_checkpoint_that_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds a 'vit' model; accepted: a causal language model"):
        load(tmp_path)
