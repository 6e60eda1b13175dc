"""What a co-execution group costs, how long its meta-iteration takes, and what it has room for.

`GroupLoad` is one group's frozen summary. The ledger builds it anew from the members whenever they change, so sums
never drift, and a policy can judge a candidate from it in constant time.

Estimates are what it reasons with. A pipeline without one counts as zero seconds: it stops no admission, and no SLO
that involves it can be promised. Residency is by bytes where footprints are known; a cap on pipelines per group stands
in where they are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlmux.core.estimation.cycles import PhaseLoad, fits_period, formula_s, is_formula_exact, meta_iteration_s
from rlmux.core.estimation.switches import Tenant, switch_seconds
from rlmux.core.estimation.tail_gain import numbers_left, with_tails
from rlmux.core.model import Cluster, GroupId, NodeId, Phase, PhaseSeconds, Pipeline, PipelineId, Placement, Pool

MAX_PIPELINES_PER_GROUP = 5
"""Stands in for host memory where footprints are unknown (the paper keeps 2 to 5 on a node of 1 to 2 TB)."""


_ROUNDING = 1e-9
_NOTICEABLE = 1e-4
"""Part of a period by which it must be shorter for tails to leave their nodes earlier, or at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A pipeline in its group."""

    pipeline: Pipeline
    placement: Placement
    steps_per_cycle: int = 1
    """Steps in each meta-iteration of its group."""

    @property
    def is_colocated(self) -> bool:
        return set(self.placement.train_nodes) <= set(self.placement.rollout_nodes)

    @property
    def phase_load(self) -> PhaseLoad:
        return self.load_of(self.pipeline.held or self.pipeline.estimate)

    def load_of(self, estimate: PhaseSeconds | None) -> PhaseLoad:
        """Its demand on its group if its phases take so long where they are apart."""
        if self.is_colocated and self.pipeline.colocated_estimate is not None:
            estimate = self.pipeline.colocated_estimate
        return PhaseLoad(
            rollout_s=estimate.rollout_s if estimate else 0.0,
            train_s=estimate.train_s if estimate else 0.0,
            rollout_nodes=self.placement.rollout_nodes,
            steps_per_cycle=self.steps_per_cycle,
            sync_s=estimate.sync_s if estimate else 0.0,
            train_nodes=self.placement.train_nodes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """One co-execution group as policies see it."""

    id: GroupId
    members: tuple[Member, ...]
    """Pipelines in the cyclic order of the meta-iteration: by admission, unless a choice sets another."""
    rollout_nodes: tuple[NodeId, ...]
    """Rollout nodes, in the order in which they joined the group."""
    train_nodes: tuple[NodeId, ...]
    rollout_loads_s: tuple[float, ...]
    """Rollout seconds of one meta-iteration, by rollout node, without tails that leave it to the next."""
    train_load_s: float
    """Training seconds of one meta-iteration on the busiest training node; of all members where both phases share
    nodes."""
    train_loads_s: tuple[float, ...]
    """Training seconds of one meta-iteration, by training node."""
    longest_sync_s: float
    """Longest sync of a member, in seconds."""
    cycle_s: float
    """T_cycle: the longest that a member needs for its steps per cycle when alone."""
    load_s: float
    """T_load: the busiest node's work in one meta-iteration."""
    period_s: float
    """Seconds of one strict meta-iteration: max(T_cycle, T_load), or more where that is not exact or weights sync."""
    budget_s: float
    """Longest period that keeps every member's SLO with its spread in hand; infinite where none is known."""
    free_rollout_bytes: tuple[float, ...]
    """Host memory left in bytes, by rollout node."""
    free_train_bytes: float
    """Host memory left in bytes on the fullest training node."""
    num_without_footprint: int
    """Members whose host memory is not known."""
    usd_per_hour: float
    """Price of its nodes."""
    least_usd_per_hour: float
    """Price of its members on nodes that are never idle, each step as slow as its SLO allows."""
    is_colocated: bool
    """Whether a member rolls out on the training nodes; no pipeline can join unless the group `is_shared`."""
    pools: Mapping[str, Pool]
    """Pools of the cluster, by name."""
    tail_left: int
    """Trajectories of a step at which rollouts leave their nodes to the next member's; 0: they keep them to their
    end."""
    has_switches: bool
    """Whether a member's switches have been measured: the seconds above count those that sharing devices brings."""
    is_formula_exact: bool
    """Whether max(T_cycle, T_load) is the period: one step per cycle each, one set of training nodes for all, rollout
    node sets that are equal or disjoint."""

    @property
    def is_saturated(self) -> bool:
        """T_load >= T_cycle: no bubble is left (Algorithm 1 skips such groups)."""
        return self.load_s >= self.cycle_s

    @property
    def keeps_slos(self) -> bool:
        """Whether the meta-iteration stays within every member's SLO, as far as its members' seconds are known."""
        return self.period_s <= self.budget_s * (1.0 + _ROUNDING)

    @property
    def is_uneven(self) -> bool:
        """Whether it breaks an SLO, or a member has several steps per cycle."""
        return not self.keeps_slos or any(member.steps_per_cycle > 1 for member in self.members)

    def period_with_steps(self, steps_per_cycle: Mapping[PipelineId, int]) -> float:
        """Seconds of the strict meta-iteration with these steps per cycle for its members, in this cyclic order."""
        by_name = {member.pipeline.id: member for member in self.members}
        members = [replace(by_name[name], steps_per_cycle=count) for name, count in steps_per_cycle.items()]
        return meta_iteration_s(_shortest(members, self.pools)[0])

    @property
    def num_members(self) -> int:
        return len(self.members)

    @property
    def is_shared(self) -> bool:
        """Whether every node serves both phases of every member, so that others may join with `is_shared`."""
        return self.is_colocated and set(self.train_nodes) == set(self.rollout_nodes)

    def period_with(
        self,
        pipeline: Pipeline,
        rollout_nodes: Sequence[NodeId],
        num_new_rollout_nodes: int,
        train_nodes: tuple[NodeId, ...] | None = None,
    ) -> float:
        """The strict meta-iteration's seconds after the pipeline joined on these nodes; by default it trains on all."""
        new = tuple(NodeId("(new)", index) for index in range(num_new_rollout_nodes))
        nodes = (*rollout_nodes, *new)
        is_narrow = train_nodes is not None and train_nodes != self.train_nodes
        is_exact = is_narrow or self._may_migrate(pipeline) or _is_lighter_alone(self.members)
        if is_exact or pipeline.switch or self.has_switches or self.longest_sync_s or sync_s(pipeline):
            loads = self._loads_with(pipeline, nodes, train_nodes)
            return sum(load.solo_s for load in loads) if self.is_colocated else meta_iteration_s(loads)
        if self.is_colocated:
            return self.period_s + _colocated_solo_s(pipeline)
        rollout_s, train_s = phases_of(pipeline)
        if len(nodes) == 1 and self.is_formula_exact and self._is_alone_or_unshared(nodes[0]):
            on_node_s = 0.0 if new else self.rollout_loads_s[self.rollout_nodes.index(nodes[0])]
            return max(self.period_s, rollout_s + train_s, self.train_load_s + train_s, on_node_s + rollout_s)
        return meta_iteration_s(self._loads_with(pipeline, nodes))

    def _loads_with(
        self, pipeline: Pipeline, nodes: tuple[NodeId, ...], train_nodes: tuple[NodeId, ...] | None = None
    ) -> list[PhaseLoad]:
        if train_nodes is None:
            train_nodes = nodes if self.is_shared else self.train_nodes
        placement = Placement(group=self.id, rollout_nodes=nodes, train_nodes=train_nodes)
        return _shortest([*self.members, Member(pipeline=pipeline, placement=placement)], self.pools)[0]

    def _may_migrate(self, pipeline: Pipeline) -> bool:
        """Whether tails may leave their nodes once the pipeline has joined."""
        return pipeline.tail is not None or any(member.pipeline.tail for member in self.members)

    def slowdown_of(self, pipeline_id: PipelineId) -> float:
        """A member's mean step in the meta-iteration over T_solo; 1 where nothing is known.

        T_solo is the solo time on the requested nodes, wherever the pipeline is placed.
        """
        member = next(member for member in self.members if member.pipeline.id == pipeline_id)
        alone_s = solo_s(member.pipeline)
        return self.period_s / (member.steps_per_cycle * alone_s) if alone_s else 1.0

    def rollout_s_with(self, pipeline: Pipeline, node: NodeId) -> float:
        """Rollout seconds of one meta-iteration on one of its nodes after the pipeline joined there, with switches;
        tails leave it as early as they may."""
        rollout_s, _ = phases_of(pipeline)
        if self._may_migrate(pipeline):
            placement = Placement(group=self.id, rollout_nodes=(node,), train_nodes=self.train_nodes)
            newcomer = Member(pipeline=pipeline, placement=placement)
            there = [*(member for member in self.members if node in member.placement.rollout_nodes), newcomer]
            numbers = [0, *numbers_left([member.pipeline.tail for member in there])]
            each = [_phase_loads(there, self.pools, tail_left=num_left) for num_left in numbers]
            return min(sum(load.held_s * load.steps_per_cycle for load in loads) for loads in each)
        if not (pipeline.switch or self.has_switches):
            return self.rollout_loads_s[self.rollout_nodes.index(node)] + rollout_s
        there = [member for member in self.members if node in member.placement.rollout_nodes]
        tenants: list[Tenant] = [(member.pipeline, (node,), ()) for member in there]
        *added, (own_s, _) = switch_seconds([*tenants, (pipeline, (node,), ())], self.pools)
        return (
            rollout_s
            + own_s
            + sum(
                (member.phase_load.rollout_s + switch_s) * member.steps_per_cycle
                for member, (switch_s, _) in zip(there, added, strict=True)
            )
        )

    def one_after_another_s(self, pipeline: Pipeline, rollout_nodes: Sequence[NodeId]) -> float:
        """Seconds in which every member and the pipeline make one whole step each, no two at a time."""
        return sum(load.solo_s for load in self._loads_with(pipeline, tuple(rollout_nodes)))

    def _is_alone_or_unshared(self, node: NodeId) -> bool:
        return all(
            node not in member.placement.rollout_nodes or len(member.placement.rollout_nodes) == 1
            for member in self.members
        )

    def keeps_slos_with(self, pipeline: Pipeline, rollout_nodes: Sequence[NodeId], num_new_rollout_nodes: int) -> bool:
        """Whether step slowdown period / T_solo stays within every member's SLO and the newcomer's."""
        budget_s = min(self.budget_s, budget_of(pipeline))
        if budget_s == math.inf:
            return True
        if self.is_formula_exact or self.is_colocated or self._may_migrate(pipeline):
            return self.period_with(pipeline, rollout_nodes, num_new_rollout_nodes) <= budget_s
        new = tuple(NodeId("(new)", index) for index in range(num_new_rollout_nodes))
        return fits_period(self._loads_with(pipeline, (*rollout_nodes, *new)), budget_s)

    def has_memory_for(self, pipeline: Pipeline, rollout_nodes: Sequence[NodeId]) -> bool:
        """Residency by bytes on the shared nodes; by the cap among pipelines without footprints."""
        if not has_footprint(pipeline) and self.num_without_footprint >= MAX_PIPELINES_PER_GROUP:
            return False
        if pipeline.footprint.train_host_bytes > self.free_train_bytes:
            return False
        need = pipeline.footprint.rollout_host_bytes
        return all(need <= self.free_rollout_bytes[self.rollout_nodes.index(node)] for node in rollout_nodes)


