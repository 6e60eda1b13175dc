"""Which free nodes a gang gets: within one machine wherever one has room, else on as few as possible."""

from __future__ import annotations

import random

import pytest

from rlmux.core.model import Cluster, NodeId, Phase, Pool
from rlmux.core.placement.pool_nodes import ClusterNodes
from rlmux.core.placement.rollback import Undo


class Nodes:
    """Nodes of one training pool by their numbers; each letter names the machine of a node."""

    def __init__(self, machines: str, num_nodes: int | None = None) -> None:
        pool = Pool(name="t", phase=Phase.TRAIN, num_nodes=num_nodes or len(machines), machines=tuple(machines))
        self.undo = Undo()
        self.all = ClusterNodes(Cluster(pools={"t": pool}), self.undo)
        self.uses: dict[NodeId, int] = {}

    def take(self, count: int) -> list[int]:
        taken = self.all.take(Phase.TRAIN, count)
        self.uses |= dict.fromkeys(taken, 1)
        self.all.check(self.uses)
        return [node.index for node in taken]

    def give_back(self, *indices: int) -> None:
        for index in indices:
            del self.uses[NodeId("t", index)]
        self.all.let_go(tuple(NodeId("t", index) for index in indices))
        self.all.check(self.uses)


def test_a_gang_lies_within_one_machine_where_the_lowest_numbers_do_not():
    nodes = Nodes("aaaabbbb")
    assert nodes.take(1) == [0]
    assert nodes.take(4) == [4, 5, 6, 7]
    assert nodes.take(3) == [1, 2, 3]


def test_machines_need_not_be_numbered_one_after_another():
    assert Nodes("abababab").take(4) == [0, 2, 4, 6]


def test_the_best_fit_keeps_whole_machines_for_larger_gangs():
    nodes = Nodes("aaaabbbbcc")
    assert nodes.take(2) == [8, 9]
    assert nodes.take(1) == [0], "of equal machines the one with the lowest number"
    assert nodes.take(3) == [1, 2, 3]
    assert nodes.take(4) == [4, 5, 6, 7]


def test_a_gang_that_fits_no_machine_crosses_as_few_as_possible_the_largest_part_first():
    nodes = Nodes("aaabbbbccddd")
    assert nodes.take(6) == [3, 4, 5, 6, 7, 8], "all of b, and c has just the two that are left"
    assert nodes.take(6) == [0, 1, 2, 9, 10, 11]


def test_a_gang_straddles_machines_at_once_although_one_would_be_large_enough_later():
    nodes = Nodes("aaaabbbb")
    assert [nodes.take(1), nodes.take(3), nodes.take(1)] == [[0], [1, 2, 3], [4]]
    nodes.give_back(1, 2)
    assert nodes.take(4) == [5, 6, 7, 1]


@pytest.mark.parametrize("machines", ["aaaa", ""])
def test_without_several_machines_the_lowest_numbers_come_first(machines):
    nodes = Nodes(machines, num_nodes=4)
    assert nodes.take(3) == [0, 1, 2]
    nodes.give_back(0, 2)
    assert nodes.take(3) == [0, 2, 3]


def test_a_lost_node_counts_for_its_machine_once_it_has_joined_again():
    nodes = Nodes("aaabbbb")
    nodes.all.lose(NodeId("t", 5))
    assert nodes.take(3) == [0, 1, 2]
    nodes.give_back(0, 1, 2)
    assert nodes.take(4) == [0, 1, 2, 3]
    nodes.all.regain(NodeId("t", 5))
    nodes.give_back(0, 1, 2, 3)
    assert nodes.take(4) == [3, 4, 5, 6]


def test_a_node_lost_in_use_is_not_handed_out_when_it_is_given_back():
    nodes = Nodes("aabb")
    assert nodes.take(2) == [0, 1]
    nodes.all.lose(NodeId("t", 1))
    nodes.give_back(0, 1)
    assert nodes.take(1) == [0]
    assert nodes.take(2) == [2, 3]


def test_a_pool_names_the_machine_of_each_of_its_nodes_or_of_none():
    with pytest.raises(ValueError, match=r"^pool t: machines names 2 of 3 nodes$"):
        Pool(name="t", phase=Phase.TRAIN, num_nodes=3, machines=("a", "b"))


def best(machines: str, free: set[int], count: int) -> list[int]:
    """The rule as it reads, by looking at every machine."""
    taken: list[int] = []
    while left := count - len(taken):
        by_machine = [[index for index in sorted(free) if machines[index] == name] for name in sorted(set(machines))]
        parts = sorted((part for part in by_machine if part), key=lambda part: (len(part), part[0]))
        enough = [part for part in parts if len(part) >= left]
        part = enough[0] if enough else min(parts, key=lambda part: (-len(part), part[0]))
        taken += part[:left]
        free -= set(part[:left])
    return taken


@pytest.mark.parametrize("seed", range(20))
def test_every_gang_gets_the_nodes_that_a_look_at_every_machine_finds(seed):
    """With losses, and trials that are taken back after some of the gangs."""
    draw = random.Random(seed)
    machines = "".join(draw.choice("abcd") for _ in range(16)) + "ab"
    nodes, free, lost = Nodes(machines), set(range(18)), set[int]()
    gangs: list[list[int]] = []
    for _ in range(60):
        change = draw.choice(("take", "take", "give back", "lose", "regain", "trial"))
        if change == "take" and free:
            gangs.append(expected := best(machines, free, draw.randint(1, min(5, len(free)))))
            assert nodes.take(len(expected)) == expected
        elif change == "give back" and gangs:
            gang = gangs.pop(draw.randrange(len(gangs)))
            nodes.give_back(*gang)
            free |= set(gang) - lost
        elif change == "lose" and len(lost) < 4:
            lost.add(index := draw.choice(sorted(set(range(18)) - lost)))
            nodes.all.lose(NodeId("t", index))
            free.discard(index)
        elif change == "regain" and lost:
            lost.discard(index := draw.choice(sorted(lost)))
            nodes.all.regain(NodeId("t", index))
            free |= {index} - {each for gang in gangs for each in gang}
        elif change == "trial":
            try_out(nodes, gangs, machines, free, draw)
        nodes.all.check(nodes.uses)


def try_out(nodes: Nodes, gangs: list[list[int]], machines: str, free: set[int], draw: random.Random) -> None:
    """Give a gang back, take others, and take all of that back."""
    mark, lists, uses, free = nodes.undo.begin(), nodes.all.free_lists(), dict(nodes.uses), set(free)
    if gangs:
        nodes.give_back(*(gang := draw.choice(gangs)))
        free |= {index for index in gang if not nodes.all.is_lost(NodeId("t", index))}
    while free and draw.random() < 0.7:
        expected = best(machines, free, draw.randint(1, min(5, len(free))))
        assert nodes.take(len(expected)) == expected
    nodes.undo.take_back(mark)
    nodes.all.take_back(lists)
    nodes.uses = uses
