"""LoRA adapters in training: put in place, seeded and written down by `peft`.

    model, float32 ──inject_adapter──▶ the same model; each target is   base_layer (frozen)  +  lora_B(lora_A(x))
                                                                              A: random numbers of the seed, B: 0
    trained_parameters ──▶ name in a file ─▶ parameter      of an adapter, or of a model without one all

    adapter_model.safetensors, adapter_config.json          as `PeftModel.from_pretrained` reads them

Names in a file are peft's: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.

Invariant: an adapter's first tensors are a function of (model, adapter, seed) alone.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlmux.core.errors import UserError
from rlmux.rl.config import ADAPTER_TARGETS, TARGETS_BY_ARCHITECTURE, AdapterConfig

ADAPTER_FILE = "adapter_model.safetensors"
"""Name of an adapter's tensors in a checkpoint."""
ADAPTER_CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_ADAPTER = "default"
"""peft's name for a single adapter."""


def inject_adapter(model: PreTrainedModel, adapter: AdapterConfig, seed: int) -> None:
    """Freeze a model and put an adapter beside the targets of each of its blocks, in place.

    Raises UserError for a model without support for adapters.
    """
    accepted = TARGETS_BY_ARCHITECTURE.get(model.config.model_type, ())
    if lacking := [target for target in adapter.targets if target not in accepted]:
        raise UserError(
            f"adapter: a {model.config.model_type!r} model is not served with an adapter beside {lacking[0]}; "
            f"accepted: {', '.join(accepted) or ', '.join(TARGETS_BY_ARCHITECTURE)}"
        )
    load_peft()
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # A head that is tied to the embedding gets an adapter alone: the embedding stays as it is.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        torch.manual_seed(seed)
        inject_adapter_in_model(_peft_config(adapter), model)
    nn.Module.eval(model)


def load_peft() -> None:
    """Import peft. Raises UserError where it is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(f"adapter: peft cannot be imported ({error}); accepted: pip install 'rlmux[train]'") from error


def merged_model(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The base with the adapter in a folder merged into its weights, in place.

    A head that is tied to the embedding and has an adapter is untied first: the embedding stays as it is.
    """
    load_peft()
    from peft import PeftModel

    targets = json.loads((folder / ADAPTER_CONFIG_FILE).read_bytes())["target_modules"]
    if base.config.tie_word_embeddings and "lm_head" in targets:
        base.config.tie_word_embeddings = False
        base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach().clone())
    merged: PreTrainedModel = PeftModel.from_pretrained(base, folder).merge_and_unload()
    return merged


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by their names in a file."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {_name_in_file(name): each for name, each in parameters.items()}


def _name_in_file(name: str) -> str:
    if ".lora_" not in name:
        return name
    return _PREFIX + name.replace(f".{_ADAPTER}.", ".")


def adapter_config_file(adapter: AdapterConfig, base: str | None) -> bytes:
    """Content of adapter_config.json. `base`: folder of the checkpoint that the adapter belongs to, None for none."""
    fields = _peft_config(adapter).to_dict()
    fields |= {"base_model_name_or_path": base, "target_modules": sorted(adapter.targets), "inference_mode": True}
    return (json.dumps(fields, indent=1, sort_keys=True, default=str) + "\n").encode()


def _peft_config(adapter: AdapterConfig) -> Any:
    from peft import LoraConfig

    alpha: Any = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        target_modules=[target for target in ADAPTER_TARGETS if target in adapter.targets],
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
