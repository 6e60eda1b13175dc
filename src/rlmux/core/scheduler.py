"""The scheduler: facts in, orders out. The only door through which state changes.

    event ──▶ handle ──▶ apply the fact, which marks what is dirty ──▶ settle, until nothing is ──▶ [actions]

    settle    over          pipelines that ended give their nodes back
              queue         waiting pipelines are placed                       Policy.place
              balance       pipelines are chosen to relocate                   Policy.rebalance
              admitted      pipelines that were placed begin, wherever they are placed by now
              boundaries    between two steps, a pipeline parks, relocates, or opens its next rollout
              expectations  what is expected of steps, where that is new
              groups        ready work starts, pauses or migrates              Policy.dispatch
              fillers       what no other pipeline wants
              faults        decisions of the policy that failed are reported

Two tiers. *Placement* pins a pipeline to nodes and thereby to a co-execution group. *Dispatch* decides, inside one
group, which ready work starts on which free device. A policy answers both questions and touches nothing: every
choice is checked, recorded as intended, and becomes an action. A decision that fails changes nothing: the plain order
of work stands in for it (`policy_faults.py`).

No stage calls another: it marks, and the first stage with something marked is next. So every event ends with the same
questions in the same order, whatever it was.

The same object serves the simulator (virtual time) and the runtime's controller (real time); they are its only
callers. It reads no clock: time is a field of the event. Replaying the events of a log gives the same
actions again, which is how a run is resumed. Drivers and displays read it through `query`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlmux.core import events
from rlmux.core.actions import Action
from rlmux.core.decision.policy import Policy
from rlmux.core.events import Event
from rlmux.core.model import Cluster, PipelineId
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.query import SchedulerQuery
from rlmux.core.queue.accounts import AccountRow, Bill, account_rows, bill_of
from rlmux.core.queue.wait_reasons import Wait, wait_of, waits
from rlmux.core.queue_order import AccountSpent, AccountUsage, QueueOrder
from rlmux.core.settle import admin_events, filler_placement, lifecycle_events, node_events, placer, step_events
from rlmux.core.settle.dispatch import dispatch
from rlmux.core.settle.parts import Parts
from rlmux.core.state import SchedulerState

_APPLY: dict[type, Callable[[Parts, Any], list[Action]]] = {
    events.PipelineSubmitted: lifecycle_events.on_submitted,
    events.PipelineCancelled: lifecycle_events.on_cancelled,
    events.ClientFinished: lifecycle_events.on_client_finished,
    events.PipelineFailed: lifecycle_events.on_failed,
    events.PipelineRestarted: lifecycle_events.on_restarted,
    events.WorkerLost: lifecycle_events.on_worker_lost,
    events.StageFinished: step_events.on_stage_finished,
    events.StagePaused: step_events.on_stage_paused,
    events.WorkArrived: step_events.on_work_announced,
    events.WorkWithdrawn: step_events.on_work_announced,
    events.ReplyArrived: step_events.on_reply_arrived,
    events.RewardOverdue: step_events.on_reward_overdue,
    events.ChunkFinished: step_events.on_chunk_finished,
    events.TrajectoriesMigrated: step_events.on_trajectories_migrated,
    events.NoticeGiven: node_events.on_notice_given,
    events.NodeLost: node_events.on_node_lost,
    events.NodeJoined: node_events.on_node_joined,
    events.PoolPriced: node_events.on_pool_priced,
    events.PipelineHeld: admin_events.on_held,
    events.HoldReleased: admin_events.on_hold_released,
    events.PipelineRanked: admin_events.on_ranked,
    events.ParkRequested: admin_events.on_park_requested,
    events.PipelineParked: admin_events.on_parked,
    events.SharesSet: admin_events.on_shares_set,
    events.UsageRestored: admin_events.on_usage_restored,
    events.WaitsRestored: admin_events.on_waits_restored,
    events.AlikeRestored: lifecycle_events.on_alike_restored,
    events.TimeReached: admin_events.on_time_reached,
}
"""How each event is applied: the state that it is a fact of, and what is dirty then; the orders that are part of it."""
_ROUNDS_OF_A_PIPELINE = 100
"""Rounds of settling for each pipeline, at most. In simulations of up to 60 pipelines 13 were the most in all."""
_OF_WORK = frozenset({events.StageFinished, events.StagePaused, events.ChunkFinished, events.ReplyArrived})
"""Events that by themselves change nothing about nodes, so that fillers stay where they are."""


class Scheduler:
    """Decides for a whole cluster; see the module's picture.

    Raises IllegalTransitionError, with the recent events, when an event does not fit the state, which is then not to
    be used further.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        queue_order: QueueOrder | None = None,
        *,
        raises_policy_faults: bool = False,
    ) -> None:
        """`queue_order`: in which order waiting pipelines are offered room; without, that of submission.
        `raises_policy_faults`: for tests, a decision of the policy that fails raises its error.
        """
        self.cluster = cluster
        self.policy = policy
        self._parts = Parts.of(cluster, policy, queue_order, raises_policy_faults=raises_policy_faults)
        self.query = SchedulerQuery(self._parts.state, self._parts.placement)
        """All that drivers, displays and tests may read."""

    def handle(self, event: Event) -> list[Action]:
        """Apply one fact and return the orders that follow from it, in the order they are to be carried out."""
        parts, state, kind = self._parts, self._parts.state, type(event)
        parts.journal.add(event)
        if not event.time_s >= state.now_s:
            raise parts.journal.illegal(f"time goes from {state.now_s} to {event.time_s}: it has no date, or goes back")
        state.now_s = event.time_s
        state.dirty.fillers = kind not in _OF_WORK
        return _APPLY[kind](parts, event) + self._settle()

    def _settle(self) -> list[Action]:
        """Place, rebalance, dispatch and fill until nothing is dirty.

        It ends because each stage takes its mark away, and a change of nodes, which alone marks earlier stages, is made
        once: a pipeline leaves its nodes, and is placed or relocated at one time, only once. Raises
        IllegalTransitionError, with the last marks, where that does not hold.
        """
        parts, dirty = self._parts, self._parts.state.dirty
        limit = _ROUNDS_OF_A_PIPELINE * (len(parts.state.runs) + 1)
        over, admitted, boundaries, groups = dirty.over, dirty.admitted, dirty.boundaries, dirty.groups
        actions: list[Action] = []
        for _ in parts.journal.rounds(limit, dirty.marked):
            if over:
                actions += placer.release(parts, over.pop(next(iter(over))))
            elif dirty.queue or dirty.newcomer is not None:
                actions += placer.place_waiting(parts)
            elif dirty.balance:
                placer.rebalance(parts)
            elif admitted:
                actions += placer.begin_admitted(parts, *admitted.pop(next(iter(admitted))))
            elif boundaries:
                actions += placer.pass_boundary(parts, boundaries.pop(next(iter(boundaries))))
            elif dirty.expectations:
                dirty.expectations = False
                actions += parts.expectations.emit()
            elif groups:
                actions += dispatch(parts, groups.pop(next(iter(groups))))
            elif dirty.fillers:
                actions += filler_placement.place(parts)
            elif dirty.policy_faults:
                actions += parts.faults.take()
            elif parts.state.fillers.ready:
                return actions + filler_placement.start(parts)
            else:
                break
        return actions

    def wait_of(self, pipeline: PipelineId) -> Wait | None:
        """Why this pipeline waits, and what would start it now; None where it does not wait. Decides nothing."""
        parts = self._parts
        run, state, shares = parts.state.runs[pipeline], parts.state, parts.shares
        with parts.faults.uncounted():
            return wait_of(run, state=state, ledger=parts.ledger, queue=parts.queue, shares=shares)

    def waits(self, limit: int) -> list[tuple[PipelineId, Wait]]:
        """Wait reasons of the first in the queue, in the order of offers; held pipelines come last."""
        parts = self._parts
        with parts.faults.uncounted():
            found = waits(state=parts.state, queue=parts.queue, shares=parts.shares, limit=limit)
        return [(run.pipeline.id, wait) for run, wait in found]

    def accounts(self) -> tuple[AccountRow, ...]:
        """What projects and users have used, and are entitled to. Decides nothing."""
        return account_rows(self._parts.state, self._parts.shares)

    def bill(self) -> Bill:
        """What all charges add up to. Decides nothing."""
        return bill_of(self._parts.state, self._parts.shares)

    def usage(self) -> tuple[AccountUsage, ...]:
        """Usage for a later part of the run. Decides nothing."""
        return self._parts.shares.usage() if self._parts.shares.are_set else ()

    def spent(self) -> tuple[AccountSpent, ...]:
        """As `usage`, of the dollars of budgets. Decides nothing."""
        return self._parts.shares.spent()

    def raise_policy_faults(self) -> None:
        """From now on a decision of the policy that fails raises its error: for tests."""
        self._parts.faults.raises = True

    @property
    def state(self) -> SchedulerState:
        """What the invariants check. Nothing outside `core` reads it, and nothing but this class changes it."""
        return self._parts.state

    @property
    def ledger(self) -> PlacementLedger:
        """What the invariants check, as `state`."""
        return self._parts.ledger
