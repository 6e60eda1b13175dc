"""Where a pipeline could go: the candidates that placement policies choose among (RollMux section 4.2).

    direct   existing rollout nodes of a group, its training nodes         no new cost
    scaled   new rollout nodes, the group's training nodes                 rollout nodes only
    new      a group of its own                                            both

A candidate listed here fits: memory or cap, node counts, and no member's SLO nor the newcomer's is broken
by the group's strict meta-iteration. A group whose training nodes are fewer than the pipeline requests is
no candidate: its model would not fit there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from rlmux.core.model import AdmissionKind, Cluster, NodeId, Phase, Pipeline, Pool
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.group_load import GroupLoad, budget_of, cold_start_s, solo_s
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.economy import budget_left_s


def direct(group: GroupLoad, pipeline: Pipeline) -> Iterator[PlacementChoice]:
    """Every choice of existing rollout nodes that takes the pipeline, in node order."""
    for nodes in combinations(group.rollout_nodes, pipeline.num_rollout_nodes):
        if group.has_memory_for(pipeline, nodes) and group.keeps_slos_with(pipeline, nodes, 0):
            yield joining(group, nodes, 0)


def scaled(group: GroupLoad, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
    """New rollout nodes beside the group's training nodes."""
    count = pipeline.num_rollout_nodes
    if (
        count <= view.num_free_nodes(Phase.ROLLOUT)
        and group.has_memory_for(pipeline, ())
        and group.keeps_slos_with(pipeline, (), count)
    ):
        return joining(group, (), count)
    return None


def may_join(group: GroupLoad, pipeline: Pipeline) -> bool:
    """Constant-time test that is necessary for every candidate in the group."""
    budget_s = min(group.budget_s, budget_of(pipeline))
    estimate = pipeline.estimate
    return (
        not group.is_colocated
        and len(group.train_nodes) >= pipeline.num_train_nodes
        and max(group.period_s, solo_s(pipeline)) <= budget_s
        and group.train_load_s + (estimate.train_s if estimate else 0.0) <= budget_s
    )


def joining(group: GroupLoad, rollout_nodes: tuple[NodeId, ...], num_new: int) -> PlacementChoice:
    return PlacementChoice(
        kind=AdmissionKind.SCALED if num_new else AdmissionKind.DIRECT,
        group=group.id,
        rollout_nodes=rollout_nodes,
        num_new_rollout_nodes=num_new,
        train_nodes=group.train_nodes,
    )


