"""Fillers: pipelines that take only what no other pipeline wants, and leave at the next safe point.

    PipelineSubmitted ─▶ waiting ── place ─▶ pinned to nodes ── start ─▶ computes on a device where nothing does
                            ▲                    │                            │
                            └── its memory ◀─────┘       Pause ◀── a policy chooses work for that device
                                is needed

No policy, ledger or queue sees them, so all decisions are made as if there were none:

- a free device is free though a filler computes there; where work is chosen for it, the filler is paused, and
  the policy chooses again afterwards: the work begins late by one safe point at most. One that looks ahead (`jigsaw`)
  plans again from there, which may be another plan
- a filler's state lies on a device only beside those of others. Where sizes are not known, each fills a device: then
  others come back by a warm switch
- a filler's processes are in host memory only as far as others leave it; when they need it, its processes end, and it
  goes on elsewhere or later

Its rollouts sample from the model that it was given, always: nothing that it does or leaves undone changes a result.
"""

from __future__ import annotations

from rlmux.core.actions import Action, Admit, Park
from rlmux.core.model import AdmissionKind, NodeId, Phase, PipelineStatus, Placement, Pool
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.choice import Refusal
from rlmux.core.settle import parking
from rlmux.core.settle.parts import Parts
from rlmux.core.state import FILLERS, SchedulerState
from rlmux.core.steps.step_machine import PipelineInput

CHUNK_S = 0.1
"""Longest uninterrupted piece of a filler's work, in seconds: it leaves a device within it, and what it has begun."""


def place(parts: Parts) -> list[Action]:
    """End the processes of fillers whose host memory others need now, and pin waiting ones to nodes."""
    parts.state.dirty.fillers = False
    actions = _make_room(parts)
    for run in list(parts.state.waiting_fillers.values()):
        if not run.admission.is_held:  # those that were submitted first come first
            actions += _place(parts, run)
    return actions


def start(parts: Parts) -> list[Action]:
    """Start ready work on devices where nothing computes, the oldest first."""
    state = parts.state
    actions: list[Action] = []
    for work in list(state.fillers.ready.values()):
        run = state.runs[work.pipeline]
        if not work.is_waiting and parts.leases.can_take_idle(run, work.devices[0]):
            del state.fillers.ready[work.sequence]
            actions.append(parts.steps.start(run, work, 1.0, 1.0))
    return actions


def unpin(parts: Parts, run: PipelineRun) -> None:
    """Take the filler off its nodes."""
    parts.orders.end_all(run)
    parts.steps.withdraw(run)
    parts.groups.leave_fillers(run)


def begin_again(parts: Parts, run: PipelineRun, restored_step: int) -> None:
    """The filler's processes were started anew: what is known of the open step is sampled again."""
    parts.orders.end_all(run)
    parts.steps.withdraw(run)
    parts.leases.forget_states(run)
    parts.steps.begin_after(run, restored_step)


def lose_node(parts: Parts, node: NodeId) -> list[Action]:
    """Fillers that are pinned to the node wait; their processes have ended."""
    actions: list[Action] = []
    for run in _on_node(parts.state, node):
        if run.status is PipelineStatus.RUNNING:
            unpin(parts, run)
            actions += parking.end(parts, run)
        else:
            parts.state.dirty.over[run.pipeline.id] = run
    return actions


def leave_node(parts: Parts, node: NodeId) -> list[Action]:
    """The node is about to go: fillers there end their processes, and go on elsewhere."""
    there = [run for run in _on_node(parts.state, node) if run.status is PipelineStatus.RUNNING]
    return [*(Park(pipeline=run.pipeline.id) for run in there), *lose_node(parts, node)]


def _on_node(state: SchedulerState, node: NodeId) -> list[PipelineRun]:
    return [
        run
        for run in state.fillers.members.values()
        if run.nodes.placement is not None and node in run.nodes.placement.nodes
    ]


def _place(parts: Parts, run: PipelineRun) -> list[Action]:
    choice = _nodes_for(parts, run)
    if not isinstance(choice, Refusal):
        return [_admit(parts, run, choice)]
    if choice.is_final:
        parts.steps.move_pipeline(run, PipelineInput.REFUSED)
        del parts.state.waiting_fillers[run.pipeline.id]
    return parts.queue.refuse(run, choice)


