"""Can the model of a Hugging Face checkpoint folder be trained here? Small files and headers tell. No tensor is read
but a head beside tied embeddings, which has to be a copy of them.

    config.json                        architecture, rotary positions, sizes
    model.safetensors, or the files    8 bytes: length of the header │ header: name, dtype, shape, offsets │ tensors
    that the index names

What is refused here is what `engines` cannot compute, what `transformers` would fill with random numbers, and what two
programs would read differently. This module reads JSON and bytes, so that planning needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json
from rlmux.rl.config import ACCEPTED_MODELS, ARCHITECTURES
from rlmux.rl.memory.model_shape import read_json

_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Rotary positions whose frequencies do not depend on the length of the sequence."""

_DTYPES = ("F32", "F16", "BF16", "F64")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PIECE_BYTES = 1 << 22
"""Bytes of two tensors that are compared at a time."""
_MAX_HEADER_BYTES = 100_000_000
"""Longest header that safetensors itself accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """What the checks of other keys need of a checkpoint."""

    max_positions: int | None
    """Tokens of the longest sequence with positions in the model that the engines attend over; None where
    config.json does not say."""
    model_type: str
    """Architecture."""
    positions_key: str
    """Key of config.json that `max_positions` is from."""


class _Tensor(NamedTuple):
    """Where a safetensors file has a tensor."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    """Offset in the file, in bytes."""
    num_bytes: int


def check_checkpoint(folder: Path, *, is_served: bool = False, needs_weights: bool = True) -> CheckpointFolder:
    """Read a checkpoint's config.json and the headers of its weights. Without `needs_weights` config.json is enough.

    `is_served`: another engine samples, so any model is accepted that transformers might train;
    rl/user_code/engine_check.py finds whether a server has it. Raises UserError, with the file and what is accepted,
    for a checkpoint that cannot be trained.
    """
    accepted = "accepted: a Hugging Face checkpoint folder with config.json and *.safetensors"
    if not os.path.isdir(folder):  # one that is too long to exist is no folder either
        raise UserError(f"no such folder ({folder}); {accepted}")
    if not (folder / "config.json").is_file():
        raise UserError(f"the folder has no config.json ({folder}); {accepted}")
    has_weights = any(folder.glob("*.safetensors"))
    if needs_weights and not has_weights:
        raise UserError(f"the folder has no *.safetensors ({folder}); {accepted}")
    config_file = folder / "config.json"
    config = _read_json(config_file)
    _check_config(config, config_file, is_served=is_served)
    tensors = _read_tensors(folder) if has_weights else {}
    _check_tied_head(config, tensors, folder)
    if is_served:
        max_positions, key = config.get("max_position_embeddings"), "max_position_embeddings"
    else:
        _check_computed(config, config_file)
        if has_weights:
            _check_tensors(config, {name: tensor.shape for name, tensor in tensors.items()}, folder)
        max_positions, key = _max_positions(config)
    return CheckpointFolder(max_positions=max_positions, positions_key=key, model_type=config["model_type"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON: {error}; accepted: a file as transformers writes it") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is a {type(found).__name__}; accepted: an object, as transformers writes it")
    return found


def _check_config(config: Mapping[str, Any], path: Path, *, is_served: bool) -> None:
    """What every model needs to be counted and trained."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or (model_type not in ARCHITECTURES and not is_served):
        raise UserError(
            f"{path} has model_type {model_type!r}, which our own rollout engine does not compute; accepted: "
            f"{ACCEPTED_MODELS}"
        )
    for key in _SIZES:
        _check_size(config, key, path)
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"):
        if config.get(key) is not None:
            _check_size(config, key, path)
    if config.get("quantization_config") is not None:
        raise UserError(f"{path} has a quantization_config; accepted: weights in {', '.join(_DTYPES)}")


def _check_computed(config: Mapping[str, Any], path: Path) -> None:
    """What our own rollout engine computes."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"{path} has {key} {config[key]!r}; accepted: false")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path} has hidden_act {config['hidden_act']!r}; accepted: silu")
    if config["model_type"] == "qwen3_moe":
        _check_experts(config, path)
    _check_rope(config, path)


def _check_experts(config: Mapping[str, Any], path: Path) -> None:
    num_experts = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5, and before
    for key in (num_experts, "num_experts_per_tok", "moe_intermediate_size"):
        _check_size(config, key, path)
    for key, accepted in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if (config.get(key) or accepted) != accepted:
            raise UserError(f"{path} has {key} {config[key]!r}; accepted: {accepted}, experts in every layer")


def _max_positions(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """Tokens of the longest sequence that is computed as the model does, None for any, and the key that says so.

    Within its sliding window a model attends as one without it.
    """
    positions, window = config.get("max_position_embeddings"), config.get("sliding_window")
    has_window = window is not None and (config["model_type"] == "mistral" or config.get("use_sliding_window"))
    if has_window and (positions is None or window < positions):
        return window, "sliding_window"
    return positions, "max_position_embeddings"


def _check_size(config: Mapping[str, Any], key: str, path: Path) -> None:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path} has {key} {value!r}; accepted: a whole number, 1 or more")


def _check_rope(config: Mapping[str, Any], path: Path) -> None:
    """`rope_parameters` since transformers 5, `rope_scaling` before; `type` is the oldest name of `rope_type`."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        rope_type = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
        if rope_type not in _ROPE_TYPES:
            raise UserError(f"{path} has {key} with rope_type {rope_type!r}; accepted: {', '.join(_ROPE_TYPES)}")


