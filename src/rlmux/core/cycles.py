"""How long a group's strict meta-iteration takes.

In a strict meta-iteration every member runs one rollout and one train phase, and every node serves its
members in the same cyclic order. The k-th phases obey

    rollout[j,k] after train[j,k-1]    rollout[j,k] after the previous member's rollout on each of j's nodes
    train[j,k]   after rollout[j,k]    train[j,k]   after the previous member's train phase

so the period is the largest (seconds on a cycle) / (meta-iterations it spans) of that graph. When the
members' rollout node sets are pairwise equal or disjoint, it is max(T_cycle, T_load). Proof: take a simple
cycle with q steps from a train phase back to a rollout and w wraps to the next meta-iteration; it spans q +
w of them. With w = 0 it is one member's rollout and train (T_cycle); with q = 0 it is one node's round
(T_load). Otherwise it is q runs of rollouts, each on one node set and at most T_load long, and train
phases, each once, at most T_load in all: at most (q + 1) T_load over at least q + 1 meta-iterations.

The proof needs node sets that are equal or disjoint. Counterexample: order a, ab, b with rollout seconds
10, 1, 10 on nodes {A}, {A, B}, {B} and 1 s of training each: T_cycle = T_load = 11, the period is 11.5, as
a run of rollouts crosses from A to B inside `ab`. Such groups are computed exactly (Karp's maximum cycle
mean).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLoad:
    """What one member asks of its group in each meta-iteration."""

    rollout_s: float
    train_s: float
    rollout_nodes: tuple[Hashable, ...]
    """The nodes that all work on its rollout at once."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s


def cycle_s(loads: Sequence[PhaseLoad]) -> float:
    """T_cycle: the longest solo step (RollMux section 4.1)."""
    return max((load.solo_s for load in loads), default=0.0)


def load_s(loads: Sequence[PhaseLoad]) -> float:
    """T_load: the busiest node's work in one meta-iteration (RollMux section 4.1)."""
    rollout_s_by_node: dict[Hashable, float] = {}
    for load in loads:
        for node in load.rollout_nodes:
            rollout_s_by_node[node] = rollout_s_by_node.get(node, 0.0) + load.rollout_s
    return max(sum(load.train_s for load in loads), max(rollout_s_by_node.values(), default=0.0))


def meta_iteration_s(loads: Sequence[PhaseLoad]) -> float:
    """Seconds of one strict meta-iteration in steady state, the members in this cyclic order."""
    bound_s = max(cycle_s(loads), load_s(loads))
    if has_separate_node_sets([load.rollout_nodes for load in loads]):
        return bound_s
    return max(bound_s, _max_cycle_mean(_one_meta_iteration(loads)))


def has_separate_node_sets(node_sets: Sequence[tuple[Hashable, ...]]) -> bool:
    """Whether any two of the sets are equal or disjoint, so that max(T_cycle, T_load) is exact."""
    set_of_node: dict[Hashable, frozenset[Hashable]] = {}
    for nodes in node_sets:
        if len(nodes) == 1 and nodes[0] not in set_of_node:
            set_of_node[nodes[0]] = frozenset(nodes)
            continue
        node_set = frozenset(nodes)
        for node in nodes:
            if set_of_node.setdefault(node, node_set) != node_set:
                return False
    return True


def _one_meta_iteration(loads: Sequence[PhaseLoad]) -> list[list[float]]:
    """The (max, +) matrix from the phases' ends in one meta-iteration to their ends in the next.

    Row and column j are member j's rollout, n + j its train phase; minus infinity where nothing is awaited.
    """
    n = len(loads)
    last_on_node: dict[Hashable, int] = {}
    for j, load in enumerate(loads):
        for node in load.rollout_nodes:
            last_on_node[node] = j
    rows: list[list[float]] = []
    train_rows: list[list[float]] = []
    rollout_row_on_node = {node: _unit_row(2 * n, j) for node, j in last_on_node.items()}
    train_row = _unit_row(2 * n, 2 * n - 1)
    for j, load in enumerate(loads):
        row = _unit_row(2 * n, n + j)
        for node in load.rollout_nodes:
            row = [max(a, b) for a, b in zip(row, rollout_row_on_node[node], strict=True)]
        row = [a + load.rollout_s for a in row]
        for node in load.rollout_nodes:
            rollout_row_on_node[node] = row
        rows.append(row)
        train_row = [max(a, b) + load.train_s for a, b in zip(row, train_row, strict=True)]
        train_rows.append(train_row)
    return rows + train_rows


def _unit_row(size: int, index: int) -> list[float]:
    return [0.0 if i == index else -math.inf for i in range(size)]


def _max_cycle_mean(matrix: list[list[float]]) -> float:
    """Karp: the largest mean weight of a cycle. The last vertex reaches every other: one source is enough."""
    size = len(matrix)
    walks = [_unit_row(size, size - 1)]
    for _ in range(size):
        last = walks[-1]
        walks.append([max(a + b for a, b in zip(row, last, strict=True)) for row in matrix])
    return max(
        (
            min((walks[size][v] - walks[k][v]) / (size - k) for k in range(size) if walks[k][v] > -math.inf)
            for v in range(size)
            if walks[size][v] > -math.inf
        ),
        default=0.0,
    )
