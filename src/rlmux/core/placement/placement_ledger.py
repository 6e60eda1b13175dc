"""The placement ledger: which pipeline is pinned to which nodes, and what that leaves for others.

    ledger.admit(pipeline, choice) ─▶ Placement        ledger.depart(id) ─▶ nodes given back
    ledger.relocate(id, choice) at a step boundary; the nodes it leaves are given back by ledger.finish_relocation(id)

A co-execution group owns its nodes: groups share none. Each member is pinned to one or more of its rollout nodes and of
its training nodes, mostly to all of these. A node leaves with its last member, so does a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.core.model import Cluster, GroupId, NodeId, Phase, Pipeline, PipelineId, Placement, WorkLeft
from rlmux.core.placement.choice import PlacementChoice, check_choice
from rlmux.core.placement.group_index import GroupIndex
from rlmux.core.placement.group_load import GroupLoad, Member, budget_of, group_load, phases_of, with_steps_per_cycle
from rlmux.core.placement.pool_nodes import ClusterNodes, require
from rlmux.core.placement.rollback import Undo

MAX_FRUITLESS_SEARCHES = 10_000
"""Searches of a policy that are remembered."""


@dataclass(slots=True)
class Trial:
    """Changes of a ledger that are taken back, unless this is set."""

    is_kept: bool = False


class PlacementLedger:
    """Owns groups, pins, nodes and host memory; the only place where they change."""

    def __init__(
        self,
        cluster: Cluster,
        work_left: Callable[[PipelineId], WorkLeft | None] = lambda pipeline: None,
        num_waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self.cluster = cluster
        """Pools at the prices of now."""
        self.work_left = work_left
        self.num_waiting = num_waiting
        if cluster.pool_for(Phase.TRAIN) is None:
            raise UserError(
                f"cluster: no pool has phase 'train' (pools: {', '.join(cluster.pools) or 'none'}); "
                "one is needed to place a pipeline"
            )
        self.rented: dict[str, None] = {}
        """Pools with a price over time: their nodes are paid while they are held, however many there are."""
        self._undo = Undo()
        self._nodes = ClusterNodes(cluster, self._undo)
        self._groups: dict[GroupId, GroupLoad] = {}
        self._uneven: dict[GroupId, None] = {}
        """Groups that `uneven_groups` returns, in no order."""
        self._index: GroupIndex | None = None
        """Built when first needed: most copies never need one."""
        self._group_of: dict[PipelineId, GroupId] = {}
        self._vacating: dict[PipelineId, tuple[NodeId, ...]] = {}
        """Nodes on which relocated pipelines still work, until their relocation is finished."""
        self._next_group = 0
        self._fruitless_searches: dict[tuple[PipelineId, ...], None] = {}
        """Groups of pipelines that a policy found no better grouping for, oldest first."""
        self._num_dropped = 0
        """Groups that were ever dropped: where a trial dropped one, it does not come back in its place."""
        self._after_leaving: dict[PipelineId, tuple[GroupLoad, GroupLoad, tuple[NodeId, ...]]] = {}
        """The group of each pipeline that left it in a trial, the group without it, and the nodes that this frees.
        A cache: the trials of one decision let the same pipelines leave, one trial after another."""
        self.policy_caches: dict[str, Any] = {}
        """Caches of the policy, which keeps nothing itself, by their names."""

    # reading

    @property
    def num_pipelines(self) -> int:
        return len(self._group_of)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def groups(self) -> Iterator[GroupLoad]:
        """Every group, oldest first."""
        return iter(self._groups.values())

    def groups_with_room(self, pipeline: Pipeline) -> list[GroupLoad]:
        """Groups that may take the pipeline on their training nodes, and some that may not; oldest first."""
        if self._index is None:
            self._index = GroupIndex(self._groups.values(), self._undo)
        return self._index.with_room(phases_of(pipeline)[1], budget_of(pipeline))

    def youngest_group(self) -> GroupLoad | None:
        return self._groups[next(reversed(self._groups))] if self._groups else None

    def group(self, group_id: GroupId) -> GroupLoad:
        return self._groups[group_id]

    def group_of(self, pipeline_id: PipelineId) -> GroupLoad:
        return self._groups[self._group_of[pipeline_id]]

    def uneven_groups(self) -> tuple[GroupLoad, ...]:
        """Groups that break a member's SLO, and those with several steps per cycle for a member; oldest first."""
        return tuple(self._groups[group_id] for group_id in sorted(self._uneven))

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
        """Free nodes: infinite for an unbounded pool, 0 where the cluster has no pool for the phase."""
        return self._nodes.num_free(phase)

    def num_nodes(self, phase: Phase) -> float:
        """Nodes of the phase's pool, free or not, without lost ones."""
        return self._nodes.num_present(phase)

    def num_nodes_in_use(self, pool: str) -> int:
        return self._nodes.num_in_use(pool)

    @property
    def peak_nodes_by_pool(self) -> Mapping[str, int]:
        return dict(self._nodes.peak_by_pool)

    @property
    def usd_per_hour(self) -> float:
        """Price of all nodes in use."""
        pools = self.cluster.pools.items()
        return sum(self.num_nodes_in_use(name) * pool.usd_per_node_hour for name, pool in pools)

    def was_searched_in_vain(self, pipelines: tuple[PipelineId, ...]) -> bool:
        return pipelines in self._fruitless_searches

    # changing

    def note_fruitless_search(self, pipelines: tuple[PipelineId, ...]) -> None:
        """Remember that no better grouping of these was found, for the last `MAX_FRUITLESS_SEARCHES` of them."""
        self._fruitless_searches[pipelines] = None
        if len(self._fruitless_searches) > MAX_FRUITLESS_SEARCHES:
            del self._fruitless_searches[next(iter(self._fruitless_searches))]

    def admit(self, pipeline: Pipeline, choice: PlacementChoice) -> Placement:
        """Pin the pipeline as chosen. A choice that does not hold raises and changes nothing."""
        self.check_admission(pipeline, choice)
        return self._pin(pipeline, choice)

    def check_admission(self, pipeline: Pipeline, choice: PlacementChoice) -> None:
        """Raises IllegalTransitionError where the pipeline cannot be pinned as chosen."""
        if pipeline.id in self._group_of:
            raise IllegalTransitionError(
                f"pipeline {pipeline.id} is already placed in group {self._group_of[pipeline.id]}"
            )
        self._check(pipeline, choice)

    def depart(self, pipeline_id: PipelineId) -> tuple[NodeId, ...]:
        """Unpin the pipeline, which is placed; returns the nodes that are free now."""
        released = self._leave(pipeline_id)
        return self._nodes.let_go(released) + self.finish_relocation(pipeline_id)

    def relocate(self, pipeline_id: PipelineId, choice: PlacementChoice) -> tuple[Placement, tuple[NodeId, ...]]:
        """Depart and admit in one; returns the new placement and the nodes that the pipeline will give back.

        It goes on working where it was until the end of its step, so those nodes stay in use until
        `finish_relocation`. The choice is made against a ledger that still has the pipeline, so it names neither a
        group nor a node that its own departure removes. One that does not hold raises and changes nothing.
        """
        member = self.member(pipeline_id)
        with self.trial() as trial:
            released = self._leave(pipeline_id)
            self._check(member.pipeline, choice)
            trial.is_kept = True
        placement = self._pin(member.pipeline, choice)
        if pipeline_id not in self._vacating:  # a second relocation changes where it goes, not where it works
            self._undo.put(self._vacating, pipeline_id, member.placement.nodes)
            self._nodes.use(member.placement.nodes)
        self._nodes.let_go(released)
        return placement, released

    def revise(self, pipeline: Pipeline) -> None:
        """Update a placed pipeline to its current estimates."""
        group = self.group_of(pipeline.id)
        members = tuple(
            replace(member, pipeline=pipeline) if member.pipeline.id == pipeline.id else member
            for member in group.members
        )
        self._store(group.id, members, group.rollout_nodes, group.train_nodes)
        self._fruitless_searches = {names: None for names in self._fruitless_searches if pipeline.id not in names}

    def set_price(self, pool: str, usd_per_gpu_hour: float) -> None:
        """Sum up every group at the pool's new price; searches in vain at the old one do not count."""
        self.rented[pool] = None
        priced = replace(self.cluster.pools[pool], usd_per_gpu_hour=usd_per_gpu_hour)
        self.cluster = replace(self.cluster, pools={**self.cluster.pools, pool: priced})
        for group in list(self._groups.values()):
            self._store(group.id, group.members, group.rollout_nodes, group.train_nodes)
        self._fruitless_searches.clear()

    def renew(self, pipeline_id: PipelineId) -> None:
        """Steps of a placed pipeline are to be made again: what was kept about its group as it was does not count."""
        self._put(replace(self.group_of(pipeline_id)))

    def set_aside(self, pipeline_id: PipelineId) -> None:
        """Take the pipeline out of its group and leave its nodes in use: for a trial of another place for it."""
        self._leave(pipeline_id)

    def finish_relocation(self, pipeline_id: PipelineId) -> tuple[NodeId, ...]:
        """The pipeline has really left the nodes that it was relocated from; returns those that this frees."""
        return (
            self._nodes.let_go(self._undo.remove(self._vacating, pipeline_id)) if pipeline_id in self._vacating else ()
        )

    def finish_relocations(self) -> None:
        """Every pipeline has left the nodes that it was relocated from."""
        for pipeline_id in list(self._vacating):
            self.finish_relocation(pipeline_id)

    @contextmanager
    def trial(self) -> Iterator[Trial]:
        """What is changed inside is taken back at the end, also where that is an exception, unless the trial is kept.

        Trials nest. Pipelines come, go and move in them; no node is lost, no price changes, and nothing is revised.
        """
        trial = Trial()
        mark, had_index, next_group = self._undo.begin(), self._index is not None, self._next_group
        num_dropped = self._num_dropped
        free_lists = self._nodes.free_lists()
        try:
            yield trial
        finally:
            if trial.is_kept:
                self._undo.keep()
            else:
                self._undo.take_back(mark)
                self._nodes.take_back(free_lists)
                self._next_group = next_group
                if not had_index:
                    self._index = None
                if self._num_dropped > num_dropped:
                    in_order = sorted(self._groups.items())
                    self._groups.clear()
                    self._groups.update(in_order)

    def expect_loss(self, node: NodeId) -> None:
        """The node is about to go: no pipeline is placed on it, and those that are there stay until they leave."""
        self._nodes.expect_loss(node)

    def is_lost(self, node: NodeId) -> bool:
        """Whether nothing may be placed there: it is lost, or about to go."""
        return self._nodes.is_lost(node)

    def is_about_to_go(self, node: NodeId) -> bool:
        return self._nodes.is_about_to_go(node)

    def is_leaving(self, group: GroupLoad) -> bool:
        """Whether one of the group's nodes is about to go."""
        return self.expects_losses and any(map(self._nodes.is_about_to_go, group.rollout_nodes + group.train_nodes))

    @property
    def expects_losses(self) -> bool:
        """Whether any node is about to go."""
        return self._nodes.expects_losses

    def lose_node(self, node: NodeId) -> tuple[PipelineId, ...]:
        """The node is gone: no pipeline is placed on it until it is regained. Returns the pipelines pinned to it."""
        self._nodes.lose(node)
        return tuple(
            member.pipeline.id
            for group in self._groups.values()
            for member in group.members
            if node in member.placement.nodes
        )

    def regain_node(self, node: NodeId) -> None:
        """A node that was lost, or was to be, is there."""
        self._nodes.regain(node)

    # "all is well"

    def check(self) -> None:
        """Recompute everything from the pins and compare; raises with the difference."""
        held: dict[NodeId, GroupId] = {}
        for group_id, group in self._groups.items():
            require(bool(group.members), f"group {group_id} is empty")
            require(group.id == group_id, f"group {group_id} calls itself {group.id}")
            require(bool(group.train_nodes), f"group {group_id} has no training node")
            for node in dict.fromkeys(group.rollout_nodes + group.train_nodes):
                require(node not in held, f"node {node} is held by groups {held.get(node)} and {group_id}")
                held[node] = group_id
            pinned = {node for member in group.members for node in member.placement.rollout_nodes}
            require(pinned == set(group.rollout_nodes), f"group {group_id}: rollout nodes without a pin")
            for member in group.members:
                name = member.pipeline.id
                require(self._group_of.get(name) == group_id, f"pipeline {name} is not filed under {group_id}")
                require(member.placement.group == group_id, f"pipeline {name} is pinned to another group")
                require(
                    set(member.placement.train_nodes) <= set(group.train_nodes),
                    f"pipeline {name} trains outside its group",
                )
            trained = {node for member in group.members for node in member.placement.train_nodes}
            require(
                group.is_colocated or trained == set(group.train_nodes),
                f"group {group_id}: training nodes without a pin",
            )
            fresh = group_load(group_id, group.members, group.rollout_nodes, group.train_nodes, self.cluster)
            require(fresh == group, f"group {group_id}: the summary is stale")
            require(
                min((group.free_train_bytes, *group.free_rollout_bytes)) >= 0,
                f"group {group_id}: host memory is over-committed",
            )
        uneven = {group_id for group_id, group in self._groups.items() if group.is_uneven}
        require(uneven == set(self._uneven), "the groups that break an SLO are not those that are listed")
        if self._index is not None:
            self._index.check(self._groups)
        require(len(self._fruitless_searches) <= MAX_FRUITLESS_SEARCHES, "too many fruitless searches are remembered")
        num_members = sum(len(group.members) for group in self._groups.values())
        require(num_members == len(self._group_of), "a pipeline is in two groups or in none")
        num_uses = dict.fromkeys(held, 1)
        for vacated in self._vacating.values():
            for node in vacated:
                num_uses[node] = num_uses.get(node, 0) + 1
        self._nodes.check(num_uses)

    # helpers, in the order they are called

    def _leave(self, pipeline_id: PipelineId) -> tuple[NodeId, ...]:
        """Take the pipeline out of its group; returns the nodes that no pipeline is pinned to any more."""
        group = self._groups[self.member(pipeline_id).placement.group]
        self._undo.remove(self._group_of, pipeline_id)
        if group.num_members == 1:
            self._drop(group.id)
            return tuple(dict.fromkeys(group.rollout_nodes + group.train_nodes))
        known = self._after_leaving.get(pipeline_id)
        if known is None or known[0] is not group:
            known = (group, *self._without(group, pipeline_id))
            if self._undo.is_noting:
                self._after_leaving[pipeline_id] = known
        if not self._undo.is_noting:
            self._after_leaving.pop(pipeline_id, None)
        self._put(known[1])
        return known[2]

    def _without(self, group: GroupLoad, pipeline_id: PipelineId) -> tuple[GroupLoad, tuple[NodeId, ...]]:
        """The group without one of its several members, and the nodes that no pipeline is pinned to any more."""
        staying = tuple(other for other in group.members if other.pipeline.id != pipeline_id)
        still_pinned = {node for other in staying for node in other.placement.nodes}
        if group.is_colocated:
            still_pinned.update(group.train_nodes)
        released = tuple(
            node for node in dict.fromkeys(group.rollout_nodes + group.train_nodes) if node not in still_pinned
        )
        rollout_nodes = tuple(node for node in group.rollout_nodes if node in still_pinned)
        train_nodes = tuple(node for node in group.train_nodes if node in still_pinned)
        members = with_steps_per_cycle(staying, {})
        return group_load(group.id, members, rollout_nodes, train_nodes, self.cluster), released

    def _check(self, pipeline: Pipeline, choice: PlacementChoice) -> None:
        check_choice(
            pipeline,
            choice,
            cluster=self.cluster,
            num_free_nodes={phase: self.num_free_nodes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)},
            group=self._groups.get(choice.group) if choice.group is not None else None,
        )

    def _pin(self, pipeline: Pipeline, choice: PlacementChoice) -> Placement:
        rollout_new = self._nodes.take(Phase.ROLLOUT, choice.num_new_rollout_nodes)
        train_new = self._nodes.take(Phase.TRAIN, choice.num_new_train_nodes)
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
        train_nodes = choice.train_nodes + train_new
        group_train = tuple(dict.fromkeys(group_train + train_nodes))
        if choice.is_colocated and choice.group is None:
            rollout_nodes = train_new + rollout_new
            train_nodes = rollout_nodes[: pipeline.num_train_nodes]
            group_train = rollout_nodes if choice.is_shared else train_nodes
        placement = Placement(group=group_id, rollout_nodes=rollout_nodes, train_nodes=train_nodes)
        self._undo.put(self._group_of, pipeline.id, group_id)
        self._store(
            group_id,
            with_steps_per_cycle(
                (*members, Member(pipeline=pipeline, placement=placement)), dict(choice.steps_per_cycle)
            ),
            tuple(dict.fromkeys(group_rollout + rollout_nodes)),
            group_train,
        )
        return placement

    def _store(
        self,
        group_id: GroupId,
        members: tuple[Member, ...],
        rollout_nodes: tuple[NodeId, ...],
        train_nodes: tuple[NodeId, ...],
    ) -> None:
        self._put(group_load(group_id, members, rollout_nodes, train_nodes, self.cluster))

    def _put(self, group: GroupLoad) -> None:
        self._undo.put(self._groups, group.id, group)
        if group.is_uneven:
            self._undo.put(self._uneven, group.id, None)
        elif group.id in self._uneven:
            self._undo.remove(self._uneven, group.id)
        if self._index is not None:
            self._index.put(group)

    def _drop(self, group_id: GroupId) -> None:
        self._undo.remove(self._groups, group_id)
        self._num_dropped += 1
        if group_id in self._uneven:
            self._undo.remove(self._uneven, group_id)
        if self._index is not None:
            self._index.drop(group_id)
