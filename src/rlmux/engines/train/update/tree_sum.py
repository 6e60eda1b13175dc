r"""Sums equally shaped tensors in a fixed order: as a binary tree over their order of arrival, or one after another.

    leaves     0   1   2   3   4   5   6        half of the leaves, rounded up, go left at every fork
                \ /     \ /     \ /    |
                 +       +       +     |
                  \_____/         \___/
                     +              +
                      \____________/
                             +

Invariant: the order of every addition depends on the number of leaves alone. 2^k ranks that each sum one of the tree's
2^k highest subtrees (`subtree`), joined by the forks above, therefore give the same bits as one rank that sums all
leaves. At most log2(leaves) + 1 tensors are held.

`leaf_order` deals things out of a sorted list so that subtrees of one height are alike: at every fork the largest goes
left, the next two right, the next two left, and so on.

`RunningSum` holds one tensor. The order of its additions depends on the number of leaves and of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TreeSum:
    """`add` all leaves in order, then take the `total`."""

    def __init__(self, num_leaves: int) -> None:
        self._additions = _additions(num_leaves)
        self._num_added = 0
        self._partials: list[Tensor] = []
        """Sums of subtrees that wait for the subtree on their right, from left to right."""

    @property
    def tensors(self) -> list[Tensor]:
        """The partial sums held now."""
        return self._partials

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf, of any float type. Keeps a float32 copy."""
        total = leaf.to(torch.float32, copy=True)
        for _ in range(self._additions[self._num_added]):
            total = self._partials.pop().add_(total)
        self._partials.append(total)
        self._num_added += 1

    def total(self) -> Tensor | None:
        """The sum of all leaves, None where there are none; the tree is empty afterwards."""
        assert self._num_added == len(self._additions), "all leaves are there"
        return self._partials.pop() if self._partials else None


class RunningSum:
    """`TreeSum` without the tree: each leaf is added to one float32 tensor."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """The sum so far; empty before the first leaf."""

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf, of any float type, in place."""
        if self.tensors:
            self.tensors[0].add_(leaf)
        else:
            self.tensors.append(leaf.to(torch.float32, copy=True))

    def total(self) -> Tensor | None:
        """The sum of all leaves, None without any; empty afterwards."""
        return self.tensors.pop() if self.tensors else None


def subtree(num_leaves: int, number: int, count: int) -> range:
    """Leaves of the `number`-th of the `count` highest subtrees of one height; `count` is a power of two.

    Subtrees differ by one leaf at most, and the first has most. Those without a leaf have an empty range.
    """
    leaves = range(num_leaves)
    while count > 1:
        count //= 2
        num_left = -(-len(leaves) // 2)
        leaves = leaves[num_left:] if number // count % 2 else leaves[:num_left]
    return leaves


def leaf_order(num_leaves: int) -> list[int]:
    """Place in the sorted list, the smallest first, of the thing that becomes each leaf."""
    return _dealt(range(num_leaves))


def _dealt(places: Sequence[int]) -> list[int]:
    if len(places) < 2:
        return list(places)
    left: list[int] = []
    right: list[int] = []
    for number, place in enumerate(reversed(places)):
        (left if number % 4 in (0, 3) else right).append(place)
    if len(left) < len(right):
        left.append(right.pop())
    return _dealt(left[::-1]) + _dealt(right[::-1])


def _additions(num_leaves: int) -> list[int]:
    """Additions that become possible with each leaf."""
    if num_leaves < 2:
        return [0] * num_leaves
    num_left = -(-num_leaves // 2)
    additions = _additions(num_left) + _additions(num_leaves - num_left)
    additions[-1] += 1
    return additions
