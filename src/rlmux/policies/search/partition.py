"""Groups into which a few pipelines could be put, under strict meta-iterations.

    demands ─▶ candidate groups: every feasible one at its cheapest node count ─▶ the cheapest (set_partition.py)

A group is feasible when every member's solo step, the training node's load and every rollout node's load
fit the smallest budget among the members (SLO times T_solo), and host memory or the cap holds; that is
max(T_cycle, T_load) <= budget. Switches and syncs are in these seconds as the ledger counts them: a warm switch for
each phase on nodes whose states do not all fit, the longest sync beside the busiest rollout node. A pipeline may also
stand alone on its training nodes, colocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from rlmux.core.model import GroupId, Pipeline, RolloutTail
from rlmux.core.placement.group_load import (
    MAX_PIPELINES_PER_GROUP,
    has_footprint,
    phases_of,
    slo_budget_s,
    solo_s,
    sync_s,
)

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrices:
    """What a node costs and holds."""

    rollout_usd: float
    """Dollars per hour of a rollout node."""
    train_usd: float
    """Dollars per hour of a training node."""
    rollout_host_bytes: float = math.inf
    train_host_bytes: float = math.inf
    rollout_device_bytes: float = math.inf
    """Memory of a device of a rollout node, in bytes."""
    train_device_bytes: float = math.inf
    num_free_rollout: float = math.inf
    num_free_train: float = math.inf


class PipelineDemand(NamedTuple):
    """Demand of a pipeline on nodes, in numbers. Seconds are of one step.

    A search makes tens of thousands with other seconds, which a named tuple does in a fraction of the time.
    """

    rollout_s: float
    train_s: float
    budget_s: float
    num_rollout_nodes: int
    num_train_nodes: int
    rollout_bytes: float
    train_bytes: float
    colocated_s: float
    """Seconds of its step alone on its training nodes, both phases there; infinite where unknown."""
    is_counted: bool
    """True for a pipeline without a footprint: the cap on a group's members stands in for memory."""
    sync_s: float = 0.0
    """Seconds between its training and its next rollout, which hold no node."""
    rollout_switch_s: float = 0.0
    """Seconds of a warm switch to its rollout state."""
    train_switch_s: float = 0.0
    rollout_device_bytes: float = math.inf
    """Bytes of its rollout state on each device; infinite where unknown, since it fills the device then."""
    train_device_bytes: float = math.inf
    takes_neighbours: bool = True
    """False for a pipeline whose own step is beyond its SLO, which a neighbour could only make worse."""
    tail: RolloutTail | None = None
    """How its rollouts end, where their tails may leave their nodes to others."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s


def demand_of(pipeline: Pipeline, slo_margin: float = 0.0) -> PipelineDemand:
    """The pipeline in numbers; `slo_margin` is the part of its budget kept in hand, as far as it exceeds T_solo.

    Its phases count as long as they hold their devices, as in the ledger's groups.
    """
    footprint, switch = pipeline.footprint, pipeline.switch
    rollout_s, train_s = phases_of(pipeline)
    alone_s = max(solo_s(pipeline), rollout_s + train_s + sync_s(pipeline))
    budget_s = slo_budget_s(pipeline)
    return PipelineDemand(
        rollout_s=rollout_s,
        train_s=train_s,
        budget_s=max(alone_s, budget_s * (1.0 - slo_margin)),
        num_rollout_nodes=pipeline.num_rollout_nodes,
        num_train_nodes=pipeline.num_train_nodes,
        rollout_bytes=footprint.rollout_host_bytes,
        train_bytes=footprint.train_host_bytes,
        colocated_s=pipeline.colocated_estimate.solo_s if pipeline.colocated_estimate else math.inf,
        is_counted=not has_footprint(pipeline),
        sync_s=sync_s(pipeline),
        rollout_switch_s=switch.rollout_s if switch else 0.0,
        train_switch_s=switch.train_s if switch else 0.0,
        rollout_device_bytes=_or_all(footprint.rollout_device_bytes),
        train_device_bytes=_or_all(footprint.train_device_bytes),
        takes_neighbours=alone_s <= budget_s * (1.0 + _ROUNDING),
        tail=pipeline.tail,
    )


def _or_all(device_bytes: float | None) -> float:
    return math.inf if device_bytes is None else device_bytes


def do_fit(states_bytes: float, memory_bytes: float) -> bool:
    """Whether states of so many bytes together fit a device; one of unknown size fits none beside another."""
    return states_bytes <= memory_bytes and states_bytes < math.inf


@dataclass(frozen=True, slots=True)
class CandidateGroup:
    """A possible co-execution group; its members are indices of demands."""

    mask: int
    """Bits of the members: bit i is set if demand i is one."""
    members: tuple[int, ...]
    cost_usd: float
    """Dollars per hour of its nodes."""
    num_train_nodes: int
    num_rollout_nodes: int
    pins: tuple[tuple[int, ...], ...]
    """Numbers of each member's rollout nodes within the group; empty tuples in a colocated group."""
    is_colocated: bool
    steps_per_cycle: tuple[int, ...] = ()
    """Steps of each member in a cycle; () for one each."""
    train_pins: tuple[tuple[int, ...], ...] = ()
    """Numbers of each member's training nodes within the group; () where all train on all of them."""
    group: GroupId | None = None
    """The group that is like this already; None where pipelines have to move for it."""


