import pytest
import torch
from torch import Tensor

from rlmux.engines.train.update.tree_sum import RunningSum, TreeSum, leaf_order, subtree


def leaves(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(257, generator=generator) * 10**k for k in torch.arange(num) % 5]


def tree_sum(tensors: list[Tensor]) -> Tensor:
    tree = TreeSum(len(tensors))
    for tensor in tensors:
        tree.add(tensor)
    total = tree.total()
    assert total is not None
    return total


def test_the_total_is_the_sum() -> None:
    for num in range(1, 18):
        expected = torch.stack([leaf.double() for leaf in leaves(num)]).sum(0)
        torch.testing.assert_close(tree_sum(leaves(num)).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_with_subtrees_of_their_own_give_the_same_bits(num_ranks: int) -> None:
    for num in range(1, 34):
        of_ranks = [[leaves(num)[leaf] for leaf in subtree(num, rank, num_ranks)] for rank in range(num_ranks)]
        sums = [tree_sum(own) if own else None for own in of_ranks]
        while len(sums) > 1:  # neighbours, then pairs of pairs
            sums = [left if right is None else left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
        assert torch.equal(sums[0], tree_sum(leaves(num))), num


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_subtrees_are_all_leaves_in_order_and_of_one_size_to_a_leaf(num_ranks: int) -> None:
    for num in range(34):
        of_ranks = [subtree(num, rank, num_ranks) for rank in range(num_ranks)]
        assert [leaf for own in of_ranks for leaf in own] == list(range(num))
        assert len(of_ranks[0]) - min(map(len, of_ranks)) in (0, 1)
        assert len(of_ranks[0]) == max(map(len, of_ranks))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_has_more_work_than_another_by_more_than_the_largest_thing(num_ranks: int) -> None:
    for num in range(1, 34):
        order = leaf_order(num)
        assert sorted(order) == list(range(num))
        sizes = [(place + 1) ** 2 for place in range(num)]
        loads = [sum(sizes[order[leaf]] for leaf in subtree(num, rank, num_ranks)) for rank in range(num_ranks)]
        assert max(loads) - min(loads) <= sizes[-1], num


def test_the_order_of_addition_is_a_tree_and_not_a_line() -> None:
    in_line = leaves(11)[0].clone()
    for leaf in leaves(11)[1:]:
        in_line += leaf
    assert not torch.equal(in_line, tree_sum(leaves(11)))


def test_a_running_sum_holds_one_float32_tensor_and_changes_no_leaf() -> None:
    total, given = RunningSum(), [leaf.bfloat16() for leaf in leaves(11)]
    assert total.total() is None
    for leaf in given:
        total.add(leaf)
        assert len(total.tensors) == 1
    found = total.total()
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack([leaf.float() for leaf in given]).sum(0), rtol=1e-4, atol=1e-2)
    assert torch.equal(given[0], leaves(11)[0].bfloat16())
    assert total.tensors == []


def test_few_partial_sums_are_held() -> None:
    tree = TreeSum(63)
    most = 0
    for leaf in leaves(63):
        most = max(most, len(tree.tensors) + 1)
        tree.add(leaf)
    assert most == 6
    tree.total()
    assert tree.tensors == []
