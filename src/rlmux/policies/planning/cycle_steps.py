"""Groups in which a short pipeline laps a long one, so that both fit one set of nodes.

With one turn each, a group's period is at least its longest member's step, so a pipeline whose SLO allows less cannot
join: a 250 s pipeline that accepts 1.5 times never shares with one of 1450 s. With several steps per cycle it can:

    steps per cycle long: 1, short: 4    train node   | long ........ | s | s | s | s |    period within 4 budgets of `short`

Candidates: each member in turn sets the pair_rates with one turn, everybody else gets the fewest steps per cycle that keep its SLO.
A candidate counts if an exact test of the meta-iteration says that it fits. There is no formula for these groups, so
they are kept small; what was found is remembered, as most of it is asked again at the next change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from rlmux.core.cycles import PhaseLoad, fits_period
from rlmux.core.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.policies.planning.partition import Column, Item, NodePrices, pack_rollouts

MAX_STEPS_PER_CYCLE = 4
MAX_LAPPED_MEMBERS = 3
_MAX_REMEMBERED = 100_000


class LapFinder:
    """Finds such groups, and remembers."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Column | None] = {}
        """By the numbers of prices and items."""
        self._numbers: dict[NodePrices | Item, int] = {}
        """Hashing an item takes as long as many look-ups of its number."""

    def columns(self, items: Sequence[Item], prices: NodePrices, one_step_each: Sequence[Column]) -> list[Column]:
        """Columns with several steps per cycle that are cheaper than the same members with one turn each."""
        if len(self._known) > _MAX_REMEMBERED:
            self._known.clear()
            self._numbers.clear()
        search = _LapSearch(
            items=items,
            prices=prices,
            cost_by_mask={column.mask: column.cost_usd for column in one_step_each},
            known=self._known,
            numbers=[self._numbers.setdefault(item, len(self._numbers)) for item in items],
        )
        order = sorted(range(len(items)), key=lambda i: (-items[i].solo_s, items[i].budget_s, i))
        search.extend((), (self._numbers.setdefault(prices, len(self._numbers)),), 0, order)
        return search.found


@dataclass(slots=True, kw_only=True)
class _LapSearch:
    """One call of the finder: grows groups from their longest member down."""

    items: Sequence[Item]
    prices: NodePrices
    cost_by_mask: Mapping[int, float]
    """Of groups with one turn each."""
    known: dict[tuple[int, ...], Column | None]
    numbers: Sequence[int]
    """Of the items, for `known`."""
    found: list[Column] = field(default_factory=list)

    def extend(self, members: tuple[int, ...], key: tuple[int, ...], mask: int, later: Sequence[int]) -> None:
        for position, index in enumerate(later):
            grown, grown_key, grown_mask = (*members, index), (*key, self.numbers[index]), mask | 1 << index
            below_usd = self.cost_by_mask.get(grown_mask, math.inf)
            column = self._best(grown, grown_key, below_usd) if members else None
            if column is not None:
                mapped = tuple(grown[i] for i in column.members)
                self.found.append(replace(column, mask=grown_mask, members=mapped))
            if (column is not None or below_usd < math.inf) and len(grown) < MAX_LAPPED_MEMBERS:
                self.extend(grown, grown_key, grown_mask, later[position + 1 :])

    def _best(self, members: tuple[int, ...], key: tuple[int, ...], below_usd: float) -> Column | None:
        """The cheapest group of exactly these with several steps per cycle for some, its members numbered as given.

        `below_usd` is what they cost with one turn each: a function of the same members and prices.
        """
        if key not in self.known:
            self.known[key] = _best_column([self.items[i] for i in members], self.prices, below_usd)
        return self.known[key]


def _best_column(items: list[Item], prices: NodePrices, below_usd: float) -> Column | None:
    """None where none is cheaper than `below_usd`."""
    if sum(item.train_bytes for item in items) > prices.train_host_bytes:
        return None
    if sum(item.is_counted for item in items) > MAX_PIPELINES_PER_GROUP:
        return None
    if sum(item.train_s / item.budget_s for item in items) > 1.0:
        return None
    best: Column | None = None
    below_usd -= 1e-9
    num_train = max(item.num_train_nodes for item in items)
    for steps_per_cycle, period_s in _candidates(items):
        fewest_usd = prices.train_usd * num_train + prices.rollout_usd * _fewest_nodes(items, steps_per_cycle, period_s)
        if fewest_usd >= below_usd:
            continue
        order = sorted(range(len(items)), key=lambda i: cycle_rank(steps_per_cycle[i], items[i].solo_s))
        busy = [replace(items[i], rollout_s=items[i].rollout_s * steps_per_cycle[i]) for i in order]
        for num_rollout in count(1):
            pins = pack_rollouts(busy, period_s, prices.rollout_host_bytes, at_least=num_rollout)
            if pins is None:
                break
            num_used = 1 + max(max(nodes) for nodes in pins)
            cost = prices.train_usd * num_train + prices.rollout_usd * num_used
            if cost >= below_usd or num_used < num_rollout:
                break
            loads = [
                PhaseLoad(
                    rollout_s=items[i].rollout_s,
                    train_s=items[i].train_s,
                    rollout_nodes=nodes,
                    steps_per_cycle=steps_per_cycle[i],
                )
                for i, nodes in zip(order, pins, strict=True)
            ]
            if fits_period(loads, period_s):
                in_order = tuple(steps_per_cycle[i] for i in order)
                best = Column(0, tuple(order), cost, num_train, num_used, pins, False, in_order)
                below_usd = cost
                break
    return best


def _fewest_nodes(items: Sequence[Item], steps_per_cycle: Sequence[int], period_s: float) -> int:
    busy_s = sum(
        item.rollout_s * item.num_rollout_nodes * count for item, count in zip(items, steps_per_cycle, strict=True)
    )
    return max(math.ceil(busy_s / period_s - 1e-9), *(item.num_rollout_nodes for item in items))


def cycle_rank(steps_per_cycle: int, solo_s: float) -> tuple[int, float]:
    """The cyclic order of members with several steps_per_cycle: few steps per cycle first, then long steps first."""
    return (steps_per_cycle, -solo_s)


def _candidates(items: Sequence[Item]) -> Iterator[tuple[tuple[int, ...], float]]:
    """(steps_per_cycle, longest period within every SLO), each once, that could fit by utilisation."""
    seen: dict[tuple[int, ...], None] = {}
    for item in items:
        if item.budget_s == math.inf:
            continue
        steps_per_cycle = tuple(max(1, math.ceil(item.budget_s / other.budget_s - 1e-9)) for other in items)
        if steps_per_cycle in seen or max(steps_per_cycle) > MAX_STEPS_PER_CYCLE or max(steps_per_cycle) == 1:
            continue
        seen[steps_per_cycle] = None
        period_s = min(count * other.budget_s for count, other in zip(steps_per_cycle, items, strict=True))
        works_s = sum(count * other.train_s for count, other in zip(steps_per_cycle, items, strict=True))
        longest_s = max(count * other.solo_s for count, other in zip(steps_per_cycle, items, strict=True))
        if max(works_s, longest_s) <= period_s:
            yield steps_per_cycle, period_s
