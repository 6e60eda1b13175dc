r"""Sums equally shaped tensors with a fixed binary tree over their order of arrival.

    leaves     0   1   2   3   4   5   6
                \ /     \ /     \ /    |
                 +       +       +     |
                  \_____/         \___/
                     +              +
                      \____________/
                             +

Invariant: the order of every addition depends on the number of leaves alone. Ranks that each sum an aligned
block of 2^k leaves, joined by the same tree, therefore give the same bits as one rank that sums them all. At
most log2(leaves) + 1 tensors are held.
"""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """`add` the leaves in order, then take the `total`."""

    def __init__(self) -> None:
        self._partials: list[tuple[int, Tensor]] = []
        """(leaves below, their sum), block sizes strictly falling: the binary digits of the leaf count."""

    @property
    def tensors(self) -> list[Tensor]:
        """What is held now."""
        return [partial for _, partial in self._partials]

    def add(self, leaf: Tensor) -> None:
        """Take the next leaf; it may be added into, so hand over a tensor of its own."""
        size, total = 1, leaf
        while self._partials and self._partials[-1][0] == size:
            _, left = self._partials.pop()
            total = left.add_(total)
            size *= 2
        self._partials.append((size, total))

    def total(self) -> Tensor:
        """The sum of all leaves; the tree is empty afterwards."""
        _, total = self._partials.pop()
        while self._partials:
            _, left = self._partials.pop()
            total = left.add_(total)
        return total
