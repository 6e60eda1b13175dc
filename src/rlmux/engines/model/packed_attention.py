"""Attention within each sequence, for sequences that lie one after another in a single row without padding.

    tokens     a a a a b b b b c c c c c c       [1, T]
    runs       (2, 4)          (1, 6)            sequences of equal length that follow each other: (how many, length)

Only attention depends on where sequences begin; the rest of a decoder works token by token. Each run is one batch of
scaled dot products, without padding. torch chooses the kernel by device and dtype, flash attention where available.

Sliding windows, soft caps of scores and attention sinks are computed as transformers' eager attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

_NAME = "rlmux_packed"


def pack_attention(model: PreTrainedModel) -> None:
    """Make a model attend within the `runs` of its forward call."""
    AttentionInterface.register(_NAME, _attend_within_runs)
    model.set_attn_implementation(_NAME)


def is_packed(model: Any) -> bool:
    """Whether `pack_attention` was called for this model."""
    return bool(model.config._attn_implementation == _NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionKind:
    """How scores become weights in one layer."""

    scaling: float | None
    """Factor of each score; None: the default for the head size."""
    window: int | None
    """Tokens that a token sees, itself among them; None for all before it."""
    softcap: float | None
    """Bound that a tanh keeps scores within."""
    sinks: Tensor | None
    """Score [heads] of a key that stands for nothing."""


def _attend_within_runs(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    runs: Sequence[tuple[int, int]],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Queries [1, heads, T, head_dim], keys and values [1, kv_heads, T, head_dim] to [1, T, heads, head_dim]."""
    sizes = [count * length for count, length in runs]
    kind = _AttentionKind(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    queries, keys, values = (torch.split(each[0], sizes, dim=1) for each in (query, key, value))
    mixed = [_attend(*qkv, run=run, kind=kind) for *qkv, run in zip(queries, keys, values, runs, strict=True)]
    return torch.cat(mixed)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, run: tuple[int, int], kind: _AttentionKind) -> Tensor:
    """One run of n sequences of equal length: [heads, n * length, head_dim] to [n * length, heads, head_dim]."""
    queries, keys, values = (torch.unflatten(each, 1, run).transpose(0, 1) for each in (query, key, value))
    if kind.softcap is not None or kind.sinks is not None:
        mixed = _mix_by_scores(queries, keys, values, kind)
    elif kind.window is not None and kind.window < run[1]:
        seen = _seen(run[1], kind.window, query.device)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=kind.scaling, enable_gqa=True)
    else:
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=kind.scaling, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)


def _mix_by_scores(queries: Tensor, keys: Tensor, values: Tensor, kind: _AttentionKind) -> Tensor:
    """Attention with every score held: [n, heads, length, head_dim] of all three, fewer heads of keys and values."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
    scaling = queries.shape[-1] ** -0.5 if kind.scaling is None else kind.scaling
    scores = queries @ keys.transpose(-1, -2) * scaling
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    length = queries.shape[2]
    scores = scores.masked_fill(~_seen(length, kind.window, queries.device), -torch.inf).float()
    if kind.sinks is not None:
        sinks = kind.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :length].to(values.dtype) @ values


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [length, length] each query sees."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < (window or length))
