"""Attention within each sequence, for sequences that lie one after another in a single row without padding.

    tokens     a a a a b b b b c c c c c c       [1, T]
    runs       (2, 4)          (1, 6)            sequences of equal length that follow each other: (how many, length)

All else that a decoder computes is a matter of one token, so only attention needs to know where sequences begin: each
run is one batch of scaled dot products. Nothing is computed for padding, since there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

_NAME = "rlmux_packed"


def pack_attention(model: PreTrainedModel) -> None:
    """Have a model attend within the `runs` that its forward is given."""
    AttentionInterface.register(_NAME, _attend_within_runs)
    model.set_attn_implementation(_NAME)


def _attend_within_runs(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    runs: Sequence[tuple[int, int]],
    **_: object,
) -> tuple[Tensor, None]:
    """Queries [1, heads, T, head_dim], keys and values [1, kv_heads, T, head_dim] to [1, T, heads, head_dim]."""
    sizes = [count * length for count, length in runs]
    queries, keys, values = (torch.split(each[0], sizes, dim=1) for each in (query, key, value))
    mixed = [_attend(*qkv, run=run, scaling=scaling) for *qkv, run in zip(queries, keys, values, runs, strict=True)]
    return torch.cat(mixed)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, run: tuple[int, int], scaling: float) -> Tensor:
    """One run of n sequences of equal length: [heads, n * length, head_dim] to [n * length, heads, head_dim]."""
    queries, keys, values = (torch.unflatten(each, 1, run).transpose(0, 1) for each in (query, key, value))
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)
