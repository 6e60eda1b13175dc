"""The nodes of every pool: which are in use, free or lost, and how many use each.

ClusterNodes   uses of each node: by a group, and by each pipeline that vacates it; the last one gives it back
PoolNodes      one pool's; `FreeNodes` chooses among the free ones

A module of its own: nodes of one pool have invariants of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import Cluster, NodeId, Phase, Pool
from rlmux.core.placement.free_nodes import free_nodes
from rlmux.core.placement.rollback import Undo


class PoolNodes:
    """A pool's nodes: free, in use or lost."""

    def __init__(self, pool: Pool, undo: Undo) -> None:
        self.pool = pool
        self._undo = undo
        self.in_use: dict[int, None] = {}
        self._lost: dict[int, None] = {}
        self._free = free_nodes(pool, self._lost, undo)

    def free_list(self) -> Any:
        """State that `take_back` restores in addition to the trial's changes."""
        return self._free.mark()

    def take_back(self, free_list: Any) -> None:
        """Roll back to the node sets taken by `free_list`."""
        self._free.take_back(free_list)

    @property
    def num_present(self) -> float:
        return math.inf if self.pool.num_nodes is None else self.pool.num_nodes - len(self._lost)

    @property
    def num_free(self) -> float:
        if self.pool.num_nodes is None:
            return math.inf
        num_lost_unused = sum(index not in self.in_use for index in self._lost)
        return self.pool.num_nodes - len(self.in_use) - num_lost_unused

    def take(self, count: int) -> tuple[NodeId, ...]:
        """So many free nodes, which there are: within one machine wherever one has room (`FreeByMachine.take`)."""
        indices = self._free.take(count)
        for index in indices:
            self._undo.put(self.in_use, index, None)
        return tuple(NodeId(self.pool.name, index) for index in indices)

    def give_back(self, node: NodeId) -> None:
        self._undo.remove(self.in_use, node.index)
        if node.index not in self._lost:
            self._free.add(node.index)

    def is_lost(self, node: NodeId) -> bool:
        return node.index in self._lost

    def lose(self, node: NodeId) -> None:
        if node.index in self._lost:
            raise IllegalTransitionError(f"node {node} was lost before and has not joined again")
        self._lost[node.index] = None
        self._free.remove(node.index)

    def regain(self, node: NodeId) -> None:
        if node.index not in self._lost:
            raise IllegalTransitionError(f"node {node} joins but was never lost")
        del self._lost[node.index]
        if node.index not in self.in_use:
            self._free.add(node.index)

    def check(self) -> None:
        numbers, bound = self._free.numbers()
        free = set(numbers)
        require(len(free) == len(numbers), f"pool {self.pool.name}: a free node is listed twice")
        require(not free & set(self.in_use), f"pool {self.pool.name}: a node is free and in use")
        require(not free & set(self._lost), f"pool {self.pool.name}: a lost node is free")
        known = free | set(self.in_use) | {index for index in self._lost if index < bound}
        require(known == set(range(bound)), f"pool {self.pool.name}: a node is nowhere")
        require(
            self.pool.num_nodes is None or bound <= self.pool.num_nodes,
            f"pool {self.pool.name}: more nodes handed out than there are",
        )


class ClusterNodes:
    """Every pool's nodes, and their uses."""

    def __init__(self, cluster: Cluster, undo: Undo) -> None:
        self._cluster = cluster
        self._undo = undo
        self._by_pool = {name: PoolNodes(pool, undo) for name, pool in cluster.pools.items()}
        self._about_to_go: dict[NodeId, None] = {}
        self._num_uses: dict[NodeId, int] = {}
        """Uses of each node in use."""
        self.peak_by_pool = dict.fromkeys(cluster.pools, 0)
        """Most nodes that were ever in use at once, by pool."""

    def free_lists(self) -> list[Any]:
        """State that `take_back` restores, by pool, in addition to the trial's changes."""
        return [nodes.free_list() for nodes in self._by_pool.values()]

    def take_back(self, free_lists: list[Any]) -> None:
        """Roll back to the node sets taken by `free_lists`."""
        for nodes, free_list in zip(self._by_pool.values(), free_lists, strict=True):
            nodes.take_back(free_list)

    def num_free(self, phase: Phase) -> float:
        pool = self._cluster.pool_for(phase)
        return self._by_pool[pool.name].num_free if pool else 0

    def num_present(self, phase: Phase) -> float:
        pool = self._cluster.pool_for(phase)
        return self._by_pool[pool.name].num_present if pool else 0

    def num_in_use(self, pool: str) -> int:
        return len(self._by_pool[pool].in_use)

    def take(self, phase: Phase, count: int) -> tuple[NodeId, ...]:
        """So many free nodes of the phase's pool, each used once; a gang lies within one machine if it can."""
        pool = self._cluster.pool_for(phase)
        if pool is None or count == 0:
            return ()
        nodes = self._by_pool[pool.name]
        taken = nodes.take(count)
        for node in taken:
            self._undo.put(self._num_uses, node, 1)
        if len(nodes.in_use) > self.peak_by_pool[pool.name]:
            self._undo.put(self.peak_by_pool, pool.name, len(nodes.in_use))
        return taken

    def use(self, nodes: tuple[NodeId, ...]) -> None:
        """Count one use more of each node, which is in use."""
        for node in nodes:
            self._undo.put(self._num_uses, node, self._num_uses[node] + 1)

    def let_go(self, nodes: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """Count one use less of each node; returns the nodes that become free."""
        freed = []
        for node in nodes:
            self._undo.put(self._num_uses, node, self._num_uses[node] - 1)
            if self._num_uses[node] == 0:
                self._undo.remove(self._num_uses, node)
                self._by_pool[node.pool].give_back(node)
                freed.append(node)
        return tuple(freed)

    def is_lost(self, node: NodeId) -> bool:
        return self._by_pool[node.pool].is_lost(node)

    def expect_loss(self, node: NodeId) -> None:
        """The node is handed out no more; it is in use until those that use it let it go."""
        self.lose(node)
        self._about_to_go[node] = None

    def is_about_to_go(self, node: NodeId) -> bool:
        return node in self._about_to_go

    @property
    def expects_losses(self) -> bool:
        return bool(self._about_to_go)

    def lose(self, node: NodeId) -> None:
        if node in self._about_to_go:
            del self._about_to_go[node]
        else:
            self._by_pool[node.pool].lose(node)

    def regain(self, node: NodeId) -> None:
        self._about_to_go.pop(node, None)
        self._by_pool[node.pool].regain(node)

    def check(self, num_uses: Mapping[NodeId, int]) -> None:
        """Compare with the uses that there should be; raises with the difference."""
        require(num_uses == self._num_uses, "a node's uses are miscounted")
        for pool, nodes in self._by_pool.items():
            mine = {node.index for node in num_uses if node.pool == pool}
            require(mine == set(nodes.in_use), f"pool {pool}: nodes in use and nodes held differ")
            nodes.check()
            require(self.peak_by_pool[pool] >= len(mine), f"pool {pool}: more nodes in use than the peak")


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise IllegalTransitionError(f"placement ledger: {otherwise}")
