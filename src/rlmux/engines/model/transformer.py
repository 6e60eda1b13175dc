"""The forward pass of a Qwen, Llama or Mistral decoder over fixed cache slots, in plain torch.

    Hugging Face weights ──fuse──▶ DecoderWeights ──▶ prefill(tokens)  keys and values of whole contexts
                                                 └──▶ DecodePlan.step(tokens, positions)  logits of one token

For kv group i the fused projection yields [q_0 .. q_(G-1), k, v], so one strided view serves queries, keys
and values. Three things are folded into the weights when they are fused: the gain of every RMS norm that
precedes a matrix product, the transposition of the matrices, and an interleaving of the query and key
channels that turns the rotation by position into one complex product (a dot product does not mind the order).
The rotation and the gain of the per-head norms are the only per-token factors left.

Invariant: a row's numbers depend on that row alone. Every op here works on rows, and which widths and windows
keep even the rounding is measured by `batch_probe`.

Weights, cache and hidden states have one dtype. In bfloat16 the norms and the rotation are computed in float32 and
rounded; logits are float32 in either.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from rlmux.engines.model.adapter_rows import RowAdapters, rotation_pairs
from rlmux.engines.model.decode_graphs import DecodeGraphs
from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.experts import ExpertWeights
from rlmux.engines.model.row_product import row_product
from rlmux.engines.model.weight_layout import attention_sizes, check_sizes, views_of, weight_sizes

FUSED_AT_ONCE = 2**22
"""Numbers whose products with a norm's gain are in a GPU's memory at once."""
_ROWS_ON_CORE = 16
"""Rows of a matrix that a core transposes at once."""
_MAX_MASK_TABLE = 1024
"""Positions up to which the masks are kept as a table of their square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Matrices are [in, out]."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    """[experts, in, out] where there are experts; so is `down`."""
    down: Tensor
    head_gain: Tensor
    """[group_size + 1, head_dim]: gains of the query and key norms; ones where the model has none."""
    qkv_bias: Tensor | None = None
    """[qkv_size]"""
    experts: ExpertWeights | None = None
    """The experts that `gate_up` and `down` are of; None in a dense model."""


class DecoderWeights:
    """All fused weights as views of one flat buffer, so that moving them is one copy.

    `refresh` fills the buffer in place from Hugging Face names, a few tensors at a time.
    """

    def __init__(
        self,
        shape: DecoderShape,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        flat: Tensor | None = None,
    ) -> None:
        """`flat`: the buffer, where it is there already; else one of zeros is made."""
        self.shape = shape
        size = sum(math.prod(size) for size in weight_sizes(shape))
        self.flat = torch.zeros(size, dtype=dtype, device=device) if flat is None else flat
        views = views_of(self.flat, shape)
        self.embedding = next(views)
        self.head = next(views)
        self.layers = [_layer_weights(views, shape) for _ in range(shape.num_layers)]
        self.gains = next(views)
        """[2 * layers + 1, hidden]: gains of the two norms of each block, and of the last one, which an adapter's own
        matrices need."""

    def first_layers(self, num_layers: int) -> DecoderWeights:
        """The same tensors, seen as a model of fewer layers."""
        fewer = copy.copy(self)
        fewer.layers = self.layers[:num_layers]
        fewer.shape = replace(self.shape, num_layers=len(fewer.layers))
        return fewer

    def refresh(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights under their Hugging Face names, each rounded once; all are checked before any changes.

        They are fused on the device, one of a layer's at a time, and the embeddings in parts: a core is far slower.
        """
        check_sizes(tensors, self.shape)
        device = self.embedding.device

        def get(name: str) -> Tensor:
            return tensors[name].to(device)

        self.embedding.copy_(tensors["model.embed_tokens.weight"])
        head = "model.embed_tokens.weight" if self.shape.has_tied_embeddings else "lm_head.weight"
        _copy_product(self.head, tensors[head], get("model.norm.weight"))
        self.gains[-1] = get("model.norm.weight")
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            self._refresh_attention(layer, {k: get(prefix + k) for k in attention_sizes(self.shape)})
            gain = get(prefix + "post_attention_layernorm.weight")
            self.gains[2 * index : 2 * index + 2] = torch.stack([get(prefix + "input_layernorm.weight"), gain])
            if layer.experts is not None:
                _copy_product(layer.experts.router, get(prefix + "mlp.gate.weight"), gain)
                for target, matrix in zip(layer.gate_up, get(prefix + "mlp.experts.gate_up_proj"), strict=True):
                    _copy_product(target, matrix, gain)
                layer.down.copy_(get(prefix + "mlp.experts.down_proj").transpose(1, 2))
                continue
            for target, name in zip(layer.gate_up.chunk(2, dim=1), ("gate", "up"), strict=True):
                _copy_product(target, get(f"{prefix}mlp.{name}_proj.weight"), gain)
            layer.down.copy_(get(prefix + "mlp.down_proj.weight").T)

    def _refresh_attention(self, layer: LayerWeights, own: Mapping[str, Tensor]) -> None:
        shape = self.shape
        order = rotation_pairs(shape.head_dim).to(layer.qkv.device)
        groups, hidden = shape.num_kv_heads, shape.hidden_size
        query = own["self_attn.q_proj.weight"].view(groups, shape.group_size, shape.head_dim, hidden)
        key = own["self_attn.k_proj.weight"].view(groups, 1, shape.head_dim, hidden)
        value = own["self_attn.v_proj.weight"].view(groups, 1, shape.head_dim, hidden)
        gain = own["input_layernorm.weight"]
        heads = torch.split(layer.qkv, shape.head_dim, dim=1)
        per_group = shape.group_size + 2
        paired = torch.empty(shape.head_dim, hidden, dtype=query.dtype, device=query.device)
        for group in range(groups):
            own_heads = heads[group * per_group : (group + 1) * per_group]
            for target, head in zip(own_heads, (*query[group], key[group, 0]), strict=False):
                _copy_product(target, torch.index_select(head, 0, order, out=paired), gain)
            _copy_product(own_heads[-1], value[group, 0], gain)
        layer.output.copy_(own["self_attn.o_proj.weight"].T)
        if layer.qkv_bias is not None:
            biases = [own[f"self_attn.{name}_proj.bias"].view(groups, -1, shape.head_dim) for name in "qkv"]
            layer.qkv_bias.copy_(torch.cat([*(each[:, :, order] for each in biases[:2]), biases[2]], dim=1).flatten())
        layer.head_gain.fill_(1.0)
        if shape.has_head_norms:
            layer.head_gain[:-1] = own["self_attn.q_norm.weight"][order]
            layer.head_gain[-1] = own["self_attn.k_norm.weight"][order]


