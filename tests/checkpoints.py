"""Checkpoint folders of zeros, written without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 98,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (98, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
    "model.layers.1.self_attn.q_proj.weight": (16, 16),
}


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_checkpoint(folder: Path) -> Path:
    """A folder with `CONFIG` and weights of `SHAPES`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder / "model.safetensors", SHAPES)
    return folder
