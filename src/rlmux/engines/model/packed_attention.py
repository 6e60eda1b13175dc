"""Attention within each sequence, for sequences that lie one after another in a single row without padding.

    tokens     a a a a b b b b c c c c c c       [1, T]
    runs       (2, 4)          (1, 6)            sequences of equal length that follow each other: (how many, length)
    starts     0       4       8     14              first token of each, and the end of the last: [sequences + 1]

Only attention depends on where sequences begin; the rest of a decoder works token by token.

    a call a run     any device and dtype. A run is one batch of scaled dot products, without padding; torch chooses the
                     kernel. Sliding windows, soft caps of scores and attention sinks as transformers' eager attention.
    one call         flash attention over all sequences: plain causal attention in half precision, on a GPU, of a model
                     whose every parameter is trained.

The gradient of flash attention adds up in a fixed order only within `deterministic_backward`, which torch's function
for one call follows too; it is tried before it is used, and the training probe of each pipeline compares gradients.
That order depends on the number of sequences in the call. Tenants of one base, who must have their own bits beside
others, therefore take a call a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

_NAME = "rlmux_packed"
_WHOLE_NAME = "rlmux_packed_whole"
"""Of a model whose every parameter is trained."""
_LEAST_CAPABILITY = (8, 0)
"""Compute capability that flash attention needs."""
_MAX_HEAD_SIZE = 256


def pack_attention(model: PreTrainedModel) -> None:
    """Make a model attend within the sequences of `packed_inputs`, a part of its forward call."""
    name = _WHOLE_NAME if all(each.requires_grad for each in model.parameters()) else _NAME
    AttentionInterface.register(name, _attend_within_runs)
    model.set_attn_implementation(name)


def is_packed(model: Any) -> bool:
    """Whether `pack_attention` was called for this model."""
    return model.config._attn_implementation in (_NAME, _WHOLE_NAME)


def packed_inputs(model: Any, runs: Sequence[tuple[int, int]], device: torch.device) -> dict[str, Any]:
    """What tells a packed model's forward call on `device` where sequences begin."""
    is_whole = model.config._attn_implementation == _WHOLE_NAME
    return {"runs": runs, "starts": sequence_starts(runs, device) if is_whole and _has_one_call(device) else None}


def _has_one_call(device: torch.device) -> bool:
    """Whether torch has flash attention over sequences of unequal length for this device."""
    if device.type != "cuda" or _one_call() is None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY and _one_call_agrees(device)


@cache
def _one_call_agrees(device: torch.device) -> bool:
    """Whether one call gives what a call a run gives, within rounding, and the same bits again; tried once. It fails
    where a build of torch has the function and not its kernels."""
    runs = [(2, 3), (1, 7), (1, 20)]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, num_heads, 33, 64) for num_heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]

    def results(starts: Tensor | None) -> list[Tensor]:
        query, key, value = (each.clone().requires_grad_() for each in given)
        mixed, _ = _attend_within_runs(None, query, key, value, None, runs=runs, starts=starts)
        return [mixed.detach(), *torch.autograd.grad(mixed.float().square().sum(), [query, key, value])]

    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # as every gradient is computed
    try:
        starts = sequence_starts(runs, device)
        by_runs, once, again = results(None), results(starts), results(starts)
    except (RuntimeError, TypeError, ValueError):
        return False
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    is_near = all(torch.allclose(a, b, rtol=0.1, atol=0.1) for a, b in zip(once, by_runs, strict=True))
    return is_near and all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@cache
def _one_call() -> Callable[..., Any] | None:
    """torch's attention over sequences of unequal length; None where this torch has none with grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # an older torch
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys() else None


def sequence_starts(runs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """First token of each sequence and the end of the last, int32 [sequences + 1], without a wait for the device."""
    starts = torch.tensor([0, *accumulate(length for count, length in runs for _ in range(count))], dtype=torch.int32)
    return starts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else starts


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
    starts: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Queries [1, heads, T, head_dim], keys and values [1, kv_heads, T, head_dim] to [1, T, heads, head_dim]."""
    kind = _AttentionKind(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    longest, attend = max(length for _, length in runs), _one_call()
    if starts is not None and attend is not None and _fits_one_call((query, key, value), longest, kind):
        rows = [each[0].transpose(0, 1) for each in (query, key, value)]
        causal = {"window_size": (-1, 0), "scale": kind.scaling, "enable_gqa": True}
        return attend(*rows, starts, starts, longest, longest, **causal)[None], None
    sizes = [count * length for count, length in runs]
    queries, keys, values = (torch.split(each[0], sizes, dim=1) for each in (query, key, value))
    mixed = [_attend(*qkv, run=run, kind=kind) for *qkv, run in zip(queries, keys, values, runs, strict=True)]
    return torch.cat(mixed)[None], None


def _fits_one_call(qkv: Sequence[Tensor], longest: int, kind: _AttentionKind) -> bool:
    """Whether flash attention computes this attention of sequences of up to `longest` tokens."""
    is_plain = kind.softcap is None and kind.sinks is None and (kind.window is None or kind.window >= longest)
    (dtype, *others), (size, *sizes) = {each.dtype for each in qkv}, {each.shape[-1] for each in qkv}
    is_half = dtype in (torch.float16, torch.bfloat16) and not others
    return is_plain and is_half and not sizes and size % 8 == 0 and size <= _MAX_HEAD_SIZE and longest > 1


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
