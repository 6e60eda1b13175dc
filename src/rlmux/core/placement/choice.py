"""What a policy answers about placement, and what must hold of such a choice.

    policy.place(pipeline, view) ─▶ PlacementChoice | Refusal
    policy.rebalance(view)       ─▶ Relocations, FruitlessSearches

The ledger checks every choice (`check_choice`) before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import AdmissionKind, Cluster, GroupId, NodeId, Phase, Pipeline, PipelineId
from rlmux.core.placement.group_load import GroupLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """Where a policy wants a pipeline: existing nodes by name, new ones by number."""

    kind: AdmissionKind
    group: GroupId | None
    """The group to join; None: it founds one."""
    rollout_nodes: tuple[NodeId, ...] = ()
    """Existing rollout nodes of the group that it shares."""
    num_new_rollout_nodes: int = 0
    train_nodes: tuple[NodeId, ...] = ()
    """Existing training nodes of the group that it trains on."""
    num_new_train_nodes: int = 0
    """New training nodes that it trains on besides; they leave the group with their last member."""
    is_colocated: bool = False
    """Whether rollouts run on all nodes taken, training nodes first, and training on the first `num_train_nodes`."""
    is_shared: bool = False
    """Whether others may join a colocated pipeline on the same nodes, each training on the `train_nodes` it names."""
    steps_per_cycle: tuple[tuple[PipelineId, int], ...] = ()
    """Steps in each meta-iteration and, by their order, the cyclic order: for the pipeline and members of its new
    group. The others keep their steps per cycle and follow; a newcomer has 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a pipeline is not placed."""

    reason: str
    """One line, with the numbers."""
    is_final: bool
    """Whether it can never fit on this cluster; False: it may fit after a departure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """One pipeline's relocation, valid once those listed before it are done."""

    pipeline: PipelineId
    choice: PlacementChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class FruitlessSearch:
    """A search for a better grouping of these pipelines that found none."""

    pipelines: tuple[PipelineId, ...]


def check_choice(
    pipeline: Pipeline,
    choice: PlacementChoice,
    *,
    cluster: Cluster,
    num_free_nodes: Mapping[Phase, float],
    group: GroupLoad | None,
) -> None:
    """Raises IllegalTransitionError, saying why, where the choice cannot be carried out.

    `group` is the group that the choice names; None where it names none, or one that does not exist.
    """
    subject = f"pipeline {pipeline.id}: the choice {choice}"
    for phase, count in (
        (Phase.ROLLOUT, choice.num_new_rollout_nodes),
        (Phase.TRAIN, choice.num_new_train_nodes),
    ):
        free = num_free_nodes[phase]
        if not 0 <= count <= free:
            raise IllegalTransitionError(f"{subject} takes {count} new {phase} nodes; {free} are free")
        pool = cluster.pool_for(phase)
        need = _host_bytes(pipeline, phase, choice.is_colocated)
        if count and pool and need > pool.host_memory_bytes:
            raise IllegalTransitionError(
                f"{subject} needs {need / 1e9:.3f} GB on a {phase} node of {pool.host_memory_bytes / 1e9:.3f} GB"
            )
    if any(count < 1 for _, count in choice.steps_per_cycle):
        raise IllegalTransitionError(f"{subject} gives a member no step in the cycle")
    if choice.group is None:
        _check_founding(choice, subject)
    elif group is None:
        raise IllegalTransitionError(f"{subject} joins a group that does not exist")
    else:
        _check_joining(pipeline, choice, group, subject)


def _check_founding(choice: PlacementChoice, subject: str) -> None:
    if choice.rollout_nodes or choice.train_nodes:
        raise IllegalTransitionError(f"{subject} founds a group but names nodes that others hold")
    if choice.num_new_train_nodes + (choice.num_new_rollout_nodes if choice.is_colocated else 0) < 1:
        raise IllegalTransitionError(f"{subject} founds a group without a training node")
    if not choice.is_colocated and choice.num_new_rollout_nodes < 1:
        raise IllegalTransitionError(f"{subject} founds a group without a rollout node")


def _check_joining(pipeline: Pipeline, choice: PlacementChoice, group: GroupLoad, subject: str) -> None:
    if choice.is_shared and group.is_shared:
        _check_sharing(choice, group, subject)
    else:
        _check_disaggregated(choice, group, subject)
    if not group.has_memory_for(pipeline, choice.rollout_nodes):
        raise IllegalTransitionError(f"{subject}: group {group.id} has no memory for it")


def _check_disaggregated(choice: PlacementChoice, group: GroupLoad, subject: str) -> None:
    if choice.is_colocated or group.is_colocated:
        raise IllegalTransitionError(f"{subject} shares nodes that hold both phases of one pipeline")
    is_part = set(choice.train_nodes) <= set(group.train_nodes) and len(set(choice.train_nodes)) == len(
        choice.train_nodes
    )
    if not is_part or len(choice.train_nodes) + choice.num_new_train_nodes < 1:
        raise IllegalTransitionError(f"{subject}: group {group.id} has training nodes {group.train_nodes}")
    unknown = [node for node in choice.rollout_nodes if node not in group.rollout_nodes]
    if unknown or len(set(choice.rollout_nodes)) != len(choice.rollout_nodes):
        raise IllegalTransitionError(f"{subject}: group {group.id} has rollout nodes {group.rollout_nodes}")
    if len(choice.rollout_nodes) + choice.num_new_rollout_nodes < 1:
        raise IllegalTransitionError(f"{subject} names no rollout node")


def _check_sharing(choice: PlacementChoice, group: GroupLoad, subject: str) -> None:
    if choice.num_new_rollout_nodes or choice.num_new_train_nodes:
        raise IllegalTransitionError(f"{subject} adds nodes to a group whose members share all of them")
    if choice.rollout_nodes != group.rollout_nodes:
        raise IllegalTransitionError(f"{subject}: group {group.id} has rollout nodes {group.rollout_nodes}")
    if not choice.train_nodes or not set(choice.train_nodes) <= set(group.train_nodes):
        raise IllegalTransitionError(f"{subject}: group {group.id} has training nodes {group.train_nodes}")


def _host_bytes(pipeline: Pipeline, phase: Phase, is_colocated: bool) -> float:
    footprint = pipeline.footprint
    if is_colocated:
        return footprint.rollout_host_bytes + footprint.train_host_bytes
    return footprint.rollout_host_bytes if phase is Phase.ROLLOUT else footprint.train_host_bytes
