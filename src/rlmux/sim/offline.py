"""What hindsight would pay: at every arrival and departure, the cheapest grouping of whoever runs then.

Regrouping costs nothing here and happens at once, as in the paper's offline optimum (section 8.2): no
policy that decides without knowing the future can do better within the same groups (strict meta-iterations,
every SLO kept, the cap on a group). The search is exact while it ends within its limit; `bound_usd` says
what is proven otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from rlmux.core.errors import UserError
from rlmux.core.model import Phase
from rlmux.core.packing import Item, NodePrices, cheapest_partition, columns_of, item_of
from rlmux.core.placement import MAX_PIPELINES_PER_GROUP
from rlmux.sim.arrivals import Workload

MAX_SEARCH_NODES = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineCost:
    """The cost of hindsight."""

    cost_usd: float
    bound_usd: float
    """No grouping of the same kind costs less."""
    hours: float
    num_groupings: int
    num_proven: int

    @property
    def usd_per_hour(self) -> float:
        return self.cost_usd / self.hours

    @property
    def bound_usd_per_hour(self) -> float:
        return self.bound_usd / self.hours


def offline_cost(workload: Workload, *, max_search_nodes: int = MAX_SEARCH_NODES) -> OfflineCost:
    """Integrate the cheapest grouping over a workload whose departures are given."""
    cluster = workload.cluster
    rollout, train = cluster.pool_for(Phase.ROLLOUT), cluster.pool_for(Phase.TRAIN)
    if rollout is None or train is None:
        raise UserError("the offline optimum needs a rollout pool and a training pool")
    prices = NodePrices(rollout_usd=rollout.usd_per_node_hour, train_usd=train.usd_per_node_hour)
    changes: list[tuple[float, int, int]] = []
    for index, arrival in enumerate(workload.arrivals):
        if arrival.depart_s is None:
            raise UserError(f"pipeline {arrival.pipeline.id} has no departure; the offline optimum needs one")
        heappush(changes, (arrival.submit_s, 1, index))
        heappush(changes, (arrival.depart_s, 0, index))
    start_s = now_s = changes[0][0] if changes else 0.0
    running: dict[int, Item] = {}
    cost_usd = bound_usd = rate = bound_rate = 0.0
    num_groupings = num_proven = 0
    while changes:
        time_s, is_arrival, index = heappop(changes)
        cost_usd += rate * (time_s - now_s) / 3600
        bound_usd += bound_rate * (time_s - now_s) / 3600
        now_s = time_s
        if is_arrival:
            running[index] = item_of(workload.arrivals[index].pipeline)
        else:
            del running[index]
        if changes and changes[0][0] == now_s:
            continue
        rate, bound_rate, is_proven = _cheapest(list(running.values()), prices, max_search_nodes)
        num_groupings += 1
        num_proven += is_proven
    return OfflineCost(
        cost_usd=cost_usd,
        bound_usd=bound_usd,
        hours=(now_s - start_s) / 3600,
        num_groupings=num_groupings,
        num_proven=num_proven,
    )


def _cheapest(items: list[Item], prices: NodePrices, max_search_nodes: int) -> tuple[float, float, bool]:
    """$/h of the best grouping found, what is proven, and whether these are the same."""
    if not items:
        return 0.0, 0.0, True
    columns = columns_of(items, prices, MAX_PIPELINES_PER_GROUP)
    best = cheapest_partition(columns, len(items), max_nodes=max_search_nodes)
    assert best is not None, "each pipeline alone is a grouping"
    return best.cost_usd, best.bound_usd, best.is_proven
