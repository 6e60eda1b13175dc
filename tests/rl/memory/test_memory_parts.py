"""What is counted before anything starts, against what the engines really make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import CONFIG

from rlmux.core.model import Phase
from rlmux.engines.adapters.lora import trained_parameters
from rlmux.engines.model import transformer
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.packed_attention import pack_attention
from rlmux.engines.residency import storage_bytes
from rlmux.engines.rollout import batch_probe, prefill_ahead
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update import micro_batches
from rlmux.engines.train.update.training_forward import score_tokens
from rlmux.engines.train.update.tree_sum import TreeSum
from rlmux.rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.rl.memory import memory_parts, model_shape
from rlmux.rl.memory.adapter_base import base_bytes, bases_of
from rlmux.rl.memory.footprint import device_parts, footprint_of, host_parts
from rlmux.rl.memory.memory_parts import (
    CUDA_CONTEXT_BYTES,
    building_bytes,
    loading_bytes,
    rollout_parts,
    total,
    train_parts,
    train_state_bytes,
    weights_bytes,
    whole_model_bytes,
)
from rlmux.rl.memory.model_shape import shape_of
from rlmux.rl.vocabulary import CharVocabulary

VOCAB_SIZE = CharVocabulary().vocab_size
QWEN3 = ModelConfig(hidden_size=96, num_layers=3, num_heads=6, num_kv_heads=2, intermediate_size=160)
LLAMA = replace(QWEN3, architecture="llama", num_kv_heads=3)


def config(model: ModelConfig = QWEN3, **changes: object) -> TrainingConfig:
    fields = {
        "algorithm": AlgorithmConfig(prompts_per_step=4, group_size=4, micro_batch_size=2),
        "rollout": RolloutConfig(max_prompt_tokens=16, max_new_tokens=40, num_slots=8),
        **changes,
    }
    return TrainingConfig(name="p", model=model, **fields)  # type: ignore[arg-type]


def test_what_the_engines_do_is_counted_as_they_do_it() -> None:
    assert memory_parts.PREFILL_BUCKET == batch_probe.PREFILL_BUCKET
    assert memory_parts.NUM_PROBED_LAYERS == batch_probe._PROBED_LAYERS
    assert memory_parts.MAX_PREFILL_TOKENS == prefill_ahead._MAX_TOKENS
    assert memory_parts.MAX_MASK_TABLE == transformer._MAX_MASK_TABLE
    assert memory_parts.FUSED_AT_ONCE == transformer.FUSED_AT_ONCE


@pytest.mark.parametrize("model", [QWEN3, LLAMA])
@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_counted_exactly(tmp_path: Path, model: ModelConfig, is_tied: bool) -> None:
    made = build_model(model, VOCAB_SIZE, 0)
    made.config.tie_word_embeddings = is_tied
    made = type(made)(made.config)
    made.save_pretrained(tmp_path)
    counted = shape_of(ModelConfig(path=str(tmp_path))).num_parameters
    assert counted == sum(parameter.numel() for parameter in made.parameters())
    if is_tied:
        assert shape_of(model).num_parameters == counted


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    ],
)
def test_experts_of_other_architectures_are_counted(tmp_path: Path, changes: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    shape = shape_of(ModelConfig(path=str(tmp_path)))
    assert (shape.num_experts, shape.num_picked, shape.intermediate_size) == (4, 2, CONFIG["intermediate_size"])
    idle = shape.num_parameters - shape.num_active_parameters
    assert idle == shape.num_layers * 2 * 3 * shape.hidden_size * shape.intermediate_size


@pytest.mark.parametrize("model", [QWEN3, LLAMA])
def test_activations_are_those_that_autograd_keeps(model: ModelConfig) -> None:
    made = build_model(model, VOCAB_SIZE, 0)
    pack_attention(made)
    given = config(model)
    (batch,) = micro_batches.cut([_sequence(given)] * 2, 2)
    of_model = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_model:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = score_tokens(made, batch, 1.0)
    counted = train_parts(given)["activations"]
    assert counted == pytest.approx(sum(kept.values()) - len(scores.logprobs) * VOCAB_SIZE * 4, rel=0.02)


def _sequence(given: TrainingConfig) -> micro_batches.TrainingSequence:
    rollout = given.rollout
    return micro_batches.TrainingSequence(
        prompt_tokens=[5] * rollout.max_prompt_tokens,
        tokens=[6] * rollout.max_new_tokens,
        is_sampled=[True] * rollout.max_new_tokens,
        weight=1.0,
    )


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 4, 7, 8, 13])
def test_partial_gradient_sums_are_as_many_as_the_tree_holds_at_most(num_leaves: int) -> None:
    tree, most = TreeSum(num_leaves), 0
    for _ in range(num_leaves):
        most = max(most, len(tree.tensors) + 1)  # the new leaf beside those that are there
        tree.add(torch.zeros(1))
    algorithm = AlgorithmConfig(prompts_per_step=num_leaves, group_size=2, micro_batch_size=2)
    given = config(algorithm=algorithm)
    assert train_parts(given)["gradient sums"] == most * weights_bytes(given)


def test_one_sum_is_counted_where_results_may_change_with_the_ranks() -> None:
    given = config(train=TrainConfig(equal_across_ranks=False))
    assert train_parts(given)["gradient sums"] == weights_bytes(given)
    assert TrainConfig().is_equal_across_ranks(200_000_000)
    assert not TrainConfig().is_equal_across_ranks(200_000_001)


@pytest.mark.parametrize(("dtype", "kv_tokens"), [("float32", None), ("bfloat16", None), ("float32", 150)])
def test_a_rollout_engines_tensors_are_counted_exactly(dtype: Any, kv_tokens: int | None) -> None:
    sizes = RolloutConfig(max_prompt_tokens=16, max_new_tokens=40, num_slots=8, dtype=dtype, kv_tokens=kv_tokens)
    given = config(rollout=sizes)
    engine = SlotRolloutEngine(given.model, given.rollout, vocab_size=VOCAB_SIZE, seed=0)
    parts = rollout_parts(given, is_gpu=True)  # without what is on a CPU while weights are built
    resident = sum(parts[name] for name in ("weights", "KV cache", "slots", "tables"))
    assert resident == pytest.approx(engine.resident_bytes(), rel=0.02)
    assert parts["KV cache"] == storage_bytes(engine._slots.cache.tensors())


def test_what_leaves_a_bounded_cache_is_counted_where_a_device_is_the_hosts_memory() -> None:
    sizes = RolloutConfig(max_prompt_tokens=16, max_new_tokens=480, num_slots=64)
    whole, bounded = config(rollout=sizes), config(rollout=replace(sizes, kv_tokens=8192))
    assert "evicted KV" not in rollout_parts(bounded, is_gpu=True)
    parts = rollout_parts(bounded)
    assert parts["KV cache"] < parts["KV cache"] + parts["evicted KV"] < rollout_parts(whole)["KV cache"]


def test_weights_of_a_gpu_are_built_and_loaded_in_host_memory() -> None:
    wide = config(ModelConfig(hidden_size=768, num_layers=4, num_heads=12, num_kv_heads=4, intermediate_size=2304))
    assert rollout_parts(wide)["weights being built"] == building_bytes(wide) > whole_model_bytes(wide)
    assert total(rollout_parts(wide, is_gpu=True)) < total(rollout_parts(wide))
    assert footprint_of(wide, is_gpu=True).rollout_host_bytes > building_bytes(wide) > 4 * loading_bytes(wide)


def test_a_warmup_with_larger_batches_counts() -> None:
    without = total(train_parts(config()))
    warmup = SftWarmupConfig(num_updates=1, batch_size=64)
    assert total(train_parts(config(sft_warmup=warmup))) > without


def test_a_gpu_worker_has_a_context_and_grouped_heads_no_flash_attention() -> None:
    on_core, on_gpu = footprint_of(config()), footprint_of(config(), is_gpu=True)
    assert on_gpu.rollout_device_bytes == total(rollout_parts(config(), is_gpu=True)) + CUDA_CONTEXT_BYTES
    assert on_gpu.train_device_bytes > on_core.train_device_bytes + CUDA_CONTEXT_BYTES
    ungrouped = config(replace(QWEN3, num_kv_heads=6))
    assert footprint_of(ungrouped, is_gpu=True).train_device_bytes == pytest.approx(
        footprint_of(ungrouped).train_device_bytes + CUDA_CONTEXT_BYTES
    )


def test_a_trainers_host_memory_holds_checkpoint_and_published_versions() -> None:
    given = config(algorithm=AlgorithmConfig(staleness=2, kl_coef=0.1))
    weights = weights_bytes(given)
    assert host_parts(given) == {
        "checkpoint being written": 4 * weights,
        "weights being published": weights,
        "versions in shared memory": 5 * weights,
    }


def test_moments_are_counted_where_they_lie_and_as_large_as_they_are() -> None:
    on_device = config()
    on_host = replace(on_device, train=TrainConfig(optimizer_state="cpu"))
    rounded = replace(on_device, train=TrainConfig(optimizer_state="8bit"))
    moments = train_parts(on_device)["moments"]
    assert (train_parts(on_host)["moments"], host_parts(on_host)["moments"]) == (0, moments)
    assert train_parts(rounded)["moments"] == pytest.approx(moments / 4, rel=0.02)
    assert train_state_bytes(rounded) < train_state_bytes(on_host) == train_state_bytes(on_device)


def test_the_parts_of_a_model_are_counted_as_the_ranks_have_them() -> None:
    whole = config(algorithm=AlgorithmConfig(prompts_per_step=4, group_size=4, micro_batch_size=2, kl_coef=0.1))
    cut = replace(whole, train=TrainConfig(num_workers=4, sharding="shard"))
    of_whole, of_cut = train_parts(whole), train_parts(cut)
    for part in ("weights", "gradients", "moments", "reference"):
        assert of_cut[part] == of_whole[part] / 4
    assert "gradient sums" not in of_cut
    assert of_cut["gathered weights"] < of_whole["weights"]
    assert host_parts(cut)["checkpoint being written"] == host_parts(whole)["checkpoint being written"] / 4
    assert train_state_bytes(cut) == train_state_bytes(whole), "a checkpoint holds whole tensors"


def test_a_whole_model_is_in_host_memory_only_where_ranks_cannot_read_their_rows_of_it(tmp_path: Path) -> None:
    cut = config(train=TrainConfig(num_workers=2, sharding="shard"), adapter=AdapterConfig(rank=1, alpha=2.0))
    large = replace(QWEN3, num_layers=20)
    assert host_parts(replace(cut, model=large)) == {"whole model, before it is cut": weights_bytes(config(large))}
    build_model(large, VOCAB_SIZE, 0).save_pretrained(tmp_path)
    read = replace(cut, model=ModelConfig(path=str(tmp_path)))
    assert set(host_parts(read)) == {
        "checkpoint being written",
        "parameter being hashed",
        "parameter being published",
        "versions in shared memory",
    }
    assert host_parts(read)["parameter being published"] <= 2 * weights_bytes(read)


def test_an_adapters_parts_are_its_own_and_its_base_is_counted_where_it_lies():
    whole = TrainingConfig(name="p", model=ModelConfig(hidden_size=256, num_layers=4, seed=1))
    tenant = replace(whole, adapter=AdapterConfig(rank=4, alpha=8.0))
    assert weights_bytes(tenant) == sum(
        4 * parameter.numel() for parameter in trained_parameters(TorchTrainEngine(tenant).model).values()
    )
    assert train_state_bytes(tenant) < train_state_bytes(whole) / 10
    with_base, without = train_parts(tenant), train_parts(tenant, has_base=False)
    assert with_base["base"] == weights_bytes(whole)
    assert total(with_base) - total(without) == with_base["base"]
    assert total(train_parts(whole)) > total(with_base)


def test_pipelines_of_one_base_have_it_once():
    whole = TrainingConfig(name="whole", model=ModelConfig(seed=1))
    tenants = [
        replace(whole, name=name, seed=seed, adapter=AdapterConfig(rank=rank, alpha=8.0))
        for name, seed, rank in (("a", 1, 4), ("b", 2, 16))
    ]
    other = replace(tenants[0], name="other", model=ModelConfig(seed=2))
    found = bases_of([whole, *tenants, other])
    assert [names for _, names in found.values()] == [["a", "b"], ["other"]]
    assert {num_bytes for num_bytes, _ in found.values()} == {base_bytes(whole.model)}
    rounded = replace(tenants[1], rollout=RolloutConfig(dtype="bfloat16"))
    ((both, _),) = bases_of([tenants[0], rounded]).values()
    assert both == base_bytes(whole.model, ("float32", "bfloat16")) < 1.5 * base_bytes(whole.model)


def test_a_base_is_in_shared_memory_only_as_something_reads_it_there():
    own = TrainingConfig(name="own", model=ModelConfig(seed=1), adapter=AdapterConfig(rank=4, alpha=8.0))
    server = RolloutConfig(dtype="bfloat16", engine=EngineConfig(name="vllm", python="python"))
    served = replace(own, name="served", rollout=server)

    def bytes_for(*configs: TrainingConfig) -> float:
        return sum(num_bytes for num_bytes, _ in bases_of(configs).values())

    trained = bytes_for(served)
    assert trained == base_bytes(own.model, ())
    assert bytes_for(own, served) == bytes_for(own), "a server has its base in its own memory"
    rounded = [replace(each, train=TrainConfig(dtype="bfloat16")) for each in (own, served)]
    assert bytes_for(*rounded) == bytes_for(own) - trained
    assert bases_of([rounded[1], replace(served, train=TrainConfig(num_workers=2, sharding="shard"))]) == {}


def test_a_checkpoints_shape_is_parsed_once_for_each_state_of_its_file(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(model_shape, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for num_tokens in (32, 64):
        (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": num_tokens}))
        shapes = [model_shape.shape_of(ModelConfig(path=str(tmp_path))) for _ in range(3)]
        assert [shape.vocab_size for shape in shapes] == [num_tokens] * 3
    assert len(parsed) == 2


def test_one_gpu_takes_micro_batches_by_tokens_unless_the_file_has_a_size() -> None:
    plain = config()
    silent = replace(plain, algorithm=replace(plain.algorithm, micro_batch_size=None))
    assert silent.algorithm.sequences_per_pass == 32
    assert silent.computed_on("cuda").train.tokens_per_micro_batch == 16_384
    assert silent.computed_on("cpu") is silent
    for given in (
        plain,
        replace(silent, train=TrainConfig(tokens_per_micro_batch=100)),
        replace(silent, train=TrainConfig(num_workers=2)),
    ):
        assert given.computed_on("cuda") is given


def test_memory_on_a_gpu_is_counted_with_micro_batches_by_tokens() -> None:
    plain = config()
    silent = replace(plain, algorithm=replace(plain.algorithm, micro_batch_size=None, prompts_per_step=512))
    by_tokens = replace(silent, train=TrainConfig(tokens_per_micro_batch=16_384))
    parts = [device_parts(each, Phase.TRAIN, is_gpu=True) for each in (silent, by_tokens)]
    assert parts[0] == parts[1]
    on_core = [total(device_parts(each, Phase.TRAIN)) for each in (silent, by_tokens)]
    assert on_core[0] < on_core[1]
