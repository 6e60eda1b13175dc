"""The cost of hindsight: at every arrival and departure, the cheapest grouping of the pipelines that run then.

Regrouping costs nothing here and happens at once, as in the paper's offline optimum (section 8.2): no
policy that decides without knowing the future can do better within the same groups (strict meta-iterations, every SLO
kept at every moment, the cap on a group). The search is exact while it ends within its limit; `bound_usd` shows
what is proven otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmux.core.errors import UserError
from rlmux.core.model import Phase, PhaseSeconds, Pipeline
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP
from rlmux.policies.search.partition import (
    NodePrices,
    PipelineDemand,
    candidate_groups,
    demand_of,
)
from rlmux.policies.search.set_partition import cheapest_partition
from rlmux.sim.bounds import steady_slo_slack_usd, steady_solo_speed_usd
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import Steady

MAX_SEARCH_NODES = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineCost:
    """The cost of hindsight."""

    cost_usd: float
    bound_usd: float
    """Cost below which no grouping under the same rules is."""
    hours: float
    num_groupings: int
    num_proven: int

    @property
    def usd_per_hour(self) -> float:
        return self.cost_usd / self.hours

    @property
    def bound_usd_per_hour(self) -> float:
        return self.bound_usd / self.hours


def offline_cost(
    workload: Workload, *, regroup_every_s: float | None = None, max_search_nodes: int = MAX_SEARCH_NODES
) -> OfflineCost:
    """Integrate the cheapest grouping over a workload whose departures are given.

    `regroup_every_s` groups anew that often too, by what steps really take then: for durations that drift.
    """
    cluster = workload.cluster
    rollout, train = cluster.pool_for(Phase.ROLLOUT), cluster.pool_for(Phase.TRAIN)
    if rollout is None or train is None:
        raise UserError("the offline optimum needs a rollout pool and a training pool")
    prices = NodePrices(rollout_usd=rollout.usd_per_node_hour, train_usd=train.usd_per_node_hour)
    changes = _changes(workload, regroup_every_s)
    start_s = now_s = changes[0][0] if changes else 0.0
    running: dict[int, Arrival] = {}
    cost_usd = bound_usd = rate = bound_rate = 0.0
    num_groupings = num_proven = 0
    for position, (time_s, what, index) in enumerate(changes):
        cost_usd += rate * (time_s - now_s) / 3600
        bound_usd += bound_rate * (time_s - now_s) / 3600
        now_s = time_s
        if what == _ARRIVAL:
            running[index] = workload.arrivals[index]
        elif what == _DEPARTURE:
            del running[index]
        if position + 1 < len(changes) and changes[position + 1][0] == now_s:
            continue
        demands = [demand_of(_as_of(arrival, now_s)) for arrival in running.values()]
        rate, bound_rate, is_proven = _cheapest(demands, prices, max_search_nodes)
        num_groupings += 1
        num_proven += is_proven
    return OfflineCost(
        cost_usd=cost_usd,
        bound_usd=bound_usd,
        hours=(now_s - start_s) / 3600,
        num_groupings=num_groupings,
        num_proven=num_proven,
    )


def steady_usd_per_hour(workload: Workload, *, uses_slack: bool, colocated: bool = False) -> float:
    """$/h of steady whole nodes at every moment, from loads alone (`sim/bounds.py`), averaged over the workload.

    No bound: a policy that keeps the mean step within its SLO may be below it for a while, and above it later
    (`bounds.kept_slos_usd` is one). Without slack every step takes its solo time; with it, a step may take SLO times
    that. `colocated` lets pipelines roll out on training GPUs too.
    """
    steady_usd = steady_slo_slack_usd if uses_slack else steady_solo_speed_usd
    changes = _changes(workload, None)
    running: dict[int, Pipeline] = {}
    cost_usd, now_s, rate = 0.0, changes[0][0], 0.0
    for time_s, what, index in changes:
        cost_usd += rate * (time_s - now_s) / 3600
        now_s = time_s
        if what == _ARRIVAL:
            running[index] = workload.arrivals[index].pipeline
        else:
            del running[index]
        rate = steady_usd(list(running.values()), workload.cluster, colocated=colocated)
    return cost_usd * 3600 / (now_s - changes[0][0])


_DEPARTURE, _ARRIVAL, _TICK = range(3)


def _changes(workload: Workload, every_s: float | None) -> list[tuple[float, int, int]]:
    """(time, what, which arrival), in order; departures before arrivals."""
    changes: list[tuple[float, int, int]] = []
    for index, arrival in enumerate(workload.arrivals):
        if arrival.depart_s is None:
            raise UserError(f"pipeline {arrival.pipeline.id} has no departure; the offline optimum needs one")
        changes += [(arrival.submit_s, _ARRIVAL, index), (arrival.depart_s, _DEPARTURE, index)]
    changes.sort()
    if every_s is not None and changes:
        first_s, last_s = changes[0][0], changes[-1][0]
        num_ticks = int((last_s - first_s) / every_s)
        changes = sorted(changes + [(first_s + n * every_s, _TICK, 0) for n in range(1, num_ticks + 1)])
    return changes


def _as_of(arrival: Arrival, now_s: float) -> Pipeline:
    """The pipeline with what its steps take now as its estimate."""
    pipeline = arrival.pipeline
    if pipeline.estimate is None or isinstance(arrival.world.variation, Steady):
        return pipeline
    step = 1 + int((now_s - arrival.submit_s) / pipeline.estimate.solo_s)
    factor = arrival.world.variation.factor(step)
    rollout_s, train_s = pipeline.estimate.rollout_s * factor, pipeline.estimate.train_s * factor
    return replace(pipeline, estimate=PhaseSeconds(rollout_s=rollout_s, train_s=train_s))


def _cheapest(demands: list[PipelineDemand], prices: NodePrices, max_search_nodes: int) -> tuple[float, float, bool]:
    """$/h of the best grouping found, what is proven, and whether these are the same."""
    if not demands:
        return 0.0, 0.0, True
    candidates = candidate_groups(demands, prices, MAX_PIPELINES_PER_GROUP)
    best = cheapest_partition(candidates, len(demands), max_nodes=max_search_nodes)
    assert best is not None, "each pipeline alone is a grouping"
    return best.cost_usd, best.bound_usd, best.is_proven
