"""A refusal for want of memory names the smallest change of the file with which the worker fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.model import Phase
from rlmux.rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.rl.memory.footprint import device_parts
from rlmux.rl.memory.memory_parts import total
from rlmux.rl.memory.smallest_change import smallest_change

BIG = TrainingConfig(
    name="big",
    model=ModelConfig(hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=1024),
    algorithm=AlgorithmConfig(name="grpo", prompts_per_step=8, group_size=8, micro_batch_size=8),
    rollout=RolloutConfig(num_slots=64, max_new_tokens=512),
    train=TrainConfig(),
)


def needs(phase: Phase, config: TrainingConfig = BIG) -> float:
    return total(device_parts(config, phase))


def test_a_change_that_is_enough_alone_is_named_alone():
    assert smallest_change(BIG, Phase.ROLLOUT, 0.7 * needs(Phase.ROLLOUT), 1) == "rollout.slots: 32"
    assert smallest_change(BIG, Phase.TRAIN, 0.7 * needs(Phase.TRAIN), 1) == "algorithm.micro_batch_size: 4"


def test_where_half_the_slots_do_not_fit_the_largest_cache_that_fits_is_named():
    half = replace(BIG, rollout=replace(BIG.rollout, num_slots=32))
    capacity = total(device_parts(half, Phase.ROLLOUT, is_gpu=True)) - 1
    assert smallest_change(BIG, Phase.ROLLOUT, capacity, 1, is_gpu=True) == "rollout.kv_tokens: 18000"
    for num, fits in ((18_000, True), (19_000, False)):
        bounded = replace(BIG, rollout=replace(BIG.rollout, kv_tokens=num))
        assert (total(device_parts(bounded, Phase.ROLLOUT, is_gpu=True)) <= capacity) == fits


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.TRAIN])
def test_several_changes_are_named_where_no_single_one_is_enough(phase):
    said = smallest_change(BIG, phase, 0.12 * needs(phase), 8).split(" and ")
    assert len(said) > 1
    assert len(set(said)) == len(said)


def test_what_fits_nowhere_has_no_change():
    assert smallest_change(BIG, Phase.ROLLOUT, 1e3, 8) == ""
    assert smallest_change(BIG, Phase.TRAIN, 1e3, None) == ""


def test_shards_are_as_many_as_the_pool_has_devices():
    least = needs(Phase.TRAIN) * 0.16
    assert "workers: 16" not in smallest_change(BIG, Phase.TRAIN, least, 8)


@pytest.mark.parametrize(
    ("engine", "takes_adapters"),
    [
        (EngineConfig(name="vllm", python="python"), True),
        (EngineConfig(name="vllm", url="http://127.0.0.1:1"), False),
        (EngineConfig(name="my_engine:Engine"), False),
    ],
    ids=["a server of its own", "a running server", "an engine of the user"],
)
def test_no_adapter_is_named_beside_an_engine_that_takes_none(engine, takes_adapters):
    least = TrainConfig(dtype="bfloat16", activation_checkpointing=True, optimizer_state="8bit")
    least = replace(least, equal_across_ranks=False)
    few = replace(BIG.algorithm, micro_batch_size=1)
    given = replace(BIG, rollout=replace(BIG.rollout, engine=engine), train=least, algorithm=few)
    capacity = needs(Phase.TRAIN, replace(given, adapter=AdapterConfig(rank=16, alpha=32.0)))
    named = smallest_change(given, Phase.TRAIN, capacity, 1)
    assert named == ("adapter: {rank: 16, alpha: 32}" if takes_adapters else "")