def _admit(parts: Parts, run: PipelineRun, nodes: tuple[NodeId, ...]) -> Admit:
    parts.queue.start(run)
    parking.forget(run)
    parts.steps.move_pipeline(run, PipelineInput.PLACED)
    placement = Placement(group=FILLERS, rollout_nodes=nodes, train_nodes=())
    parts.groups.join_fillers(run, placement)
    parts.steps.begin_after(run, max(run.admission.restart_step, 0))
    return Admit(pipeline=run.pipeline.id, placement=placement, kind=AdmissionKind.DIRECT)


def _nodes_for(parts: Parts, run: PipelineRun) -> tuple[NodeId, ...] | Refusal:
    """The nodes with the fewest pipelines that have memory for it, or why there are none."""
    pool, count, name = _pool(parts), run.pipeline.num_rollout_nodes, run.pipeline.id
    assert pool is not None, "a cluster has a pool that serves rollouts"
    need = run.pipeline.footprint.rollout_host_bytes
    if need > pool.host_memory_bytes or (pool.num_nodes is not None and count > pool.num_nodes):
        has = f"pool {pool.name} has {pool.num_nodes} nodes of {pool.host_memory_bytes / 1e9:.3f} GB"
        return Refusal(reason=f"{name} requests {count} nodes with {need / 1e9:.3f} GB each; {has}", is_final=True)
    held = _held_bytes(parts)
    num_pinned = _num_pinned(parts)
    there = range(pool.num_nodes) if pool.num_nodes is not None else sorted({node.index for node in num_pinned})
    present = [node for index in there if not parts.ledger.is_lost(node := NodeId(pool.name, index))]
    nodes = [node for node in present if held.get(node, 0.0) + need <= pool.host_memory_bytes]
    if len(nodes) < count:
        spare = f"of {len(present)} nodes {len(nodes)} have host memory to spare"
        reason = f"{name} is a filler and requests {count}: {spare}"
        return Refusal(reason=reason, is_final=False)
    nodes.sort(key=lambda node: (num_pinned.get(node, 0), node.index))
    return tuple(sorted(nodes[:count]))


def _make_room(parts: Parts) -> list[Action]:
    """End the processes of fillers whose host memory others need now, the youngest first."""
    pool = _pool(parts)
    if pool is None or not parts.state.fillers.members:
        return []
    actions: list[Action] = []
    held = _held_bytes(parts)
    for run in reversed(list(parts.state.fillers.members.values())):
        assert run.nodes.placement is not None
        nodes = run.nodes.placement.nodes
        if run.status is not PipelineStatus.RUNNING or all(held[node] <= pool.host_memory_bytes for node in nodes):
            continue
        for node in nodes:
            held[node] -= run.pipeline.footprint.rollout_host_bytes
        actions.append(Park(pipeline=run.pipeline.id))
        unpin(parts, run)
        actions += parking.end(parts, run)
    return actions


def _held_bytes(parts: Parts) -> dict[NodeId, float]:
    """Host memory that pipelines and fillers keep on each node, in bytes."""
    held: dict[NodeId, float] = {}
    for run, placement in _placed(parts):
        footprint = run.pipeline.footprint
        for node in placement.rollout_nodes:
            held[node] = held.get(node, 0.0) + footprint.rollout_host_bytes
        for node in placement.train_nodes:
            held[node] = held.get(node, 0.0) + footprint.train_host_bytes
    return held


def _num_pinned(parts: Parts) -> dict[NodeId, int]:
    """Pipelines and fillers on each node of the pool that serves rollouts."""
    pool, num_pinned = _pool(parts), dict[NodeId, int]()
    for _, placement in _placed(parts):
        for node in placement.nodes:
            if pool is not None and node.pool == pool.name:
                num_pinned[node] = num_pinned.get(node, 0) + 1
    return num_pinned


def _placed(parts: Parts) -> list[tuple[PipelineRun, Placement]]:
    """Each placement that has processes, or is about to."""
    placed = []
    for group in (*parts.state.groups.values(), parts.state.fillers):
        for run in group.members.values():
            if run.nodes.placement is not None:
                placed.append((run, run.nodes.placement))
            if run.nodes.next_placement is not None:
                placed.append((run, run.nodes.next_placement))
    return placed


def _pool(parts: Parts) -> Pool | None:
    """The pool that serves rollouts."""
    return parts.cluster.pool_serving(Phase.ROLLOUT)
