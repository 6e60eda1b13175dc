"""Several adapters in one batch, each row with its own: y = W x + (alpha / rank) B (A x), never merged.

    outputs  =  inputs W                             every row, one matrix product
    outputs +=  own rows of (inputs down) up         each adapter that has rows here, one after another

Each adapter is multiplied at its own rank and for all rows of the batch; rows of others have zeros between the two
products, and adding zero changes no number. So a row is computed by the same two products, at the same sizes, whatever
else is in the batch: nothing is padded to the largest rank, nothing is gathered by row. The price is that an adapter's
two thin products are made for all rows.

Invariant: a row's numbers depend on that row and on its own adapter alone, wherever the base's do. An adapter is
finite: zero times infinity would reach other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmux.engines.model.row_product import row_product

HEAD = "head"
"""Name of what is beside the output matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The two thin matrices beside one fused projection."""

    down: Tensor
    """[in, R]"""
    up: Tensor
    """[R, out]"""


class RowAdapters:
    """Which adapter serves which rows of a batch."""

    def __init__(
        self, parts: Sequence[tuple[Sequence[Mapping[str, LowRank]], Tensor | None]], names: tuple[str, ...] = ()
    ) -> None:
        """`parts`: an adapter's layers, then its output matrix, and a mask [rows, 1] of other adapters' rows; None: all
        rows are its own. `names`: theirs."""
        self._parts = parts
        self.names = names

    def add(self, layer: int, name: str, inputs: Tensor, outputs: Tensor) -> None:
        """Add to `outputs` [rows, out] what each row's adapter makes of `inputs` [rows, in]."""
        for layers, is_others in self._parts:
            low_rank = layers[layer].get(name)
            if low_rank is not None:
                outputs.addmm_(_inner(inputs, low_rank, is_others), low_rank.up)

    def add_to_logits(self, inputs: Tensor, logits: Tensor) -> None:
        """Add to `logits` [rows, vocab] what each row's adapter of the output matrix makes of `inputs` [rows, in]."""
        for layers, is_others in self._parts:
            low_rank = layers[-1].get(HEAD)
            if low_rank is not None:
                logits.add_(row_product(_inner(inputs, low_rank, is_others), low_rank.up))


def _inner(inputs: Tensor, low_rank: LowRank, is_others: Tensor | None) -> Tensor:
    """Product of the rows and the first matrix; zero for other adapters' rows."""
    inner = row_product(inputs, low_rank.down)
    return inner if is_others is None else inner.masked_fill_(is_others, 0.0)


def rotation_pairs(head_dim: int) -> Tensor:
    """Channel order that puts the two channels a rotation mixes side by side."""
    half = head_dim // 2
    return torch.arange(head_dim).view(2, half).T.reshape(-1)
