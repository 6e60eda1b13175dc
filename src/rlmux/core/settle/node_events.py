"""Nodes that are about to go, that are lost, that join, and that have another price.

    NoticeGiven ─▶ nothing is placed there; pipelines pinned there park at their next step boundary, with a checkpoint
                   ─▶ placed elsewhere, or later      those whose step does not end in time are lost with the node
NodeLost ─▶ pipelines pinned there wait, from their last published version ─▶ placed elsewhere, or later
NodeJoined ─▶ waiting pipelines are tried again
PoolPriced ─▶ waiting pipelines are tried again, and the policy regroups at the new price

Several sources report a node: Ray, a notice that has expired, a user. An event that tells of a node what is known
already changes nothing; one about a node that the cluster does not have is an error.
"""

from __future__ import annotations

from rlmux.core.actions import Action, ExpectLoss, Park
from rlmux.core.events import NodeJoined, NodeLost, NoticeGiven, PoolPriced
from rlmux.core.model import NodeId, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.settle import filler_placement, parking, placer
from rlmux.core.settle.parts import Parts
from rlmux.core.steps.step_machine import PipelineInput


def on_notice_given(parts: Parts, event: NoticeGiven) -> list[Action]:
    """Pipelines leave the node while they can. An on-demand one has no step boundary: it stays to the end."""
    _check_exists(parts, event.node)
    if _is_gone(parts, event.node):
        return []
    actions: list[Action] = [ExpectLoss(node=event.node, at_s=event.gone_at_s)]
    if parts.ledger.is_about_to_go(event.node):
        return actions  # it goes at another time
    parts.ledger.expect_loss(event.node)
    actions += filler_placement.leave_node(parts, event.node)
    for run in parts.state.runs.values():
        if run.status is PipelineStatus.RUNNING and not run.pipeline.work_arrives and _is_on(run, event.node):
            parking.request(parts, run)
    return actions


def on_node_lost(parts: Parts, event: NodeLost) -> list[Action]:
    """Pipelines pinned to the node go back to waiting, from their last published version.

    So does one that was about to move there: its processes, which are elsewhere, are ended.
    """
    _check_exists(parts, event.node)
    if _is_gone(parts, event.node):
        return []
    state = parts.state
    actions = filler_placement.lose_node(parts, event.node)
    lost = dict.fromkeys(parts.ledger.lose_node(event.node))
    lost.update(
        (run.pipeline.id, None)
        for run in state.runs.values()
        if run.nodes.placement is not None and event.node in run.nodes.placement.nodes
    )
    for pipeline in lost:
        actions += _wait_without(parts, state.runs[pipeline], event.node)
    state.dirty.queue = True
    return actions


def _wait_without(parts: Parts, run: PipelineRun, node: NodeId) -> list[Action]:
    parts.groups.plan_move(run, None)
    parts.orders.end_all(run)
    if run.status is not PipelineStatus.RUNNING:  # it was waiting for these orders to end
        parts.state.dirty.over[run.pipeline.id] = run
        return []
    is_elsewhere = run.nodes.placement is not None and node not in run.nodes.placement.nodes
    group = placer.unpin(parts, run)
    parts.state.dirty.groups[group.id] = group
    parts.ledger.depart(run.pipeline.id)
    parking.forget(run)
    parts.steps.move_pipeline(run, PipelineInput.NODE_LOST)
    parts.queue.wait_again(run)
    return [Park(pipeline=run.pipeline.id)] if is_elsewhere else []


def on_node_joined(parts: Parts, event: NodeJoined) -> list[Action]:
    _check_exists(parts, event.node)
    if not parts.ledger.is_lost(event.node):
        return []
    was_about_to_go = parts.ledger.is_about_to_go(event.node)
    parts.ledger.regain_node(event.node)
    parts.state.dirty.queue = True
    return [ExpectLoss(node=event.node, at_s=None)] if was_about_to_go else []


def on_pool_priced(parts: Parts, event: PoolPriced) -> list[Action]:
    if event.pool not in parts.ledger.cluster.pools:
        raise parts.journal.illegal(f"pool {event.pool} is priced; pools: {', '.join(parts.ledger.cluster.pools)}")
    parts.ledger.set_price(event.pool, event.usd_per_gpu_hour)
    parts.state.dirty.queue = parts.state.dirty.balance = True
    return []


def _check_exists(parts: Parts, node: NodeId) -> None:
    if not parts.cluster.has_node(node):
        raise parts.journal.illegal(f"no node {node}; nodes: {parts.cluster.node_names()}")


def _is_gone(parts: Parts, node: NodeId) -> bool:
    """Whether it is lost, and not only about to go."""
    return parts.ledger.is_lost(node) and not parts.ledger.is_about_to_go(node)


def _is_on(run: PipelineRun, node: NodeId) -> bool:
    """Whether the pipeline is pinned to the node, or about to be."""
    return any(
        placement is not None and node in placement.nodes
        for placement in (run.nodes.placement, run.nodes.next_placement)
    )