Pack = Callable[[Sequence[PipelineDemand], float, NodePrices], tuple[tuple[int, ...], ...] | None]
"""`pack_rollouts`, or what answers as it does."""


def candidate_groups(
    demands: Sequence[PipelineDemand], prices: NodePrices, max_members: int = 8, pack: Pack | None = None
) -> list[CandidateGroup]:
    """Every feasible group of the demands with one step per cycle each, once, at its cheapest."""
    order = sorted(range(len(demands)), key=lambda i: (demands[i].budget_s, i))
    builder = _CandidateBuilder(demands, prices, max_members, order, pack or pack_rollouts)
    for position in range(len(order)):
        builder.start(position)
    return builder.candidates


class _CandidateBuilder:
    """Grows groups from their tightest member upwards, so that the budget is known from the start."""

    def __init__(
        self, demands: Sequence[PipelineDemand], prices: NodePrices, max_members: int, order: list[int], pack: Pack
    ) -> None:
        self.pack = pack
        self.demands = demands
        self.prices = prices
        self.max_members = max_members
        self.order = order
        self.crowded = demands
        """Demands whose training has its switch; the demands themselves where no switch is known."""
        if any(demand.train_switch_s for demand in demands):
            self.crowded = [_with_train_switch(demand) for demand in demands]
        self.candidates: list[CandidateGroup] = []

    def start(self, position: int) -> None:
        index = self.order[position]
        demand = self.demands[index]
        if self._colocated_s(demand) <= demand.budget_s and (
            demand.rollout_bytes + demand.train_bytes <= self.prices.train_host_bytes
        ):
            cost = self.prices.train_usd * demand.num_train_nodes
            self.candidates.append(CandidateGroup(1 << index, (index,), cost, demand.num_train_nodes, 0, ((),), True))
        self._grow(position, (), 0.0, 0.0, 0, demand.budget_s)

    def _crowded_trainings(self, members: tuple[int, ...]) -> Sequence[PipelineDemand]:
        """`crowded_trainings` of these, each demand with its switch made once."""
        alone = [self.demands[i] for i in members]
        if len(members) < 2 or self.crowded is self.demands:
            return alone
        if do_fit(sum(demand.train_device_bytes for demand in alone), self.prices.train_device_bytes):
            return alone
        return [self.crowded[i] for i in members]

    def _colocated_s(self, demand: PipelineDemand) -> float:
        """Seconds of its step on its training nodes alone, with its own switches where its two states do not fit."""
        states_bytes = demand.rollout_device_bytes + demand.train_device_bytes
        if do_fit(states_bytes, self.prices.train_device_bytes):
            return demand.colocated_s
        return demand.colocated_s + demand.rollout_switch_s + demand.train_switch_s

    def _grow(
        self,
        position: int,
        members: tuple[int, ...],
        train_s: float,
        train_bytes: float,
        num_counted: int,
        budget_s: float,
    ) -> None:
        index = self.order[position]
        demand = self.demands[index]
        train_s += demand.train_s
        train_bytes += demand.train_bytes
        num_counted += demand.is_counted
        if (
            demand.solo_s > budget_s
            or train_s > budget_s
            or train_bytes > self.prices.train_host_bytes
            or num_counted > MAX_PIPELINES_PER_GROUP
        ):
            return
        members = (*members, index)
        crowded = self._crowded_trainings(members)
        if sum(member.train_s for member in crowded) > budget_s or any(member.solo_s > budget_s for member in crowded):
            return
        pins = self.pack(crowded, budget_s, self.prices)
        if pins is None or not _fit_cycle(crowded, pins, budget_s, self.prices):
            return
        num_rollout = 1 + max(max(nodes) for nodes in pins)
        num_train = max(self.demands[i].num_train_nodes for i in members)
        cost = self.prices.train_usd * num_train + self.prices.rollout_usd * num_rollout
        mask = sum(1 << i for i in members)
        same = None
        if len(members) == 1 and self.candidates and self.candidates[-1].mask == mask:
            same = self.candidates[-1]
        if same is None or cost < same.cost_usd:
            if same is not None:
                self.candidates.pop()
            self.candidates.append(CandidateGroup(mask, members, cost, num_train, num_rollout, pins, False))
        if demand.takes_neighbours and len(members) < self.max_members:
            room_s = budget_s - train_s
            for later in range(position + 1, len(self.order)):
                other = self.demands[self.order[later]]
                is_short = other.train_s <= room_s and other.rollout_s + other.train_s <= budget_s
                if is_short and other.takes_neighbours:
                    self._grow(later, members, train_s, train_bytes, num_counted, budget_s)


