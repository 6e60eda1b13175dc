"""The nodes of one pool: which are in use, free or lost."""

from __future__ import annotations

import heapq
import math

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import NodeId, Pool


class PoolNodes:
    """A pool's nodes: the lowest free number is taken first; an unbounded pool counts on as needed."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.in_use: dict[int, None] = {}
        self._returned: list[int] = []
        self._next = 0
        self._lost: dict[int, None] = {}

    def copy(self) -> PoolNodes:
        twin = PoolNodes(self.pool)
        twin.in_use, twin._returned = dict(self.in_use), list(self._returned)
        twin._next, twin._lost = self._next, dict(self._lost)
        return twin

    @property
    def num_present(self) -> float:
        return math.inf if self.pool.num_nodes is None else self.pool.num_nodes - len(self._lost)

    @property
    def num_free(self) -> float:
        if self.pool.num_nodes is None:
            return math.inf
        num_lost_unused = sum(index not in self.in_use for index in self._lost)
        return self.pool.num_nodes - len(self.in_use) - num_lost_unused

    def take(self) -> NodeId:
        while True:
            index = heapq.heappop(self._returned) if self._returned else self._count_on()
            if index not in self._lost:
                self.in_use[index] = None
                return NodeId(self.pool.name, index)

    def _count_on(self) -> int:
        self._next += 1
        return self._next - 1

    def give_back(self, node: NodeId) -> None:
        del self.in_use[node.index]
        if node.index not in self._lost:
            heapq.heappush(self._returned, node.index)

    def lose(self, node: NodeId) -> None:
        if node.index in self._lost:
            raise IllegalTransitionError(f"node {node} was lost before and has not joined again")
        self._lost[node.index] = None
        self._returned = [index for index in self._returned if index != node.index]
        heapq.heapify(self._returned)

    def regain(self, node: NodeId) -> None:
        if node.index not in self._lost:
            raise IllegalTransitionError(f"node {node} joins but was never lost")
        del self._lost[node.index]
        if node.index < self._next and node.index not in self.in_use:
            heapq.heappush(self._returned, node.index)

    def check(self) -> None:
        free = set(self._returned)
        require(len(free) == len(self._returned), f"pool {self.pool.name}: a free node is listed twice")
        require(not free & set(self.in_use), f"pool {self.pool.name}: a node is free and in use")
        require(not free & set(self._lost), f"pool {self.pool.name}: a lost node is free")
        known = free | set(self.in_use) | {index for index in self._lost if index < self._next}
        require(known == set(range(self._next)), f"pool {self.pool.name}: a node is nowhere")
        require(
            self.pool.num_nodes is None or self._next <= self.pool.num_nodes,
            f"pool {self.pool.name}: more nodes handed out than there are",
        )


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise IllegalTransitionError(f"placement ledger: {otherwise}")
