"""Nodes that are lost and that join: what was there goes on elsewhere.

NodeLost ─▶ pipelines pinned there wait, from their last published version ─▶ placed elsewhere, or later
NodeJoined ─▶ waiting pipelines are tried again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlmux.core.actions import Park
from rlmux.core.events import NodeJoined, NodeLost
from rlmux.core.fillers import Fillers
from rlmux.core.journal import Journal
from rlmux.core.model import PipelineStatus
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
        return {NodeLost: self._on_node_lost, NodeJoined: self._on_node_joined}

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
        self._ledger.regain_node(event.node)
        self._fillers.regain_node(event.node)
        self._placing.place_waiting()
