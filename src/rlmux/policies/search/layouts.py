"""How pipelines of given kinds can be laid out on the nodes of one group, each layout with its period and its cost.

    kinds ─▶ layouts, cheapest first: so many rollout nodes, who is pinned where, seconds of the meta-iteration

A kind is all that a layout depends on: seconds, nodes, bytes and the price of slowness, no SLO. Sixteen kinds make up
the pipelines of a production trace, so computed results are needed again and again. Fewest rollout nodes are not
always cheapest where slowness has a price: every number counts until the period no longer falls.

A module of its own: it enumerates layouts without knowing prices.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

from rlmux.core.estimation.cycles import PhaseLoad, fits_period, meta_iteration_s
from rlmux.core.estimation.tail_gain import numbers_left, tail_seconds
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.policies.search.partition import NodePrices, PipelineDemand, do_fit

Pins = tuple[tuple[int, ...], ...]
"""Numbers of the nodes of each member."""

_NOTICEABLE = 1e-4
"""Part of a period by which another way must be shorter to be looked at."""
_MAX_TRIED = 24
"""Ways to pin both phases whose meta-iterations are computed, those with the least work on the busiest node first."""
_MAX_CACHED = 200_000
"""Sets of kinds whose layouts are kept."""


class MemberKind(NamedTuple):
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
    """Numbers of each member's training nodes within the group, as many as it requests."""
    is_colocated: bool


class LayoutBook:
    """Layouts by the kinds of the members; a cache that may be dropped at any moment."""

    def __init__(self) -> None:
        self._prices = NodePrices(rollout_usd=0.0, train_usd=0.0)
        self._numbers: dict[MemberKind, int] = {}
        self._kinds: list[MemberKind] = []
        self._layouts: dict[tuple[int, ...], tuple[Layout, ...]] = {}

    def use(self, prices: NodePrices) -> None:
        """Answer for these prices from now on."""
        if prices != self._prices or len(self._layouts) > _MAX_CACHED:
            self._prices = prices
            self._numbers.clear()
            self._kinds.clear()
            self._layouts.clear()

    def number_of(self, kind: MemberKind) -> int:
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


def _layouts(kinds: Sequence[MemberKind], prices: NodePrices) -> Iterator[Layout]:
    demands = [kind.demand for kind in kinds]
    if len(kinds) == 1:
        yield from _colocated(kinds[0], prices)
    elif sum(demand.is_counted for demand in demands) > MAX_PIPELINES_PER_GROUP:
        return
    num_train = max(demand.num_train_nodes for demand in demands)
    trainings = _trainings(demands, num_train, prices)
    syncs_s = [demand.sync_s for demand in demands]
    fewest = max(demand.num_rollout_nodes for demand in demands)
    most = sum(demand.num_rollout_nodes for demand in demands)
    enough_s = _without_waits_s(demands, trainings)
    lefts = (0, *numbers_left([demand.tail for demand in demands])) if len(kinds) > 1 else (0,)
    least_s = math.inf
    for num_rollout in range(fewest, most + 1):
        if least_s <= enough_s:
            return  # more rollout nodes cannot make it shorter
        best: tuple[float, Pins, Pins] | None = None
        for num_left in lefts:
            below_s = least_s if best is None else best[0]
            rollouts = _rollouts(demands, num_rollout, prices, below_s, num_left)
            found = _shortest(rollouts, trainings, syncs_s, below_s)
            if found is not None and found[0] < below_s:
                best = found
        if best is None or best[0] >= least_s:
            continue
        least_s, pins, train_pins = best
        usd = num_train * prices.train_usd + num_rollout * prices.rollout_usd
        yield Layout(usd + _slowness_usd(kinds, least_s), least_s, num_train, num_rollout, pins, train_pins, False)


def _without_waits_s(demands: Sequence[PipelineDemand], trainings: Sequence[_PinnedPhase]) -> float:
    """Seconds below which no number of rollout nodes brings the meta-iteration."""
    return min(
        (
            max(
                training.busiest_s,
                *(d.rollout_s + s + d.sync_s for d, s in zip(demands, training.seconds, strict=True)),
            )
            for training in trainings
        ),
        default=0.0,
    )


def _colocated(kind: MemberKind, prices: NodePrices) -> Iterator[Layout]:
    demand = kind.demand
    if demand.colocated_s == math.inf or demand.rollout_bytes + demand.train_bytes > prices.train_host_bytes:
        return
    step_s = demand.colocated_s
    if not do_fit(demand.rollout_device_bytes + demand.train_device_bytes, prices.train_device_bytes):
        step_s += demand.rollout_switch_s + demand.train_switch_s
    usd = demand.num_train_nodes * prices.train_usd
    train_pins = (tuple(range(demand.num_train_nodes)),)
    yield Layout(usd + _slowness_usd([kind], step_s), step_s, demand.num_train_nodes, 0, ((),), train_pins, True)


