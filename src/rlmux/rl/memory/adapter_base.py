"""Pipelines with the same frozen base, and the base's bytes, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path

from rlmux.rl.config import ModelConfig, TrainingConfig
from rlmux.rl.memory.model_shape import BYTES, shape_of


def base_name(model: ModelConfig, seed: int) -> str:
    """Hash of what decides a base: the keys of a new model and its seed, or a folder's files with sizes and times."""
    content: dict[str, object] = {**asdict(model), "seed": seed}
    if model.path is not None:
        files = sorted(Path(model.path).resolve().glob("*"))
        content = {"files": [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def rollout_base(config: TrainingConfig) -> str:
    """Key of the pipelines that sample in one batch: adapters of one base with the same `rollout`, by our own engine.

    Empty for a pipeline that samples alone. Tail batching and interruptible rollouts do; so does a cache of
    `kv_tokens`, since slots add up and its do not.
    """
    rollout = config.rollout
    samples_alone = rollout.tail_batching or rollout.interruptible or rollout.kv_tokens is not None
    if config.adapter is None or rollout.engine.name != "rlmux" or samples_alone:
        return ""
    return _key(base_name(config.model, config.model_seed), rollout, config.train.num_threads)


def train_base(config: TrainingConfig) -> str:
    """Key of the pipelines that train in one step: adapters of one base with the same `train`, of one rank each.

    Empty for a pipeline that trains alone.
    """
    if config.adapter is None or config.train.num_workers > 1:
        return ""
    return _key(base_name(config.model, config.model_seed), config.train)


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def base_bytes(model: ModelConfig, rollout_dtypes: Collection[str] = ("float32",), *, is_trained: bool = True) -> float:
    """Bytes of a base in shared memory: once as training reads it, once in each dtype as our rollouts read it."""
    shape = shape_of(model)
    fused = shape.num_layers * shape.layer_matrices + 2 * shape.embedding
    trained = shape.num_parameters * BYTES["float32"] if is_trained else 0
    return float(trained + fused * sum(BYTES[dtype] for dtype in rollout_dtypes))


def bases_of(configs: Iterable[TrainingConfig]) -> dict[str, tuple[float, list[str]]]:
    """(bytes, names of its pipelines) of each base in shared memory, by its name; each is counted once.

    Training reads it there in float32 and whole; trainers in bfloat16, and each of several with a part, have their own.
    Our engine samples from it; a server has its own.
    """
    tenants: dict[str, list[TrainingConfig]] = {}
    for config in configs:
        if config.adapter is not None and (_trains_from_memory(config) or _samples_from_memory(config)):
            tenants.setdefault(base_name(config.model, config.model_seed), []).append(config)
    return {
        name: (
            base_bytes(
                own[0].model,
                {config.rollout.dtype for config in own if _samples_from_memory(config)},
                is_trained=any(map(_trains_from_memory, own)),
            ),
            [config.name for config in own],
        )
        for name, own in tenants.items()
    }


def _trains_from_memory(config: TrainingConfig) -> bool:
    return config.train.dtype == "float32" and not config.train.is_sharded


def _samples_from_memory(config: TrainingConfig) -> bool:
    return config.rollout.engine.name == "rlmux"
