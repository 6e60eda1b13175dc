"""Fillers: pipelines that take only what no other pipeline wants, and leave at the next safe point.

    PipelineSubmitted ─▶ waiting ── place ─▶ pinned to nodes ── start ─▶ computes on a device where nothing does
                            ▲                    │                            │
                            └── its memory ◀─────┘       Pause ◀── a policy chooses work for that device
                                is needed

No policy, ledger or queue knows of them, so all decisions are made as if there were none:

- a free device is free though a filler computes there; where work is chosen for it, the filler is told to pause, and
  the policy is asked again when it has: the work begins late by one safe point at most. One that looks ahead (`jigsaw`)
  plans again from there, which may be another plan
- a filler's state lies on a device only beside those of others. Where sizes are not known, each fills a device: then
  others come back by a warm switch
- a filler's processes are in host memory only as far as others leave it; when they need it, its processes end, and it
  goes on elsewhere or later

Its rollouts sample from the model that it was given, always: nothing that it does or leaves undone changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlmux.core.actions import Action, Admit, Park, Queue, Refuse, Release, Relocate
from rlmux.core.admission_queue import AdmissionQueue
from rlmux.core.events import ChunkFinished, Event, ReplyArrived, StageFinished, StagePaused
from rlmux.core.journal import Journal
from rlmux.core.leases import Leases
from rlmux.core.model import AdmissionKind, Cluster, NodeId, Phase, PipelineStatus, Placement
from rlmux.core.orders import Orders
from rlmux.core.parking import Parking
from rlmux.core.placement import PlacementLedger
from rlmux.core.placement_choice import Refusal
from rlmux.core.state import FILLERS, GroupState, PipelineRun, SchedulerState
from rlmux.core.step_machine import PipelineInput, StepMachine

CHUNK_S = 0.1
"""Longest uninterrupted piece of a filler's work, in seconds: it leaves a device within it, and what it has begun."""
_OF_WORK = (StageFinished, StagePaused, ChunkFinished, ReplyArrived)
"""Events that by themselves change nothing about nodes."""
_OF_NODES = (Admit, Relocate, Release, Park, Refuse, Queue)
"""Actions after which nodes, or what waits for them, may be others."""


