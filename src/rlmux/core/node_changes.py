"""Nodes that are about to go, that are lost and that join: what was there goes on elsewhere.

    NoticeGiven ─▶ nothing is placed there; pipelines pinned there park at their next step boundary, with a checkpoint
                   ─▶ placed elsewhere, or later      those whose step does not end in time are lost with the node
NodeLost ─▶ pipelines pinned there wait, from their last published version ─▶ placed elsewhere, or later
NodeJoined ─▶ waiting pipelines are tried again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlmux.core.actions import ExpectLoss, Park
from rlmux.core.events import NodeJoined, NodeLost, NoticeGiven
from rlmux.core.fillers import Fillers
from rlmux.core.journal import Journal
from rlmux.core.model import NodeId, PipelineStatus
from rlmux.core.orders import Orders
from rlmux.core.parking import Parking
from rlmux.core.placement import PlacementLedger
from rlmux.core.placing import Placing
from rlmux.core.state import GroupState, PipelineRun, SchedulerState
from rlmux.core.step_machine import PipelineInput, StepMachine


class NodeChanges:
    """Handles these events; see the module."""

    def __init__(
        self,
        *,
        state: SchedulerState,
        ledger: PlacementLedger,
        placing: Placing,
        parking: Parking,
        fillers: Fillers,
        orders: Orders,
        steps: StepMachine,
        journal: Journal,
        dispatch: Callable[[GroupState], None],
    ) -> None:
        """`dispatch`: starts what the policy chooses in a group."""
        self._state = state
        self._ledger = ledger
        self._placing = placing
        self._parking = parking
        self._fillers = fillers
        self._orders = orders
        self._steps = steps
        self._journal = journal
        self._dispatch = dispatch

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {
            NoticeGiven: self._on_notice_given,
            NodeLost: self._on_node_lost,
            NodeJoined: self._on_node_joined,
        }

    def _on_notice_given(self, event: NoticeGiven) -> None:
        """Pipelines leave the node while they can. One whose work arrives has no step boundary: it stays to the end."""
        self._journal.act(ExpectLoss(node=event.node, at_s=event.gone_at_s))
        if self._ledger.is_about_to_go(event.node):
            return  # it goes at another time
        self._ledger.expect_loss(event.node)
        self._fillers.leave_node(event.node)
        for run in list(self._state.runs.values()):
            if run.status is PipelineStatus.RUNNING and not run.pipeline.work_arrives and _is_on(run, event.node):
                self._parking.request(run)
                if not run.shards:
                    self._steps.open_rollout(run)

    def _on_node_lost(self, event: NodeLost) -> None:
        """Pipelines pinned to the node go back to waiting, from their last published version.

        So does one that was about to move there: its processes, which are elsewhere, are ended.
        """
        self._fillers.lose_node(event.node)
        lost = dict.fromkeys(self._ledger.lose_node(event.node))
        lost.update(
            (run.pipeline.id, None)
            for run in self._state.runs.values()
            if run.placement is not None and event.node in run.placement.nodes
        )
        groups: dict[int, GroupState] = {}
        cancelled: list[PipelineRun] = []
        for pipeline in lost:
            run = self._state.runs[pipeline]
            run.next_placement = None
            self._orders.end_all(run)
            if run.status is not PipelineStatus.RUNNING:  # it was waiting for these orders to end
                cancelled.append(run)
                continue
            if run.placement is not None and event.node not in run.placement.nodes:
                self._journal.act(Park(pipeline=pipeline))
            group = self._placing.unpin(run)
            groups[group.id] = group
            self._ledger.depart(run.pipeline.id)
            run.restart_step = run.published_version
            run.waiting_since_s = self._state.now_s
            self._parking.forget(run)
            self._steps.move_pipeline(run, PipelineInput.NODE_LOST)
            self._state.waiting[run.pipeline.id] = run
        for run in cancelled:
            self._placing.release(run)
        self._placing.place_waiting()
        for group in groups.values():
            if group.members:
                self._dispatch(group)

    def _on_node_joined(self, event: NodeJoined) -> None:
        if self._ledger.is_about_to_go(event.node):
            self._journal.act(ExpectLoss(node=event.node, at_s=None))
        self._ledger.regain_node(event.node)
        self._placing.place_waiting()


def _is_on(run: PipelineRun, node: NodeId) -> bool:
    """Whether the pipeline is pinned to the node, or about to be."""
    return any(placement is not None and node in placement.nodes for placement in (run.placement, run.next_placement))
