"""Pipelines with the same frozen base, and the base's bytes, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rlmux.rl.config import ModelConfig, TrainingConfig
from rlmux.rl.memory.model_shape import shape_of

_FLOAT_BYTES = 4


def base_name(model: ModelConfig, seed: int) -> str:
    """Hash of what decides a base: the keys of a new model and its seed, or a folder's files with sizes and times."""
    content: dict[str, object] = {**asdict(model), "seed": seed}
    if model.path is not None:
        files = sorted(Path(model.path).resolve().glob("*"))
        content = {"files": [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def base_bytes(model: ModelConfig) -> float:
    """Bytes of a base in shared memory: once as training reads it, once as rollouts read it."""
    shape = shape_of(model)
    fused = shape.num_layers * shape.layer_matrices + 2 * shape.embedding
    return float(shape.num_parameters + fused) * _FLOAT_BYTES


def bases_of(configs: Iterable[TrainingConfig]) -> dict[str, tuple[float, list[str]]]:
    """(bytes, names of its pipelines) of each base that adapters stand on, by its name; each is counted once."""
    found: dict[str, tuple[float, list[str]]] = {}
    for config in configs:
        if config.adapter is not None:
            name = base_name(config.model, config.model_seed)
            found.setdefault(name, (base_bytes(config.model), []))[1].append(config.name)
    return found
