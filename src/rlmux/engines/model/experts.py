"""A mixture of experts in the slot engine: each row's numbers depend on that row alone.

    normed [rows, hidden] ──router──▶ the likeliest experts of each row, and their weights
                          └─▶ expert 0 on its rows ─▶ expert 1 on its rows ─▶ ...   added up in this order for every row

How many rows an expert has depends on their neighbours, and a matrix product may round otherwise at another number of
rows. So an expert computes its rows in batches of a few sizes, filled up with zeros, that a measurement found to give
the same bits (`_exact_sizes`).

A module of its own: only mixtures of experts compute with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from rlmux.engines.model.row_product import row_product

_SIZES = (4, 8, 16, 32, 64)
"""Batch sizes of an expert; the largest is the reference."""

_sizes_by_kind: dict[tuple[object, ...], tuple[int, ...]] = {}
"""Measured sizes of this process, by shape, dtype, device and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One layer's experts. The gain of the norm before them is folded in."""

    router: Tensor
    """[hidden, experts]"""
    gate_up: Tensor
    """[experts, hidden, 2 * width]"""
    down: Tensor
    """[experts, width, hidden]"""
    num_picked: int
    """Experts of each row."""
    is_normalized: bool
    """Whether the weights of a row's experts add up to 1."""

    def mix(self, normed: Tensor) -> Tensor:
        """Weighted sum of the experts' outputs for `normed` [rows, hidden]."""
        probabilities = torch.softmax(row_product(normed, self.router), dim=-1, dtype=torch.float32)
        weights, picks = probabilities.topk(self.num_picked, dim=-1)
        if self.is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(normed)
        sizes = self._exact_sizes()
        for expert in torch.unique(picks).tolist():
            rows, places = torch.where(picks == expert)
            factors = weights[rows, places].unsqueeze(1).to(normed.dtype)
            for start in range(0, len(rows), sizes[-1]):
                own = rows[start : start + sizes[-1]]
                made = self._compute(expert, normed.index_select(0, own), sizes)
                mixed.index_add_(0, own, made.mul_(factors[start : start + sizes[-1]]))
        return mixed

    def _compute(self, expert: int, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """One expert on no more rows than the largest size."""
        size = next(size for size in sizes if size >= len(rows))
        padded = rows.new_zeros(size, rows.shape[1])
        padded[: len(rows)] = rows
        gate, up = row_product(padded, self.gate_up[expert]).chunk(2, dim=1)
        return row_product(silu(gate).mul_(up), self.down[expert])[: len(rows)]

    def _exact_sizes(self) -> tuple[int, ...]:
        """Sizes of batches in which a row gives the same bits, ascending: the largest of `_SIZES` always."""
        kind = (tuple(self.gate_up.shape[1:]), self.gate_up.dtype, str(self.gate_up.device), torch.get_num_threads())
        if kind not in _sizes_by_kind:
            _sizes_by_kind[kind] = self._measure()
        return _sizes_by_kind[kind]

    def _measure(self) -> tuple[int, ...]:
        gate_up, down = (self._random(each.shape[1:]) for each in (self.gate_up, self.down))
        probe = ExpertWeights(
            router=self.router, gate_up=gate_up[None], down=down[None], num_picked=1, is_normalized=False
        )
        rows = self._random(torch.Size([_SIZES[-1], gate_up.shape[0]]))
        reference = probe._compute(0, rows, _SIZES[-1:])
        return tuple(
            size
            for size in _SIZES
            if torch.equal(probe._compute(0, rows[:size], (size,)), reference[:size])
            and torch.equal(probe._compute(0, rows[:size].flip(0), (size,)).flip(0), reference[:size])
        ) or (_SIZES[-1],)

    def _random(self, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape) + shape[-1])
        return torch.randn(shape, generator=generator).to(self.gate_up)
