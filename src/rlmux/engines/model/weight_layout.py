"""Layout of the slot engine's fused weights, and the tensors that a weight file must have for them.

A module of its own: it has names and shapes, and no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from rlmux.core.errors import UserError
from rlmux.engines.model.decoder_shape import DecoderShape


def weight_sizes(shape: DecoderShape) -> Iterator[tuple[int, ...]]:
    """Sizes of the fused tensors, in the order of the flat buffer."""
    attention_size = shape.num_kv_heads * shape.group_size * shape.head_dim
    yield shape.vocab_size, shape.hidden_size
    yield shape.hidden_size, shape.vocab_size
    for _ in range(shape.num_layers):
        yield shape.hidden_size, shape.qkv_size
        yield attention_size, shape.hidden_size
        experts = (shape.num_experts,) if shape.num_experts else ()
        yield *experts, shape.hidden_size, 2 * shape.intermediate_size
        yield *experts, shape.intermediate_size, shape.hidden_size
        yield shape.group_size + 1, shape.head_dim
        if shape.has_qkv_bias:
            yield (shape.qkv_size,)
        if shape.num_experts:
            yield shape.hidden_size, shape.num_experts
    yield 2 * shape.num_layers + 1, shape.hidden_size


def views_of(flat: Tensor, shape: DecoderShape) -> Iterator[Tensor]:
    start = 0
    for size in weight_sizes(shape):
        length = math.prod(size)
        yield flat[start : start + length].view(size)
        start += length


def attention_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    hidden, dim = shape.hidden_size, shape.head_dim
    query_size, kv_size = shape.num_kv_heads * shape.group_size * dim, shape.num_kv_heads * dim
    sizes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, query_size),
    }
    if shape.has_qkv_bias:
        for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
            sizes[f"self_attn.{name}_proj.bias"] = (size,)
    if shape.has_head_norms:
        sizes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return sizes


def mlp_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    hidden, intermediate, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
    if experts:
        return {
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * intermediate, hidden),
            "mlp.experts.down_proj": (experts, hidden, intermediate),
        }
    return {
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }


def file_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Every tensor a weight file must have, by Hugging Face name."""
    hidden = shape.hidden_size
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.has_tied_embeddings:
        sizes["lm_head.weight"] = (shape.vocab_size, hidden)
    for index in range(shape.num_layers):
        own = attention_sizes(shape) | {"post_attention_layernorm.weight": (hidden,)} | mlp_sizes(shape)
        sizes |= {f"model.layers.{index}.{name}": size for name, size in own.items()}
    return sizes


def with_hub_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the hub has them: an expert's matrices each for itself, which transformers 5 and files of versions
    stack. [experts, 2 * intermediate, hidden] is the gate's rows, then the up projection's."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, is_expert, part = name.partition(".mlp.experts.")
        if not is_expert or tensor.dim() < 3:
            named[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor.unbind()):
            for own, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                named[f"{before}.mlp.experts.{expert}.{own}.weight"] = rows.contiguous()
    return named


def check_sizes(tensors: Mapping[str, Tensor], shape: DecoderShape) -> None:
    """Raises UserError for a tensor that is missing or of another size."""
    for name, size in file_sizes(shape).items():
        if name not in tensors:
            raise UserError(f"weights: {name} is missing; a Hugging Face safetensors layout is accepted")
        if tuple(tensors[name].shape) != size:
            raise UserError(f"weights: {name} is {tuple(tensors[name].shape)}; the model needs {size}")
