"""The memory of a rollout device of several GPUs is counted as the sum over them, and a refusal names the split that
fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlmux.core.model import Phase
from rlmux.rl.config import AdapterConfig, AlgorithmConfig, EngineConfig, ModelConfig, RolloutConfig, TrainingConfig
from rlmux.rl.memory.footprint import device_parts, footprint_of, server_bytes
from rlmux.rl.memory.memory_parts import CUDA_CONTEXT_BYTES, rollout_parts, total
from rlmux.rl.memory.model_shape import shape_of
from rlmux.rl.memory.smallest_change import smallest_change

OWN_OF_SERVER = 2e9
VLLM, OWN = EngineConfig(name="vllm", python="python"), EngineConfig()
QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
}  # fmt: skip
Config = Callable[..., TrainingConfig]


@pytest.fixture
def config(tmp_path) -> Config:
    """A pipeline of Qwen3-32B, or of one with other sizes; its rollouts by a server."""

    def make(engine: EngineConfig = VLLM, sizes: dict[str, int] | None = None, **rollout: Any) -> TrainingConfig:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B | (sizes or {})))
        return TrainingConfig(
            name="wide",
            model=ModelConfig(path=str(tmp_path)),
            algorithm=AlgorithmConfig(name="grpo", prompts_per_step=8, group_size=8),
            rollout=RolloutConfig(
                **{"num_slots": 8, "max_prompt_tokens": 1024, "max_new_tokens": 4096, "engine": engine} | rollout
            ),
        )

    return make


def parts_of(given: TrainingConfig, num_gpus: int) -> dict[str, float]:
    return device_parts(given, Phase.ROLLOUT, is_gpu=True, num_gpus=num_gpus)


@pytest.mark.parametrize(("count", "num_copies"), [(1, 4), (2, 2), (4, 1)])
def test_weights_count_once_a_copy_and_what_the_server_adds_once_a_gpu(config, count, num_copies):
    given = config(tensor_parallel=count)
    own = rollout_parts(given, is_gpu=True)
    expected = total(own) + (num_copies - 1) * own["weights"] + 4 * OWN_OF_SERVER
    assert server_bytes(given, 4) == pytest.approx(expected)
    assert parts_of(given, 4) == {
        "vllm server on 4 GPUs": server_bytes(given, 4),
        "CUDA context": 4 * CUDA_CONTEXT_BYTES,
    }


def test_without_a_number_of_gpus_there_is_one_copy(config):
    assert server_bytes(config(tensor_parallel=4)) == server_bytes(config(tensor_parallel=4), 4)
    assert server_bytes(config()) == server_bytes(config(), 1)


def test_keys_are_counted_as_often_as_they_are_repeated(config):
    sizes = {"num_key_value_heads": 2}
    cache = [server_bytes(config(sizes=sizes, tensor_parallel=count), 8) for count in (2, 4, 8)]
    weights, keys = (rollout_parts(config(sizes=sizes))[part] for part in ("weights", "KV cache"))
    assert cache[0] - cache[1] == pytest.approx(2 * weights - keys)
    assert cache[1] - cache[2] == pytest.approx(weights - 2 * keys)


def test_memory_that_the_file_gives_is_of_all_gpus(config):
    given = replace(VLLM, memory_gb=50.0)
    assert server_bytes(config(given, tensor_parallel=2), 4) == 50e9


def test_a_footprint_is_of_all_gpus_and_training_is_not_concerned(config):
    one, four = (footprint_of(config(), is_gpu=True, num_gpus=num) for num in (1, 4))
    assert four.train_device_bytes == one.train_device_bytes
    weights = rollout_parts(config())["weights"]
    more = 3 * (weights + OWN_OF_SERVER)
    assert four.rollout_device_bytes - one.rollout_device_bytes == pytest.approx(more + 3 * CUDA_CONTEXT_BYTES)
    assert four.rollout_host_bytes - one.rollout_host_bytes == pytest.approx(more), "contexts never leave the GPU"


def test_our_own_engine_has_one_context_whatever_its_device_is(config):
    assert parts_of(config(OWN), 4) == parts_of(config(OWN), 1)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "width", "accepted"),
    [
        (64, 8, 25600, [1, 2, 4, 8, 16, 32, 64]),
        (16, 2, 1024, [1, 2, 4, 8, 16]),
        (14, 2, 4864, [1, 2]),
        (6, 6, 9, [1, 3]),
    ],
)
def test_a_model_splits_over_divisors_of_heads_and_width_with_key_heads_repeated(
    config, num_heads, num_kv_heads, width, accepted
):
    shape = replace(shape_of(config().model), num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=width)
    assert [number for number in range(1, 65) if shape.splits_over(number)] == accepted


def remedy(
    given: TrainingConfig, capacity: float, num_devices: int | None = 8, num_gpus: int = 1, **counted: bool
) -> str:
    return smallest_change(
        given, Phase.ROLLOUT, capacity, num_devices, pool="fast", num_gpus=num_gpus, is_gpu=True, **counted
    )


def test_a_server_that_does_not_fit_one_gpu_is_split_over_the_fewest_that_it_fits(config):
    capacity = total(parts_of(config(tensor_parallel=4), 4)) / 4
    assert remedy(config(), capacity) == "rollout.tensor_parallel: 4 with cluster.pools.fast.gpus_per_device: 4"
    assert "tensor_parallel: 2" in remedy(config(), total(parts_of(config(tensor_parallel=2), 2)) / 2)


def test_copies_that_do_not_fit_their_device_are_made_fewer_first(config):
    capacity = total(parts_of(config(tensor_parallel=2), 4))
    assert remedy(config(), capacity, 2, num_gpus=4) == "rollout.tensor_parallel: 2"


@pytest.mark.parametrize(
    ("engine", "changes", "num_devices"),
    [
        (VLLM, {}, 2),
        (VLLM, {"num_workers": 4}, 8),
        (VLLM, {"sizes": {"intermediate_size": 25602}}, 8),
        (EngineConfig(name="my_engine:Engine", memory_gb=200.0), {}, 8),
    ],
    ids=["too few devices", "too few for its workers", "no such divisor", "an engine of the user"],
)
def test_no_split_is_named_that_would_be_refused(config, engine, changes, num_devices):
    capacity = total(parts_of(config(tensor_parallel=4), 4)) / 4
    assert "tensor_parallel: 4" not in remedy(config(engine, **changes), capacity, num_devices)


def test_a_split_is_named_for_an_adapter_too(config):
    """Each copy of the model that a server has is a base of its own."""
    given = replace(config(dtype="bfloat16"), adapter=AdapterConfig(rank=4, alpha=8.0))
    split = "rollout.tensor_parallel: 2 with cluster.pools.fast.gpus_per_device: 2"
    assert remedy(given, 60e9) == remedy(given, 60e9, has_base=False) == split
    own = replace(given, rollout=replace(given.rollout, engine=OWN))
    assert remedy(own, 60e9).startswith("rollout.engine: vllm with rollout.tensor_parallel: ")


def test_a_server_has_the_base_of_its_adapter_for_itself_in_each_copy_and_two_versions(config):
    given = replace(config(tensor_parallel=2), adapter=AdapterConfig(rank=32, alpha=8.0))
    own = rollout_parts(given, is_gpu=True)
    assert own["base"] == pytest.approx(rollout_parts(config(), is_gpu=True)["weights"])
    assert own["weights"] < own["base"] / 100
    expected = total(own) + own["base"] + 3 * own["weights"] + 4 * OWN_OF_SERVER
    assert server_bytes(given, 4) == pytest.approx(expected)
    shared = footprint_of(given, is_gpu=True, num_gpus=4, own_bases=())
    alone = footprint_of(given, is_gpu=True, num_gpus=4)
    assert shared.rollout_device_bytes == alone.rollout_device_bytes
    assert shared.rollout_host_bytes == alone.rollout_host_bytes


def test_a_new_models_base_lies_in_its_servers_folder_and_a_checkpoints_is_linked(config):
    served = replace(config(), adapter=AdapterConfig(rank=4, alpha=8.0), model=ModelConfig(hidden_size=256))
    process_bytes = 150e6
    for given, written in (
        (served, 4 * shape_of(served.model).num_parameters),
        (replace(served, adapter=None), 0),
        (replace(config(), adapter=served.adapter), 0),
    ):
        counted = footprint_of(given)
        assert counted.rollout_host_bytes == pytest.approx(process_bytes + counted.rollout_device_bytes + written)


def test_where_our_own_engine_has_no_room_for_many_sequences_a_server_is_named(config):
    own = config(OWN, dtype="bfloat16", num_slots=64)
    assert remedy(own, 80e9) == (
        "rollout.engine: vllm with rollout.tensor_parallel: 4 and cluster.pools.fast.gpus_per_device: 4"
    )
    half = device_parts(replace(own, rollout=replace(own.rollout, num_slots=32)), Phase.ROLLOUT, is_gpu=True)
    assert remedy(own, total(half)) == "rollout.slots: 32", "what our engine does with half the slots needs no server"


def test_a_split_comes_with_other_changes_where_it_is_not_enough(config):
    capacity = total(parts_of(config(tensor_parallel=4, dtype="bfloat16"), 4)) / 4
    said = remedy(config(), capacity, 4)
    assert said == ("rollout.tensor_parallel: 4 with cluster.pools.fast.gpus_per_device: 4 and rollout.dtype: bfloat16")
