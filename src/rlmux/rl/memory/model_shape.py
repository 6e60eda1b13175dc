"""The sizes of a model, from the user's file or a checkpoint's config.json, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json
from rlmux.rl.config import AdapterConfig, ModelConfig
from rlmux.rl.vocabulary import CharVocabulary

BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by the file's name of its dtype."""
_WITH_HEAD_NORMS = ("qwen3", "qwen3_moe")


def adapter_parameters(shape: ModelShape, adapter: AdapterConfig) -> int:
    """Parameters of an adapter: A and B beside each target, of each layer or of the model."""
    hidden, query, kv, inner = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    ends = {
        "q_proj": hidden + query,
        "k_proj": hidden + kv,
        "v_proj": hidden + kv,
        "o_proj": query + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    of_head = hidden + shape.vocab_size if "lm_head" in adapter.targets else 0
    of_layer = sum(ends[target] for target in adapter.targets if target in ends)
    return adapter.rank * (shape.num_layers * of_layer + of_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that determine the bytes of a model and its computation."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """Whether input and output embedding are one matrix."""
    has_head_norms: bool
    """Whether queries and keys are normed, as in qwen3."""
    has_qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in qwen2."""
    num_experts: int = 0
    """Experts of each layer, of width `intermediate_size`; 0 for a dense model."""
    num_picked: int = 0
    """Experts that compute a token."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of a token's key, or of its value, in one layer."""
        return self.num_kv_heads * self.head_dim

    def splits_over(self, num_gpus: int) -> bool:
        """Whether a server can split the model over so many GPUs. Key heads are repeated where there are too few."""
        of_keys = max(self.num_kv_heads, num_gpus) % min(self.num_kv_heads, num_gpus)
        return not (self.num_heads % num_gpus or of_keys or self.intermediate_size % num_gpus)

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices."""
        return self._attention_matrices + self.mlp_matrices + self.hidden_size * self.num_experts

    @property
    def _attention_matrices(self) -> int:
        return 2 * self.hidden_size * (self.query_size + self.kv_size)

    @property
    def mlp_matrices(self) -> int:
        """Parameters of one layer's feed-forward matrices, of all its experts."""
        return max(1, self.num_experts) * 3 * self.hidden_size * self.intermediate_size

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute a token: all except experts that are not picked."""
        idle = self.num_experts - self.num_picked
        return self.num_parameters - self.num_layers * idle * 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding(self) -> int:
        """Parameters of one embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        norms = self.hidden_size * (2 * self.num_layers + 1)
        norms += 2 * self.head_dim * self.num_layers if self.has_head_norms else 0
        norms += (self.query_size + 2 * self.kv_size) * self.num_layers if self.has_qkv_bias else 0
        return self.num_layers * self.layer_matrices + self.embedding * (1 if self.is_tied else 2) + norms


def shape_of(model: ModelConfig) -> ModelShape:
    """Raises UserError if the folder's config.json does not describe a model."""
    if model.path is not None:
        path = Path(model.path)
        try:
            return _shape_in(read_json(path / "config.json"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"model.path {path}: config.json is not that of a transformers model: {error!r}") from error
    return ModelShape(
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size or model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        vocab_size=CharVocabulary().vocab_size,
        is_tied=True,
        has_head_norms=model.architecture in _WITH_HEAD_NORMS,
        has_qkv_bias=model.architecture == "qwen2",
        num_experts=model.num_experts or 0,
        num_picked=model.num_experts_per_token or 0,
    )


def read_json(path: Path) -> Any:
    """The value of a checkpoint's small file, parsed once for each state of the file. Raises OSError, ValueError."""
    state = path.stat()
    return _parsed(path, (state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=16)
def _parsed(path: Path, _: tuple[int, ...]) -> Any:
    return parse_json(path.read_bytes())


def _shape_in(config: Mapping[str, Any]) -> ModelShape:
    num_experts = _num_experts(config)
    return ModelShape(
        hidden_size=config["hidden_size"],
        intermediate_size=(num_experts and config.get("moe_intermediate_size")) or config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        is_tied=config.get("tie_word_embeddings", False),
        has_head_norms=config.get("model_type") in _WITH_HEAD_NORMS,
        has_qkv_bias=config.get("model_type") == "qwen2",
        num_experts=num_experts,
        num_picked=config["num_experts_per_tok"] if num_experts else 0,
    )


def _num_experts(config: Mapping[str, Any]) -> int:
    """Their number, by its name since transformers 5 or the one before; 0 for a dense model."""
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)
