"""The small server's model: a Qwen3 or Llama in numpy, and LoRA adapters of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class WorkerError(Exception):
    """What a call to vLLM's workers fails with: its server answers 500."""


class Model:
    """A Qwen3 or Llama decoder, one token of one sequence at a time."""

    def __init__(self, folder: Path, *, is_rounded: bool) -> None:
        """`is_rounded`: weights are held in bfloat16. It computes in float32 with them all the same."""
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = read_safetensors(folder / "model.safetensors")
        self.is_rounded = is_rounded
        if is_rounded:
            self.tensors = {name: widened(rounded(tensor)) for name, tensor in self.tensors.items()}
        config = self.config
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
        self.frequencies = theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)

    def draw_weights(self) -> None:
        """Random weights in place of those that were read."""
        generator = np.random.Generator(np.random.Philox(0))
        for name, tensor in self.tensors.items():
            self.tensors[name] = generator.uniform(-1e-3, 1e-3, tensor.shape).astype(np.float32)

    def step(self, weights: Mapping[str, np.ndarray], token: int, cache: list[list[Any]], position: int) -> np.ndarray:
        """Logits [vocab] behind this token; its keys and values go to the cache. `weights`: its own or an adapter's."""
        eps = self.config["rms_norm_eps"]
        scale = np.float32(np.sqrt(self.dim))
        hidden = weights["model.embed_tokens.weight"][token]
        angles = position * self.frequencies
        cos, sin = (np.tile(of(angles), 2).astype(np.float32) for of in (np.cos, np.sin))
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            normed = norm(hidden, weights[f"{name}input_layernorm.weight"], eps)
            query, key, value = (
                (weights[f"{name}self_attn.{kind}_proj.weight"] @ normed).reshape(-1, self.dim) for kind in "qkv"
            )
            if f"{name}self_attn.q_norm.weight" in weights:
                query = norm(query, weights[f"{name}self_attn.q_norm.weight"], eps)
                key = norm(key, weights[f"{name}self_attn.k_norm.weight"], eps)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            keys, values = cache[layer]
            keys.append(key)
            values.append(value)
            group = self.heads // self.kv_heads
            all_keys, all_values = np.stack(keys, 1), np.stack(values, 1)
            seen = [
                softmax(all_keys[head // group] @ query[head] / scale) @ all_values[head // group]
                for head in range(self.heads)
            ]
            hidden = hidden + weights[f"{name}self_attn.o_proj.weight"] @ np.concatenate(seen)
            normed = norm(hidden, weights[f"{name}post_attention_layernorm.weight"], eps)
            gate = weights[f"{name}mlp.gate_proj.weight"] @ normed
            up = weights[f"{name}mlp.up_proj.weight"] @ normed
            hidden = hidden + weights[f"{name}mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        hidden = norm(hidden, weights["model.norm.weight"], eps)
        return weights.get("lm_head.weight", weights["model.embed_tokens.weight"]) @ hidden


def rounded(tensor: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers, even ones where two are as near."""
    bits = np.ascontiguousarray(tensor).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers that these bfloat16 are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def norm(hidden: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + np.float32(eps)) * gain


def rotate(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = rows.shape[-1] // 2
    return rows * cos + np.concatenate([-rows[:, half:], rows[:, :half]], -1) * sin


def softmax(row: np.ndarray) -> np.ndarray:
    exponents = np.exp(row - row.max())
    return exponents / exponents.sum()


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file of float32 or bfloat16, as float32."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                tensors[name] = widened(np.frombuffer(content[begin:end], np.uint16)).reshape(entry["shape"])
            else:
                tensors[name] = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"])
    return tensors


class Adapters:
    """LoRA adapters of --enable-lora, in PEFT's files: base + lora_B @ lora_A * lora_alpha / r."""

    def __init__(self, max_rank: int) -> None:
        self.max_rank = max_rank
        self.pairs: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        self.merged: dict[str, dict[str, np.ndarray]] = {}

    def load(self, name: str, folder: Path) -> None:
        """Raises FileNotFoundError without an adapter's files, WorkerError for a rank that is too high."""
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = read_safetensors(folder / "adapter_model.safetensors")
        if config["r"] > self.max_rank:
            raise WorkerError(f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_rank}.")
        scale = np.float32(config["lora_alpha"] / config["r"])
        pairs = {}
        for key, down in tensors.items():
            if key.endswith(".lora_A.weight"):
                stem = key.removesuffix(".lora_A.weight")
                pairs[f"{stem.removeprefix('base_model.model.')}.weight"] = (
                    down,
                    tensors[f"{stem}.lora_B.weight"] * scale,
                )
        self.pairs[name] = pairs
        self.merged.pop(name, None)

    def unload(self, name: str) -> None:
        del self.pairs[name]
        self.merged.pop(name, None)

    def forget_base(self) -> None:
        """The base has other weights now."""
        self.merged.clear()

    def weights(self, name: str | None, base: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Weights of an adapter's model; of the base for None, and for an adapter that was unloaded meanwhile."""
        if name is None or name not in self.pairs:
            return base
        if name not in self.merged:
            changed = {key: base[key] + up @ down for key, (down, up) in self.pairs[name].items()}
            self.merged[name] = {**base, **changed}
        return self.merged[name]