def group_load(
    group_id: GroupId,
    members: tuple[Member, ...],
    rollout_nodes: tuple[NodeId, ...],
    train_nodes: tuple[NodeId, ...],
    cluster: Cluster,
) -> GroupLoad:
    """Sum up a group from its members."""
    loads, tail_left = _shortest(members, cluster.pools)
    rollout_s = dict.fromkeys(rollout_nodes, 0.0)
    train_s = dict.fromkeys(train_nodes, 0.0)
    held_bytes = dict.fromkeys(rollout_nodes + train_nodes, 0.0)
    for member, load in zip(members, loads, strict=True):
        for node in member.placement.rollout_nodes:
            rollout_s[node] += load.held_s * load.steps_per_cycle
            held_bytes[node] += member.pipeline.footprint.rollout_host_bytes
        for node in member.placement.train_nodes:
            train_s[node] += load.train_s * load.steps_per_cycle
            held_bytes[node] += member.pipeline.footprint.train_host_bytes
    is_colocated = any(member.is_colocated for member in members)
    seconds = _seconds_of(loads, max(rollout_s.values()), max(train_s.values()), is_colocated=is_colocated)
    free = {node: cluster.pools[node.pool].host_memory_bytes - held_bytes[node] for node in held_bytes}
    return GroupLoad(
        id=group_id,
        members=members,
        rollout_nodes=rollout_nodes,
        train_nodes=train_nodes,
        rollout_loads_s=tuple(rollout_s.values()),
        train_load_s=seconds.train_s,
        train_loads_s=tuple(train_s.values()),
        longest_sync_s=seconds.longest_sync_s,
        cycle_s=seconds.cycle_s,
        load_s=seconds.load_s,
        period_s=seconds.period_s,
        budget_s=min(slo_budget_s(member.pipeline) * member.steps_per_cycle for member in members),
        free_rollout_bytes=tuple(free[node] for node in rollout_nodes),
        free_train_bytes=min(free[node] for node in train_nodes),
        usd_per_hour=sum(cluster.pools[node.pool].usd_per_node_hour for node in held_bytes),
        least_usd_per_hour=sum(_least_usd_per_hour(member.pipeline, cluster) for member in members),
        num_without_footprint=sum(not has_footprint(member.pipeline) for member in members),
        is_colocated=is_colocated,
        pools=cluster.pools,
        tail_left=tail_left,
        has_switches=any(member.pipeline.switch for member in members),
        is_formula_exact=seconds.is_formula_exact,
    )


