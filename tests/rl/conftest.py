"""Builders for the tests of this room: configs, and turns as an engine would finish them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlmux.rl.config import AlgorithmConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainingConfig
from rlmux.rl.types import FinishedTurn, TrajectoryRequest


@pytest.fixture
def make_config() -> Callable[..., TrainingConfig]:
    def make(task: str = "sort", **changes: Any) -> TrainingConfig:
        task_fields = {
            "name",
            "params",
            "path",
            "prompt_key",
            "answer_key",
            "reward",
            "reward_timeout_s",
            "num_reward_processes",
            "reward_memory_gb",
            "reward_file_gb",
            "environment",
        }
        algorithm = {"prompts_per_step": 3, "group_size": 2, **changes.pop("algorithm", {})}
        rollout = {"max_new_tokens": 32, "max_prompt_tokens": 64, **changes.pop("rollout", {})}
        return TrainingConfig(
            name="p",
            seed=changes.pop("seed", 0),
            task=TaskConfig(name=task, **{key: changes.pop(key) for key in task_fields & set(changes)}),
            algorithm=AlgorithmConfig(**algorithm),
            rollout=RolloutConfig(**rollout),
            sft_warmup=changes.pop("sft_warmup", SftWarmupConfig(num_updates=2, batch_size=4)),
            **changes,
        )

    return make


@pytest.fixture
def finish() -> Callable[..., FinishedTurn]:
    """A finished turn from (text tokens, is_sampled) stretches."""

    def make(
        request: TrajectoryRequest, *stretches: tuple[tuple[int, ...], bool], stop_reason: str = "stop"
    ) -> FinishedTurn:
        tokens = tuple(token for spoken, _ in stretches for token in spoken)
        return FinishedTurn(
            id=request.id,
            tokens=tokens,
            is_sampled=tuple(sampled for spoken, sampled in stretches for _ in spoken),
            logprobs=(-1.0,) * len(tokens),
            versions=(request.id.step - 1,) * len(tokens),
            stop_reason=stop_reason,
            num_turns=sum(sampled for _, sampled in stretches),
        )

    return make
