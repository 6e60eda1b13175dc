"""Cheapest partition of a few pipelines into co-execution groups, under strict meta-iterations.

    items ─▶ columns: every feasible group with its cheapest node count ─▶ set partition by branch and bound

A group is feasible when every member's solo step, the training node's load and every rollout node's load
fit the smallest budget among the members (SLO times T_solo), and host memory or the cap holds; that is
max(T_cycle, T_load) <= budget. A pipeline may also stand alone on its training nodes, colocated.

The search is exact when it ends within its node limit; otherwise `bound_usd` says how far off it may be.
The bound is a dual one: prices of pipelines such that no column costs less than its members' prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.group_load import MAX_PIPELINES_PER_GROUP, budget_of, has_footprint, solo_s
from rlmux.core.model import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrices:
    """What a node costs and holds."""

    rollout_usd: float
    train_usd: float
    rollout_host_bytes: float = math.inf
    train_host_bytes: float = math.inf
    num_free_rollout: float = math.inf
    num_free_train: float = math.inf


@dataclass(frozen=True, slots=True)
class Item:
    """A pipeline as numbers."""

    rollout_s: float
    train_s: float
    budget_s: float
    num_rollout_nodes: int
    num_train_nodes: int
    rollout_bytes: float
    train_bytes: float
    colocated_s: float
    """Its step alone on its training nodes; infinite where unknown."""
    is_counted: bool
    """It has no footprint: the cap on a group counts it."""

    @property
    def solo_s(self) -> float:
        return self.rollout_s + self.train_s


def item_of(pipeline: Pipeline, slo_margin: float = 0.0) -> Item:
    """`slo_margin` is the share of its budget that is kept in hand, as far as it exceeds T_solo."""
    estimate, footprint = pipeline.estimate, pipeline.footprint
    return Item(
        rollout_s=estimate.rollout_s if estimate else 0.0,
        train_s=estimate.train_s if estimate else 0.0,
        budget_s=max(solo_s(pipeline), budget_of(pipeline) * (1.0 - slo_margin)),
        num_rollout_nodes=pipeline.num_rollout_nodes,
        num_train_nodes=pipeline.num_train_nodes,
        rollout_bytes=footprint.rollout_host_bytes,
        train_bytes=footprint.train_host_bytes,
        colocated_s=pipeline.colocated_estimate.solo_s if pipeline.colocated_estimate else math.inf,
        is_counted=not has_footprint(pipeline),
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A possible group."""

    mask: int
    """Bit i: item i is a member."""
    members: tuple[int, ...]
    cost_usd: float
    """Of an hour."""
    num_train_nodes: int
    num_rollout_nodes: int
    pins: tuple[tuple[int, ...], ...]
    """By member: the numbers of its rollout nodes; empty tuples in a colocated one."""
    is_colocated: bool
    steps_per_cycle: tuple[int, ...] = ()
    """By member: steps in each meta-iteration; () for one each."""


def columns_of(items: Sequence[Item], prices: NodePrices, max_members: int = 8) -> list[Column]:
    """Every feasible group of the items, each once, at its cheapest."""
    order = sorted(range(len(items)), key=lambda i: (items[i].budget_s, i))
    builder = _ColumnBuilder(items, prices, max_members, order)
    for position in range(len(order)):
        builder.start(position)
    return builder.columns


