"""How many bytes a pipeline's state takes, from its config alone: what is added up before it is placed.

    rollout worker   weights, their fused copies, the KV cache of all slots
    train worker     weights, gradients, two moments, partial gradient sums, the reference; activations of a micro-batch

float32 throughout. An estimate from above: engines report what they really hold by `resident_bytes`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.core.model import Footprint
from rlmux.rl.config import ModelConfig, TrainingConfig
from rlmux.rl.vocabulary import CharVocabulary

_FLOAT_BYTES = 4
_PROCESS_BYTES = 150e6
"""Bytes of a worker process beyond what it shares with the fork server."""
_ACTIVATIONS_PER_LAYER = 24
"""Values kept for the backward pass, for each token, layer and hidden unit; a rough figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        query_and_output = 2 * self.hidden_size * self.num_heads * self.head_dim
        key_and_value = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * (query_and_output + key_and_value + mlp) + embeddings


def footprint_of(config: TrainingConfig) -> Footprint:
    """Bytes that each worker of the pipeline keeps on its device, and in host memory while it is resident there."""
    shape = _shape_of(config.model)
    weights = shape.num_parameters * _FLOAT_BYTES
    rollout, algorithm = config.rollout, config.algorithm
    context = rollout.max_prompt_tokens + rollout.max_new_tokens
    kv_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _FLOAT_BYTES
    rollout_bytes = 2 * weights + 2 * rollout.num_slots * context * kv_per_token
    tokens = (
        max(algorithm.micro_batch_size, config.sft_warmup.batch_size if config.sft_warmup.num_updates else 0) * context
    )
    activations = tokens * _FLOAT_BYTES * (
        shape.num_layers * shape.hidden_size * _ACTIVATIONS_PER_LAYER + 3 * shape.vocab_size
    )  # fmt: skip
    copies = 8 if algorithm.kl_coef > 0 else 7
    train_bytes = copies * weights + activations
    return Footprint(
        rollout_host_bytes=_PROCESS_BYTES + rollout_bytes,
        train_host_bytes=_PROCESS_BYTES + train_bytes,
        rollout_device_bytes=rollout_bytes,
        train_device_bytes=train_bytes,
    )


def _shape_of(model: ModelConfig) -> _Shape:
    if model.path is not None:
        return _shape_of_folder(Path(model.path))
    return _Shape(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        vocab_size=CharVocabulary().vocab_size,
        is_tied=True,
    )


def _shape_of_folder(folder: Path) -> _Shape:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        return _Shape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocab_size=config["vocab_size"],
            is_tied=config.get("tie_word_embeddings", False),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.path {folder}: config.json is not that of a transformers model: {error!r}") from error
