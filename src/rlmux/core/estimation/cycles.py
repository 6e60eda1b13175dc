"""How long a group's strict meta-iteration takes.

In a strict meta-iteration every member goes through its steps per cycle, one rollout and one train phase each. Each
step has a cycle slot, and every node serves the slots of its members in the same cyclic order. The k-th meta-iteration
obeys

    rollout of a slot after the same member's previous train phase
    rollout of a slot after the previous slot's rollout on each of its nodes
    train phase of a slot after its rollout, and after the previous slot's train phase

so the period is the largest (seconds on a cycle) / (meta-iterations it spans) of that graph.

RollMux gives each member one step per cycle. If then the members' rollout node sets are pairwise equal or disjoint,
the period is max(T_cycle, T_load). Proof: take a simple cycle with q steps from a train phase back to a rollout and w
wraps to the next meta-iteration; it spans q + w of them. With w = 0 it is one member's rollout and train (T_cycle);
with q = 0 it is one node's work in the cycle (T_load). Otherwise it is q runs of rollouts, each on one node set and at
most T_load long, and train phases, each once, at most T_load in all: at most (q + 1) T_load over at least q + 1
meta-iterations.

Where a member's new weights take sync_s to reach its rollout nodes, that lies between its train phase and its next
rollout and holds no node. The cycle with q steps back then has q syncs more: at most q (T_rollout + sync_s) + T_train
over at least q + 1, with T_rollout the busiest rollout node's work and the longest sync. So the period is at most
max(T_cycle, T_rollout + sync_s, T_train), and less than the longest sync below that; this bound is what is promised.

Members may train on training nodes of their own number: two that request one node each train side by side in a group of
two. The formula then holds where all train on the same nodes; else the period is computed.

The proof needs node sets that are equal or disjoint. Counterexample: order a, ab, b with rollout seconds
10, 1, 10 on nodes {A}, {A, B}, {B} and 1 s of training each: T_cycle = T_load = 11, the period is 11.5, as a run
of rollouts crosses from A to B inside `ab`. Such groups, and those with several steps per cycle for a member, are
computed exactly (Karp's maximum cycle mean).

The tail of a rollout may leave its nodes to the next slot's (`core/estimation/tail_gain.py`): that one then follows
tail_s before the rollout has ended, and a node's work is what the rollouts hold it for, rollout_s - tail_s. A simple
cycle passes each phase once. One that leaves training for a rollout q times spans q + 1 meta-iterations or more, unless
it is one member's own; its q runs of rollouts are the work of q node sets at most, and so are its runs of train phases.
Where these sets are equal or disjoint, the period is therefore at most the larger of T_cycle, T_load and, for q from
1 to the number of members,

    (min(q, rollout sets) T_rollout + min(q, train sets) T_train + q (longest tail + longest sync)) / (q + 1)

A member with m steps per cycle has its n-th slot (from 0) at n / m of the meta-iteration, ties in the members' order:

    steps per cycle a: 1, b: 3    order  a b b b        steps per cycle a: 2, b: 3    order  a b b a b

A step of that member then takes period / m on average.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import add

USER_CODE_PATIENCE_S = 1.0
"""Seconds for which a pipeline that only waits for its own user code (rewards, environments, prompts) keeps its devices
and its slots in the cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLoad:
    """Demand of one member on its group."""

    rollout_s: float
    train_s: float
    rollout_nodes: tuple[Hashable, ...]
    """Nodes that all work on its rollout at once."""
    steps_per_cycle: int = 1
    """Steps in each meta-iteration."""
    sync_s: float = 0.0
    """Seconds between a train phase and the next rollout, which hold no node."""
    train_nodes: tuple[Hashable, ...] = (0,)
    """Nodes that all work on its training at once."""
    tail_s: float = 0.0
    """Seconds at the end of its rollout in which its nodes may begin the next one."""

    @property
    def held_s(self) -> float:
        """Seconds from the begin of its rollout until its nodes may begin the next one."""
        return self.rollout_s - self.tail_s

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s


def cycle_s(loads: Sequence[PhaseLoad]) -> float:
    """T_cycle: the longest that a member needs for its steps per cycle when alone (RollMux section 4.1)."""
    return max((load.solo_s * load.steps_per_cycle for load in loads), default=0.0)


def load_s(loads: Sequence[PhaseLoad]) -> float:
    """T_load: the busiest node's work in one meta-iteration (RollMux section 4.1)."""
    return max(_busiest_s(loads))


