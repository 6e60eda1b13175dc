"""A matrix product whose rows do not depend on where in the batch they stand.

    left [rows, inner] x right [inner, columns]  ──▶  a view [rows, columns] of [rows, whole cache lines]

MKL's kernels for few rows (seen: two and three, with AVX2) add a row's last columns in an order that depends on where
the row begins in memory. Here every row of the product begins at a cache line, whatever the number of columns is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CACHE_LINE_BYTES = 64


def row_product(left: Tensor, right: Tensor) -> Tensor:
    """`left` [rows, inner] times `right` [inner, columns]; without gradients."""
    num_columns, step = right.shape[1], _CACHE_LINE_BYTES // left.element_size()
    if num_columns % step == 0:
        return torch.mm(left, right)
    padded = left.new_empty(left.shape[0], -(-num_columns // step) * step)
    return torch.mm(left, right, out=padded[:, :num_columns])
