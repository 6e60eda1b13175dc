"""Placement on shared nodes: every node of a group serves both phases of all its members.

A finite cluster is one group with all its nodes. The period that is promised is that of one phase after another; the
look-ahead then puts the deadlines that follow from SLOs before everything else.
"""

from __future__ import annotations

from operator import itemgetter

from rlmux.core.model import AdmissionKind, Cluster, NodeId, Phase, Pipeline
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.group_load import GroupLoad
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.candidates import impossible, least_loaded, newcomer, queue

MAX_MEMBERS = 8
"""Members of a group on shared nodes, unless a policy is made with another number."""


def place_on_shared_nodes(
    pipeline: Pipeline, view: PlacementView, *, max_members: int = MAX_MEMBERS, keeps_slos: bool = True
) -> PlacementChoice | Refusal:
    """The first group whose nodes serve both phases of all members and that keeps every SLO; else a new one.

    Without `keeps_slos`, SLOs play no part.
    """
    needs = nodes_for_both(pipeline, view)
    refusal = impossible(pipeline, view, needs=needs, is_colocated=True)
    if refusal is not None:
        return refusal
    free = {phase: view.num_free_nodes(phase) for phase in needs}
    has_own_nodes = all(count <= free[phase] for phase, count in needs.items())
    joiner = newcomer(pipeline, view, has_own_nodes=has_own_nodes)
    for group in view.groups():
        if (
            group.is_shared
            and group.num_members < max_members
            and len(group.rollout_nodes) >= max(pipeline.num_rollout_nodes, pipeline.num_train_nodes)
            and _has_memory(group, pipeline)
            and (not keeps_slos or group.keeps_slos_with(joiner, group.rollout_nodes, 0))
        ):
            return PlacementChoice(
                kind=AdmissionKind.DIRECT,
                group=group.id,
                rollout_nodes=group.rollout_nodes,
                train_nodes=_least_trained(group, pipeline.num_train_nodes, view.cluster),
                is_colocated=True,
                is_shared=True,
            )
    if not has_own_nodes:
        return queue(pipeline, view)
    num_new = {phase: int(free[phase]) if free[phase] < float("inf") else count for phase, count in needs.items()}
    return PlacementChoice(
        kind=AdmissionKind.NEW,
        group=None,
        num_new_rollout_nodes=num_new[Phase.ROLLOUT],
        num_new_train_nodes=num_new[Phase.TRAIN],
        is_colocated=True,
        is_shared=True,
    )


def nodes_for_both(pipeline: Pipeline, view: PlacementView) -> dict[Phase, int]:
    """Nodes of each pool on which the pipeline has room for both phases."""
    if view.cluster.is_one_pool:
        return {Phase.TRAIN: max(pipeline.num_train_nodes, pipeline.num_rollout_nodes), Phase.ROLLOUT: 0}
    has_rollout_pool = view.cluster.pool_for(Phase.ROLLOUT) is not None
    return {Phase.TRAIN: pipeline.num_train_nodes, Phase.ROLLOUT: pipeline.num_rollout_nodes if has_rollout_pool else 0}


def _has_memory(group: GroupLoad, pipeline: Pipeline) -> bool:
    need = pipeline.footprint.rollout_host_bytes + pipeline.footprint.train_host_bytes
    return group.has_memory_for(pipeline, group.rollout_nodes) and need <= min(group.free_rollout_bytes)


def _least_trained(group: GroupLoad, count: int, cluster: Cluster) -> tuple[NodeId, ...]:
    """The nodes with the least training on them, in the group's order among equals."""
    load_s = dict.fromkeys(group.rollout_nodes, 0.0)
    for member in group.members:
        for node in member.placement.train_nodes:
            load_s[node] += member.phase_load.train_s or 1e-9
    ranked = sorted(((load_s[node], node) for node in group.rollout_nodes), key=itemgetter(0))
    return least_loaded(ranked, count, cluster)
