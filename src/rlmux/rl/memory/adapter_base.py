"""Pipelines with the same frozen base, and the base's bytes, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
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


def base_bytes(model: ModelConfig, rollout_dtypes: Iterable[str] = ("float32",)) -> float:
    """Bytes of a base in shared memory: once as training reads it, once in each dtype as rollouts read it."""
    shape = shape_of(model)
    fused = shape.num_layers * shape.layer_matrices + 2 * shape.embedding
    return float(shape.num_parameters * BYTES["float32"] + fused * sum(BYTES[dtype] for dtype in rollout_dtypes))


def bases_of(configs: Iterable[TrainingConfig]) -> dict[str, tuple[float, list[str]]]:
    """(bytes, names of its pipelines) of each base that adapters stand on, by its name; each is counted once."""
    tenants: dict[str, list[TrainingConfig]] = {}
    for config in configs:
        if config.adapter is not None:
            tenants.setdefault(base_name(config.model, config.model_seed), []).append(config)
    return {
        name: (base_bytes(own[0].model, {config.rollout.dtype for config in own}), [config.name for config in own])
        for name, own in tenants.items()
    }