def _busiest_s(loads: Sequence[PhaseLoad]) -> tuple[float, float]:
    """Work of the busiest rollout node and of the busiest training node in one meta-iteration."""
    rollout_s_by_node: dict[Hashable, float] = {}
    train_s_by_node: dict[Hashable, float] = {}
    for load in loads:
        for node in load.rollout_nodes:
            rollout_s_by_node[node] = rollout_s_by_node.get(node, 0.0) + load.held_s * load.steps_per_cycle
        for node in load.train_nodes:
            train_s_by_node[node] = train_s_by_node.get(node, 0.0) + load.train_s * load.steps_per_cycle
    return max(rollout_s_by_node.values(), default=0.0), max(train_s_by_node.values(), default=0.0)


def formula_s(cycle_s: float, rollout_s: float, train_s: float, sync_s: float) -> float:
    """The period where `is_formula_exact`: T_cycle, the busiest rollout node's work and the longest sync, or training.

    Without syncs it is max(T_cycle, T_load). With them it is an upper bound, less than the longest sync too long.
    """
    return max(cycle_s, rollout_s + sync_s, train_s)


def meta_iteration_s(loads: Sequence[PhaseLoad]) -> float:
    """Seconds of one strict meta-iteration in steady state, the members in this order.

    Exact, but for syncs where the formula holds: at most one sync too long there.
    """
    rollout_s, train_s = _busiest_s(loads)
    if is_formula_exact(loads):
        return formula_s(cycle_s(loads), rollout_s, train_s, max((load.sync_s for load in loads), default=0.0))
    least_s = max(cycle_s(loads), rollout_s, train_s)
    if _most_with_tails_s(loads, rollout_s, train_s) <= least_s:
        return least_s
    return max(least_s, _max_cycle_mean(_one_meta_iteration(loads)))


def _most_with_tails_s(loads: Sequence[PhaseLoad], rollout_s: float, train_s: float) -> float:
    """Seconds that the meta-iteration takes at most beside T_cycle and T_load, where there are tails; infinite where
    there are none, or nothing is known."""
    longest_tail_s = max(load.tail_s for load in loads)
    if not longest_tail_s or any(load.steps_per_cycle > 1 for load in loads):
        return math.inf
    rollout_sets, train_sets = [load.rollout_nodes for load in loads], [load.train_nodes for load in loads]
    if not (has_separate_node_sets(rollout_sets) and has_separate_node_sets(train_sets)):
        return math.inf
    num_rollout, num_train = len(set(rollout_sets)), len(set(train_sets))
    between_s = longest_tail_s + max(load.sync_s for load in loads)
    return max(
        (min(q, num_rollout) * rollout_s + min(q, num_train) * train_s + q * between_s) / (q + 1)
        for q in range(1, len(loads) + 1)
    )


def fits_period(loads: Sequence[PhaseLoad], period_s: float) -> bool:
    """Whether the meta-iteration takes at most this long; quicker than computing how long.

    Plays meta-iterations one after another and takes the period off in between: the ends settle if it is enough.
    """
    if max(cycle_s(loads), load_s(loads)) > period_s:
        return False
    if is_formula_exact(loads):
        return meta_iteration_s(loads) <= period_s
    if _most_with_tails_s(loads, *_busiest_s(loads)) <= period_s:
        return True
    slots, num_ends = _numbered_slots(loads)
    ends_s = [0.0] * num_ends
    slack = 1e-9 * period_s
    for _ in range(2 * len(slots) + 2):
        before_s = ends_s[:]
        _play(slots, ends_s)
        least_s, most_s = _later_by(ends_s, before_s, period_s)
        if most_s <= slack:
            return True
        if least_s > slack:
            return False  # what comes later by so much everywhere comes later by no less the next time
    return False


_Phase = tuple[list[int], float, float]
_Slot = tuple[int, tuple[_Phase, _Phase], float]
"""One slot of a meta-iteration: the member's number, (nodes' numbers, seconds, seconds of its tail) of its rollout and
of its train phase, and the seconds of its sync."""


def _numbered_slots(loads: Sequence[PhaseLoad]) -> tuple[list[_Slot], int]:
    """Slots in cyclic order, members and nodes numbered in one row; and how many numbers there are."""
    rollout_nodes = dict.fromkeys(node for load in loads for node in load.rollout_nodes)
    train_nodes = dict.fromkeys(node for load in loads for node in load.train_nodes)
    rollout_numbers = {node: n for n, node in enumerate(rollout_nodes, len(loads))}
    train_numbers = {node: n for n, node in enumerate(train_nodes, len(loads) + len(rollout_nodes))}
    slots = []
    for j in cycle_order([load.steps_per_cycle for load in loads]):
        load = loads[j]
        rollout = [rollout_numbers[node] for node in load.rollout_nodes]
        train = [train_numbers[node] for node in load.train_nodes]
        slots.append((j, ((rollout, load.rollout_s, load.tail_s), (train, load.train_s, 0.0)), load.sync_s))
    return slots, len(loads) + len(rollout_nodes) + len(train_nodes)


