"""The one source of a pipeline's model, so that every engine starts from the same bits.

    ModelConfig ──▶ build_model(config, vocab_size, seed) ──▶ transformers model, float32, on the CPU
                                                               ├── the train engine trains it
                                                               └── the rollout engine copies its weights

Invariant: the weights are a function of (config, vocab_size, seed) alone, or of the checkpoint folder. The
process-wide random state is left as it was found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlmux.core.errors import UserError
from rlmux.rl.config import MAX_POSITIONS, ModelConfig

MODEL_CLASSES: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
}
"""Architectures of new models."""


def build_model(model_config: ModelConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """Build the pipeline's model, with random weights from `seed` or the weights of the checkpoint folder.

    A folder's embedding may have more rows than the tokenizer has tokens (padding), never fewer. Raises UserError for
    sizes that do not fit together and for a folder that cannot be used.
    """
    if model_config.path is not None:
        return _load_folder(Path(model_config.path), vocab_size)
    model_class, config = new_model_config(model_config, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
    nn.Module.eval(model)
    return model


def build_skeleton(model_config: ModelConfig, vocab_size: int) -> PreTrainedModel:
    """`build_model` with parameters on the meta device: they take no memory and have no values. Buffers are real.

    Raises UserError as `build_model` does.
    """
    with _parameters_on_meta():
        if model_config.path is None:
            model_class, config = new_model_config(model_config, vocab_size)
            model: PreTrainedModel = model_class(config)
        else:
            config = folder_config(Path(model_config.path), vocab_size)
            made: Any = AutoModelForCausalLM
            model = made.from_config(config, dtype=torch.float32)
    model.tie_weights()
    nn.Module.eval(model)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def new_model_config(model_config: ModelConfig, vocab_size: int) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Class and config of a new model. Raises UserError for sizes that do not fit together."""
    if model_config.hidden_size % model_config.num_heads:
        raise UserError(
            f"model.num_heads: {model_config.num_heads} does not divide hidden_size {model_config.hidden_size}"
        )
    if model_config.num_heads % model_config.num_kv_heads:
        raise UserError(
            f"model.num_kv_heads: {model_config.num_kv_heads} does not divide num_heads {model_config.num_heads}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": model_config.hidden_size,
        "intermediate_size": model_config.intermediate_size,
        "num_hidden_layers": model_config.num_layers,
        "num_attention_heads": model_config.num_heads,
        "num_key_value_heads": model_config.num_kv_heads,
        "head_dim": model_config.hidden_size // model_config.num_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
        "dtype": torch.float32,
    }
    if sizes["head_dim"] % 2:
        raise UserError(
            f"model.hidden_size: {model_config.hidden_size} / num_heads {model_config.num_heads} gives "
            f"an odd head size {sizes['head_dim']}; rotary positions need an even one"
        )
    if model_config.architecture == "mistral":
        sizes["sliding_window"] = None
    if model_config.architecture == "qwen3_moe":
        sizes |= {
            "num_experts": model_config.num_experts,
            "num_experts_per_tok": model_config.num_experts_per_token,
            "moe_intermediate_size": model_config.moe_intermediate_size,
            "norm_topk_prob": True,
        }
    model_class, config_class = MODEL_CLASSES[model_config.architecture]
    return model_class, config_class(**sizes)


def _load_folder(folder: Path, vocab_size: int) -> PreTrainedModel:
    config = folder_config(folder, vocab_size)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True
    )
    nn.Module.eval(model)
    return model


def folder_config(folder: Path, vocab_size: int) -> PretrainedConfig:
    """Config of a checkpoint folder. Raises UserError for a folder that cannot be used."""
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: no config.json in {folder}; a Hugging Face checkpoint folder is accepted")
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(
            f"model.path: {folder} holds a {config.model_type!r} model; accepted: a causal language model that "
            "transformers loads with AutoModelForCausalLM"
        )
    num_embedded = config.get_text_config().vocab_size
    if num_embedded < vocab_size:
        raise UserError(f"model.path: {folder} embeds {num_embedded} tokens, fewer than the tokenizer's {vocab_size}")
    return config


def weight_paths(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads of a checkpoint folder; none where it has others."""
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
