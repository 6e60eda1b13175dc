"""The paper's three micro-benchmarks: what sharing gives per dollar, in the paper's groups (section 8.4).

    (a) temporal          A, A on one rollout node and one training node
    (b) training shared   D, D, E on a rollout node each and one training node
    (c) spatial           C on two rollout nodes, a D on each of them; two training nodes

    gain over Solo-D = mean over pipelines of 1 / step slowdown  x  $/h of Solo-D / $/h of the group

Switches and weight sync cost what was measured. The small pipelines of (c) train on twice the GPUs they
ask for, so their training takes half as long. Long-tail migration is left out here (`tail_migration.py` has it).

The policy `gavel` on the same nodes stands for the paper's Gavel+: the solo seconds of the steps that it finishes in a
long time are its throughput. It needs the `solver` extra.

A module of its own: it runs the groups as the paper draws them, by a policy of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Idling, Policy
from rlmux.core.decision.views import GroupView
from rlmux.core.model import AdmissionKind, Pipeline
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.view import PlacementView
from rlmux.policies import make_policy
from rlmux.policies.lookahead.dispatching import start_in_cycle_order, start_oldest_first
from rlmux.sim.api import solo_usd_per_hour
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload

PUBLISHED: Mapping[str, tuple[float, float]] = {
    "micro-a": (1.82, 1.47),
    "micro-b": (1.90, 1.35),
    "micro-c": (1.99, 1.43),
}
"""Published gain over Solo-D, and over veRL, in throughput at equal $/h (OSDI)."""
GAVEL_PUBLISHED: Mapping[str, float] = {"micro-a": 1.17, "micro-b": 1.26, "micro-c": 1.14}
"""Gain of Gavel+ over Solo-D per dollar, as drawn (arXiv v2)."""
_GAVEL_STEPS = 400
"""Steps of the slowest pipeline, alone, for which `gavel` is simulated: some hundred turns."""
_ROLLOUT_NODES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "micro-a": ((0,), (0,)),
    "micro-b": ((0,), (1,), (2,)),
    "micro-c": ((0, 1), (0,), (1,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AsDrawn(Policy):
    """All pipelines in one group, each on the rollout nodes that the paper's figure gives it."""

    rollout_nodes: tuple[tuple[int, ...], ...]
    """Numbers of the rollout nodes of each pipeline, in order of submission."""
    is_strict: bool
    """Whether the order is round robin; else first come, first served, so that a short pipeline laps a long one."""
    name: str = "as-drawn"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        wanted = self.rollout_nodes[view.num_pipelines]
        if not view.num_pipelines:
            return PlacementChoice(
                kind=AdmissionKind.NEW,
                group=None,
                num_new_rollout_nodes=len(wanted),
                num_new_train_nodes=pipeline.num_train_nodes,
            )
        group = next(iter(view.groups()))
        held = tuple(node for node in group.rollout_nodes if node.index in wanted)
        return PlacementChoice(
            kind=AdmissionKind.DIRECT if len(held) == len(wanted) else AdmissionKind.SCALED,
            group=group.id,
            rollout_nodes=held,
            num_new_rollout_nodes=len(wanted) - len(held),
            train_nodes=group.train_nodes,
        )

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return plan.choose(*(start_in_cycle_order(plan) if self.is_strict else start_oldest_first(plan)))

    def idling(self, view: GroupView) -> Idling:
        return Idling(cycle_lead=1.0 if self.is_strict else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroGain:
    """One case, one order inside the group."""

    case: str
    is_strict: bool
    over_solo: float
    over_colocated: float
    slowdowns: Mapping[str, float]
    """Step slowdown of each pipeline, by name."""

    def over_solo_unslowed(self, prefix: str) -> float:
        """`over_solo` if the pipelines whose names begin so took their own step time."""
        speeds = {name: 1.0 / slowdown for name, slowdown in self.slowdowns.items()}
        unslowed = [1.0 if name.startswith(prefix) else speed for name, speed in speeds.items()]
        return self.over_solo * sum(unslowed) / sum(speeds.values())


def micro_gain(case: str, *, is_strict: bool) -> MicroGain:
    """Simulate the case with all of its pipelines there all the time."""
    workload = catalog.load(case)
    policy = AsDrawn(rollout_nodes=_ROLLOUT_NODES[case], is_strict=is_strict)
    result = simulate(_ending_together(workload), policy, rescales_training=True)
    slowdowns = {str(p.pipeline): p.step_slowdown or 1.0 for p in result.pipelines}
    throughput = sum(1.0 / slowdown for slowdown in slowdowns.values()) / len(slowdowns)
    over_solo = throughput * solo_usd_per_hour(workload) / _usd_per_hour(workload, case)
    return MicroGain(
        case=case,
        is_strict=is_strict,
        over_solo=over_solo,
        over_colocated=over_solo / colocated_over_solo(workload),
        slowdowns=slowdowns,
    )


def gavel_gain(case: str, *, costs: bool = True) -> float:
    """Gain of `gavel` over Solo-D at equal dollars; without `costs`, switches and weight sync are free.

    Raises UserError where OR-tools is missing.
    """
    workload = catalog.build(case, costs=costs)
    together = _ending_together(workload, num_steps=_GAVEL_STEPS)
    result = simulate(together, make_policy("gavel"), rescales_training=True)
    end_s = together.arrivals[0].depart_s
    assert end_s is not None, "all leave at one time"
    throughput = sum(pipeline.solo_s for pipeline in result.pipelines) / end_s / len(result.pipelines)
    return throughput * solo_usd_per_hour(workload) / _usd_per_hour(workload, case)


def colocated_over_solo(workload: Workload) -> float:
    """Throughput at equal $/h of every pipeline alone on its training nodes, over Solo-D."""
    speed = 0.0
    usd = 0.0
    for arrival in workload.arrivals:
        pipeline = arrival.pipeline
        assert pipeline.estimate is not None
        assert pipeline.colocated_estimate is not None
        speed += pipeline.estimate.solo_s / pipeline.colocated_estimate.solo_s
        usd += pipeline.num_train_nodes * workload.cluster.pools["h800"].usd_per_node_hour
    return speed / len(workload.arrivals) * solo_usd_per_hour(workload) / usd


def _usd_per_hour(workload: Workload, case: str) -> float:
    """Price of all nodes of the case."""
    num_rollout, num_train = catalog.micro_gpus(case)
    pools = workload.cluster.pools
    return num_rollout * pools["h20"].usd_per_node_hour + num_train * pools["h800"].usd_per_node_hour


def _ending_together(workload: Workload, num_steps: int = 40) -> Workload:
    """The workload whose pipelines all leave at one time, after so many steps of the slowest alone."""
    longest_s = max(arrival.world.solo_s(1) for arrival in workload.arrivals)
    arrivals = tuple(
        replace(arrival, depart_s=num_steps * longest_s, pipeline=replace(arrival.pipeline, num_steps=None))
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals)