class _Seconds(NamedTuple):
    """What a group's meta-iteration takes."""

    train_s: float
    longest_sync_s: float
    cycle_s: float
    load_s: float
    period_s: float
    is_formula_exact: bool


def _seconds_of(loads: Sequence[PhaseLoad], rollout_s: float, train_s: float, *, is_colocated: bool) -> _Seconds:
    """`rollout_s` and `train_s`: work of the busiest rollout node and of the busiest training node."""
    cycle_s = max(load.solo_s * load.steps_per_cycle for load in loads)
    longest_sync_s = max(load.sync_s for load in loads)
    is_exact = is_formula_exact(loads)
    if is_colocated:
        # Both phases of every member are on the same nodes: one after another is what can be promised.
        train_s = sum(load.train_s * load.steps_per_cycle for load in loads)
        in_turn_s = sum(load.solo_s for load in loads)
        return _Seconds(train_s, longest_sync_s, cycle_s, in_turn_s, max(cycle_s, in_turn_s), is_exact)
    period_s = formula_s(cycle_s, rollout_s, train_s, longest_sync_s) if is_exact else meta_iteration_s(loads)
    return _Seconds(train_s, longest_sync_s, cycle_s, max(train_s, rollout_s), period_s, is_exact)


def _least_usd_per_hour(pipeline: Pipeline, cluster: Cluster) -> float:
    estimate = pipeline.estimate
    if estimate is None or pipeline.slo_slowdown == math.inf:
        return 0.0
    prices = {
        phase: pool.usd_per_node_hour if (pool := cluster.pool_for(phase)) else 0.0
        for phase in (Phase.ROLLOUT, Phase.TRAIN)
    }
    usd_seconds = (
        prices[Phase.ROLLOUT] * pipeline.num_rollout_nodes * estimate.rollout_s
        + prices[Phase.TRAIN] * pipeline.num_train_nodes * estimate.train_s
    )
    return usd_seconds / slo_step_s(pipeline) if usd_seconds else 0.0


