"""Groups in which a short pipeline makes several steps in each cycle, so that it fits one set of nodes with a long one.

With one step per cycle each, a group's period is at least its longest member's step, so a pipeline whose SLO allows
less cannot join: a 250 s pipeline that accepts 1.5 times never shares with one of 1450 s. With several steps per
cycle it can:

    steps per cycle: long 1, short 4   train node | long ........ | s | s | s | s |   period within 4 budgets of `short`

Each member in turn is the one with one step per cycle; every other gets the fewest steps that keep its SLO. Such a
group counts if it passes an exact test of the meta-iteration. There is no formula for these groups, so they
are kept small; what was found is cached, as most of it is needed again at the next change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from rlmux.core.estimation.cycles import PhaseLoad
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.policies.search.packing import PackingBook
from rlmux.policies.search.partition import (
    CandidateGroup,
    NodePrices,
    PipelineDemand,
    crowded_rollouts,
    crowded_trainings,
)

MAX_STEPS_PER_CYCLE = 4
MAX_MEMBERS = 3
"""Members of a group in which one has several steps per cycle."""
_MAX_CACHED = 100_000


class CycleStepFinder:
    """Finds such groups, and caches them.

    An answer is a function of the given demands and prices, so dropping the cache changes no decision.
    """

    def __init__(self) -> None:
        self.packing = PackingBook()
        """What the same kinds of pipelines came to under other budgets."""
        self._known: dict[tuple[int, ...], CandidateGroup | None] = {}
        """Cheapest group of the prices and demands with these numbers; None if there is none."""
        self._numbers: dict[NodePrices | PipelineDemand, int] = {}
        """Short names of prices and demands: hashing a demand takes as long as many look-ups of its number."""

    def candidate_groups(
        self, demands: Sequence[PipelineDemand], prices: NodePrices, one_step_each: Sequence[CandidateGroup]
    ) -> list[CandidateGroup]:
        """Groups with several steps per cycle that are cheaper than the same members with one step each."""
        if len(self._known) > _MAX_CACHED:
            self._known.clear()
            self._numbers.clear()
        search = _CycleStepSearch(
            demands=demands,
            prices=prices,
            cost_by_mask={candidate.mask: candidate.cost_usd for candidate in one_step_each},
            known=self._known,
            packing=self.packing,
            numbers=[self._numbers.setdefault(demand, len(self._numbers)) for demand in demands],
        )
        social = [index for index, demand in enumerate(demands) if demand.takes_neighbours]
        order = sorted(social, key=lambda i: (-demands[i].solo_s, demands[i].budget_s, i))
        search.extend((), (self._numbers.setdefault(prices, len(self._numbers)),), 0, order)
        return search.found


@dataclass(slots=True, kw_only=True)
class _CycleStepSearch:
    """One call of the finder: grows groups from their longest member down."""

    demands: Sequence[PipelineDemand]
    prices: NodePrices
    cost_by_mask: Mapping[int, float]
    """Dollars per hour of each group with one step per cycle each, by the bits of its members."""
    known: dict[tuple[int, ...], CandidateGroup | None]
    packing: PackingBook
    numbers: Sequence[int]
    """Number of each demand in the keys of `known`."""
    found: list[CandidateGroup] = field(default_factory=list)

    def extend(self, members: tuple[int, ...], key: tuple[int, ...], mask: int, later: Sequence[int]) -> None:
        for position, index in enumerate(later):
            grown, grown_key, grown_mask = (*members, index), (*key, self.numbers[index]), mask | 1 << index
            below_usd = self.cost_by_mask.get(grown_mask, math.inf)
            candidate = self._best(grown, grown_key, below_usd) if members else None
            if candidate is not None:
                self.found.append(_numbered(candidate, grown, grown_mask))
            if (candidate is not None or below_usd < math.inf) and len(grown) < MAX_MEMBERS:
                self.extend(grown, grown_key, grown_mask, later[position + 1 :])

    def _best(self, members: tuple[int, ...], key: tuple[int, ...], below_usd: float) -> CandidateGroup | None:
        """The cheapest group of exactly these with several steps per cycle for some, its members numbered as given.

        `below_usd` is what they cost with one step per cycle each: a function of the same members and prices.
        """
        if key not in self.known:
            demands = [self.demands[i] for i in members]
            self.known[key] = _cheapest_group(demands, self.prices, below_usd, self.packing)
        return self.known[key]


def _numbered(candidate: CandidateGroup, members: Sequence[int], mask: int) -> CandidateGroup:
    """The group with these numbers for its members."""
    return CandidateGroup(
        mask,
        tuple([members[i] for i in candidate.members]),
        candidate.cost_usd,
        candidate.num_train_nodes,
        candidate.num_rollout_nodes,
        candidate.pins,
        candidate.is_colocated,
        candidate.steps_per_cycle,
    )


def _cheapest_group(
    demands: list[PipelineDemand], prices: NodePrices, below_usd: float, packing: PackingBook
) -> CandidateGroup | None:
    """The cheapest group of all these with several steps per cycle for some; None where none is below `below_usd`."""
    if sum(demand.train_bytes for demand in demands) > prices.train_host_bytes:
        return None
    if sum(demand.is_counted for demand in demands) > MAX_PIPELINES_PER_GROUP:
        return None
    demands = list(crowded_trainings(demands, prices))
    if sum(demand.train_s / demand.budget_s for demand in demands) > 1.0:
        return None
    best: CandidateGroup | None = None
    below_usd -= 1e-9
    num_train = max(demand.num_train_nodes for demand in demands)
    for steps_per_cycle, period_s in _steps_to_try(demands):
        fewest_usd = prices.train_usd * num_train + prices.rollout_usd * _fewest_nodes(
            demands, steps_per_cycle, period_s
        )
        if fewest_usd >= below_usd:
            continue
        order = sorted(range(len(demands)), key=lambda i: cycle_rank(steps_per_cycle[i], demands[i].solo_s))
        busy = [_times(demands[i], steps_per_cycle[i]) for i in order]
        for num_rollout in count(1):
            pins = packing.pack(busy, period_s, prices, at_least=num_rollout)
            if pins is None:
                break
            num_used = 1 + max(max(nodes) for nodes in pins)
            cost = prices.train_usd * num_train + prices.rollout_usd * num_used
            if cost >= below_usd or num_used < num_rollout:
                break
            loads = [
                PhaseLoad(
                    rollout_s=demand.rollout_s,
                    train_s=demand.train_s,
                    rollout_nodes=nodes,
                    steps_per_cycle=steps_per_cycle[i],
                    sync_s=demand.sync_s,
                )
                for i, demand, nodes in zip(
                    order, crowded_rollouts([demands[i] for i in order], pins, prices), pins, strict=True
                )
            ]
            if packing.fits(loads, period_s):
                in_order = tuple(steps_per_cycle[i] for i in order)
                best = CandidateGroup(0, tuple(order), cost, num_train, num_used, pins, False, in_order)
                below_usd = cost
                break
    return best


def _times(demand: PipelineDemand, num_steps: int) -> PipelineDemand:
    """The demand with the rollouts of so many steps."""
    return demand._replace(rollout_s=demand.rollout_s * num_steps, rollout_switch_s=demand.rollout_switch_s * num_steps)


def _fewest_nodes(demands: Sequence[PipelineDemand], steps_per_cycle: Sequence[int], period_s: float) -> int:
    busy_s = sum(
        demand.rollout_s * demand.num_rollout_nodes * count
        for demand, count in zip(demands, steps_per_cycle, strict=True)
    )
    return max(math.ceil(busy_s / period_s - 1e-9), *(demand.num_rollout_nodes for demand in demands))


def cycle_rank(steps_per_cycle: int, solo_s: float) -> tuple[int, float]:
    """Sort key of the cyclic order of members: few steps per cycle first, then long steps first."""
    return (steps_per_cycle, -solo_s)


def _steps_to_try(demands: Sequence[PipelineDemand]) -> Iterator[tuple[tuple[int, ...], float]]:
    """(steps per cycle by demand, longest period within every SLO), each once, that could fit by utilisation."""
    seen: dict[tuple[int, ...], None] = {}
    for demand in demands:
        if demand.budget_s == math.inf:
            continue
        steps_per_cycle = tuple(max(1, math.ceil(demand.budget_s / other.budget_s - 1e-9)) for other in demands)
        if steps_per_cycle in seen or max(steps_per_cycle) > MAX_STEPS_PER_CYCLE or max(steps_per_cycle) == 1:
            continue
        seen[steps_per_cycle] = None
        period_s = min(count * other.budget_s for count, other in zip(steps_per_cycle, demands, strict=True))
        works_s = sum(count * other.train_s for count, other in zip(steps_per_cycle, demands, strict=True))
        longest_s = max(count * other.solo_s for count, other in zip(steps_per_cycle, demands, strict=True))
        if max(works_s, longest_s) <= period_s:
            yield steps_per_cycle, period_s
