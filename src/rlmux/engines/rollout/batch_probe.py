"""Finds the batch shapes that give the same bits as the full one, measured on this machine.

    full shape: num_slots rows, max_len positions        always right, the reference
    smaller:    width rows, window positions,            used only if a probe found its rows bit-equal
                slots of `capacity` tokens
    wider:      the slots of several tenants             the same, in both orders of the rows

A matrix product may sum in another order at another size, so a smaller batch is no mere saving: it can change
a token. Whether it does depends on the library, the processor and the shape, not on the data; random numbers
show it. A probe runs two layers, the output head and the sampler at both shapes and compares bits. That a row
may stand anywhere in the full shape is probed the same way, with the rows in reverse order. Where the cache has fewer
slots of max_len positions than there are rows, the full shape takes so many sequences at a time. Results are
remembered for the process. Of what a probe computed only a hash of each row stays; its cache of two layers is freed.

Invariant: a shape is handed out only if it is the reference or its probe passed. Where no probe passes, every
step runs at the full shape: slower, the same result. In bfloat16 a probe also compares matrix products before they are
rounded; attention's it does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlmux.engines.adapters.adapter_weights import AdapterWeights
from rlmux.engines.model.adapter_rows import RowAdapters
from rlmux.engines.model.row_product import row_product
from rlmux.engines.model.transformer import DecodePlan, DecoderWeights, KvCache, PositionTables, prefill
from rlmux.engines.residency import release_storage
from rlmux.engines.rollout.sampling import sample
from rlmux.rl.config import AdapterConfig

PREFILL_BUCKET = 16
"""Prompts are padded to a multiple of this; a prompt's own length alone decides how far."""

# Batch shapes worth probing: each probe takes time, and a shape somewhat too large costs little.
_WIDTHS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_PREFILL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_REFERENCE_PREFILL_ROWS = 4
"""Rows of the prefill batch that others are compared with, and that is always right."""
_MAX_WINDOWS = 8
"""Windows that are probed at most, evenly spread over the cache's positions."""
_PROBED_LAYERS = 2
"""Layers of a probe: the second reads what the first has rounded."""

is_exact_by_shape: dict[tuple[object, ...], bool] = {}
"""Measurements of this process, by model, machine and batch shape."""