def _slowness_usd(kinds: Sequence[MemberKind], period_s: float) -> float:
    return sum(kind.slowness_usd * (1.0 - kind.demand.solo_s / period_s) for kind in kinds) if period_s else 0.0


class _PinnedPhase(NamedTuple):
    """One phase of all members, pinned to nodes."""

    busiest_s: float
    """Seconds of the busiest node in a meta-iteration."""
    pins: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    """Seconds of each member's phase, switches included."""
    tails_s: tuple[float, ...]
    """Seconds at the end of each member's phase in which its nodes may begin the next."""


class _OnePhase(NamedTuple):
    """Demand of one phase of a member on its nodes."""

    seconds: float
    switch_s: float
    state_bytes: float
    """Bytes of its state on each device."""
    num_nodes: int
    host_bytes: float
    growth_s: float = 0.0
    """Seconds by which the phase ends later where its tail leaves its nodes."""
    tail_s: float = 0.0
    """Seconds of that tail."""
    tail_fraction: float = 0.0
    """Part of each node that the tail keeps."""


def _rollouts(
    demands: Sequence[PipelineDemand], num_nodes: int, prices: NodePrices, below_s: float, num_left: int
) -> list[_PinnedPhase]:
    """Every way to pin the rollouts to exactly so many nodes that keeps each of them busy for less than `below_s`, the
    shortest first; with tails that leave shared nodes once so many trajectories are left, 0 for none."""
    phases = [
        _OnePhase(
            demand.rollout_s,
            demand.rollout_switch_s,
            demand.rollout_device_bytes,
            demand.num_rollout_nodes,
            demand.rollout_bytes,
            *(tail_seconds(demand.rollout_s, demand.tail, num_left) if num_left else (0.0, 0.0)),
            demand.tail.device_fraction if demand.tail else 0.0,
        )
        for demand in demands
    ]
    return _pinned(phases, num_nodes, prices.rollout_host_bytes, prices.rollout_device_bytes, below_s)


def _trainings(demands: Sequence[PipelineDemand], num_nodes: int, prices: NodePrices) -> list[_PinnedPhase]:
    """Every way to train on exactly so many nodes, each member on as many as it requests, the shortest first."""
    phases = [
        _OnePhase(
            demand.train_s, demand.train_switch_s, demand.train_device_bytes, demand.num_train_nodes, demand.train_bytes
        )
        for demand in demands
    ]
    return _pinned(phases, num_nodes, prices.train_host_bytes, prices.train_device_bytes, math.inf)


def _pinned(
    phases: Sequence[_OnePhase], num_nodes: int, host_bytes: float, device_bytes: float, below_s: float
) -> list[_PinnedPhase]:
    """Every way to pin members to exactly so many nodes, nodes numbered as they come up, that fits their memory and
    keeps each busy for less than `below_s`, the shortest first."""
    found: list[_PinnedPhase] = []
    nodes_of: list[tuple[int, ...]] = [()] * len(phases)
    states: list[_NodeState] = [(0, 0.0, 0.0, 0.0)] * num_nodes
    num_to_come = [sum([phase.num_nodes for phase in phases[index + 1 :]]) for index in range(len(phases))]

    def pin(index: int, num_used: int) -> None:
        if index == len(phases):
            found.append(_pinned_so(phases, tuple(nodes_of), states, device_bytes))
            return
        seconds, _, state_bytes, num_requested, need_bytes, growth_s, tail_s, _ = phases[index]
        seconds += growth_s - tail_s
        for nodes in _next_nodes(num_used, num_requested, num_nodes):
            num_used_then = max(num_used, nodes[-1] + 1)
            if num_used_then + num_to_come[index] < num_nodes:
                continue
            before = [states[node] for node in nodes]
            for node, (num_members, busy_s, held_bytes, on_device_bytes) in zip(nodes, before, strict=True):
                if busy_s + seconds >= below_s or held_bytes + need_bytes > host_bytes:
                    break
                states[node] = num_members + 1, busy_s + seconds, held_bytes + need_bytes, on_device_bytes + state_bytes
            else:
                nodes_of[index] = nodes
                pin(index + 1, num_used_then)
            for node, state in zip(nodes, before, strict=True):
                states[node] = state

    pin(0, 0)
    found.sort()
    return found


_NodeState = tuple[int, float, float, float]
"""Members pinned to a node, their seconds without switches and tails, their bytes in host memory and on each device."""


