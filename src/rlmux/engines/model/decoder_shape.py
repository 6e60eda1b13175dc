"""Sizes of the decoders that the slot engine computes, read from a Hugging Face model, and checks of support."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from rlmux.core.errors import UserError
from rlmux.rl.config import ACCEPTED_MODELS, ARCHITECTURES


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes that decide every tensor."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    group_size: int
    """Query heads that share one key and value head."""
    head_dim: int
    intermediate_size: int
    has_head_norms: bool
    """Queries and keys are RMS-normed per head (Qwen3)."""
    has_qkv_bias: bool = False
    """Queries, keys and values have a bias (Qwen2)."""
    num_experts: int = 0
    """Experts of each layer, of width `intermediate_size`; 0 for a dense model."""
    num_picked: int = 0
    """Experts that compute a token."""
    has_normed_picks: bool = True
    """Whether the weights of a token's experts add up to 1."""
    has_tied_embeddings: bool
    norm_epsilon: float

    @staticmethod
    def of(model: PreTrainedModel) -> DecoderShape:
        """Read a Hugging Face model's sizes. Refuses what `step` cannot compute (`check_window` for windows)."""
        config = model.config
        if config.model_type not in ARCHITECTURES:
            raise UserError(
                f"model.path: rlmux's own rollout engine does not compute a {config.model_type!r} model; accepted: "
                f"{ACCEPTED_MODELS}"
            )
        if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
            raise UserError("model.path: projection biases are not supported; accepted: models without them")
        num_experts = config.num_experts if config.model_type == "qwen3_moe" else 0
        if num_experts and (config.decoder_sparse_step != 1 or config.mlp_only_layers):
            raise UserError(
                "model.path: layers without experts are not supported here; accepted: experts in every layer"
            )
        if config.hidden_act != "silu":
            raise UserError(f"model.path: hidden_act {config.hidden_act!r} is not supported; accepted: silu")
        return DecoderShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            group_size=config.num_attention_heads // config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.moe_intermediate_size if num_experts else config.intermediate_size,
            has_head_norms=config.model_type in ("qwen3", "qwen3_moe"),
            has_qkv_bias=config.model_type == "qwen2",
            num_experts=num_experts,
            num_picked=config.num_experts_per_tok if num_experts else 0,
            has_normed_picks=bool(getattr(config, "norm_topk_prob", True)),
            has_tied_embeddings=bool(config.tie_word_embeddings),
            norm_epsilon=config.rms_norm_eps,
        )

    @property
    def heads_per_group(self) -> int:
        """Queries of a kv group, its key and its value."""
        return self.group_size + 2

    @property
    def qkv_size(self) -> int:
        """Columns of the fused projection to queries, keys and values."""
        return self.num_kv_heads * self.heads_per_group * self.head_dim


def check_window(model: PreTrainedModel, longest: int) -> None:
    """Raises UserError for a sliding window that sequences of `longest` tokens exceed: `step` attends to all tokens."""
    window = getattr(model.config, "sliding_window", None)
    if window is not None and longest > window:
        raise UserError(
            f"model.path: sliding_window {window} is not supported; accepted: null, or no sequence longer than that"
        )