class Fillers:
    """Places fillers and starts their work; see the module."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        ledger: PlacementLedger,
        state: SchedulerState,
        queue: AdmissionQueue,
        leases: Leases,
        orders: Orders,
        steps: StepMachine,
        parking: Parking,
        journal: Journal,
        dispatch: Callable[[GroupState], None],
    ) -> None:
        """`dispatch`: starts what the policy chooses in a group."""
        self._pool = cluster.pool_serving(Phase.ROLLOUT)
        self._cluster = cluster
        self._ledger = ledger
        self._state = state
        self._queue = queue
        self._leases = leases
        self._orders = orders
        self._steps = steps
        self._parking = parking
        self._journal = journal
        self._dispatch = dispatch

    def submit(self, run: PipelineRun) -> None:
        """A filler has come; `fill` places it."""
        self._state.waiting_fillers[run.pipeline.id] = run

    def fill(self, event: Event, actions: Sequence[Action]) -> None:
        """Take what others left of an event, once all of them have been served. `actions`: decided for it so far."""
        if not isinstance(event, _OF_WORK) or any(isinstance(action, _OF_NODES) for action in actions):
            self._make_room()
            self._place()
        self._return_devices()
        self._start()

    def release(self, run: PipelineRun) -> None:
        """The filler is over: its processes end."""
        self._unpin(run)
        self._journal.act(Release(pipeline=run.pipeline.id))

    def park(self, run: PipelineRun) -> None:
        """The filler has ended its processes at a step boundary: it waits."""
        self._unpin(run)
        self._parking.end(run, self._steps)

    def begin_again(self, run: PipelineRun, restored_step: int) -> None:
        """The filler's processes were started anew: what is known of the open step is sampled again."""
        self._orders.end_all(run)
        self._steps.withdraw(run)
        self._forget_states(run)
        self._steps.begin_after(run, restored_step)

    def lose_node(self, node: NodeId) -> None:
        """Fillers that are pinned to the node wait; their processes have ended."""
        for run in list(self._state.fillers.members.values()):
            if run.placement is not None and node in run.placement.nodes:
                if run.status is PipelineStatus.RUNNING:
                    self.park(run)
                else:
                    self.release(run)

    def leave_node(self, node: NodeId) -> None:
        """The node is about to go: fillers there end their processes, and go on elsewhere."""
        for run in self._state.fillers.members.values():
            if run.placement is not None and node in run.placement.nodes and run.status is PipelineStatus.RUNNING:
                self._journal.act(Park(pipeline=run.pipeline.id))
        self.lose_node(node)

    # ------------------------------------------------------------------ devices

    def _return_devices(self) -> None:
        """Let groups start what they chose on devices that fillers have left."""
        state = self._state
        groups: dict[int, GroupState] = {}
        for device, group_id in list(state.wanted_by.items()):
            if state.devices[device].filler is None:
                del state.wanted_by[device]
                if group_id in state.groups:
                    groups[group_id] = state.groups[group_id]
        for group in groups.values():
            self._dispatch(group)

    def _start(self) -> None:
        """Start ready work on devices where nothing computes, the oldest first."""
        state = self._state
        for work in list(state.fillers.ready.values()):
            run = state.runs[work.pipeline]
            if not work.is_waiting and self._leases.can_take_idle(run, work.devices[0]):
                del state.fillers.ready[work.sequence]
                self._steps.start(run, work, 1.0, 1.0)

    # ------------------------------------------------------------------ nodes

    def _place(self) -> None:
        """Pin waiting fillers to nodes, those that were submitted first first."""
        for run in list(self._state.waiting_fillers.values()):
            if run.is_held:
                continue
            choice = self._nodes_for(run)
            if isinstance(choice, Refusal):
                if choice.is_final:
                    self._steps.move_pipeline(run, PipelineInput.REFUSED)
                    del self._state.waiting_fillers[run.pipeline.id]
                self._queue.tell(run, choice)
            else:
                self._admit(run, choice)

    def _admit(self, run: PipelineRun, nodes: tuple[NodeId, ...]) -> None:
        state = self._state
        del state.waiting_fillers[run.pipeline.id]
        self._parking.forget(run)
        run.reason, run.admitted_s = "", state.now_s
        self._steps.move_pipeline(run, PipelineInput.PLACED)
        run.placement = placement = Placement(group=FILLERS, rollout_nodes=nodes, train_nodes=())
        pool = self._cluster.pools[nodes[0].pool]
        run.rollout_devices = tuple(device for node in nodes for device in pool.devices(node))
        self._leases.add_devices(placement)
        state.fillers.members[run.pipeline.id] = run
        self._journal.act(Admit(pipeline=run.pipeline.id, placement=placement, kind=AdmissionKind.DIRECT))
        self._steps.begin_after(run, max(run.restart_step, 0))

    def _nodes_for(self, run: PipelineRun) -> tuple[NodeId, ...] | Refusal:
        """The nodes with the fewest pipelines that have memory for it, or why there are none."""
        pool, count, name = self._pool, run.pipeline.num_rollout_nodes, run.pipeline.id
        assert pool is not None, "a cluster has a pool that serves rollouts"
        need = run.pipeline.footprint.rollout_host_bytes
        if need > pool.host_memory_bytes or (pool.num_nodes is not None and count > pool.num_nodes):
            has = f"pool {pool.name} has {pool.num_nodes} nodes of {pool.host_memory_bytes / 1e9:.3f} GB"
            return Refusal(reason=f"{name} asks for {count} nodes with {need / 1e9:.3f} GB each; {has}", is_final=True)
        held = self._held_bytes()
        num_pinned = self._num_pinned()
        there = range(pool.num_nodes) if pool.num_nodes is not None else sorted({node.index for node in num_pinned})
        present = [node for index in there if not self._ledger.is_lost(node := NodeId(pool.name, index))]
        nodes = [node for node in present if held.get(node, 0.0) + need <= pool.host_memory_bytes]
        if len(nodes) < count:
            spare = f"of {len(present)} nodes {len(nodes)} have host memory to spare"
            reason = f"{name} is a filler and asks for {count}: {spare}"
            return Refusal(reason=reason, is_final=False)
        nodes.sort(key=lambda node: (num_pinned.get(node, 0), node.index))
        return tuple(sorted(nodes[:count]))

    def _make_room(self) -> None:
        """End the processes of fillers whose host memory others need now, the youngest first."""
        if self._pool is None or not self._state.fillers.members:
            return
        held = self._held_bytes()
        for run in reversed(list(self._state.fillers.members.values())):
            assert run.placement is not None
            nodes = run.placement.nodes
            if run.status is not PipelineStatus.RUNNING or all(
                held[node] <= self._pool.host_memory_bytes for node in nodes
            ):
                continue
            for node in nodes:
                held[node] -= run.pipeline.footprint.rollout_host_bytes
            self._journal.act(Park(pipeline=run.pipeline.id))
            self.park(run)

    def _held_bytes(self) -> dict[NodeId, float]:
        """Host memory that pipelines and fillers keep on each node, in bytes."""
        held: dict[NodeId, float] = {}
        for run, placement in self._placed():
            footprint = run.pipeline.footprint
            for node in placement.rollout_nodes:
                held[node] = held.get(node, 0.0) + footprint.rollout_host_bytes
            for node in placement.train_nodes:
                held[node] = held.get(node, 0.0) + footprint.train_host_bytes
        return held

    def _num_pinned(self) -> dict[NodeId, int]:
        """Pipelines and fillers on each node of the pool that serves rollouts."""
        num_pinned: dict[NodeId, int] = {}
        for _, placement in self._placed():
            for node in placement.nodes:
                if self._pool is not None and node.pool == self._pool.name:
                    num_pinned[node] = num_pinned.get(node, 0) + 1
        return num_pinned

    def _placed(self) -> list[tuple[PipelineRun, Placement]]:
        """Each placement that has processes, or is about to."""
        placed = []
        for group in (*self._state.groups.values(), self._state.fillers):
            for run in group.members.values():
                if run.placement is not None:
                    placed.append((run, run.placement))
                if run.next_placement is not None:
                    placed.append((run, run.next_placement))
        return placed

    def _unpin(self, run: PipelineRun) -> None:
        """Take the filler off its nodes."""
        self._orders.end_all(run)
        self._steps.withdraw(run)
        self._forget_states(run)
        del self._state.fillers.members[run.pipeline.id]
        run.placement, run.rollout_devices = None, ()

    def _forget_states(self, run: PipelineRun) -> None:
        for device in run.rollout_devices:
            self._leases.remove_state(run, Phase.ROLLOUT, device)
        run.host_resident.clear()
