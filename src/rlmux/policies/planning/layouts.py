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

from rlmux.core.cycles import PhaseLoad, fits_period, meta_iteration_s
from rlmux.core.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.policies.planning.partition import NodePrices, PipelineDemand, crowded_nodes, do_fit

Pins = tuple[tuple[int, ...], ...]
"""Numbers of the nodes of each member."""

_NOTICEABLE = 1e-4
"""Part of a period by which another way must be shorter to be looked at."""
_MAX_TRIED = 24
"""Ways to pin both phases whose meta-iterations are computed, those with the least work on the busiest node first."""
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
    train_pins: tuple[tuple[int, ...], ...]
    """Numbers of each member's training nodes within the group, as many as it asks for."""
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
    num_train = max(one.num_train_nodes for one in demands)
    trainings = _trainings(demands, num_train, prices)
    fewest = max(one.num_rollout_nodes for one in demands)
    most = sum(one.num_rollout_nodes for one in demands)
    least_s = math.inf
    for num_rollout in range(fewest, most + 1):
        best = _shortest(_rollouts(demands, num_rollout, prices), trainings, [one.sync_s for one in demands])
        if best is None or best[0] >= least_s:
            continue
        least_s, pins, train_pins = best
        usd = num_train * prices.train_usd + num_rollout * prices.rollout_usd
        yield Layout(usd + _slowness_usd(kinds, least_s), least_s, num_train, num_rollout, pins, train_pins, False)


def _colocated(kind: Kind, prices: NodePrices) -> Iterator[Layout]:
    demand = kind.demand
    if demand.colocated_s == math.inf or demand.rollout_bytes + demand.train_bytes > prices.train_host_bytes:
        return
    step_s = demand.colocated_s
    if not do_fit(demand.rollout_device_bytes + demand.train_device_bytes, prices.train_device_bytes):
        step_s += demand.rollout_switch_s + demand.train_switch_s
    usd = demand.num_train_nodes * prices.train_usd
    train_pins = (tuple(range(demand.num_train_nodes)),)
    yield Layout(usd + _slowness_usd([kind], step_s), step_s, demand.num_train_nodes, 0, ((),), train_pins, True)


def _slowness_usd(kinds: Sequence[Kind], period_s: float) -> float:
    return sum(kind.slowness_usd * (1.0 - kind.demand.solo_s / period_s) for kind in kinds) if period_s else 0.0


class _Pinned(NamedTuple):
    """One phase of all members, pinned to nodes."""

    busiest_s: float
    """Seconds of the busiest node in a meta-iteration."""
    pins: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    """Seconds of each member's phase, switches included."""


class _OnePhase(NamedTuple):
    """What one phase of a member asks of its nodes."""

    seconds: float
    switch_s: float
    state_bytes: float
    """Bytes of its state on each device."""
    num_nodes: int
    host_bytes: float


def _rollouts(demands: Sequence[PipelineDemand], num_nodes: int, prices: NodePrices) -> list[_Pinned]:
    """Every way to pin the rollouts to exactly so many nodes, the shortest first."""
    phases = [
        _OnePhase(
            one.rollout_s, one.rollout_switch_s, one.rollout_device_bytes, one.num_rollout_nodes, one.rollout_bytes
        )
        for one in demands
    ]
    return _pinned(phases, num_nodes, prices.rollout_host_bytes, prices.rollout_device_bytes)


def _trainings(demands: Sequence[PipelineDemand], num_nodes: int, prices: NodePrices) -> list[_Pinned]:
    """Every way to train on exactly so many nodes, each member on as many as it asks for, the shortest first."""
    phases = [
        _OnePhase(one.train_s, one.train_switch_s, one.train_device_bytes, one.num_train_nodes, one.train_bytes)
        for one in demands
    ]
    return _pinned(phases, num_nodes, prices.train_host_bytes, prices.train_device_bytes)


def _pinned(phases: Sequence[_OnePhase], num_nodes: int, host_bytes: float, device_bytes: float) -> list[_Pinned]:
    found = []
    for pins in _all_pins([one.num_nodes for one in phases], num_nodes, [one.host_bytes for one in phases], host_bytes):
        crowded = crowded_nodes([one.state_bytes for one in phases], pins, device_bytes)
        seconds = [
            one.seconds if crowded.isdisjoint(nodes) else one.seconds + one.switch_s
            for one, nodes in zip(phases, pins, strict=True)
        ]
        busy_s: dict[int, float] = {}
        for taken_s, nodes in zip(seconds, pins, strict=True):
            for node in nodes:
                busy_s[node] = busy_s.get(node, 0.0) + taken_s
        found.append(_Pinned(max(busy_s.values()), pins, tuple(seconds)))
    return sorted(found)


def _shortest(
    rollouts: Sequence[_Pinned], trainings: Sequence[_Pinned], syncs_s: Sequence[float]
) -> tuple[float, Pins, Pins] | None:
    """(period, rollout pins, training pins) of the shortest meta-iteration; None if memory forbids all."""
    pairs = sorted(
        (max(rollout.busiest_s, training.busiest_s, *map(_sum3, rollout.seconds, training.seconds, syncs_s)), r, t)
        for r, rollout in enumerate(rollouts)
        for t, training in enumerate(trainings)
    )
    best: tuple[float, Pins, Pins] | None = None
    for at_least_s, r, t in pairs[:_MAX_TRIED]:
        if best is not None and at_least_s >= best[0] * (1.0 - _NOTICEABLE):
            break
        rollout, training = rollouts[r], trainings[t]
        loads = [
            PhaseLoad(rollout_s=rollout_s, train_s=train_s, rollout_nodes=nodes, sync_s=sync_s, train_nodes=train_nodes)
            for rollout_s, nodes, train_s, train_nodes, sync_s in zip(
                rollout.seconds, rollout.pins, training.seconds, training.pins, syncs_s, strict=True
            )
        ]
        if best is None or fits_period(loads, best[0] * (1.0 - _NOTICEABLE)):
            best = (meta_iteration_s(loads), rollout.pins, training.pins)
    return best


def _sum3(rollout_s: float, train_s: float, sync_s: float) -> float:
    return rollout_s + train_s + sync_s


def _all_pins(counts: Sequence[int], num_nodes: int, bytes_each: Sequence[float], host_bytes: float) -> Iterator[Pins]:
    """Every way to pin members with so many nodes each to exactly so many, nodes numbered as they come up."""
    free_bytes = [host_bytes] * num_nodes

    def pin(index: int, num_used: int, pins: Pins) -> Iterator[Pins]:
        if index == len(counts):
            if num_used == num_nodes:
                yield pins
            return
        need = bytes_each[index]
        for nodes in combinations(range(min(num_nodes, num_used + counts[index])), counts[index]):
            num_new = sum(node >= num_used for node in nodes)
            is_next = num_new == 0 or nodes[-1] == num_used + num_new - 1
            if not is_next or any(free_bytes[node] < need for node in nodes):
                continue
            for node in nodes:
                free_bytes[node] -= need
            yield from pin(index + 1, num_used + num_new, (*pins, nodes))
            for node in nodes:
                free_bytes[node] += need

    yield from pin(0, 0, ())