def crowded_trainings(demands: Sequence[PipelineDemand], prices: NodePrices) -> Sequence[PipelineDemand]:
    """The demands, their training with the switches that sharing all training nodes brings."""
    if len(demands) < 2 or not any(demand.train_switch_s for demand in demands):
        return demands
    if do_fit(sum(demand.train_device_bytes for demand in demands), prices.train_device_bytes):
        return demands
    return [_with_train_switch(demand) for demand in demands]


def _with_train_switch(demand: PipelineDemand) -> PipelineDemand:
    return demand._replace(train_s=demand.train_s + demand.train_switch_s)


def crowded_rollouts(
    demands: Sequence[PipelineDemand], pins: Sequence[tuple[int, ...]], prices: NodePrices
) -> Sequence[PipelineDemand]:
    """The demands, their rollouts with the switches that sharing these nodes brings."""
    if len(demands) < 2 or not any(demand.rollout_switch_s for demand in demands):
        return demands
    crowded = crowded_nodes([demand.rollout_device_bytes for demand in demands], pins, prices.rollout_device_bytes)
    return [
        demand if crowded.isdisjoint(nodes) else demand._replace(rollout_s=demand.rollout_s + demand.rollout_switch_s)
        for demand, nodes in zip(demands, pins, strict=True)
    ]


def crowded_nodes(states_bytes: Sequence[float], pins: Sequence[tuple[int, ...]], memory_bytes: float) -> set[int]:
    """Numbers of the nodes whose states do not all fit a device."""
    there: dict[int, list[float]] = {}
    for state_bytes, nodes in zip(states_bytes, pins, strict=True):
        for node in nodes:
            there.setdefault(node, []).append(state_bytes)
    return {node for node, sizes in there.items() if len(sizes) > 1 and not do_fit(sum(sizes), memory_bytes)}


