"""A row's product is the same bits wherever the row stands in its batch."""

from __future__ import annotations

import pytest
import torch

from rlmux.engines.model.row_product import row_product


@pytest.mark.parametrize("num_columns", [4, 17, 33, 97, 98, 112])
@pytest.mark.parametrize("num_rows", [2, 3, 5, 16])
def test_a_row_gives_the_same_bits_in_every_place(num_rows: int, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_columns)
    for inner in (16, 32, 64, 128):
        right = torch.randn(inner, num_columns, generator=generator)
        row = torch.randn(inner, generator=generator)
        found = set()
        for place in range(num_rows):
            left = torch.randn(num_rows, inner, generator=generator)
            left[place] = row
            product = row_product(left, right)
            assert product.shape == (num_rows, num_columns)
            found.add(product[place].contiguous().numpy().tobytes())
        assert len(found) == 1, f"inner {inner}"