class BatchProbe:
    """Picks batch shapes for one engine's weights."""

    def __init__(
        self,
        weights: DecoderWeights,
        tables: PositionTables,
        num_slots: int,
        max_len: int,
        num_tokens: int | None = None,
    ) -> None:
        """`num_tokens`: of the cache; None for `num_slots * max_len`."""
        self._weights = weights.first_layers(_PROBED_LAYERS)
        self._tables = tables
        self._num_slots = num_slots
        self._max_len = max_len
        self._num_tokens = num_slots * max_len if num_tokens is None else num_tokens
        self._num_rows = num_slots
        """Rows of the widest batch: the slots of all tenants."""
        stride = -(-max_len // _MAX_WINDOWS // PREFILL_BUCKET) * PREFILL_BUCKET
        self._references: dict[int, Sequence[bytes]] = {}
        """Hashes of each row of the full shape's outputs, by the window that limits the probe's positions."""
        self._decode_shapes: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._windows: list[int] = [*range(stride, max_len, stride), max_len]
        roomy = [window for window in self._windows if window * num_slots <= self._num_tokens]
        self._capacities: list[int] = [window for window in self._windows if not roomy or window >= roomy[-1]]
        """Of slots, ascending; less than what all slots have room for would save nothing."""
        self._adapters: Sequence[AdapterConfig] = ()

    def widen(self, num_tenants: int) -> int:
        """Use the slots of so many tenants, or of the most that are exact; returns the number of slots.

        Each tenant's slots are the full shape. For a cache of `num_slots * max_len` tokens a tenant.
        """
        counts = range(num_tenants, 0, -1)
        self._num_rows = next(self._num_slots * count for count in counts if self._are_exact(count))
        self._decode_shapes.clear()
        return self._num_rows

    def _are_exact(self, num_tenants: int) -> bool:
        return self._can_decode(self._num_slots * num_tenants, self._max_len, self._max_len)

    @property
    def _widths(self) -> list[int]:
        return sorted({width for width in _WIDTHS if width < self._num_rows} | {self._num_slots, self._num_rows})

    def set_adapters(self, adapters: Sequence[AdapterConfig]) -> None:
        """Set the adapters of later probes, by ranks and targets, all of them on every row."""
        self._adapters = adapters
        self._references.clear()
        self._decode_shapes.clear()

    @property
    def is_slot_exact(self) -> bool:
        """Whether a sequence gives the same bits in every slot and beside any others, at the full shape."""
        full = self._num_slots, self._max_len, self._max_len
        return self._remember(("slots",), lambda: self.is_decode_exact(*full))

    def capacity_for(self, num_positions: int) -> int:
        """The smallest capacity of slots that holds this many positions and has an exact shape."""
        return next(
            capacity
            for capacity in self._capacities
            if capacity >= num_positions and self._can_decode(self._num_slots, capacity, capacity)
        )

    def decode_shape(self, num_rows: int, num_positions: int, capacity: int) -> tuple[int, int]:
        """The smallest (width, window) that holds this many rows and positions and is exact.

        `capacity`: of the cache's slots, one of `capacity_for`.
        """
        wanted = num_rows, num_positions, capacity
        if wanted not in self._decode_shapes:
            self._decode_shapes[wanted] = next(
                (width, window)
                for width in self._widths
                for window in self._windows
                if width >= num_rows
                and num_positions <= window <= capacity
                and self._can_decode(width, window, capacity)
            )
        return self._decode_shapes[wanted]

    def prefill_rows(self, num_rows: int, length: int) -> int:
        """How many rows to prefill at once to serve `num_rows`: no fewer if so many are exact."""
        enough = (rows for rows in _PREFILL_ROWS if rows >= num_rows)
        return next((rows for rows in enough if self._can_prefill(rows, length)), _REFERENCE_PREFILL_ROWS)

    def _can_decode(self, width: int, window: int, capacity: int) -> bool:
        if (width, window) == (self._num_slots, self._max_len):
            return True
        shape = width, window, capacity
        return self._remember(("decode", *shape), lambda: self.is_decode_exact(*shape))

    def _can_prefill(self, rows: int, length: int) -> bool:
        if rows == _REFERENCE_PREFILL_ROWS:
            return True
        return self._remember(("prefill", rows, length), lambda: self.is_prefill_exact(rows, length))

    def _remember(self, shape: tuple[object, ...], measure: Callable[[], bool]) -> bool:
        key = (
            self._weights.shape,
            self._num_slots,
            self._max_len,
            self._num_tokens,
            str(self._weights.flat.device),
            self._weights.flat.dtype,
            torch.get_num_threads(),
            tuple((adapter.rank, adapter.targets) for adapter in self._adapters),
            *shape,
        )
        if key not in is_exact_by_shape:
            is_exact_by_shape[key] = measure()
            release_storage(self._weights.flat.device)
        return is_exact_by_shape[key]

    def is_decode_exact(self, width: int, window: int, capacity: int) -> bool:
        """Measure a shape against the full one; the full one against its rows in reverse order."""
        in_order = torch.arange(self._num_slots)
        full = self._num_slots, self._max_len
        if window not in self._references:
            self._references[window] = self._decode_all(full, window, self._max_len, in_order)
        reference = self._references[window]
        if not self._are_products_exact(width, self._num_slots):
            return False
        if (width, window) == full:
            return self._decode_all(full, window, capacity, in_order.flip(0))[::-1] == reference
        if width > self._num_slots:
            return self._is_wide_exact(width, window)
        some = in_order[: min(width, self._num_tokens // capacity)]
        return self._decode((width, window), window, capacity, some) == reference[: len(some)]

    def _are_products_exact(self, num_rows: int, num_reference_rows: int) -> bool:
        """Whether matrix products give each row the bits that it has in the reference batch, before they are rounded.

        bfloat16 hides most sums of another order from a probe, though not from a million tokens. So these products are
        zero but for the order of their sums: the second half of each row repeats the first, that of the matrix negates
        it.
        """
        if self._weights.flat.dtype == torch.float32:
            return True
        layer, generator = self._weights.layers[0], torch.Generator().manual_seed(num_rows)
        of_experts = [] if layer.experts is not None else [layer.gate_up, layer.down]
        numbers = torch.arange(num_rows) % num_reference_rows
        for matrix in (layer.qkv, layer.output, *of_experts, self._weights.head):
            half = matrix.shape[0] // 2
            rows = torch.zeros(num_reference_rows, matrix.shape[0])
            rows[:, :half] = rows[:, half : 2 * half] = torch.randn(num_reference_rows, half, generator=generator)
            rows, opposed = rows.to(matrix), matrix.clone()
            opposed[half : 2 * half] = -opposed[:half]
            if not _is_bit_equal(row_product(rows[numbers], opposed), row_product(rows, opposed)[numbers]):
                return False
        return True

    def _is_wide_exact(self, width: int, window: int) -> bool:
        """Measure more rows than the full shape's, which repeat its sequences, in two orders."""
        sequences = torch.arange(width) % self._num_slots
        expected = [self._references[window][number] for number in sequences.tolist()]
        return all(
            self._decode((width, window), window, self._max_len, rows) == hashes
            for rows, hashes in ((sequences, expected), (sequences.flip(0), expected[::-1]))
        )

    def _decode_all(
        self, plan_shape: tuple[int, int], max_positions: int, capacity: int, sequences: Tensor
    ) -> Sequence[bytes]:
        """`_decode` of as many sequences at once as the cache has slots."""
        parts = torch.split(sequences, self._num_tokens // capacity)
        return [row for part in parts for row in self._decode(plan_shape, max_positions, capacity, part)]

    def _decode(
        self, plan_shape: tuple[int, int], max_positions: int, capacity: int, sequences: Tensor
    ) -> Sequence[bytes]:
        """Hashes of each slot's logits and log-probability after one step, with random sequence `sequences[i]` in
        slot i."""
        shape, device = self._weights.shape, self._weights.flat.device
        generator = torch.Generator().manual_seed(max_positions)
        positions = torch.randint(max_positions, (self._num_slots,), generator=generator)
        tokens = torch.randint(shape.vocab_size, (self._num_slots,), generator=generator)
        uniforms = torch.rand((self._num_slots, 1), generator=generator, dtype=torch.float64)
        num_slots = min(plan_shape[0], max(len(sequences), self._num_tokens // capacity))
        plan = DecodePlan(self._weights, self._random_cache(sequences, num_slots, capacity), self._tables, *plan_shape)
        plan.adapters = self._random_adapters()
        rows = sequences.new_zeros(plan_shape[0])
        rows[: len(sequences)] = sequences
        logits = plan.step(tokens[rows].to(device), positions[rows].to(device))
        _, logprobs = sample(logits, uniforms[rows].to(device), None)
        return _row_hashes(torch.cat([logits, logprobs], dim=1)[: len(sequences)].cpu())

    def _random_cache(self, sequences: Tensor, num_slots: int, capacity: int) -> KvCache:
        """The cache of random sequences. They are windows of one random series, one number apart: each is another, and
        no more than the cache itself takes memory."""
        shape = self._weights.shape
        cache = KvCache(shape, num_slots, capacity, self._weights.flat.device, self._weights.flat.dtype)
        size = 2 * shape.num_kv_heads * self._max_len * shape.head_dim
        series = torch.randn(shape.num_layers * size + self._num_slots, generator=torch.Generator().manual_seed(0))
        for layer in range(shape.num_layers):
            for slot, sequence in enumerate(sequences.tolist()):
                kv = series[layer * size + sequence :][:size].view(2, shape.num_kv_heads, self._max_len, shape.head_dim)
                cache.keys[layer, slot] = kv[0, :, :capacity].transpose(-1, -2)
                cache.values[layer, slot] = kv[1, :, :capacity]
        return cache

    def _random_adapters(self) -> RowAdapters:
        """Adapters with random matrices: adapters of version 0, with zeros, would show nothing."""
        generator = torch.Generator().manual_seed(1)
        parts = []
        for adapter in self._adapters:
            weights = AdapterWeights(self._weights.shape, adapter, self._weights.flat.device, self._weights.gains)
            weights.flat.copy_(torch.randn(weights.flat.shape, generator=generator) * 0.05)
            parts.append((weights.layers, None))
        return RowAdapters(parts)

    def is_prefill_exact(self, rows: int, length: int) -> bool:
        """Measure `rows` rows of `length` tokens against the reference rows, and against their reverse order."""
        generator = torch.Generator().manual_seed(rows * 65_537 + length)
        tokens = torch.randint(self._weights.shape.vocab_size, (rows, length), generator=generator)
        tokens = tokens.to(self._weights.flat.device)
        adapters = self._random_adapters()
        together = prefill(self._weights, self._tables, tokens, adapters)
        backwards = prefill(self._weights, self._tables, tokens.flip(0), adapters).flip(0)
        some = min(rows, _REFERENCE_PREFILL_ROWS)
        if not self._are_products_exact(rows * length, _REFERENCE_PREFILL_ROWS * length):
            return False
        few = pad_rows(tokens[-some:], _REFERENCE_PREFILL_ROWS)
        reference = prefill(self._weights, self._tables, few, adapters)
        return _is_bit_equal(together, backwards) and _is_bit_equal(together[-some:], reference[:some])


def pad_rows(tokens: Tensor, num_rows: int) -> Tensor:
    """Fill up a batch with rows of zeros."""
    padded = tokens.new_zeros(num_rows, tokens.shape[1])
    padded[: tokens.shape[0]] = tokens
    return padded


def _is_bit_equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _row_hashes(rows: Tensor) -> list[bytes]:
    return [hashlib.sha256(row.numpy().tobytes()).digest() for row in rows]