def _is_lighter_alone(members: Sequence[Member]) -> bool:
    """Whether the one member there is holds its nodes as at its token limit beside others only."""
    return len(members) == 1 and members[0].pipeline.slo_probability is not None


def _shortest(members: Sequence[Member], pools: Mapping[str, Pool]) -> tuple[list[PhaseLoad], int]:
    """Demand of each member on a group of these, and the trajectories left at which their rollouts leave their nodes,
    so that the meta-iteration is shortest; 0 where they keep them."""
    loads = _phase_loads(members, pools)
    tails = [member.pipeline.tail for member in members]
    if len(members) == 1 or not any(tails) or any(member.is_colocated for member in members):
        return loads, 0
    best, best_s, best_left = loads, meta_iteration_s(loads), 0
    for num_left in numbers_left(tails):
        loads = _phase_loads(members, pools, tail_left=num_left)
        if fits_period(loads, best_s * (1.0 - _NOTICEABLE)):
            best, best_s, best_left = loads, meta_iteration_s(loads), num_left
    return best, best_left


def _phase_loads(members: Sequence[Member], pools: Mapping[str, Pool], tail_left: int = 0) -> list[PhaseLoad]:
    """Demand of each member on a group of these, switches included."""
    tenants: list[Tenant] = [
        (member.pipeline, member.placement.rollout_nodes, member.placement.train_nodes) for member in members
    ]
    added = switch_seconds(tenants, pools)
    is_alone = _is_lighter_alone(members)
    own = [member.load_of(member.pipeline.estimate) if is_alone else member.phase_load for member in members]
    if tail_left:
        own = with_tails(own, [member.pipeline.tail for member in members], tail_left)
    return [
        replace(load, rollout_s=load.rollout_s + rollout_s, train_s=load.train_s + train_s)
        if rollout_s or train_s
        else load
        for load, (rollout_s, train_s) in zip(own, added, strict=True)
    ]


