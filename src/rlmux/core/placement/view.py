"""What policies and displays may read of placements: the ledger's answers, and no way to change it for good.

    PlacementLedger ─▶ PlacementView ─▶ policies, displays

Groups with a node that is about to go are left out of what a policy chooses from: nothing is placed there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from rlmux.core.model import Cluster, GroupId, NodeId, Phase, Pipeline, PipelineId, Placement, WorkLeft
from rlmux.core.placement.group_load import GroupLoad, Member
from rlmux.core.placement.placement_ledger import PlacementLedger

C = TypeVar("C")


class PlacementView:
    """What policies and displays may read. It answers from the ledger and offers no way to change it for good."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: PlacementLedger) -> None:
        self._ledger = ledger

    @property
    def cluster(self) -> Cluster:
        return self._ledger.cluster

    @contextmanager
    def trial(self) -> Iterator[PlacementLedger]:
        """The ledger itself, to try relocations on: all that is changed in the body is taken back at its end."""
        with self._ledger.trial():
            yield self._ledger

    def cache(self, name: str, make: Callable[[], C]) -> C:
        """The policy's cache of this name, made when it is first wanted: dropping it must change no decision."""
        return cached(self._ledger.policy_caches, name, make)

    def uneven_groups(self) -> tuple[GroupLoad, ...]:
        """Groups that break a member's SLO, and those with several steps per cycle for a member; oldest first."""
        return tuple(self._staying(self._ledger.uneven_groups()))

    @property
    def num_pipelines(self) -> int:
        return self._ledger.num_pipelines

    @property
    def num_waiting(self) -> int:
        """Pipelines that wait for nodes."""
        return self._ledger.num_waiting()

    @property
    def num_groups(self) -> int:
        return self._ledger.num_groups

    def groups(self) -> Iterator[GroupLoad]:
        """Every group whose nodes stay, oldest first."""
        return iter(self._staying(self._ledger.groups()))

    def groups_with_room(self, pipeline: Pipeline) -> list[GroupLoad]:
        """Groups that may take the pipeline on their training nodes, and some that may not; oldest first."""
        return list(self._staying(self._ledger.groups_with_room(pipeline)))

    def youngest_group(self) -> GroupLoad | None:
        youngest = self._ledger.youngest_group()
        return None if youngest is None or self._ledger.is_leaving(youngest) else youngest

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

    def work_left(self, pipeline_id: PipelineId) -> WorkLeft | None:
        """What is left of a submitted pipeline's steps; None where it has no number of them, or nothing is run."""
        return self._ledger.work_left(pipeline_id)

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
        """Free nodes: infinite for an unbounded pool, 0 where the cluster has no pool for the phase."""
        return self._ledger.num_free_nodes(phase)

    def num_nodes(self, phase: Phase) -> float:
        """Nodes of the phase's pool, free or not, without lost ones."""
        return self._ledger.num_nodes(phase)

    def is_lost(self, node: NodeId) -> bool:
        """Whether nothing may be placed there: it is lost, or about to go."""
        return self._ledger.is_lost(node)

    def is_about_to_go(self, node: NodeId) -> bool:
        return self._ledger.is_about_to_go(node)

    def usd_per_node_hour(self, phase: Phase) -> float:
        pool = self._ledger.cluster.pool_for(phase)
        return pool.usd_per_node_hour if pool else 0.0

    def usd_per_new_node_hour(self, phase: Phase) -> float:
        """What one more node costs: nothing where they are counted, since those are paid whether held or not, unless
        they have a price over time."""
        pool = self._ledger.cluster.pool_for(phase)
        if pool is None or (pool.num_nodes is not None and pool.name not in self._ledger.rented):
            return 0.0
        return pool.usd_per_node_hour

    def _staying(self, groups: Iterable[GroupLoad]) -> Iterable[GroupLoad]:
        """Those none of whose nodes is about to go. Mostly no node is: then nothing is looked at."""
        if not self._ledger.expects_losses:
            return groups
        return [group for group in groups if not self._ledger.is_leaving(group)]


def cached(caches: dict[str, Any], name: str, make: Callable[[], C]) -> C:
    """The cache of this name, made when it is first wanted."""
    if name not in caches:
        caches[name] = make()
    return cast("C", caches[name])