def _copy_product(target: Tensor, matrix: Tensor, gain: Tensor) -> None:
    """Copy `matrix` [out, in] times `gain` [in] to `target` [in, out], each product rounded once.

    A few rows at a time: on a core 16 fill a line of its cache in each row of the target, which is transposed in one
    pass without memory of its own; on a GPU they are as many as memory for the float32 products allows.
    """
    is_on_core = target.device.type == "cpu"
    num_rows = _ROWS_ON_CORE if is_on_core else max(1, FUSED_AT_ONCE // matrix.shape[1])
    if not is_on_core:
        gain = gain.float()
    for part, columns in zip(torch.split(matrix, num_rows), torch.split(target, num_rows, dim=1), strict=True):
        if is_on_core:
            torch.mul(part.T, gain[:, None], out=columns)
        else:
            columns.copy_((part.to(target.device).float() * gain).T)


class KvCache:
    """Keys and values of every slot, allocated once. Keys are stored transposed, as the scores read them.

    Each layer has `num_tokens` tokens; slots of `capacity` tokens share them: `num_slots * capacity <= num_tokens`.
    A slot's entries at and beyond its position are stale or zero, never read, and always finite.
    """

    def __init__(
        self,
        shape: DecoderShape,
        num_slots: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        num_tokens: int | None = None,
    ) -> None:
        """`max_len`: the first capacity. `num_tokens`: None for `num_slots * max_len`."""
        self._heads, self._dim = shape.num_kv_heads, shape.head_dim
        self._most_slots = num_slots
        self._num_tokens = num_slots * max_len if num_tokens is None else num_tokens
        size = self._num_tokens * self._heads * self._dim
        self._stored = torch.zeros(2, shape.num_layers, size, dtype=dtype, device=device)
        self.capacity = max_len
        """Tokens of a slot."""
        self.keys, self.values = self._views()

    @property
    def num_slots(self) -> int:
        return self.num_slots_of(self.capacity)

    def num_slots_of(self, capacity: int) -> int:
        """How many slots of this capacity there is room for."""
        return min(self._most_slots, self._num_tokens // capacity)

    def lay_out(self, capacity: int, num_kept: int) -> None:
        """Change the capacity. The first `num_kept` slots keep their tokens, as many as fit; a layer is copied at once.

        Views of `keys` and `values` that were taken before are of no use after it.
        """
        num_tokens = min(capacity, self.capacity)
        old_keys, old_values = self.keys, self.values
        self.capacity = capacity
        self.keys, self.values = self._views()
        for layer in range(len(self.keys)):
            keys = old_keys[layer, :num_kept, :, :, :num_tokens].clone()
            values = old_values[layer, :num_kept, :, :num_tokens].clone()
            self.keys[layer, :num_kept, :, :, :num_tokens] = keys
            self.values[layer, :num_kept, :, :num_tokens] = values

    def _views(self) -> tuple[Tensor, Tensor]:
        """Keys [layers, slots, kv_heads, head_dim, capacity], values [layers, slots, kv_heads, capacity, head_dim]."""
        num_slots, heads, dim = self.num_slots, self._heads, self._dim
        keys, values = self._stored[:, :, : num_slots * heads * dim * self.capacity]
        return (
            keys.unflatten(1, (num_slots, heads, dim, self.capacity)),
            values.unflatten(1, (num_slots, heads, self.capacity, dim)),
        )

    def tensors(self) -> list[Tensor]:
        """All that is stored, for an offload."""
        return [self._stored]

    def read(self, slot: int, num_tokens: int) -> Tensor:
        """A copy of a slot's context: [layers, 2, kv_heads, num_tokens, head_dim]."""
        keys = self.keys[:, slot, :, :, :num_tokens].transpose(-1, -2)
        return torch.stack([keys, self.values[:, slot, :, :num_tokens]], dim=1)

    def write(self, slot: int, kv: Tensor) -> None:
        """The reverse of `read`."""
        num_tokens = kv.shape[3]
        self.keys[:, slot, :, :, :num_tokens] = kv[:, 0].transpose(-1, -2)
        self.values[:, slot, :, :num_tokens] = kv[:, 1]

    def clear(self, slot: int) -> None:
        """Fill a slot with zeros."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    def exchange(self, slots: Tensor, sources: Tensor) -> None:
        """Put the contents of `sources` into `slots` at once; the two name the same slots."""
        for stored in (*self.keys, *self.values):  # layer by layer: a copy of all of them may not fit
            stored[slots] = stored[sources]


class PositionTables:
    """What depends on a token's position alone: its rotation and which keys it may see."""

    def __init__(
        self, model: PreTrainedModel, max_len: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype`: of the scores that a mask is added to."""
        rotary = model.model.rotary_emb
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * rotary.inv_freq.float()[None, :]
        scale = torch.full_like(angles, float(rotary.attention_scaling))
        self.rotations = torch.polar(scale, angles).to(device)
        """[max_len, head_dim / 2], complex."""
        self._dtype = dtype
        steps = torch.zeros(2 * max_len, dtype=dtype, device=device)
        steps[max_len:] = -math.inf
        self.masks = steps.unfold(0, max_len, 1)[:-1].flip(0).contiguous() if max_len <= _MAX_MASK_TABLE else None
        """[max_len, max_len]: row p is 0 up to column p and -inf beyond; computed per step where big."""
        self.columns = torch.arange(max_len, device=device)

    def mask(self, positions: Tensor, window: int) -> Tensor:
        """[rows, 1, window], to be added to the scores."""
        if self.masks is not None:
            return self.masks[:, :window].index_select(0, positions).unsqueeze(1)
        hidden = self.columns[:window] > positions[:, None, None]
        return torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, -math.inf)

    def tensors(self) -> list[Tensor]:
        """All tables, for an offload."""
        return [self.rotations, self.columns] + ([] if self.masks is None else [self.masks])


class DecodePlan:
    """One decode step of the first `width` slots over the first `window` cache positions.

    Holds the views of the cache and scratch tensors that all layers share, so that a step only computes.
    Build one per (width, window) and keep it until the cache is laid out anew. Rows beyond the cache's slots belong to
    no sequence: they are computed without attention.
    """

    def __init__(
        self, weights: DecoderWeights, cache: KvCache, tables: PositionTables, width: int, window: int
    ) -> None:
        shape, device, dtype = weights.shape, cache.keys.device, cache.keys.dtype
        rows, dim = width * shape.num_kv_heads, shape.head_dim
        attended = min(width, cache.num_slots) * shape.num_kv_heads
        self.width = width
        self.window = window
        self.adapters: RowAdapters | None = None
        """Who adds what to each row of the next steps; None: the base alone computes."""
        self.masks: dict[str, Tensor] = {}
        """Masks [width, 1] of each adapter that shared a step with another, where recorded steps read them."""
        self.graphs: DecodeGraphs | None = None
        """Recorded steps of this plan; None: each step is launched kernel by kernel."""
        self._weights = weights
        self._tables = tables
        self._epsilon = torch.tensor(shape.norm_epsilon, device=device)
        self._score_scale = dim**-0.5
        self._slot_of_row = torch.arange(rows, device=device) // shape.num_kv_heads
        self._row_numbers = torch.arange(attended, device=device)
        self._entry_of_row = self._row_numbers * cache.capacity
        self._layers = [
            _LayerViews(
                weights=layer,
                keys=cache.keys[index].view(-1, dim, cache.capacity)[:attended],
                seen_keys=cache.keys[index].view(-1, dim, cache.capacity)[:attended, :, :window],
                seen_values=cache.values[index].view(-1, cache.capacity, dim)[:attended, :window],
                value_entries=cache.values[index].view(-1, dim),
            )
            for index, layer in enumerate(weights.layers)
        ]
        self._hidden = torch.empty(width, shape.hidden_size, dtype=dtype, device=device)
        self._projected = torch.empty(width, shape.qkv_size, dtype=dtype, device=device)
        heads = self._projected.view(rows, shape.heads_per_group, dim)
        self._queries = heads[:attended, :-2]
        self._new_keys, self._new_values = heads[:attended, -2], heads[:attended, -1]
        self._rotating = _Rotating(heads[:, :-1], shape.has_head_norms)
        self._scores = torch.empty(attended, shape.group_size, window, dtype=dtype, device=device)
        mixed = torch.zeros(rows, shape.group_size, dim, dtype=dtype, device=device)
        self._mixed, self._mixed_by_slot = mixed[:attended], mixed.view(width, -1)
        self._gate_up = torch.empty(width, 2 * shape.intermediate_size, dtype=dtype, device=device)
        self._gate, self._up = self._gate_up.chunk(2, dim=1)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed one token per slot at its position; the logits [width, vocab] of the next."""
        adapters = self.adapters or RowAdapters([])
        weights, epsilon, hidden = self._weights, self._epsilon, self._hidden
        row_positions = positions.index_select(0, self._slot_of_row)
        rotations = self._tables.rotations.index_select(0, row_positions).unsqueeze(1)
        row_positions = row_positions[: len(self._row_numbers)]
        entries = self._entry_of_row + row_positions
        mask = self._tables.mask(row_positions, self.window)
        torch.index_select(weights.embedding, 0, tokens, out=hidden)
        for index, layer in enumerate(self._layers):
            own = layer.weights
            normed = _normed(hidden, epsilon)
            torch.mm(normed, own.qkv, out=self._projected)
            if own.qkv_bias is not None:
                self._projected.add_(own.qkv_bias)
            adapters.add(index, "qkv", normed, self._projected)
            self._rotating.apply(own.head_gain, rotations, epsilon)
            layer.keys[self._row_numbers, :, row_positions] = self._new_keys
            layer.value_entries.index_copy_(0, entries, self._new_values)
            torch.baddbmm(mask, self._queries, layer.seen_keys, alpha=self._score_scale, out=self._scores)
            torch.softmax(self._scores, dim=-1, out=self._scores)
            torch.bmm(self._scores, layer.seen_values, out=self._mixed)
            hidden.addmm_(self._mixed_by_slot, own.output)
            adapters.add(index, "output", self._mixed_by_slot, hidden)
            normed = _normed(hidden, epsilon)
            if own.experts is not None:
                hidden.add_(own.experts.mix(normed))
                continue
            torch.mm(normed, own.gate_up, out=self._gate_up)
            adapters.add(index, "gate_up", normed, self._gate_up)
            gated = silu(self._gate).mul_(self._up)
            hidden.addmm_(gated, own.down)
            adapters.add(index, "down", gated, hidden)
        return _logits(_normed(hidden, epsilon), weights, adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerViews:
    """What a plan sees of one layer. Rows are (slot, kv head), those that attend."""

    weights: LayerWeights
    keys: Tensor
    """[rows, head_dim, capacity]"""
    seen_keys: Tensor
    """[rows, head_dim, window]"""
    seen_values: Tensor
    """[rows, window, head_dim]"""
    value_entries: Tensor
    """[all rows * capacity, head_dim]"""


def prefill(
    weights: DecoderWeights, tables: PositionTables, tokens: Tensor, adapters: RowAdapters | None = None
) -> Tensor:
    """Keys and values [rows, layers, 2, kv_heads, length, head_dim] of `tokens` [rows, length].

    Rows may be padded on the right with anything: causality keeps padding out of what precedes it. `adapters`: of the
    rows of all tokens, one sequence after another; None for the base alone.
    """
    kv, _ = _run_layers(weights, tables, tokens, adapters or RowAdapters([]), is_output_needed=False)
    return torch.stack(kv, dim=1)


def score(
    weights: DecoderWeights,
    tables: PositionTables,
    tokens: Tensor,
    num_scored: int,
    adapters: RowAdapters | None = None,
) -> list[float]:
    """Log-probs [num_scored] of the last tokens of one sequence [length], each given all before it; float32.

    `adapters`: the one of all rows; None for the base alone.
    """
    adapters = adapters or RowAdapters([])
    _, hidden = _run_layers(weights, tables, tokens[None, :-1], adapters, is_output_needed=True)
    epsilon = torch.tensor(weights.shape.norm_epsilon, device=tokens.device)
    logits = _logits(_normed(hidden[-num_scored:], epsilon), weights, adapters)
    scores: list[float] = torch.log_softmax(logits, dim=-1).gather(1, tokens[-num_scored:, None]).squeeze(1).tolist()
    return scores


def _run_layers(
    weights: DecoderWeights, tables: PositionTables, tokens: Tensor, adapters: RowAdapters, *, is_output_needed: bool
) -> tuple[list[Tensor], Tensor]:
    """Keys and values of each layer, and the last layer's output [rows * length, hidden] where it is needed."""
    shape = weights.shape
    num_rows, length = tokens.shape
    rotations = tables.rotations[:length].repeat_interleave(shape.num_kv_heads, dim=0)
    rotations = rotations.repeat(num_rows, 1).unsqueeze(1)
    epsilon = torch.tensor(shape.norm_epsilon, device=tokens.device)
    hidden = weights.embedding.index_select(0, tokens.reshape(-1))
    kv = []
    for index, layer in enumerate(weights.layers):
        normed = _normed(hidden, epsilon)
        projected = torch.mm(normed, layer.qkv)
        if layer.qkv_bias is not None:
            projected.add_(layer.qkv_bias)
        adapters.add(index, "qkv", normed, projected)
        heads = projected.view(-1, shape.heads_per_group, shape.head_dim)
        _Rotating(heads[:, :-1], shape.has_head_norms).apply(layer.head_gain, rotations, epsilon)
        by_head = heads.view(num_rows, length, shape.num_kv_heads, shape.heads_per_group, shape.head_dim)
        queries, keys, values = torch.split(by_head.permute(0, 2, 3, 1, 4), [shape.group_size, 1, 1], dim=2)
        kv.append(torch.cat([keys, values], dim=2).transpose(1, 2))
        if is_output_needed or index + 1 < len(weights.layers):
            mixed = scaled_dot_product_attention(
                queries.flatten(1, 2), keys[:, :, 0], values[:, :, 0], is_causal=True, enable_gqa=True
            )
            mixed = mixed.transpose(1, 2).reshape(num_rows * length, -1)
            hidden.addmm_(mixed, layer.output)
            adapters.add(index, "output", mixed, hidden)
            normed = _normed(hidden, epsilon)
            if layer.experts is not None:
                hidden.add_(layer.experts.mix(normed))
                continue
            gate_up = torch.mm(normed, layer.gate_up)
            adapters.add(index, "gate_up", normed, gate_up)
            gate, up = gate_up.chunk(2, dim=1)
            gated = silu(gate).mul_(up)
            hidden.addmm_(gated, layer.down)
            adapters.add(index, "down", gated, hidden)
    return kv, hidden


def _logits(normed: Tensor, weights: DecoderWeights, adapters: RowAdapters) -> Tensor:
    """[rows, vocab] of the last norm's output [rows, hidden], float32."""
    logits = row_product(normed, weights.head).float()
    adapters.add_to_logits(normed, logits)
    return logits


def _normed(hidden: Tensor, epsilon: Tensor) -> Tensor:
    """RMS norm over the last axis, without a gain."""
    return (hidden * _inverse_rms(hidden, epsilon)).to(hidden.dtype)


def _inverse_rms(hidden: Tensor, epsilon: Tensor) -> Tensor:
    """float32."""
    length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(epsilon, length, length, value=1.0 / hidden.shape[-1]).rsqrt_()


class _Rotating:
    """Per-head norm and rotation by position of queries and keys [rows, heads, head_dim], in place."""

    def __init__(self, heads: Tensor, is_normed: bool) -> None:
        self._heads = heads
        self._computed = heads.float()  # the same tensor, or scratch: complex numbers have no bfloat16
        self._pairs = torch.view_as_complex(torch.unflatten(self._computed, -1, (-1, 2)))
        self._is_normed = is_normed

    def apply(self, gain: Tensor, rotations: Tensor, epsilon: Tensor) -> None:
        if self._computed is not self._heads:
            self._computed.copy_(self._heads)
        if self._is_normed:
            self._computed.mul_(_inverse_rms(self._computed, epsilon)).mul_(gain)
        self._pairs.mul_(rotations)
        if self._computed is not self._heads:
            self._heads.copy_(self._computed)


def _layer_weights(views: Iterator[Tensor], shape: DecoderShape) -> LayerWeights:
    """The next layer of the flat buffer, in the order of `_weight_sizes`."""
    qkv, output, gate_up, down, head_gain = (next(views) for _ in range(5))
    bias = next(views) if shape.has_qkv_bias else None
    experts = None
    if shape.num_experts:
        experts = ExpertWeights(
            router=next(views),
            gate_up=gate_up,
            down=down,
            num_picked=shape.num_picked,
            is_normalized=shape.has_normed_picks,
        )
    return LayerWeights(
        qkv=qkv, output=output, gate_up=gate_up, down=down, head_gain=head_gain, qkv_bias=bias, experts=experts
    )
