import pytest
import torch
from torch import Tensor

from rlmux.engines.tree_sum import TreeSum


def leaves(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(257, generator=generator) * 10**k for k in torch.arange(num) % 5]


def tree_sum(tensors: list[Tensor]) -> Tensor:
    tree = TreeSum()
    for tensor in tensors:
        tree.add(tensor.clone())
    return tree.total()


@pytest.mark.parametrize("num", range(1, 18))
def test_the_total_is_the_sum(num: int) -> None:
    expected = torch.stack([leaf.double() for leaf in leaves(num)]).sum(0)
    torch.testing.assert_close(tree_sum(leaves(num)).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num", range(1, 34))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_with_aligned_blocks_give_the_same_bits(num: int, num_ranks: int) -> None:
    block = max(1, 2 ** (num - 1).bit_length() // num_ranks)
    of_ranks = [leaves(num)[start : start + block] for start in range(0, num, block)]
    joined = tree_sum([tree_sum(block) for block in of_ranks])
    assert torch.equal(joined, tree_sum(leaves(num)))


def test_the_order_of_addition_is_a_tree_and_not_a_line() -> None:
    in_line = leaves(11)[0].clone()
    for leaf in leaves(11)[1:]:
        in_line += leaf
    assert not torch.equal(in_line, tree_sum(leaves(11)))


def test_few_partial_sums_are_held() -> None:
    tree = TreeSum()
    for leaf in leaves(63):
        tree.add(leaf)
    assert len(tree.tensors) == 6
    tree.total()
    assert tree.tensors == []