def _fit_cycle(
    demands: Sequence[PipelineDemand], pins: Sequence[tuple[int, ...]], budget_s: float, prices: NodePrices
) -> bool:
    """Whether every member's own step fits the budget with the switches of its rollout nodes."""
    if all(demand.solo_s + demand.rollout_switch_s <= budget_s for demand in demands):
        return True
    return all(demand.solo_s <= budget_s for demand in crowded_rollouts(demands, pins, prices))


def pack_rollouts(
    demands: Sequence[PipelineDemand], budget_s: float, prices: NodePrices, *, at_least: int = 1
) -> tuple[tuple[int, ...], ...] | None:
    """Pin rollouts to the fewest nodes, each within the budget and its memory; None if one does not fit at all.

    A node's seconds are the rollouts there, their switches if the states do not all fit, and the longest sync.
    """
    node_bytes = prices.rollout_host_bytes
    order = sorted(range(len(demands)), key=lambda i: -demands[i].rollout_s)
    if len(demands) > 1:
        budget_s -= max(demand.sync_s for demand in demands)
    if any(demand.rollout_s > budget_s or demand.rollout_bytes > node_bytes for demand in demands):
        return None
    total_s = sum(demand.rollout_s * demand.num_rollout_nodes for demand in demands)
    fewest = max(at_least, *(demand.num_rollout_nodes for demand in demands))
    if 0 < budget_s < math.inf:
        fewest = max(fewest, math.ceil(total_s / budget_s - 1e-9))
    num_nodes = fewest
    while True:
        pins: list[tuple[int, ...]] = [()] * len(demands)
        if _pin(demands, order, 0, [_NodeLoad()] * num_nodes, budget_s, prices, pins):
            return tuple(pins)
        num_nodes += 1


class _NodeLoad(NamedTuple):
    """What a node has to do and to hold."""

    rollout_s: float = 0.0
    switch_s: float = 0.0
    """Seconds of switches if the states do not all fit."""
    host_bytes: float = 0.0
    device_bytes: float = 0.0

    def plus(self, demand: PipelineDemand) -> _NodeLoad:
        return _NodeLoad(
            self.rollout_s + demand.rollout_s,
            self.switch_s + demand.rollout_switch_s,
            self.host_bytes + demand.rollout_bytes,
            self.device_bytes + demand.rollout_device_bytes,
        )


def _takes(node: _NodeLoad, demand: PipelineDemand, budget_s: float, prices: NodePrices) -> bool:
    rollout_s = node.rollout_s + demand.rollout_s
    if rollout_s > budget_s or node.host_bytes + demand.rollout_bytes > prices.rollout_host_bytes:
        return False
    switch_s = node.switch_s + demand.rollout_switch_s
    is_alone = node.device_bytes == 0.0
    if switch_s == 0.0 or is_alone or rollout_s + switch_s <= budget_s:
        return True
    return do_fit(node.device_bytes + demand.rollout_device_bytes, prices.rollout_device_bytes)


def _pin(
    demands: Sequence[PipelineDemand],
    order: Sequence[int],
    depth: int,
    nodes: list[_NodeLoad],
    budget_s: float,
    prices: NodePrices,
    pins: list[tuple[int, ...]],
) -> bool:
    """Depth-first: the longest rollouts first, equal nodes tried once."""
    if depth == len(order):
        return True
    demand = demands[order[depth]]
    open_nodes = [number for number, node in enumerate(nodes) if _takes(node, demand, budget_s, prices)]
    if len(open_nodes) < demand.num_rollout_nodes:
        return False
    tried: list[tuple[_NodeLoad, ...]] = []
    for numbers in combinations(open_nodes, demand.num_rollout_nodes):
        looks = tuple(nodes[number] for number in numbers)
        if looks in tried:
            continue
        tried.append(looks)
        for number in numbers:
            nodes[number] = nodes[number].plus(demand)
        pins[order[depth]] = numbers
        if _pin(demands, order, depth + 1, nodes, budget_s, prices, pins):
            return True
        for number, node in zip(numbers, looks, strict=True):
            nodes[number] = node
    return False