def founding(pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
    """A group of its own, where enough nodes are free."""
    if pipeline.num_rollout_nodes > view.num_free_nodes(
        Phase.ROLLOUT
    ) or pipeline.num_train_nodes > view.num_free_nodes(Phase.TRAIN):
        return None
    return PlacementChoice(
        kind=AdmissionKind.NEW,
        group=None,
        num_new_rollout_nodes=pipeline.num_rollout_nodes,
        num_new_train_nodes=pipeline.num_train_nodes,
    )


def newcomer(pipeline: Pipeline, view: PlacementView, *, has_own_nodes: bool) -> Pipeline:
    """The pipeline as groups are judged for it: without nodes of its own to found one, it would wait longer in the
    queue than for its first slot, so that wait is not held against a group (`budget_of`); what it has waited is."""
    alone_s = solo_s(pipeline)
    if has_own_nodes or pipeline.num_steps is None:
        return pipeline
    if pipeline.slo_probability is None or pipeline.slo_slowdown == math.inf or not alone_s:
        return replace(pipeline, num_steps=None)
    budget_s = budget_left_s(pipeline, view.work_left(pipeline.id), reserve_s=cold_start_s(pipeline))
    return replace(pipeline, num_steps=None, slo_slowdown=max(1.0, budget_s * pipeline.spread / alone_s))


def as_of_now(group: GroupLoad, joiner: Pipeline, view: PlacementView) -> GroupLoad:
    """The group with the budget that its members have left when the joiner comes, whose cold starts delay them once."""
    delay_s = cold_start_s(joiner)
    budget_s = min(
        budget_left_s(member.pipeline, view.work_left(member.pipeline.id), reserve_s=delay_s) * member.steps_per_cycle
        for member in group.members
    )
    return replace(group, budget_s=budget_s) if budget_s < group.budget_s else group


def any_room(group: GroupLoad, pipeline: Pipeline) -> Iterator[PlacementChoice]:
    """Every choice of existing rollout nodes with memory for the pipeline, whatever it does to SLOs."""
    if group.is_colocated or len(group.train_nodes) < pipeline.num_train_nodes:
        return
    for nodes in combinations(group.rollout_nodes, pipeline.num_rollout_nodes):
        if group.has_memory_for(pipeline, nodes):
            yield joining(group, nodes, 0)


def least_loaded(ranked: Sequence[tuple[float, NodeId]], count: int, cluster: Cluster) -> tuple[NodeId, ...]:
    """The first `count` of (load in seconds, node), least loaded first; on one machine where one has as little load."""
    if count == 1:
        return (ranked[0][1],)
    loads_s = [load_s for load_s, _ in ranked[:count]]
    by_machine: dict[str | None, list[tuple[float, NodeId]]] = {}
    for load_s, node in ranked:
        by_machine.setdefault(cluster.machine_of(node), []).append((load_s, node))
    alike = (part for part in by_machine.values() if [load_s for load_s, _ in part[:count]] == loads_s)
    return tuple(node for _, node in next(alike, ranked)[:count])


def sharing_everything(pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
    """Into the youngest group, on all its rollout nodes; a finite cluster is one group with all its nodes."""
    group = view.youngest_group()
    if group is not None:
        is_wide_enough = (
            len(group.rollout_nodes) >= pipeline.num_rollout_nodes
            and len(group.train_nodes) >= pipeline.num_train_nodes
        )
        if is_wide_enough and group.has_memory_for(pipeline, group.rollout_nodes):
            return joining(group, group.rollout_nodes, 0)
    choice = founding(pipeline, view)
    if choice is None:
        return None
    whole = {phase: view.num_free_nodes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    return replace(
        choice,
        num_new_rollout_nodes=int(_finite(whole[Phase.ROLLOUT], choice.num_new_rollout_nodes)),
        num_new_train_nodes=int(_finite(whole[Phase.TRAIN], choice.num_new_train_nodes)),
    )


def _finite(value: float, otherwise: float) -> float:
    return value if value < math.inf else otherwise


def impossible(
    pipeline: Pipeline,
    view: PlacementView,
    *,
    needs: Mapping[Phase, int] | None = None,
    is_colocated: bool = False,
) -> Refusal | None:
    """Why even an empty cluster could not take the pipeline, or None.

    `needs` are nodes by phase, by default those that the pipeline requests; colocated, a node holds both
    footprints, and a device either of the states.
    """
    footprint = pipeline.footprint
    host_bytes = {Phase.ROLLOUT: footprint.rollout_host_bytes, Phase.TRAIN: footprint.train_host_bytes}
    state_bytes = {
        Phase.ROLLOUT: footprint.rollout_device_bytes or 0.0,
        Phase.TRAIN: footprint.train_device_bytes or 0.0,
    }
    if is_colocated:
        host_bytes = dict.fromkeys(host_bytes, sum(host_bytes.values()))
        state_bytes = dict.fromkeys(state_bytes, max(state_bytes.values()))
    if needs is None:
        needs = {Phase.ROLLOUT: pipeline.num_rollout_nodes, Phase.TRAIN: pipeline.num_train_nodes}
    for phase, count in needs.items():
        reason = _why_never(view.cluster.pool_for(phase), phase, count, host_bytes[phase], state_bytes[phase])
        if reason:
            return Refusal(reason=f"pipeline {pipeline.id} {reason}", is_final=True)
    return None


def _why_never(pool: Pool | None, phase: Phase, count: int, host_bytes: float, state_bytes: float) -> str:
    if count == 0:
        return ""
    if pool is None:
        return f"needs {count} {phase} nodes; the cluster has no pool for {phase}"
    if pool.num_nodes is not None and count > pool.num_nodes:
        return f"needs {count} nodes of pool {pool.name!r}, which has {pool.num_nodes}"
    if host_bytes > pool.host_memory_bytes:
        return (
            f"keeps {host_bytes / 1e9:.3f} GB on each node of pool {pool.name!r}, which has "
            f"{pool.host_memory_bytes / 1e9:.3f} GB of host memory"
        )
    if state_bytes > pool.device_memory_bytes:
        return (
            f"keeps a state of {state_bytes / 1e9:.3f} GB on a device of pool {pool.name!r}, which has "
            f"{pool.device_memory_bytes / 1e9:.3f} GB"
        )
    return ""


def queue(pipeline: Pipeline, view: PlacementView) -> Refusal:
    """Nothing takes the pipeline now; a departure may change that."""
    free_rollout, free_train = view.num_free_nodes(Phase.ROLLOUT), view.num_free_nodes(Phase.TRAIN)
    if view.cluster.is_one_pool:
        needs = max(pipeline.num_rollout_nodes, pipeline.num_train_nodes)
        needed = f"{needs} nodes for both phases; {free_train:.0f} are free"
    else:
        needed = (
            f"{pipeline.num_rollout_nodes} rollout and {pipeline.num_train_nodes} train nodes; {free_rollout:.0f} and "
            f"{free_train:.0f} are free"
        )
    return Refusal(
        reason=f"pipeline {pipeline.id} needs {needed}, and none of {view.num_groups} groups takes it within memory "
        "and every SLO",
        is_final=False,
    )