@cache
def _next_nodes(num_used: int, num_requested: int, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Nodes that the next member may take, where so many are used: among those, and unused ones in their order."""
    taken = combinations(range(min(num_nodes, num_used + num_requested)), num_requested)
    return tuple(
        nodes
        for nodes in taken
        if nodes[-1] < num_used or nodes[-1] == num_used + sum(node >= num_used for node in nodes) - 1
    )


def _pinned_so(
    phases: Sequence[_OnePhase], pins: Pins, states: Sequence[_NodeState], device_bytes: float
) -> _PinnedPhase:
    """What comes of these pins, switches counted where the states of a node's members do not all fit a device."""
    is_crowded = [count > 1 and not do_fit(on_device_bytes, device_bytes) for count, _, _, on_device_bytes in states]
    seconds: list[float] = []
    busy_s = [0.0] * len(states)
    tails_s: list[float] = []
    for index, (phase, nodes) in enumerate(zip(phases, pins, strict=True)):
        taken_s, tail_s = phase.seconds, 0.0
        if any(states[node][0] > 1 for node in nodes):
            tail_s = phase.tail_s
            taken_s += (phase.growth_s if tail_s else 0.0) + _lost_s(phases, pins, index)
        if phase.switch_s and any(is_crowded[node] for node in nodes):
            taken_s += phase.switch_s
        seconds.append(taken_s)
        tails_s.append(tail_s)
        for node in nodes:
            busy_s[node] += taken_s - tail_s
    return _PinnedPhase(max(busy_s), pins, tuple(seconds), tuple(tails_s))


def _lost_s(phases: Sequence[_OnePhase], pins: Pins, index: int) -> float:
    """Seconds that a member loses to the longest tail on its nodes, as `core.tails.with_tails` counts them."""
    lost_s = 0.0
    for other, phase in enumerate(phases):
        if phase.tail_s and other != index and not set(pins[index]).isdisjoint(pins[other]):
            lost_s = max(lost_s, phase.tail_s * phase.tail_fraction)
    return lost_s


def _shortest(
    rollouts: Sequence[_PinnedPhase], trainings: Sequence[_PinnedPhase], syncs_s: Sequence[float], below_s: float
) -> tuple[float, Pins, Pins] | None:
    """(period, rollout pins, training pins) of the shortest meta-iteration; None if memory forbids all, or none is
    shorter than `below_s`."""
    best: tuple[float, Pins, Pins] | None = None
    for at_least_s, r, t in _likeliest(rollouts, trainings, syncs_s, below_s):
        if best is not None and at_least_s >= best[0] * (1.0 - _NOTICEABLE):
            break
        rollout, training = rollouts[r], trainings[t]
        loads = [
            PhaseLoad(
                rollout_s=rollout_s,
                train_s=train_s,
                rollout_nodes=nodes,
                sync_s=sync_s,
                train_nodes=train_nodes,
                tail_s=tail_s,
            )
            for rollout_s, nodes, tail_s, train_s, train_nodes, sync_s in zip(
                rollout.seconds, rollout.pins, rollout.tails_s, training.seconds, training.pins, syncs_s, strict=True
            )
        ]
        if best is None or fits_period(loads, best[0] * (1.0 - _NOTICEABLE)):
            best = (meta_iteration_s(loads), rollout.pins, training.pins)
    return best


def _likeliest(
    rollouts: Sequence[_PinnedPhase], trainings: Sequence[_PinnedPhase], syncs_s: Sequence[float], below_s: float
) -> list[tuple[float, int, int]]:
    """(seconds that the period has at least, number of the rollouts, number of the trainings) of the `_MAX_TRIED` pairs
    that have the least, below `below_s`."""
    found: list[tuple[float, int, int]] = []
    most_s = below_s  # what a pair must stay below to be among them: those that come later lose among equals
    longest_s: dict[tuple[tuple[float, ...], tuple[float, ...]], float] = {}
    for r, rollout in enumerate(rollouts):
        if rollout.busiest_s >= most_s:
            break
        for t, training in enumerate(trainings):
            if training.busiest_s >= most_s:
                break
            seconds = rollout.seconds, training.seconds
            own_s = longest_s.get(seconds)
            if own_s is None:
                own_s = longest_s[seconds] = max(map(_sum3, *seconds, syncs_s))
            at_least_s = max(rollout.busiest_s, training.busiest_s, own_s)
            if at_least_s < most_s:
                insort(found, (at_least_s, r, t))
                if len(found) > _MAX_TRIED:
                    found.pop()
                if len(found) == _MAX_TRIED:
                    most_s = found[-1][0]
    return found


def _sum3(rollout_s: float, train_s: float, sync_s: float) -> float:
    return rollout_s + train_s + sync_s
