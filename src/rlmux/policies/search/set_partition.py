"""Cheapest choice of candidate groups that hold each pipeline once: set partition by branch and bound.

The search is exact when it ends within its node limit; otherwise `bound_usd` bounds the error.
The bound is a dual one: prices of pipelines such that no candidate group costs less than its members' prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.policies.search.partition import CandidateGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The groups chosen, and what is proven about them."""

    groups: tuple[CandidateGroup, ...]
    cost_usd: float
    """Dollars per hour, with what moving there costs if costs were given."""
    bound_usd: float
    """Dollars per hour below which no partition costs."""
    is_proven: bool
    """Whether the search ended within its limit: no partition is cheaper."""

    @property
    def gap(self) -> float:
        """(cost - proven bound) / cost; 0 where the partition is proven to be the cheapest."""
        return 1.0 - self.bound_usd / self.cost_usd if self.cost_usd else 0.0


def cheapest_partition(
    candidates: Sequence[CandidateGroup],
    num_demands: int,
    *,
    costs: Sequence[float] | None = None,
    max_nodes: int = 20_000,
    upper: float = math.inf,
    num_rounds: int = 12,
) -> Partition | None:
    """Choose groups that hold every demand exactly once, at least cost; None if nothing is below `upper`.

    `costs` stand in for the groups' own dollars, for instance with what moving there costs.
    """
    costs = costs or [candidate.cost_usd for candidate in candidates]
    search = _PartitionSearch(candidates, num_demands, costs, num_rounds)
    return search.run(max_nodes, upper)


class _PartitionSearch:
    """Branch and bound over the candidate groups, cheapest by reduced cost first."""

    def __init__(
        self, candidates: Sequence[CandidateGroup], num_demands: int, costs: Sequence[float], num_rounds: int
    ) -> None:
        self.candidates = candidates
        self.costs = costs
        self.num_demands = num_demands
        self.prices = self._dual_prices(num_rounds)
        self.bound = sum(self.prices)
        self.best: tuple[int, ...] = ()
        self.best_cost = math.inf
        self.num_nodes = 0

    def run(self, max_nodes: int, upper: float) -> Partition | None:
        self.best_cost = upper
        self.max_nodes = max_nodes
        reduced = [
            cost - sum(self.prices[i] for i in candidate.members)
            for candidate, cost in zip(self.candidates, self.costs, strict=True)
        ]
        self.reduced = reduced
        self.by_demand: list[list[int]] = [[] for _ in range(self.num_demands)]
        for k in sorted(range(len(self.candidates)), key=lambda k: reduced[k]):
            for i in self.candidates[k].members:
                self.by_demand[i].append(k)
        self._descend((1 << self.num_demands) - 1, self.bound, ())
        if not self.best and self.num_demands:
            return None
        is_proven = self.num_nodes < max_nodes
        return Partition(
            groups=tuple(self.candidates[k] for k in self.best),
            cost_usd=self.best_cost,
            bound_usd=self.best_cost if is_proven else min(self.bound, self.best_cost),
            is_proven=is_proven,
        )

    def _descend(self, open_mask: int, bound: float, chosen: tuple[int, ...]) -> None:
        """Branch on the open demand with the fewest groups; `bound` is the root's plus the reduced costs chosen."""
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
        for i in range(self.num_demands):
            if open_mask >> i & 1:
                fits = []
                for k in self.by_demand[i]:
                    if self.reduced[k] >= slack:
                        break
                    if self.candidates[k].mask & ~open_mask == 0:
                        fits.append(k)
                        if len(fits) >= fewest_len:
                            break
                if len(fits) < fewest_len:
                    fewest, fewest_len = fits, len(fits)
                    if fewest_len <= 1:
                        break
        for k in fewest:
            self._descend(open_mask & ~self.candidates[k].mask, bound + self.reduced[k], (*chosen, k))

    def _dual_prices(self, num_rounds: int) -> list[float]:
        """Feasible prices by coordinate ascent from an even split, the order reversed each round."""
        prices = [math.inf] * self.num_demands
        weights = [math.inf] * self.num_demands
        for candidate, cost in zip(self.candidates, self.costs, strict=True):
            if len(candidate.members) == 1:
                weights[candidate.members[0]] = min(weights[candidate.members[0]], cost)
        for candidate, cost in zip(self.candidates, self.costs, strict=True):
            total = sum(weights[i] for i in candidate.members)
            for i in candidate.members:
                share = cost * weights[i] / total if 0 < total < math.inf else cost / len(candidate.members)
                prices[i] = min(prices[i], share)
        slacks = [
            cost - sum(prices[i] for i in candidate.members)
            for candidate, cost in zip(self.candidates, self.costs, strict=True)
        ]
        holding: list[list[int]] = [[] for _ in range(self.num_demands)]
        for k, candidate in enumerate(self.candidates):
            for i in candidate.members:
                holding[i].append(k)
        for round_index in range(num_rounds):
            share = 0.5 if round_index < num_rounds - 1 else 1.0
            order = range(self.num_demands) if round_index % 2 else range(self.num_demands - 1, -1, -1)
            for i in order:
                rise = share * min((slacks[k] for k in holding[i]), default=0.0)
                if rise > 0:
                    prices[i] += rise
                    for k in holding[i]:
                        slacks[k] -= rise
        return prices
