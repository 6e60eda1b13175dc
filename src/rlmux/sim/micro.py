"""The paper's three micro-benchmarks: what sharing gives per dollar, in the paper's groups (section 8.4).

    (a) temporal          A, A on one rollout node and one training node
    (b) training shared   D, D, E on a rollout node each and one training node
    (c) spatial           C on two rollout nodes, a D on each of them; two training nodes

    gain over Solo-D = mean over pipelines of 1 / step slowdown  x  $/h of Solo-D / $/h of the group

Switches and weight sync cost what was measured. The small pipelines of (c) train on twice the GPUs they
ask for, so their training takes half as long. With migration, nodes are simulated GPU by GPU and responses
end as measured (`tail.py`, the 14B curve for C, D and E): once 12.5 % are left they gather on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlmux.core.model import AdmissionKind, Phase, Pipeline, Stage
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.dispatching import first_come, in_turn
from rlmux.core.views import Choice, GroupView, MemberView, MoveShare, PauseOrder
from rlmux.sim import workloads
from rlmux.sim.api import solo_usd_per_hour
from rlmux.sim.arrivals import Workload, h20_h800_cluster
from rlmux.sim.simulator import simulate
from rlmux.sim.tail import NUM_GPUS, tailed_pipeline

PUBLISHED: Mapping[str, tuple[float, float]] = {
    "micro-a": (1.82, 1.47),
    "micro-b": (1.90, 1.35),
    "micro-c": (1.99, 1.43),
}
"""OSDI: gain over Solo-D, and over veRL, in throughput at equal $/h."""
_ROLLOUT_NODES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "micro-a": ((0,), (0,)),
    "micro-b": ((0,), (1,), (2,)),
    "micro-c": ((0, 1), (0,), (1,)),
}


TAIL_SHARE = 0.125
"""Of a rollout's responses: so many are left when the rest of the GPUs are given up."""
_PER_GPU = 16
"""Responses a GPU begins with, as in the measured rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsDrawn:
    """All pipelines in one group, each on the rollout nodes that the paper's figure gives it."""

    rollout_nodes: tuple[tuple[int, ...], ...]
    """By pipeline, in order of submission."""
    is_strict: bool
    """Round robin; False lets a short pipeline lap a long one (first come, first served)."""
    migrates: bool = False
    name: str = "as-drawn"

    @property
    def reacts_to_progress(self) -> bool:
        return self.migrates

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

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[Choice]:
        if self.migrates:
            for member in view.members:
                yield from _gather_tail(view, member)
        yield from in_turn(view) if self.is_strict else first_come(view)


def _gather_tail(view: GroupView, member: MemberView) -> Iterator[Choice]:
    """Pause all shares but the fullest once few responses are left, then move what is paused there."""
    shares = [order for order in view.running if order.pipeline == member.id and order.phase is Phase.ROLLOUT]
    paused = [work for work in view.ready if work.pipeline == member.id and work.phase is Phase.ROLLOUT]
    if any(not work.is_continuation for work in paused) or not shares:
        return
    target = max(shares, key=lambda order: (not order.is_pausing, order.num_active or 0))
    for work in paused:
        yield MoveShare(pipeline=member.id, source=work.devices[0], target=target.devices[0], copies_kv=False)
    num_left = sum(_PER_GPU if order.num_active is None else order.num_active for order in shares)
    if len(shares) > 1 and num_left <= TAIL_SHARE * _PER_GPU * len(member.rollout_devices):
        for order in shares:
            if order is not target and not order.is_pausing:
                yield PauseOrder(order=order.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroGain:
    """One case, one order inside the group."""

    case: str
    is_strict: bool
    migrates: bool
    over_solo: float
    over_colocated: float
    slowdowns: Mapping[str, float]


def micro_gain(case: str, *, is_strict: bool, migrates: bool = False) -> MicroGain:
    """Simulate the case with all of its pipelines there all the time."""
    workload = workloads.load(case)
    policy = AsDrawn(rollout_nodes=_ROLLOUT_NODES[case], is_strict=is_strict, migrates=migrates)
    num_rollout, num_train = workloads.micro_gpus(case)
    pools = workload.cluster.pools
    usd = num_rollout * pools["h20"].usd_per_node_hour + num_train * pools["h800"].usd_per_node_hour
    run = _ending_together(_by_response(workload) if migrates else workload)
    result = simulate(run, policy, rescales_training=True)
    slowdowns = {str(p.pipeline): p.step_slowdown or 1.0 for p in result.pipelines}
    throughput = sum(1.0 / slowdown for slowdown in slowdowns.values()) / len(slowdowns)
    over_solo = throughput * solo_usd_per_hour(workload) / usd
    return MicroGain(
        case=case,
        is_strict=is_strict,
        migrates=migrates,
        over_solo=over_solo,
        over_colocated=over_solo / colocated_over_solo(workload),
        slowdowns=slowdowns,
    )


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


def _by_response(workload: Workload) -> Workload:
    """The same pipelines on nodes of eight GPUs, their responses ending as the measured ones did."""
    arrivals = []
    for arrival in workload.arrivals:
        tailed = tailed_pipeline("7B_8k" if workload.name == "micro-a" else "14B_8k")
        rollout_s = arrival.world.by_stage[Stage.GENERATE]
        lost = (tailed.moved_tail_s - (tailed.rollout_s - tailed.dense_s)) / tailed.rollout_s
        num_nodes = arrival.pipeline.num_rollout_nodes
        fractions = tuple(seconds / tailed.rollout_s for seconds in tailed.finish_s for _ in range(num_nodes))
        arrivals.append(replace(arrival, finish_fractions=fractions, migration_s=lost * rollout_s))
    num_rollout, num_train = workloads.micro_gpus(workload.name)
    cluster = h20_h800_cluster(
        num_rollout_nodes=num_rollout, num_train_nodes=num_train, devices_per_node=NUM_GPUS
    )
    return replace(workload, cluster=cluster, arrivals=tuple(arrivals))


def _ending_together(workload: Workload) -> Workload:
    """Everybody leaves at the same time, after 40 steps of the slowest."""
    longest_s = max(arrival.world.solo_s(1) for arrival in workload.arrivals)
    arrivals = tuple(
        replace(arrival, depart_s=40 * longest_s, pipeline=replace(arrival.pipeline, num_steps=None))
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals)