class _ColumnBuilder:
    """Grows groups from their tightest member upwards, so that the budget is known from the start."""

    def __init__(self, items: Sequence[Item], prices: NodePrices, max_members: int, order: list[int]) -> None:
        self.items = items
        self.prices = prices
        self.max_members = max_members
        self.order = order
        self.columns: list[Column] = []

    def start(self, position: int) -> None:
        index = self.order[position]
        item = self.items[index]
        if item.colocated_s <= item.budget_s and (
            item.rollout_bytes + item.train_bytes <= self.prices.train_host_bytes
        ):
            cost = self.prices.train_usd * item.num_train_nodes
            self.columns.append(Column(1 << index, (index,), cost, item.num_train_nodes, 0, ((),), True))
        self._grow(position, (), 0.0, 0.0, 0, item.budget_s)

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
        item = self.items[index]
        train_s += item.train_s
        train_bytes += item.train_bytes
        num_counted += item.is_counted
        if (
            item.solo_s > budget_s
            or train_s > budget_s
            or train_bytes > self.prices.train_host_bytes
            or num_counted > MAX_PIPELINES_PER_GROUP
        ):
            return
        members = (*members, index)
        pins = pack_rollouts([self.items[i] for i in members], budget_s, self.prices.rollout_host_bytes)
        if pins is None:
            return
        num_rollout = 1 + max(max(nodes) for nodes in pins)
        num_train = max(self.items[i].num_train_nodes for i in members)
        cost = self.prices.train_usd * num_train + self.prices.rollout_usd * num_rollout
        mask = sum(1 << i for i in members)
        same = None
        if len(members) == 1 and self.columns and self.columns[-1].mask == mask:
            same = self.columns[-1]
        if same is None or cost < same.cost_usd:
            if same is not None:
                self.columns.pop()
            self.columns.append(Column(mask, members, cost, num_train, num_rollout, pins, False))
        if len(members) < self.max_members:
            room_s = budget_s - train_s
            for later in range(position + 1, len(self.order)):
                other = self.items[self.order[later]]
                if other.train_s <= room_s and other.rollout_s + other.train_s <= budget_s:
                    self._grow(later, members, train_s, train_bytes, num_counted, budget_s)


def pack_rollouts(
    items: Sequence[Item], budget_s: float, node_bytes: float, *, at_least: int = 1
) -> tuple[tuple[int, ...], ...] | None:
    """Pin rollouts to the fewest nodes, each within the budget and its memory; None if one does not fit at all."""
    order = sorted(range(len(items)), key=lambda i: -items[i].rollout_s)
    if any(item.rollout_s > budget_s or item.rollout_bytes > node_bytes for item in items):
        return None
    total_s = sum(item.rollout_s * item.num_rollout_nodes for item in items)
    fewest = max(at_least, *(item.num_rollout_nodes for item in items))
    if 0 < budget_s < math.inf:
        fewest = max(fewest, math.ceil(total_s / budget_s - 1e-9))
    num_nodes = fewest
    while True:
        pins: list[tuple[int, ...]] = [()] * len(items)
        if _pin(items, order, 0, [0.0] * num_nodes, [0.0] * num_nodes, budget_s, node_bytes, pins):
            return tuple(pins)
        num_nodes += 1


def _pin(
    items: Sequence[Item],
    order: Sequence[int],
    depth: int,
    loads_s: list[float],
    held_bytes: list[float],
    budget_s: float,
    node_bytes: float,
    pins: list[tuple[int, ...]],
) -> bool:
    """Depth-first: the longest rollouts first, equal nodes tried once."""
    if depth == len(order):
        return True
    item = items[order[depth]]
    open_nodes = [
        node
        for node in range(len(loads_s))
        if loads_s[node] + item.rollout_s <= budget_s and held_bytes[node] + item.rollout_bytes <= node_bytes
    ]
    if len(open_nodes) < item.num_rollout_nodes:
        return False
    tried: list[tuple[float, ...]] = []
    for nodes in _choices(open_nodes, item.num_rollout_nodes):
        looks = tuple(loads_s[node] for node in nodes) + tuple(held_bytes[node] for node in nodes)
        if looks in tried:
            continue
        tried.append(looks)
        for node in nodes:
            loads_s[node] += item.rollout_s
            held_bytes[node] += item.rollout_bytes
        pins[order[depth]] = nodes
        if _pin(items, order, depth + 1, loads_s, held_bytes, budget_s, node_bytes, pins):
            return True
        for node in nodes:
            loads_s[node] -= item.rollout_s
            held_bytes[node] -= item.rollout_bytes
    return False