def solo_s(pipeline: Pipeline) -> float:
    """T_solo, or 0 where nothing is known."""
    return pipeline.estimate.solo_s if pipeline.estimate else 0.0


def phases_of(pipeline: Pipeline) -> tuple[float, float]:
    """Seconds for which its two phases hold their devices."""
    estimate = pipeline.held or pipeline.estimate
    return (estimate.rollout_s, estimate.train_s) if estimate else (0.0, 0.0)


def sync_s(pipeline: Pipeline) -> float:
    return pipeline.estimate.sync_s if pipeline.estimate else 0.0


def colocated_step_s(pipeline: Pipeline, pool: Pool) -> float:
    """Seconds of a step with both phases on nodes of this pool, its own switches in it; infinite where not known."""
    estimate = pipeline.colocated_estimate
    if estimate is None:
        return math.inf
    node = NodeId(pool.name, 0)
    ((rollout_s, train_s),) = switch_seconds([(pipeline, (node,), (node,))], {pool.name: pool})
    return estimate.solo_s + rollout_s + train_s


def _colocated_solo_s(pipeline: Pipeline) -> float:
    estimate = pipeline.colocated_estimate or pipeline.estimate
    return estimate.solo_s if estimate else 0.0


def slo_step_s(pipeline: Pipeline) -> float:
    """The longest mean step that its SLO allows: SLO times T_solo; infinite where nothing is known."""
    return pipeline.slo_slowdown * pipeline.estimate.solo_s if pipeline.estimate else math.inf


def slo_budget_s(pipeline: Pipeline) -> float:
    """The longest step in a plan that keeps its SLO with its spread in hand; at least T_solo, infinite where nothing is
    known."""
    return max(solo_s(pipeline), slo_step_s(pipeline) / pipeline.spread)


def budget_of(pipeline: Pipeline) -> float:
    """The longest mean step that a newcomer accepts in a group; infinite where nothing is known.

    Its SLO counts from its submission, so its n steps share what comes before the first: (n SLO T_solo - cold starts -
    T_solo) / n, where the last term is the wait for its slot in the meta-iteration.
    """
    longest_s, num_steps = slo_budget_s(pipeline), pipeline.num_steps
    if num_steps is None or longest_s == math.inf:
        return longest_s
    return longest_s - (cold_start_s(pipeline) + solo_s(pipeline)) / max(1, num_steps - pipeline.first_step + 1)


def cold_start_s(pipeline: Pipeline) -> float:
    """Seconds of the first starts of both its phases; 0 where they are not known."""
    switch = pipeline.switch
    return switch.cold_rollout_s + switch.cold_train_s if switch else 0.0


def has_footprint(pipeline: Pipeline) -> bool:
    return pipeline.footprint.rollout_host_bytes > 0 or pipeline.footprint.train_host_bytes > 0


def with_steps_per_cycle(members: tuple[Member, ...], steps_per_cycle: Mapping[PipelineId, int]) -> tuple[Member, ...]:
    """New steps per cycle where given, in lowest terms; these members come first, in the order given."""
    counts = [steps_per_cycle.get(member.pipeline.id, member.steps_per_cycle) for member in members]
    divisor = math.gcd(*counts)
    changed = [
        member if member.steps_per_cycle == count // divisor else replace(member, steps_per_cycle=count // divisor)
        for member, count in zip(members, counts, strict=True)
    ]
    rank = {name: number for number, name in enumerate(steps_per_cycle)}
    return tuple(sorted(changed, key=lambda member: rank.get(member.pipeline.id, len(rank))))
