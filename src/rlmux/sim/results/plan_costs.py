"""What a plan's nodes are paid for: dollars per hour while every placed pipeline runs at its planned speed.

In one meta-iteration of T seconds, each node of a group

    computes          compute: what that work costs where it is cheapest; dearer_nodes: what it costs beyond that, on
                      dearer nodes or beside tails
    switches          switches
    is kept free      slow_steps: for hand-overs, where those of a pipeline were measured
    is idle           imbalance: a busier node of the group takes longer than T_cycle
                      bubble_rollout, bubble_train: the rest, for its pipelines' other phase or their weight sync

A part of the idle time is paid for SLOs (`slo`): what as many hours of solo work cost less in the plan without any SLO.
Beside the groups there are nodes that no pipeline holds (`idle_nodes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmux.core.estimation.cycles import PhaseLoad
from rlmux.core.estimation.switches import switch_seconds
from rlmux.core.estimation.tail_gain import with_tails
from rlmux.core.model import Cluster, NodeId, PipelineId, Pool
from rlmux.core.placement.group_load import GroupLoad, Member, solo_s
from rlmux.sim.bounds import planned_work_usd

PAID_FOR: Mapping[str, str] = {
    "compute": "work on nodes never idle",
    "dearer_nodes": "work on dearer nodes",
    "switches": "switches",
    "slow_steps": "time kept for hand-overs",
    "bubble_rollout": "rollout nodes wait",
    "bubble_train": "training nodes wait",
    "imbalance": "a busier node takes longer",
    "slo": "time kept for SLOs",
    "unknown": "groups without an estimate",
    "idle_nodes": "nodes without a pipeline",
}
"""What a plan's dollars are paid for, in words, from the lower bound up to the total."""
_ROUNDING = 1e-9
"""Dollars per hour below which a part is nothing."""
_IDLE = ("bubble_rollout", "bubble_train", "imbalance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Dollars per hour of a plan."""

    paid_for: Mapping[str, float]
    """Dollars per hour by what they are paid for, all keys of `PAID_FOR`, none negative; empty without prices."""
    bound_by_pipeline: Mapping[PipelineId, float]
    """Dollars per hour of each placed pipeline's work on nodes that are never idle, where it is cheapest."""
    usd_per_solo_hour: float | None
    """Dollars of the groups' nodes for an hour of solo work; None where a placed pipeline has no estimate, or none is
    placed."""

    @property
    def paid_usd_per_hour(self) -> float:
        """Dollars per hour of the groups' nodes and of the other nodes that the cluster counts."""
        return sum(self.paid_for.values())

    @property
    def bound_usd_per_hour(self) -> float:
        return sum(self.bound_by_pipeline.values())


def plan_costs(groups: Sequence[GroupLoad], cluster: Cluster, without_slos: Sequence[GroupLoad]) -> PlanCosts:
    """Costs of these groups and of the cluster's other nodes. `without_slos`: groups of the plan without any SLO."""
    parts = dict.fromkeys(PAID_FOR, 0.0)
    bounds: dict[PipelineId, float] = {}
    for group in groups:
        works = works_of(group, cluster)
        bounds |= {work.member.pipeline.id: work.bound_usd_per_hour for work in works}
        for part, usd in group_parts(group, works).items():
            parts[part] += usd
    parts = _for_slos(parts, _saved_usd_per_hour(groups, without_slos))
    parts["idle_nodes"] = _idle_nodes_usd_per_hour(groups, cluster)
    hours = _solo_hours_per_hour(groups)
    has_price = any(pool.usd_per_gpu_hour for pool in cluster.pools.values())
    return PlanCosts(
        paid_for={part: usd if usd > _ROUNDING else 0.0 for part, usd in parts.items()} if has_price else {},
        bound_by_pipeline=bounds,
        usd_per_solo_hour=_held_usd_per_hour(groups) / hours if hours else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One member's work in the steady state of its group, in dollars per hour."""

    member: Member
    bound_usd_per_hour: float
    """Its work where it is cheapest."""
    compute_usd_per_hour: float
    """Its work on the nodes where it is placed."""
    switch_usd_per_hour: float


def works_of(group: GroupLoad, cluster: Cluster) -> tuple[Work, ...]:
    """The members' work, without the time that is kept free for slow steps; none where a member has no estimate."""
    if not _is_known(group):
        return ()
    members = group.members
    loads = [member.load_of(member.pipeline.estimate) for member in members]
    if group.tail_left:
        loads = with_tails(loads, [member.pipeline.tail for member in members], group.tail_left)
    switches_s = switch_seconds(
        [(member.pipeline, member.placement.rollout_nodes, member.placement.train_nodes) for member in members],
        group.pools,
    )
    return tuple(
        _work(member, load, switch_s, group, cluster)
        for member, load, switch_s in zip(members, loads, switches_s, strict=True)
    )


def _work(member: Member, load: PhaseLoad, switch_s: tuple[float, float], group: GroupLoad, cluster: Cluster) -> Work:
    rollout_usd = _usd_per_hour(member.placement.rollout_nodes, group.pools)
    train_usd = _usd_per_hour(member.placement.train_nodes, group.pools)
    steps_per_s = member.steps_per_cycle / group.period_s
    compute_usd = (load.held_s * rollout_usd + load.train_s * train_usd) * steps_per_s
    cheapest_usd = planned_work_usd(member.pipeline, cluster) * 3600 * steps_per_s
    return Work(
        member=member,
        bound_usd_per_hour=min(compute_usd, cheapest_usd),
        compute_usd_per_hour=compute_usd,
        switch_usd_per_hour=(switch_s[0] * rollout_usd + switch_s[1] * train_usd) * steps_per_s,
    )


def group_parts(group: GroupLoad, works: Sequence[Work]) -> dict[str, float]:
    """What the group's dollars per hour are paid for, SLOs aside; they sum to `group.usd_per_hour`."""
    if not works:
        return {"unknown": group.usd_per_hour}
    bound_usd = sum(work.bound_usd_per_hour for work in works)
    compute_usd = sum(work.compute_usd_per_hour for work in works)
    switch_usd = sum(work.switch_usd_per_hour for work in works)
    idle = _idle_parts(group)
    return {
        "compute": bound_usd,
        "dearer_nodes": compute_usd - bound_usd,
        "switches": switch_usd,
        "slow_steps": group.usd_per_hour - sum(idle.values()) - compute_usd - switch_usd,
        **idle,
    }


def _idle_parts(group: GroupLoad) -> dict[str, float]:
    """Dollars per hour of the time in which the group's nodes are kept for nothing, by what they wait for."""
    busy_s = dict.fromkeys(group.rollout_nodes + group.train_nodes, 0.0)
    for node, seconds in zip(
        group.rollout_nodes + group.train_nodes, group.rollout_loads_s + group.train_loads_s, strict=True
    ):
        busy_s[node] += seconds
    busiest_s = max(busy_s.values())
    parts = dict.fromkeys(_IDLE, 0.0)
    for node, seconds in busy_s.items():
        usd_per_s = group.pools[node.pool].usd_per_node_hour / group.period_s
        behind_s = max(0.0, busiest_s - max(group.cycle_s, seconds))
        parts["imbalance"] += behind_s * usd_per_s
        bubble = "bubble_train" if node in group.train_nodes else "bubble_rollout"
        parts[bubble] += max(0.0, group.period_s - seconds - behind_s) * usd_per_s
    return parts


def _for_slos(parts: Mapping[str, float], usd: float) -> dict[str, float]:
    """The parts with so many dollars of the idle ones, in proportion and at most all of them, as `slo`."""
    idle_usd = sum(parts[part] for part in _IDLE)
    slo_usd = min(max(0.0, usd), idle_usd)
    left = 1.0 - slo_usd / idle_usd if idle_usd else 1.0
    return {**parts, **{part: parts[part] * left for part in _IDLE}, "slo": slo_usd}


def _idle_nodes_usd_per_hour(groups: Sequence[GroupLoad], cluster: Cluster) -> float:
    """Price of the nodes of counted pools that no group holds."""
    nodes = {node for group in groups for node in group.rollout_nodes + group.train_nodes}
    num_held = Counter(node.pool for node in nodes)
    return sum(
        (pool.num_nodes - num_held[name]) * pool.usd_per_node_hour
        for name, pool in cluster.pools.items()
        if pool.num_nodes is not None
    )


def _saved_usd_per_hour(groups: Sequence[GroupLoad], without_slos: Sequence[GroupLoad]) -> float:
    """Dollars per hour by which the solo work of these groups would cost less in the others; 0 where unknown."""
    hours, other_hours = _solo_hours_per_hour(groups), _solo_hours_per_hour(without_slos)
    if hours is None or other_hours is None:
        return 0.0
    return _held_usd_per_hour(groups) - _held_usd_per_hour(without_slos) * hours / other_hours


def _held_usd_per_hour(groups: Iterable[GroupLoad]) -> float:
    return sum(group.usd_per_hour for group in groups)


def _solo_hours_per_hour(groups: Sequence[GroupLoad]) -> float | None:
    if not groups or not all(_is_known(group) for group in groups):
        return None
    return sum(1.0 / group.slowdown_of(member.pipeline.id) for group in groups for member in group.members)


def _is_known(group: GroupLoad) -> bool:
    return group.period_s > 0.0 and all(solo_s(member.pipeline) for member in group.members)


def _usd_per_hour(nodes: Iterable[NodeId], pools: Mapping[str, Pool]) -> float:
    return sum(pools[node.pool].usd_per_node_hour for node in nodes)