def _choices(nodes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(node,) for node in nodes]
    if count == 0:
        return [()]
    return [(node, *rest) for position, node in enumerate(nodes) for rest in _choices(nodes[position + 1 :], count - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The columns chosen, and what is proven about them."""

    columns: tuple[Column, ...]
    cost_usd: float
    bound_usd: float
    """No partition costs less."""
    is_proven: bool

    @property
    def gap(self) -> float:
        """(cost - proven bound) / cost; 0 where the partition is proven to be the cheapest."""
        return 1.0 - self.bound_usd / self.cost_usd if self.cost_usd else 0.0


def cheapest_partition(
    columns: Sequence[Column],
    num_items: int,
    *,
    costs: Sequence[float] | None = None,
    max_nodes: int = 20_000,
    upper: float = math.inf,
    num_rounds: int = 12,
) -> Partition | None:
    """Choose columns that hold every item exactly once, at least cost; None if nothing is below `upper`.

    `costs` stand in for the columns' own dollars, for instance with what moving there costs.
    """
    search = _Search(columns, num_items, costs or [column.cost_usd for column in columns], num_rounds)
    return search.run(max_nodes, upper)


class _Search:
    def __init__(self, columns: Sequence[Column], num_items: int, costs: Sequence[float], num_rounds: int) -> None:
        self.columns = columns
        self.costs = costs
        self.num_items = num_items
        self.prices = self._dual_prices(num_rounds)
        self.bound = sum(self.prices)
        self.best: tuple[int, ...] = ()
        self.best_cost = math.inf
        self.num_nodes = 0

    def run(self, max_nodes: int, upper: float) -> Partition | None:
        self.best_cost = upper
        self.max_nodes = max_nodes
        reduced = [
            cost - sum(self.prices[i] for i in column.members)
            for column, cost in zip(self.columns, self.costs, strict=True)
        ]
        self.reduced = reduced
        self.by_item: list[list[int]] = [[] for _ in range(self.num_items)]
        for k in sorted(range(len(self.columns)), key=lambda k: reduced[k]):
            for i in self.columns[k].members:
                self.by_item[i].append(k)
        self._descend((1 << self.num_items) - 1, self.bound, ())
        if not self.best and self.num_items:
            return None
        is_proven = self.num_nodes < max_nodes
        return Partition(
            columns=tuple(self.columns[k] for k in self.best),
            cost_usd=self.best_cost,
            bound_usd=self.best_cost if is_proven else min(self.bound, self.best_cost),
            is_proven=is_proven,
        )

    def _descend(self, open_mask: int, bound: float, chosen: tuple[int, ...]) -> None:
        """`bound` is the root's plus the reduced costs of the columns chosen."""
        if bound >= self.best_cost - 1e-9:
            return
        if open_mask == 0:
            self.best, self.best_cost = chosen, bound
            return
        self.num_nodes += 1
        if self.num_nodes >= self.max_nodes:
            return
        fewest: list[int] = []
        fewest_len = 1 << 30
        slack = self.best_cost - bound
        for i in range(self.num_items):
            if open_mask >> i & 1:
                fits = []
                for k in self.by_item[i]:
                    if self.reduced[k] >= slack:
                        break
                    if self.columns[k].mask & ~open_mask == 0:
                        fits.append(k)
                        if len(fits) >= fewest_len:
                            break
                if len(fits) < fewest_len:
                    fewest, fewest_len = fits, len(fits)
                    if fewest_len <= 1:
                        break
        for k in fewest:
            self._descend(open_mask & ~self.columns[k].mask, bound + self.reduced[k], (*chosen, k))

    def _dual_prices(self, num_rounds: int) -> list[float]:
        """Feasible prices by coordinate ascent from an even split, the order reversed each round."""
        prices = [math.inf] * self.num_items
        weights = [math.inf] * self.num_items
        for column, cost in zip(self.columns, self.costs, strict=True):
            if len(column.members) == 1:
                weights[column.members[0]] = min(weights[column.members[0]], cost)
        for column, cost in zip(self.columns, self.costs, strict=True):
            total = sum(weights[i] for i in column.members)
            for i in column.members:
                share = cost * weights[i] / total if 0 < total < math.inf else cost / len(column.members)
                prices[i] = min(prices[i], share)
        slacks = [
            cost - sum(prices[i] for i in column.members) for column, cost in zip(self.columns, self.costs, strict=True)
        ]
        holding: list[list[int]] = [[] for _ in range(self.num_items)]
        for k, column in enumerate(self.columns):
            for i in column.members:
                holding[i].append(k)
        for round_index in range(num_rounds):
            share = 0.5 if round_index < num_rounds - 1 else 1.0
            order = range(self.num_items) if round_index % 2 else range(self.num_items - 1, -1, -1)
            for i in order:
                rise = share * min((slacks[k] for k in holding[i]), default=0.0)
                if rise > 0:
                    prices[i] += rise
                    for k in holding[i]:
                        slacks[k] -= rise
        return prices
