"""How pipelines of given kinds can be laid out on the nodes of one group, each layout with its period and its cost.

    kinds ─▶ layouts, cheapest first: so many rollout nodes, who is pinned where, seconds of the meta-iteration

A kind is all that a layout depends on: seconds, nodes, bytes and the price of slowness, no SLO. Sixteen kinds make up
the pipelines of a production trace, so what was computed once is asked again and again. Fewest rollout nodes are not
always cheapest where slowness has a price: every number counts until the period no longer falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from rlmux.core.cycles import PhaseLoad, cycle_s, load_s, meta_iteration_s
from rlmux.core.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.policies.planning.partition import NodePrices, PipelineDemand, crowded_rollouts, crowded_trainings, do_fit

_MAX_CACHED = 200_000
"""Sets of kinds whose layouts are kept."""


class Kind(NamedTuple):
    """What a pipeline is for a layout."""

    demand: PipelineDemand
    """Its seconds, nodes and bytes; the budget in it counts for nothing."""
    slowness_usd: float
    """Dollars per hour for each part of its solo speed that it lacks."""


class Layout(NamedTuple):
    """One way to put pipelines into a group; members are numbered as their kinds were given."""

    cost_usd: float
    """Dollars per hour of the nodes, and the price of the members' slowness."""
    period_s: float
    num_train_nodes: int
    num_rollout_nodes: int
    pins: tuple[tuple[int, ...], ...]
    """Numbers of each member's rollout nodes within the group; empty tuples in a colocated group."""
    is_colocated: bool


class LayoutBook:
    """Layouts by the kinds of the members; a cache that may be dropped at any moment."""

    def __init__(self) -> None:
        self._prices = NodePrices(rollout_usd=0.0, train_usd=0.0)
        self._numbers: dict[Kind, int] = {}
        self._kinds: list[Kind] = []
        self._layouts: dict[tuple[int, ...], tuple[Layout, ...]] = {}

    def use(self, prices: NodePrices) -> None:
        """Answer for these prices from now on."""
        if prices != self._prices or len(self._layouts) > _MAX_CACHED:
            self._prices = prices
            self._numbers.clear()
            self._kinds.clear()
            self._layouts.clear()

    def number_of(self, kind: Kind) -> int:
        """A short name of the kind: hashing it takes as long as many look-ups of its number."""
        number = self._numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        return number

    def layouts(self, numbers: tuple[int, ...]) -> tuple[Layout, ...]:
        """Layouts of members of these kinds, in this order, cheapest first; () where they fit no group."""
        found = self._layouts.get(numbers)
        if found is None:
            kinds = [self._kinds[number] for number in numbers]
            found = tuple(sorted(_layouts(kinds, self._prices)))
            self._layouts[numbers] = found
        return found


def _layouts(kinds: Sequence[Kind], prices: NodePrices) -> Iterator[Layout]:
    demands = [kind.demand for kind in kinds]
    if len(kinds) == 1:
        yield from _colocated(kinds[0], prices)
    elif sum(one.is_counted for one in demands) > MAX_PIPELINES_PER_GROUP:
        return
    if sum(one.train_bytes for one in demands) > prices.train_host_bytes:
        return
    num_train = max(one.num_train_nodes for one in demands)
    crowded = crowded_trainings(demands, prices)
    fewest = max(one.num_rollout_nodes for one in demands)
    most = sum(one.num_rollout_nodes for one in demands)
    least_s = math.inf
    for num_rollout in range(fewest, most + 1):
        best = _best_pins(crowded, num_rollout, prices)
        if best is None or best[0] >= least_s:
            continue
        least_s, pins = best
        usd = num_train * prices.train_usd + num_rollout * prices.rollout_usd
        yield Layout(usd + _slowness_usd(kinds, least_s), least_s, num_train, num_rollout, pins, False)


def _colocated(kind: Kind, prices: NodePrices) -> Iterator[Layout]:
    demand = kind.demand
    if demand.colocated_s == math.inf or demand.rollout_bytes + demand.train_bytes > prices.train_host_bytes:
        return
    step_s = demand.colocated_s
    if not do_fit(demand.rollout_device_bytes + demand.train_device_bytes, prices.train_device_bytes):
        step_s += demand.rollout_switch_s + demand.train_switch_s
    usd = demand.num_train_nodes * prices.train_usd
    yield Layout(usd + _slowness_usd([kind], step_s), step_s, demand.num_train_nodes, 0, ((),), True)


def _slowness_usd(kinds: Sequence[Kind], period_s: float) -> float:
    return sum(kind.slowness_usd * (1.0 - kind.demand.solo_s / period_s) for kind in kinds) if period_s else 0.0


def _best_pins(
    demands: Sequence[PipelineDemand], num_nodes: int, prices: NodePrices
) -> tuple[float, tuple[tuple[int, ...], ...]] | None:
    """(period, pins) of the shortest meta-iteration on so many rollout nodes, all used; None if memory forbids."""
    options = []
    for pins in _all_pins(demands, num_nodes, prices):
        loads = [
            PhaseLoad(rollout_s=one.rollout_s, train_s=one.train_s, rollout_nodes=nodes, sync_s=one.sync_s)
            for one, nodes in zip(crowded_rollouts(demands, pins, prices), pins, strict=True)
        ]
        options.append((max(cycle_s(loads), load_s(loads)), pins, loads))
    best: tuple[float, tuple[tuple[int, ...], ...]] | None = None
    for at_least_s, pins, loads in sorted(options, key=lambda option: option[:2]):
        if best is not None and at_least_s >= best[0]:
            break
        period_s = meta_iteration_s(loads)
        if best is None or period_s < best[0]:
            best = (period_s, pins)
    return best


def _all_pins(
    demands: Sequence[PipelineDemand], num_nodes: int, prices: NodePrices
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to pin the rollouts to exactly so many nodes, nodes numbered as they come up."""
    free_bytes = [prices.rollout_host_bytes] * num_nodes

    def pin(index: int, num_used: int, pins: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if index == len(demands):
            if num_used == num_nodes:
                yield pins
            return
        one = demands[index]
        for nodes in combinations(range(min(num_nodes, num_used + one.num_rollout_nodes)), one.num_rollout_nodes):
            new = [node for node in nodes if node >= num_used]
            is_next = new == list(range(num_used, num_used + len(new)))
            if not is_next or any(free_bytes[node] < one.rollout_bytes for node in nodes):
                continue
            for node in nodes:
                free_bytes[node] -= one.rollout_bytes
            yield from pin(index + 1, num_used + len(new), (*pins, nodes))
            for node in nodes:
                free_bytes[node] += one.rollout_bytes

    yield from pin(0, 0, ())