def _play(slots: Sequence[_Slot], ends_s: list[float]) -> None:
    """Play one meta-iteration: `ends_s` is when each member and each node was free, and becomes when it is again."""
    for member, phases, sync_s in slots:
        end_s = ends_s[member]
        for nodes, phase_s, tail_s in phases:
            for node in nodes:
                if ends_s[node] > end_s:
                    end_s = ends_s[node]
            end_s += phase_s
            for node in nodes:
                ends_s[node] = end_s - tail_s
        ends_s[member] = end_s + sync_s


def _later_by(ends_s: list[float], before_s: Sequence[float], period_s: float) -> tuple[float, float]:
    """Take a period off each end, but never below what it was before; returns the least and the largest rise above
    that."""
    least_s, most_s = math.inf, 0.0
    for number, before in enumerate(before_s):
        end_s = ends_s[number] - period_s
        if end_s <= before:
            ends_s[number] = before
            least_s = 0.0
            continue
        ends_s[number] = end_s
        rise_s = end_s - before
        if rise_s > most_s:
            most_s = rise_s
        if rise_s < least_s:
            least_s = rise_s
    return least_s, most_s


def cycle_order(steps_per_cycle: Sequence[int]) -> list[int]:
    """The members' numbers in the cyclic order of their slots."""
    if max(steps_per_cycle, default=1) == 1:
        return list(range(len(steps_per_cycle)))
    return [j for _, j in sorted((n / count, j) for j, count in enumerate(steps_per_cycle) for n in range(count))]


def is_formula_exact(loads: Sequence[PhaseLoad]) -> bool:
    """Whether the meta-iteration is known to take max(T_cycle, T_load)."""
    return all(
        load.steps_per_cycle == 1 and load.train_nodes == loads[0].train_nodes and not load.tail_s for load in loads
    ) and has_separate_node_sets([load.rollout_nodes for load in loads])


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

    Row and column t are the t-th slot's rollout, n + t its train phase; minus infinity where nothing is awaited.
    """
    order = cycle_order([load.steps_per_cycle for load in loads])
    n = len(order)
    last_on_node: dict[Hashable, int] = {}
    last_training: dict[Hashable, int] = {}
    last_of_member: dict[int, int] = {}
    for slot, j in enumerate(order):
        last_of_member[j] = slot
        last_training.update(dict.fromkeys(loads[j].train_nodes, slot))
        for node in loads[j].rollout_nodes:
            last_on_node[node] = slot
    rollout_rows: list[list[float]] = []
    train_rows: list[list[float]] = []
    row_on_node = {
        node: _row_after(_unit_row(2 * n, slot), -loads[order[slot]].tail_s) for node, slot in last_on_node.items()
    }
    row_of_member = {j: _row_after(_unit_row(2 * n, n + slot), loads[j].sync_s) for j, slot in last_of_member.items()}
    row_of_training = {node: _unit_row(2 * n, n + slot) for node, slot in last_training.items()}
    for j in order:
        load = loads[j]
        row = row_of_member[j]
        for node in load.rollout_nodes:
            row = [max(a, b) for a, b in zip(row, row_on_node[node], strict=True)]
        row = _row_after(row, load.rollout_s)
        row_on_node.update(dict.fromkeys(load.rollout_nodes, _row_after(row, -load.tail_s)))
        rollout_rows.append(row)
        for node in load.train_nodes:
            row = [max(a, b) for a, b in zip(row, row_of_training[node], strict=True)]
        row = [a + load.train_s for a in row]
        row_of_training.update(dict.fromkeys(load.train_nodes, row))
        row_of_member[j] = _row_after(row, load.sync_s)
        train_rows.append(row)
    return rollout_rows + train_rows


def _unit_row(size: int, index: int) -> list[float]:
    return [0.0 if i == index else -math.inf for i in range(size)]


def _row_after(row: list[float], seconds: float) -> list[float]:
    """The row of what ends so long after it."""
    return [a + seconds for a in row] if seconds else row


def _max_cycle_mean(matrix: list[list[float]]) -> float:
    """Karp: the largest mean weight of a cycle. Walks begin anywhere: groups may be in parts that share no node."""
    size = len(matrix)
    walks = [[0.0] * size]
    for _ in range(size):
        last = walks[-1]
        walks.append([max(map(add, row, last)) for row in matrix])
    return max(
        (
            min((walks[size][v] - walks[k][v]) / (size - k) for k in range(size) if walks[k][v] > -math.inf)
            for v in range(size)
            if walks[size][v] > -math.inf
        ),
        default=0.0,
    )