def _read_tensors(folder: Path) -> dict[str, _Tensor]:
    """Every tensor of the model, by name, from the files that transformers would read."""
    has_weights = (folder / _WEIGHTS).is_file()
    if (folder / _INDEX).is_file():
        names = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{folder / _INDEX} has no weight_map; accepted: a file as transformers writes it")
        files = [folder / name for name in sorted(set(names.values()))]
        if has_weights and files != [folder / _WEIGHTS]:
            raise UserError(
                f"{folder} has {_WEIGHTS} beside {_INDEX}, which names other files, and readers disagree on which "
                "counts; accepted: one of them"
            )
    elif has_weights:
        files = [folder / _WEIGHTS]
    else:
        raise UserError(f"the folder has neither {_WEIGHTS} nor {_INDEX} ({folder}); accepted: one of them")
    tensors: dict[str, _Tensor] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, which {_INDEX} names; accepted: every file of the checkpoint")
        tensors |= _read_header(file)
    return tensors


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Tensors by name of one safetensors file whose length is what its header promises."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise UserError(f"{path} is truncated or not a safetensors file: {num_bytes} bytes; accepted: a whole one")
        text = file.read(header_bytes)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        end = 8 + header_bytes + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        tensors = {name: _tensor(fields, path, 8 + header_bytes) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{path} has a damaged header; accepted: a safetensors file") from None
    if num_bytes != end:
        what = "truncated" if num_bytes < end else "too long"
        raise UserError(f"{path} is {what}: {num_bytes} bytes, and its header promises {end}; accepted: a whole file")
    for dtype in sorted({tensor.dtype for tensor in tensors.values()} - set(_DTYPES)):
        raise UserError(f"{path} has tensors of {dtype}; accepted: {', '.join(_DTYPES)}")
    return tensors


def _tensor(fields: Mapping[str, Any], path: Path, data_start: int) -> _Tensor:
    """A tensor of a header; `data_start`: where the file's data begins."""
    begin, end = fields["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(begin)
    return _Tensor(tuple(fields["shape"]), str(fields["dtype"]), path, data_start + begin, end - begin)


def _check_tied_head(config: Mapping[str, Any], tensors: Mapping[str, _Tensor], folder: Path) -> None:
    """A head beside tied embeddings is a copy of them: some programs read it, and others do not."""
    head = tensors.get("lm_head.weight")
    embedding = tensors.get("model.embed_tokens.weight", tensors.get("embed_tokens.weight"))
    if head is None or embedding is None or not config.get("tie_word_embeddings"):
        return
    if head[:2] != embedding[:2] or not _are_equal(head, embedding):
        raise UserError(
            "the weights have a tensor lm_head.weight that differs from the embedding, and config.json ties both with "
            f"tie_word_embeddings ({folder}); accepted: the same values, no such tensor, or tie_word_embeddings: false"
        )


def _are_equal(tensor: _Tensor, other: _Tensor) -> bool:
    """Whether two tensors of one shape and type have the same bytes."""
    with tensor.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(tensor.start)
        second.seek(other.start)
        for done in range(0, tensor.num_bytes, _PIECE_BYTES):
            num_bytes = min(_PIECE_BYTES, tensor.num_bytes - done)
            if first.read(num_bytes) != second.read(num_bytes):
                return False
    return True


def _check_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Every layer has the tensors of the first one, of the same shapes; embeddings are as config.json says."""
    prefix = "model." if any(name.startswith("model.") for name in shapes) else ""
    expected: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (config["vocab_size"], config["hidden_size"])
    }
    if not config.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    first = f"{prefix}layers.0."
    of_a_layer = {name.removeprefix(first): shape for name, shape in shapes.items() if name.startswith(first)}
    of_a_layer.setdefault("self_attn.q_proj.weight", ())
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"{prefix}layers.{layer}.{name}": shape for name, shape in of_a_layer.items()}
    for name, shape in expected.items():
        if name not in shapes:
            raise UserError(f"the weights have no tensor {name} ({folder}); accepted: all that config.json promises")
        if shapes[name] != shape:
            raise UserError(
                f"the weights have tensor {name} of shape {list(shapes[name])} ({folder}); accepted: {list(shape)}, "
                "as config.json promises"
            )
