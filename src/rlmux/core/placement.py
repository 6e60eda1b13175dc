"""The placement tier's books: which pipeline is pinned to which nodes, and what that leaves for others.

    policy.place(pipeline, view) ─▶ PlacementChoice | Refusal
    ledger.admit(pipeline, choice) ─▶ Placement        ledger.depart(id) ─▶ nodes given back
    policy.rebalance(view) ─▶ Relocations, each carried out by ledger.move(id, choice) at a step boundary

A co-execution group owns its nodes: groups share none. All members train on the group's training nodes;
each member is pinned to one or more of its rollout nodes. A rollout node leaves with its last member, so
does a group.

`GroupLoad` is one group's frozen summary. It is built anew from the members whenever they change, so sums
never drift, and a policy can judge a candidate from it in constant time.

Estimates are what the ledger reasons with. A pipeline without one counts as zero seconds: it stops no
admission, and no SLO that involves it can be promised. Residency is by bytes where footprints are known; a
cap on pipelines per group stands in where they are not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlmux.core.cycles import PhaseLoad, fits_period, is_formula_exact, meta_iteration_s
from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.core.group_index import GroupIndex
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    GroupId,
    NodeId,
    Phase,
    Pipeline,
    PipelineId,
    Placement,
    Pool,
)
from rlmux.core.switches import Tenant, switch_seconds

MAX_FRUITLESS_SEARCHES = 10_000
"""Searches of a policy that are remembered."""
MAX_PIPELINES_PER_GROUP = 5
"""Stands in for host memory where footprints are unknown (the paper keeps 2 to 5 on a node of 1 to 2 TB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """Where a policy wants a pipeline: existing nodes by name, new ones by number."""

    kind: AdmissionKind
    group: GroupId | None
    """None founds a group."""
    rollout_nodes: tuple[NodeId, ...] = ()
    """Existing rollout nodes of the group to share."""
    num_new_rollout_nodes: int = 0
    train_nodes: tuple[NodeId, ...] = ()
    """Existing training nodes of the group: all of them, as every member trains on the whole pool."""
    num_new_train_nodes: int = 0
    is_colocated: bool = False
    """Rollouts run on all nodes taken, training nodes first; training on the first `num_train_nodes`."""
    is_shared: bool = False
    """With `is_colocated`: others may join on the same nodes, each training on the `train_nodes` it names."""
    steps_per_cycle: tuple[tuple[PipelineId, int], ...] = ()
    """Steps in each meta-iteration and, by their order, the cyclic order: for the pipeline and members of its new
    group. The others keep their steps per cycle and follow; a newcomer has 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a pipeline is not placed."""

    reason: str
    """One line, with the numbers."""
    is_final: bool
    """False: it may fit after a departure. True: it can never fit on this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """One pipeline's move, valid once the relocations listed before it are done."""

    pipeline: PipelineId
    choice: PlacementChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class FruitlessSearch:
    """A search for a better grouping of these pipelines that found none."""

    pipelines: tuple[PipelineId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A pipeline in its group."""

    pipeline: Pipeline
    placement: Placement
    steps_per_cycle: int = 1
    """Steps in each meta-iteration."""

    @property
    def is_colocated(self) -> bool:
        return set(self.placement.train_nodes) <= set(self.placement.rollout_nodes)

    @property
    def phase_load(self) -> PhaseLoad:
        estimate = self.pipeline.estimate
        if self.is_colocated and self.pipeline.colocated_estimate is not None:
            estimate = self.pipeline.colocated_estimate
        return PhaseLoad(
            rollout_s=estimate.rollout_s if estimate else 0.0,
            train_s=estimate.train_s if estimate else 0.0,
            rollout_nodes=self.placement.rollout_nodes,
            steps_per_cycle=self.steps_per_cycle,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """One co-execution group as policies see it."""

    id: GroupId
    members: tuple[Member, ...]
    """In the cyclic order of the meta-iteration: by admission, unless a choice said otherwise."""
    rollout_nodes: tuple[NodeId, ...]
    """In the order they joined the group."""
    train_nodes: tuple[NodeId, ...]
    rollout_loads_s: tuple[float, ...]
    """Of one meta-iteration, by rollout node."""
    train_load_s: float
    cycle_s: float
    """T_cycle: the longest that a member needs for its steps per cycle when alone."""
    load_s: float
    """T_load: the busiest node's work in one meta-iteration."""
    period_s: float
    """Of one strict meta-iteration: max(T_cycle, T_load), or more where that is not exact."""
    budget_s: float
    """The longest period that keeps every member's SLO; infinite where none is known."""
    free_rollout_bytes: tuple[float, ...]
    """Host memory left, by rollout node."""
    free_train_bytes: float
    """Host memory left on the fullest training node."""
    num_without_footprint: int
    usd_per_hour: float
    """Of its nodes."""
    least_usd_per_hour: float
    """What its members would cost on nodes that are never idle, each step as slow as its SLO allows."""
    is_colocated: bool
    """A member rolls out on the training nodes; nobody can join unless the group `is_shared`."""
    pools: Mapping[str, Pool]
    """Of the cluster, by name."""
    has_switches: bool
    """A member's switches have been measured: the seconds above count those that sharing devices brings."""
    is_formula_exact: bool
    """Whether max(T_cycle, T_load) is the period: one turn each, and node sets that are equal or disjoint."""

    @property
    def is_saturated(self) -> bool:
        """T_load >= T_cycle: no bubble is left (Algorithm 1 skips such groups)."""
        return self.load_s >= self.cycle_s

    @property
    def num_members(self) -> int:
        return len(self.members)

    @property
    def is_shared(self) -> bool:
        """Every node serves both phases of every member, so that others may join with `is_shared`."""
        return self.is_colocated and set(self.train_nodes) == set(self.rollout_nodes)

    def period_with(self, pipeline: Pipeline, rollout_nodes: Sequence[NodeId], num_new_rollout_nodes: int) -> float:
        """The strict meta-iteration's seconds after the pipeline joined on these nodes."""
        new = tuple(NodeId("(new)", index) for index in range(num_new_rollout_nodes))
        nodes = (*rollout_nodes, *new)
        if pipeline.switch or self.has_switches:
            loads = self._loads_with(pipeline, nodes)
            return sum(load.solo_s for load in loads) if self.is_colocated else meta_iteration_s(loads)
        if self.is_colocated:
            return self.period_s + _colocated_solo_s(pipeline)
        rollout_s, train_s = _phases_of(pipeline)
        if len(nodes) == 1 and self.is_formula_exact and self._is_alone_or_unshared(nodes[0]):
            on_node_s = 0.0 if new else self.rollout_loads_s[self.rollout_nodes.index(nodes[0])]
            return max(self.period_s, rollout_s + train_s, self.train_load_s + train_s, on_node_s + rollout_s)
        return meta_iteration_s(self._loads_with(pipeline, nodes))

    def _loads_with(self, pipeline: Pipeline, nodes: tuple[NodeId, ...]) -> list[PhaseLoad]:
        train_nodes = nodes if self.is_shared else self.train_nodes
        placement = Placement(group=self.id, rollout_nodes=nodes, train_nodes=train_nodes)
        return _phase_loads([*self.members, Member(pipeline=pipeline, placement=placement)], self.pools)

    def slowdown_of(self, pipeline_id: PipelineId) -> float:
        """A member's mean step in the meta-iteration over its solo step, without switches; 1 where nothing is known."""
        load = next(member.phase_load for member in self.members if member.pipeline.id == pipeline_id)
        return self.period_s / (load.steps_per_cycle * load.solo_s) if load.solo_s else 1.0

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
        if self.is_formula_exact or self.is_colocated:
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


def _phase_loads(members: Sequence[Member], pools: Mapping[str, Pool]) -> list[PhaseLoad]:
    """What each asks of a group of these, switches included."""
    tenants: list[Tenant] = [(one.pipeline, one.placement.rollout_nodes, one.placement.train_nodes) for one in members]
    added = switch_seconds(tenants, pools)
    return [
        replace(load, rollout_s=load.rollout_s + rollout_s, train_s=load.train_s + train_s)
        if rollout_s or train_s
        else load
        for load, (rollout_s, train_s) in zip([one.phase_load for one in members], added, strict=True)
    ]


def solo_s(pipeline: Pipeline) -> float:
    """T_solo, or 0 where nothing is known."""
    return pipeline.estimate.solo_s if pipeline.estimate else 0.0


def _phases_of(pipeline: Pipeline) -> tuple[float, float]:
    estimate = pipeline.estimate
    return (estimate.rollout_s, estimate.train_s) if estimate else (0.0, 0.0)


def _colocated_solo_s(pipeline: Pipeline) -> float:
    estimate = pipeline.colocated_estimate or pipeline.estimate
    return estimate.solo_s if estimate else 0.0


def budget_of(pipeline: Pipeline) -> float:
    """The longest step the pipeline accepts: SLO times T_solo; infinite where nothing is known."""
    return pipeline.slo_slowdown * pipeline.estimate.solo_s if pipeline.estimate else math.inf


def has_footprint(pipeline: Pipeline) -> bool:
    return pipeline.footprint.rollout_host_bytes > 0 or pipeline.footprint.train_host_bytes > 0


class PlacementView:
    """What a policy may look at. It answers from the ledger and offers no way to change it."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: PlacementLedger) -> None:
        self._ledger = ledger

    @property
    def cluster(self) -> Cluster:
        return self._ledger.cluster

    def sandbox(self) -> PlacementLedger:
        """A copy to try moves on; the real books never hear of it."""
        return self._ledger.copy()

    @property
    def num_pipelines(self) -> int:
        return self._ledger.num_pipelines

    @property
    def num_groups(self) -> int:
        return self._ledger.num_groups

    def groups(self) -> Iterator[GroupLoad]:
        """Every group, oldest first."""
        return self._ledger.groups()

    def groups_with_room(self, pipeline: Pipeline) -> list[GroupLoad]:
        """Those that may take the pipeline on their training nodes, and some that may not; oldest first."""
        return self._ledger.groups_with_room(pipeline)

    def youngest_group(self) -> GroupLoad | None:
        return self._ledger.youngest_group()

    def group(self, group_id: GroupId) -> GroupLoad:
        return self._ledger.group(group_id)

    def pipeline(self, pipeline_id: PipelineId) -> Pipeline:
        return self._ledger.pipeline(pipeline_id)

    def placement(self, pipeline_id: PipelineId) -> Placement:
        return self._ledger.placement(pipeline_id)

    def member(self, pipeline_id: PipelineId) -> Member:
        return self._ledger.member(pipeline_id)

    def __contains__(self, pipeline_id: PipelineId) -> bool:
        """Whether the pipeline is placed."""
        return pipeline_id in self._ledger

    @property
    def usd_per_hour(self) -> float:
        """Price of all nodes in use."""
        return self._ledger.usd_per_hour

    def num_nodes_in_use(self, pool: str) -> int:
        return self._ledger.num_nodes_in_use(pool)

    def was_searched_in_vain(self, pipelines: tuple[PipelineId, ...]) -> bool:
        """Whether a `FruitlessSearch` of exactly these, in this order, was reported before."""
        return self._ledger.was_searched_in_vain(pipelines)

    def num_free_nodes(self, phase: Phase) -> float:
        """Infinite for an unbounded pool, 0 where the cluster has no pool for the phase."""
        return self._ledger.num_free_nodes(phase)

    def num_nodes(self, phase: Phase) -> float:
        """Free or not, without lost ones."""
        return self._ledger.num_nodes(phase)

    def usd_per_node_hour(self, phase: Phase) -> float:
        pool = self._ledger.cluster.pool_for(phase)
        return pool.usd_per_node_hour if pool else 0.0


class PlacementLedger:
    """Owns groups, pins, nodes and host memory; the only place where they change."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        if cluster.pool_for(Phase.TRAIN) is None:
            raise UserError(
                f"cluster: no pool has phase 'train' (pools: {', '.join(cluster.pools) or 'none'}); "
                "one is needed to place a pipeline"
            )
        self._nodes_by_pool = {name: _PoolNodes(pool) for name, pool in cluster.pools.items()}
        self._groups: dict[GroupId, GroupLoad] = {}
        self._index: GroupIndex | None = None
        """Made when first asked: a copy that nobody asks needs none."""
        self._group_of: dict[PipelineId, GroupId] = {}
        self._vacating: dict[PipelineId, tuple[NodeId, ...]] = {}
        """Where pipelines still work that have moved in the books."""
        self._num_uses: dict[NodeId, int] = {}
        """Of nodes in use: by a group, and by each pipeline that vacates it."""
        self._next_group = 0
        self._peak_by_pool = dict.fromkeys(cluster.pools, 0)
        self._fruitless_searches: dict[tuple[PipelineId, ...], None] = {}
        """Groups of pipelines that a policy found no better grouping for, oldest first; a sandbox has none."""

    # reading

    @property
    def num_pipelines(self) -> int:
        return len(self._group_of)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def view(self) -> PlacementView:
        return PlacementView(self)

    def groups(self) -> Iterator[GroupLoad]:
        """Every group, oldest first."""
        return iter(self._groups.values())

    def groups_with_room(self, pipeline: Pipeline) -> list[GroupLoad]:
        """Those that may take the pipeline on their training nodes, and some that may not; oldest first."""
        if self._index is None:
            self._index = GroupIndex(self._groups.values())
        return self._index.with_room(_phases_of(pipeline)[1], budget_of(pipeline))

    def youngest_group(self) -> GroupLoad | None:
        return self._groups[next(reversed(self._groups))] if self._groups else None

    def group(self, group_id: GroupId) -> GroupLoad:
        return self._groups[group_id]

    def __contains__(self, pipeline_id: PipelineId) -> bool:
        return pipeline_id in self._group_of

    def has_group(self, group_id: GroupId) -> bool:
        return group_id in self._groups

    def member(self, pipeline_id: PipelineId) -> Member:
        if pipeline_id not in self._group_of:
            raise IllegalTransitionError(f"pipeline {pipeline_id} is not placed")
        group = self._groups[self._group_of[pipeline_id]]
        return next(member for member in group.members if member.pipeline.id == pipeline_id)

    def pipeline(self, pipeline_id: PipelineId) -> Pipeline:
        return self.member(pipeline_id).pipeline

    def placement(self, pipeline_id: PipelineId) -> Placement:
        return self.member(pipeline_id).placement

    def num_free_nodes(self, phase: Phase) -> float:
        """Infinite for an unbounded pool, 0 where the cluster has no pool for the phase."""
        pool = self.cluster.pool_for(phase)
        return self._nodes_by_pool[pool.name].num_free if pool else 0

    def num_nodes(self, phase: Phase) -> float:
        """Free or not, without lost ones."""
        pool = self.cluster.pool_for(phase)
        return self._nodes_by_pool[pool.name].num_present if pool else 0

    def num_nodes_in_use(self, pool: str) -> int:
        return len(self._nodes_by_pool[pool].in_use)

    @property
    def peak_nodes_by_pool(self) -> Mapping[str, int]:
        return dict(self._peak_by_pool)

    @property
    def usd_per_hour(self) -> float:
        """Of all nodes in use."""
        return sum(len(nodes.in_use) * nodes.pool.usd_per_node_hour for nodes in self._nodes_by_pool.values())

    @property
    def settled_usd_per_hour(self) -> float:
        """Once every move under way is settled."""
        return sum(group.usd_per_hour for group in self._groups.values())

    def was_searched_in_vain(self, pipelines: tuple[PipelineId, ...]) -> bool:
        return pipelines in self._fruitless_searches

    # changing

    def note_fruitless_search(self, pipelines: tuple[PipelineId, ...]) -> None:
        """Remember that no better grouping of these was found; beyond `MAX_FRUITLESS_SEARCHES` the oldest is dropped."""
        self._fruitless_searches[pipelines] = None
        if len(self._fruitless_searches) > MAX_FRUITLESS_SEARCHES:
            del self._fruitless_searches[next(iter(self._fruitless_searches))]

    def admit(self, pipeline: Pipeline, choice: PlacementChoice) -> Placement:
        """Pin the pipeline where the choice says. A choice that does not hold raises and changes nothing."""
        if pipeline.id in self._group_of:
            raise IllegalTransitionError(
                f"pipeline {pipeline.id} is already placed in group {self._group_of[pipeline.id]}"
            )
        self._validate(pipeline, choice)
        return self._pin(pipeline, choice)

    def depart(self, pipeline_id: PipelineId) -> tuple[NodeId, ...]:
        """Unpin the pipeline; returns the nodes nobody holds any more."""
        released = self._leave(pipeline_id)
        return self._let_go(released) + self.settle(pipeline_id)

    def move(self, pipeline_id: PipelineId, choice: PlacementChoice) -> tuple[Placement, tuple[NodeId, ...]]:
        """Depart and admit in one; returns the new placement and the nodes that the pipeline will give back.

        It goes on working where it was until the end of its step, so those nodes stay in use until `settle`. The
        choice is made against the books with the pipeline still in them, so it names neither a group nor a node
        that its own departure removes. One that does not hold raises and changes nothing.
        """
        member = self.member(pipeline_id)
        group = self._groups[member.placement.group]
        released = self._leave(pipeline_id)
        try:
            self._validate(member.pipeline, choice)
        except IllegalTransitionError:
            self._undo_departure(pipeline_id, group)
            raise
        placement = self._pin(member.pipeline, choice)
        if pipeline_id not in self._vacating:  # a second move changes its plans, not where it works
            self._vacating[pipeline_id] = member.placement.nodes
            for node in member.placement.nodes:
                self._num_uses[node] += 1
        self._let_go(released)
        return placement, released

    def settle(self, pipeline_id: PipelineId) -> tuple[NodeId, ...]:
        """The pipeline has really left where its move began; returns the nodes that this frees."""
        return self._let_go(self._vacating.pop(pipeline_id, ()))

    def copy(self) -> PlacementLedger:
        """Books of their own that begin the same and hand out the same nodes for the same moves."""
        twin = PlacementLedger(self.cluster)
        twin._groups = dict(self._groups)
        twin._group_of = dict(self._group_of)
        twin._vacating = dict(self._vacating)
        twin._num_uses = dict(self._num_uses)
        twin._next_group = self._next_group
        twin._peak_by_pool = dict(self._peak_by_pool)
        twin._nodes_by_pool = {name: nodes.copy() for name, nodes in self._nodes_by_pool.items()}
        return twin

    def become(self, other: PlacementLedger) -> None:
        """Take over a copy's books, to undo what was tried since it was made. The copy is not to be used again."""
        self._groups, self._group_of = other._groups, other._group_of
        self._index = other._index
        self._vacating, self._num_uses = other._vacating, other._num_uses
        self._next_group, self._peak_by_pool = other._next_group, other._peak_by_pool
        self._nodes_by_pool = other._nodes_by_pool

    def lose_node(self, node: NodeId) -> tuple[PipelineId, ...]:
        """The node is gone: nobody is placed on it until it is regained. Returns who is pinned to it."""
        self._nodes_by_pool[node.pool].lose(node)
        return tuple(
            member.pipeline.id
            for group in self._groups.values()
            for member in group.members
            if node in member.placement.nodes
        )

    def regain_node(self, node: NodeId) -> None:
        """A lost node is back."""
        self._nodes_by_pool[node.pool].regain(node)

    # "all is well"

    def check(self) -> None:
        """Recompute everything from the pins and compare; raises with the difference."""
        held: dict[NodeId, GroupId] = {}
        for group_id, group in self._groups.items():
            _require(bool(group.members), f"group {group_id} is empty")
            _require(group.id == group_id, f"group {group_id} calls itself {group.id}")
            _require(bool(group.train_nodes), f"group {group_id} has no training node")
            for node in dict.fromkeys(group.rollout_nodes + group.train_nodes):
                _require(node not in held, f"node {node} is held by groups {held.get(node)} and {group_id}")
                held[node] = group_id
            pinned = {node for member in group.members for node in member.placement.rollout_nodes}
            _require(pinned == set(group.rollout_nodes), f"group {group_id}: rollout nodes without a pin")
            for member in group.members:
                name = member.pipeline.id
                _require(self._group_of.get(name) == group_id, f"pipeline {name} is not filed under {group_id}")
                _require(member.placement.group == group_id, f"pipeline {name} is pinned to another group")
                _require(
                    set(member.placement.train_nodes) <= set(group.train_nodes),
                    f"pipeline {name} trains outside its group",
                )
            fresh = self._load_of(group_id, group.members, group.rollout_nodes, group.train_nodes)
            _require(fresh == group, f"group {group_id}: the summary is stale")
            _require(
                min((group.free_train_bytes, *group.free_rollout_bytes)) >= 0,
                f"group {group_id}: host memory is over-committed",
            )
        if self._index is not None:
            self._index.check(self._groups)
        _require(len(self._fruitless_searches) <= MAX_FRUITLESS_SEARCHES, "too many fruitless searches are remembered")
        num_members = sum(len(group.members) for group in self._groups.values())
        _require(num_members == len(self._group_of), "a pipeline is in two groups or in none")
        num_uses = dict.fromkeys(held, 1)
        for vacated in self._vacating.values():
            for node in vacated:
                num_uses[node] = num_uses.get(node, 0) + 1
        _require(num_uses == self._num_uses, "a node's uses are miscounted")
        for pool, nodes in self._nodes_by_pool.items():
            mine = {node.index for node in num_uses if node.pool == pool}
            _require(mine == set(nodes.in_use), f"pool {pool}: nodes in use and nodes held differ")
            nodes.check()
            _require(self._peak_by_pool[pool] >= len(mine), f"pool {pool}: more nodes in use than the peak")

    # helpers, in the order they are called

    def _leave(self, pipeline_id: PipelineId) -> tuple[NodeId, ...]:
        """Take the pipeline out of its group; returns the nodes that nobody is pinned to any more."""
        member = self.member(pipeline_id)
        group = self._groups[member.placement.group]
        del self._group_of[pipeline_id]
        staying = tuple(other for other in group.members if other.pipeline.id != pipeline_id)
        if not staying:
            self._drop(group.id)
            released = tuple(dict.fromkeys(group.rollout_nodes + group.train_nodes))
        else:
            still_pinned = {node for other in staying for node in other.placement.nodes}
            still_pinned.update(group.train_nodes)
            released = tuple(node for node in group.rollout_nodes if node not in still_pinned)
            rollout_nodes = tuple(node for node in group.rollout_nodes if node in still_pinned)
            self._store(group.id, _with_steps_per_cycle(staying, {}), rollout_nodes, group.train_nodes)
        return released

    def _let_go(self, nodes: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """One use less of each; returns those that are free now."""
        freed = []
        for node in nodes:
            self._num_uses[node] -= 1
            if self._num_uses[node] == 0:
                del self._num_uses[node]
                self._nodes_by_pool[node.pool].give_back(node)
                freed.append(node)
        return tuple(freed)

    def _undo_departure(self, pipeline_id: PipelineId, group: GroupLoad) -> None:
        is_gone = group.id not in self._groups
        self._put(group)
        if is_gone:
            self._groups = dict(sorted(self._groups.items()))
        self._group_of[pipeline_id] = group.id

    def _validate(self, pipeline: Pipeline, choice: PlacementChoice) -> None:
        story = f"pipeline {pipeline.id}: the choice {choice}"
        for phase, count in (
            (Phase.ROLLOUT, choice.num_new_rollout_nodes),
            (Phase.TRAIN, choice.num_new_train_nodes),
        ):
            free = self.num_free_nodes(phase)
            if not 0 <= count <= free:
                raise IllegalTransitionError(f"{story} takes {count} new {phase} nodes; {free} are free")
            pool = self.cluster.pool_for(phase)
            need = self._host_bytes(pipeline, phase, choice.is_colocated)
            if count and pool and need > pool.host_memory_bytes:
                raise IllegalTransitionError(
                    f"{story} needs {need:.0f} bytes on a {phase} node of {pool.host_memory_bytes:.0f}"
                )
        if any(count < 1 for _, count in choice.steps_per_cycle):
            raise IllegalTransitionError(f"{story} gives a member no turn")
        if choice.group is None:
            self._validate_founding(choice, story)
        else:
            self._validate_joining(pipeline, choice, story)

    def _validate_founding(self, choice: PlacementChoice, story: str) -> None:
        if choice.rollout_nodes or choice.train_nodes:
            raise IllegalTransitionError(f"{story} founds a group but names nodes that others hold")
        if choice.num_new_train_nodes + (choice.num_new_rollout_nodes if choice.is_colocated else 0) < 1:
            raise IllegalTransitionError(f"{story} founds a group without a training node")
        if not choice.is_colocated and choice.num_new_rollout_nodes < 1:
            raise IllegalTransitionError(f"{story} founds a group without a rollout node")

    def _validate_joining(self, pipeline: Pipeline, choice: PlacementChoice, story: str) -> None:
        group = self._groups.get(choice.group) if choice.group is not None else None
        if group is None:
            raise IllegalTransitionError(f"{story} joins a group that does not exist")
        if choice.is_shared and group.is_shared:
            self._validate_sharing(pipeline, choice, group, story)
            return
        if choice.is_colocated or group.is_colocated:
            raise IllegalTransitionError(f"{story} shares nodes that hold both phases of one pipeline")
        if choice.num_new_train_nodes or choice.train_nodes != group.train_nodes:
            raise IllegalTransitionError(f"{story}: a group's training nodes are {group.train_nodes}, all or none")
        unknown = [node for node in choice.rollout_nodes if node not in group.rollout_nodes]
        if unknown or len(set(choice.rollout_nodes)) != len(choice.rollout_nodes):
            raise IllegalTransitionError(f"{story}: group {group.id} has rollout nodes {group.rollout_nodes}")
        if len(choice.rollout_nodes) + choice.num_new_rollout_nodes < 1:
            raise IllegalTransitionError(f"{story} names no rollout node")
        if not group.has_memory_for(pipeline, choice.rollout_nodes):
            raise IllegalTransitionError(f"{story}: group {group.id} has no memory for it")

    @staticmethod
    def _validate_sharing(pipeline: Pipeline, choice: PlacementChoice, group: GroupLoad, story: str) -> None:
        if choice.num_new_rollout_nodes or choice.num_new_train_nodes:
            raise IllegalTransitionError(f"{story} adds nodes to a group whose members share all of them")
        if choice.rollout_nodes != group.rollout_nodes:
            raise IllegalTransitionError(f"{story}: group {group.id} has rollout nodes {group.rollout_nodes}")
        if not choice.train_nodes or not set(choice.train_nodes) <= set(group.train_nodes):
            raise IllegalTransitionError(f"{story}: group {group.id} has training nodes {group.train_nodes}")
        if not group.has_memory_for(pipeline, choice.rollout_nodes):
            raise IllegalTransitionError(f"{story}: group {group.id} has no memory for it")

    def _pin(self, pipeline: Pipeline, choice: PlacementChoice) -> Placement:
        rollout_new = self._take(Phase.ROLLOUT, choice.num_new_rollout_nodes)
        train_new = self._take(Phase.TRAIN, choice.num_new_train_nodes)
        if choice.group is None:
            group_id = GroupId(self._next_group)
            self._next_group += 1
            members: tuple[Member, ...] = ()
            group_rollout: tuple[NodeId, ...] = ()
            group_train = train_new
        else:
            group_id = choice.group
            group = self._groups[group_id]
            members, group_rollout, group_train = group.members, group.rollout_nodes, group.train_nodes
        rollout_nodes = choice.rollout_nodes + rollout_new
        train_nodes = group_train
        if choice.is_colocated and choice.group is None:
            rollout_nodes = train_new + rollout_new
            train_nodes = rollout_nodes[: pipeline.num_train_nodes]
            group_train = rollout_nodes if choice.is_shared else train_nodes
        elif choice.is_shared:
            train_nodes = choice.train_nodes
        placement = Placement(group=group_id, rollout_nodes=rollout_nodes, train_nodes=train_nodes)
        self._group_of[pipeline.id] = group_id
        self._store(
            group_id,
            _with_steps_per_cycle(
                (*members, Member(pipeline=pipeline, placement=placement)), dict(choice.steps_per_cycle)
            ),
            tuple(dict.fromkeys(group_rollout + rollout_nodes)),
            group_train,
        )
        return placement

    def _take(self, phase: Phase, count: int) -> tuple[NodeId, ...]:
        pool = self.cluster.pool_for(phase)
        if pool is None or count == 0:
            return ()
        nodes = self._nodes_by_pool[pool.name]
        taken = tuple(nodes.take() for _ in range(count))
        self._num_uses.update(dict.fromkeys(taken, 1))
        self._peak_by_pool[pool.name] = max(self._peak_by_pool[pool.name], len(nodes.in_use))
        return taken

    def _store(
        self,
        group_id: GroupId,
        members: tuple[Member, ...],
        rollout_nodes: tuple[NodeId, ...],
        train_nodes: tuple[NodeId, ...],
    ) -> None:
        self._put(self._load_of(group_id, members, rollout_nodes, train_nodes))

    def _put(self, group: GroupLoad) -> None:
        self._groups[group.id] = group
        if self._index is not None:
            self._index.put(group)

    def _drop(self, group_id: GroupId) -> None:
        del self._groups[group_id]
        if self._index is not None:
            self._index.drop(group_id)

    def _load_of(
        self,
        group_id: GroupId,
        members: tuple[Member, ...],
        rollout_nodes: tuple[NodeId, ...],
        train_nodes: tuple[NodeId, ...],
    ) -> GroupLoad:
        loads = _phase_loads(members, self.cluster.pools)
        rollout_s = dict.fromkeys(rollout_nodes, 0.0)
        held_bytes = dict.fromkeys(rollout_nodes + train_nodes, 0.0)
        for member, load in zip(members, loads, strict=True):
            footprint = member.pipeline.footprint
            for node in member.placement.rollout_nodes:
                rollout_s[node] += load.rollout_s * load.steps_per_cycle
                held_bytes[node] += footprint.rollout_host_bytes
            for node in member.placement.train_nodes:
                held_bytes[node] += footprint.train_host_bytes
        train_s = sum(load.train_s * load.steps_per_cycle for load in loads)
        cycle = max(load.solo_s * load.steps_per_cycle for load in loads)
        busiest = max(train_s, *rollout_s.values())
        is_exact = is_formula_exact(loads)
        is_colocated = any(member.is_colocated for member in members)
        if is_colocated:
            # Both phases of everyone on the same nodes: one after another is what can be promised.
            busiest = sum(load.solo_s for load in loads)
        free = {node: self.cluster.pools[node.pool].host_memory_bytes - held_bytes[node] for node in held_bytes}
        return GroupLoad(
            id=group_id,
            members=members,
            rollout_nodes=rollout_nodes,
            train_nodes=train_nodes,
            rollout_loads_s=tuple(rollout_s.values()),
            train_load_s=train_s,
            cycle_s=cycle,
            load_s=busiest,
            period_s=max(cycle, busiest) if is_exact or is_colocated else meta_iteration_s(loads),
            budget_s=min(budget_of(member.pipeline) * member.steps_per_cycle for member in members),
            free_rollout_bytes=tuple(free[node] for node in rollout_nodes),
            free_train_bytes=min(free[node] for node in train_nodes),
            usd_per_hour=sum(self.cluster.pools[node.pool].usd_per_node_hour for node in held_bytes),
            least_usd_per_hour=sum(self._least_usd_per_hour(member.pipeline) for member in members),
            num_without_footprint=sum(not has_footprint(member.pipeline) for member in members),
            is_colocated=is_colocated,
            pools=self.cluster.pools,
            has_switches=any(member.pipeline.switch for member in members),
            is_formula_exact=is_exact,
        )

    def _least_usd_per_hour(self, pipeline: Pipeline) -> float:
        estimate = pipeline.estimate
        if estimate is None or pipeline.slo_slowdown == math.inf:
            return 0.0
        prices = {
            phase: pool.usd_per_node_hour if (pool := self.cluster.pool_for(phase)) else 0.0
            for phase in (Phase.ROLLOUT, Phase.TRAIN)
        }
        usd_seconds = (
            prices[Phase.ROLLOUT] * pipeline.num_rollout_nodes * estimate.rollout_s
            + prices[Phase.TRAIN] * pipeline.num_train_nodes * estimate.train_s
        )
        return usd_seconds / budget_of(pipeline) if usd_seconds else 0.0

    @staticmethod
    def _host_bytes(pipeline: Pipeline, phase: Phase, is_colocated: bool) -> float:
        footprint = pipeline.footprint
        if is_colocated:
            return footprint.rollout_host_bytes + footprint.train_host_bytes
        return footprint.rollout_host_bytes if phase is Phase.ROLLOUT else footprint.train_host_bytes


def _with_steps_per_cycle(members: tuple[Member, ...], steps_per_cycle: Mapping[PipelineId, int]) -> tuple[Member, ...]:
    """New steps per cycle where given, in lowest terms; these members come first, in the order given."""
    counts = [steps_per_cycle.get(member.pipeline.id, member.steps_per_cycle) for member in members]
    divisor = math.gcd(*counts)
    changed = [
        member if member.steps_per_cycle == count // divisor else replace(member, steps_per_cycle=count // divisor)
        for member, count in zip(members, counts, strict=True)
    ]
    rank = {name: number for number, name in enumerate(steps_per_cycle)}
    return tuple(sorted(changed, key=lambda member: rank.get(member.pipeline.id, len(rank))))


class _PoolNodes:
    """A pool's nodes: the lowest free number is taken first; an unbounded pool counts on as needed."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.in_use: dict[int, None] = {}
        self._returned: list[int] = []
        self._next = 0
        self._lost: dict[int, None] = {}

    def copy(self) -> _PoolNodes:
        twin = _PoolNodes(self.pool)
        twin.in_use, twin._returned = dict(self.in_use), list(self._returned)
        twin._next, twin._lost = self._next, dict(self._lost)
        return twin

    @property
    def num_present(self) -> float:
        return math.inf if self.pool.num_nodes is None else self.pool.num_nodes - len(self._lost)

    @property
    def num_free(self) -> float:
        if self.pool.num_nodes is None:
            return math.inf
        num_lost_unused = sum(index not in self.in_use for index in self._lost)
        return self.pool.num_nodes - len(self.in_use) - num_lost_unused

    def take(self) -> NodeId:
        while True:
            index = heapq.heappop(self._returned) if self._returned else self._count_on()
            if index not in self._lost:
                self.in_use[index] = None
                return NodeId(self.pool.name, index)

    def _count_on(self) -> int:
        self._next += 1
        return self._next - 1

    def give_back(self, node: NodeId) -> None:
        del self.in_use[node.index]
        if node.index not in self._lost:
            heapq.heappush(self._returned, node.index)

    def lose(self, node: NodeId) -> None:
        if node.index in self._lost:
            raise IllegalTransitionError(f"node {node} was lost before and has not joined again")
        self._lost[node.index] = None
        self._returned = [index for index in self._returned if index != node.index]
        heapq.heapify(self._returned)

    def regain(self, node: NodeId) -> None:
        if node.index not in self._lost:
            raise IllegalTransitionError(f"node {node} joins but was never lost")
        del self._lost[node.index]
        if node.index < self._next and node.index not in self.in_use:
            heapq.heappush(self._returned, node.index)

    def check(self) -> None:
        free = set(self._returned)
        _require(len(free) == len(self._returned), f"pool {self.pool.name}: a free node is listed twice")
        _require(not free & set(self.in_use), f"pool {self.pool.name}: a node is free and in use")
        _require(not free & set(self._lost), f"pool {self.pool.name}: a lost node is free")
        known = free | set(self.in_use) | {index for index in self._lost if index < self._next}
        _require(known == set(range(self._next)), f"pool {self.pool.name}: a node is nowhere")
        _require(
            self.pool.num_nodes is None or self._next <= self.pool.num_nodes,
            f"pool {self.pool.name}: more nodes handed out than there are",
        )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise IllegalTransitionError(f"placement books: {otherwise}")
