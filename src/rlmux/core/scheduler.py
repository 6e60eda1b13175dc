"""The scheduler: facts in, orders out. The only door through which state changes.

    driver ── event ──▶ handle ──▶ apply the fact ──▶ place what waits ──▶ dispatch the groups it touched ──▶ [actions]
                                        │                    │                        │
                                   StepMachine          Policy.place            Policy.dispatch

    Scheduler ─▶ StepMachine   each pipeline's life and steps, by tables of legal moves
              ─▶ Bursts        work that arrives instead of being planned
              ─▶ Dispatcher    what the policy chooses becomes orders
              ─▶ Groups        members of each co-execution group, and the cycle
              ─▶ Orders        what was ordered and has not ended
              ─▶ Leases        device fractions and residency
              ─▶ PlacementLedger   which pipeline is pinned to which nodes
              ─▶ Expectations  what its own steps say of a pipeline without an estimate
              ─▶ Placing       pipelines come to nodes, move to others and leave them
              ─▶ AdmissionQueue    which waiting pipeline starts, and why another waits
              ─▶ Shares        what accounts have used, and who is offered room first for it
              ─▶ Parking       running pipelines give their nodes back at a step boundary
              ─▶ Turns         who holds nodes next, where pipelines hold them by turns
              ─▶ Fillers       what no other pipeline wants, after each event
              ─▶ NodeChanges   nodes that are lost and join
              ─▶ Standings     what users say of their pipelines, and what was set for them

Two tiers. *Placement* pins a pipeline to nodes and thereby to a co-execution group. *Dispatch* decides, inside one
group, which ready work starts on which free device. A policy answers both questions and touches nothing: every
choice is checked here, recorded as intended, and becomes an action.

The same object serves the simulator (virtual time) and the runtime's controller (real time); they are its only
callers. It never asks what time it is: time is a field of the event. Replaying the events of a log gives the same
actions again, which is how a run is resumed. Drivers and displays read it through `query`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlmux.core.accounts import AccountRow, Bill, account_rows, bill_of
from rlmux.core.actions import Action, Switch
from rlmux.core.admission_queue import HELD, AdmissionQueue
from rlmux.core.bursts import Bursts
from rlmux.core.dispatcher import Dispatcher
from rlmux.core.events import (
    ChunkFinished,
    ClientFinished,
    Event,
    PipelineCancelled,
    PipelineFailed,
    PipelineRestarted,
    PipelineSubmitted,
    ReplyArrived,
    RewardOverdue,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkArrived,
    WorkerLost,
    WorkWithdrawn,
)
from rlmux.core.expectations import Expectations
from rlmux.core.fillers import Fillers
from rlmux.core.groups import Groups, device_keys
from rlmux.core.journal import Journal
from rlmux.core.leases import Leases
from rlmux.core.model import Cluster, DeviceId, OrderId, Phase, PipelineId, PipelineStatus, Stage
from rlmux.core.node_changes import NodeChanges
from rlmux.core.offers import AccountSpent, AccountUsage, QueueOrder
from rlmux.core.orders import Orders
from rlmux.core.parking import Parking
from rlmux.core.placement import PlacementLedger
from rlmux.core.placement_view import PlacementView
from rlmux.core.placing import Placing
from rlmux.core.policy import Policy
from rlmux.core.query import SchedulerQuery
from rlmux.core.shares import Shares
from rlmux.core.standings import Standings
from rlmux.core.state import Burst, Order, PipelineRun, SchedulerState, WorkState
from rlmux.core.step_machine import PipelineInput, StepMachine
from rlmux.core.turns import Turns
from rlmux.core.why import Wait, wait_of, waits


class Scheduler:
    """Decides for a whole cluster; see the module's picture.

    Raises IllegalTransitionError, with the recent events, when an event does not fit the state or a policy
    chooses what is not allowed; the state is then not to be used further.
    """

    def __init__(self, cluster: Cluster, policy: Policy, queue_order: QueueOrder | None = None) -> None:
        """`queue_order`: in which order waiting pipelines are offered room; without, that of submission."""
        self.cluster = cluster
        self.policy = policy
        self._state = SchedulerState()
        self._ledger = PlacementLedger(cluster, self._state.work_left)
        self._placement_view = PlacementView(self._ledger)
        self.query = SchedulerQuery(self._state, self._placement_view)
        """All that drivers, displays and tests may read."""
        self._journal = Journal(policy.name)
        self._leases = Leases(cluster, self._state, self._journal)
        self._shares = Shares(cluster, self._state, queue_order)
        self._orders = Orders(self._state, self._leases, self._shares, self._journal)
        self._expectations = Expectations(self._state, self._ledger, self._journal)
        self._groups = Groups(cluster, self._state, self._ledger, self._leases, self._shares)
        self._queue = AdmissionQueue(self._state, self._ledger, policy, self._journal, self._shares)
        turns = Turns(self._state, self._ledger, policy, self._shares)
        self._parking = Parking(
            self._state, self._ledger, self._queue, self._orders, self._shares, turns, self._journal
        )
        self._steps = StepMachine(
            self._state,
            self._orders,
            self._journal,
            relocate=lambda run: self._placing.relocate(run),
            release=lambda run: self._release(run),
            parks=self._parking.takes_effect,
        )
        self._dispatch = Dispatcher(
            self._state, policy, self._groups, self._orders, self._steps, self._leases, self._journal
        ).dispatch
        self._bursts = Bursts(
            self._state,
            self._orders,
            self._steps,
            self._groups,
            self._journal,
            lambda run: self._placing.relocate(run),
        )
        self._placing = Placing(
            state=self._state,
            ledger=self._ledger,
            policy=policy,
            queue=self._queue,
            groups=self._groups,
            orders=self._orders,
            steps=self._steps,
            bursts=self._bursts,
            expectations=self._expectations,
            parking=self._parking,
            shares=self._shares,
            turns=turns,
            journal=self._journal,
            dispatch=self._dispatch,
        )
        self._fillers = Fillers(
            cluster=cluster,
            ledger=self._ledger,
            state=self._state,
            queue=self._queue,
            leases=self._leases,
            orders=self._orders,
            steps=self._steps,
            parking=self._parking,
            journal=self._journal,
            dispatch=self._dispatch,
        )
        standings = Standings(
            run_of=self._run,
            queue=self._queue,
            placing=self._placing,
            parking=self._parking,
            fillers=self._fillers,
            shares=self._shares,
            steps=self._steps,
        )
        nodes = NodeChanges(
            state=self._state,
            ledger=self._ledger,
            placing=self._placing,
            parking=self._parking,
            fillers=self._fillers,
            orders=self._orders,
            steps=self._steps,
            journal=self._journal,
            dispatch=self._dispatch,
        )
        self._handlers = {**self._handler_by_event(), **standings.handlers(), **nodes.handlers()}

    def _handler_by_event(self) -> dict[type, Callable[[Any], None]]:
        return {
            PipelineSubmitted: self._on_submitted,
            PipelineCancelled: self._on_cancelled,
            PipelineFailed: self._on_failed,
            PipelineRestarted: self._on_restarted,
            WorkArrived: self._on_work_told,
            WorkWithdrawn: self._on_work_told,
            ClientFinished: self._on_client_finished,
            StageFinished: self._on_stage_finished,
            StagePaused: self._on_stage_paused,
            ReplyArrived: self._on_reply_arrived,
            RewardOverdue: self._on_reward_overdue,
            ChunkFinished: self._on_chunk_finished,
            TrajectoriesMigrated: self._on_trajectories_migrated,
            WorkerLost: self._on_worker_lost,
        }

    def handle(self, event: Event) -> list[Action]:
        """Apply one fact and return the orders that follow from it, in the order they are to be carried out."""
        state = self._state
        actions = self._journal.begin(event)
        if not event.time_s >= state.now_s:
            raise self._journal.illegal(f"time goes from {state.now_s} to {event.time_s}: it has no date, or goes back")
        state.now_s = event.time_s
        self._handlers[type(event)](event)
        state = self._state
        if state.fillers.members or state.waiting_fillers or state.wanted_by:
            self._fillers.fill(event, actions)
        return actions

    def wait_of(self, pipeline: PipelineId) -> Wait | None:
        """Why this pipeline waits, and what would start it now; None where it does not wait. Decides nothing."""
        run = self._state.runs[pipeline]
        return wait_of(run, state=self._state, ledger=self._ledger, queue=self._queue, shares=self._shares)

    def waits(self, limit: int) -> list[tuple[PipelineId, Wait]]:
        """Why each of the first of the queue waits, in the order of offers; those that are held come last."""
        found = waits(state=self._state, queue=self._queue, shares=self._shares, limit=limit)
        return [(run.pipeline.id, wait) for run, wait in found]

    def accounts(self) -> tuple[AccountRow, ...]:
        """What projects and users have used, and are entitled to. Decides nothing."""
        return account_rows(self._state, self._shares)

    def bill(self) -> Bill:
        """What all charges add up to. Decides nothing."""
        return bill_of(self._state, self._shares)

    def usage(self) -> tuple[AccountUsage, ...]:
        """What a later part of the run must know of this one's usage. Decides nothing."""
        return self._shares.usage() if self._shares.are_set else ()

    def spent(self) -> tuple[AccountSpent, ...]:
        """As `usage`, of the dollars of budgets. Decides nothing."""
        return self._shares.spent()

    @property
    def state(self) -> SchedulerState:
        """What the invariants check. Nothing outside `core` reads it, and nothing but this class changes it."""
        return self._state

    @property
    def ledger(self) -> PlacementLedger:
        """What the invariants check, as `state`."""
        return self._ledger

    # ------------------------------------------------------------------ pipelines come and go

    def _on_submitted(self, event: PipelineSubmitted) -> None:
        pipeline = event.pipeline
        if pipeline.id in self._state.runs:
            raise self._journal.illegal(f"pipeline {pipeline.id} was submitted before")
        if pipeline.tail is not None and not getattr(self.policy, "migrates_tails", False):
            pipeline = replace(pipeline, tail=None)  # its books do not count on what it does not do
        self._state.has_tails = self._state.has_tails or pipeline.tail is not None
        run = PipelineRun(pipeline, event.time_s, self._state.next_in_sequence())
        run.restart_step = -1 if pipeline.has_sft_warmup and pipeline.first_step == 1 else pipeline.first_step - 1
        self._state.runs[pipeline.id] = run
        self._queue.enter(run)
        self._shares.note_submitted(pipeline)
        if pipeline.is_filler:
            self._fillers.submit(run)
        else:
            self._state.waiting[pipeline.id] = run
        if run.is_held:
            self._queue.tell(run, HELD)
        if run.is_held or pipeline.is_filler:
            return
        is_next = self._queue.is_next(run)
        if is_next:
            self._placing.try_to_place(run)
        if not is_next or self._queue.does_head_fit():
            self._placing.place_waiting()
        else:
            self._placing.make_room()
        self._placing.rebalance()

    def _on_cancelled(self, event: PipelineCancelled) -> None:
        self._end_softly(self._run(event.pipeline), PipelineInput.CANCELLED)

    def _on_client_finished(self, event: ClientFinished) -> None:
        run = self._run(event.pipeline)
        self._bursts.check(run)
        self._end_softly(run, PipelineInput.CLIENT_FINISHED)

    def _end_softly(self, run: PipelineRun, what: PipelineInput) -> None:
        """It begins nothing more; what runs is paused, and the last order that ends releases it."""
        was_running = run.status is PipelineStatus.RUNNING
        self._steps.move_pipeline(run, what)
        if self._queue.leave(run):
            self._placing.place_waiting()
        if not was_running:
            return
        self._steps.withdraw(run)
        orders = self._orders.of(run)
        for order in orders:
            self._steps.order_pause(order)
        if not orders:
            self._release(run)
        elif run.pipeline.work_arrives:  # what its ready bursts kept is free
            self._dispatch(self._state.group_of(run))

    def _on_failed(self, event: PipelineFailed) -> None:
        run = self._run(event.pipeline)
        if run.status in (PipelineStatus.WAITING, PipelineStatus.RUNNING):
            run.reason = event.reason
        self._steps.move_pipeline(run, PipelineInput.FAILED)
        if self._queue.leave(run):
            self._placing.place_waiting()
        self._drain(run, self._orders.of(run))

    def _drain(self, run: PipelineRun, ended: list[Order]) -> None:
        """End these orders of a pipeline that is over: others use their devices, and the last one releases it."""
        for order in ended:
            self._orders.end(order)
        if run.placement is not None and self._orders.of(run):
            self._dispatch(self._state.group_of(run))
        elif run.placement is not None:
            self._release(run)

    def _release(self, run: PipelineRun) -> None:
        if run.pipeline.is_filler:
            self._fillers.release(run)
        else:
            self._placing.release(run)

    # ------------------------------------------------------------------ a pipeline goes through its steps

    def _on_stage_finished(self, event: StageFinished) -> None:
        order, run = self._end_named(event.order)
        if run.status is not PipelineStatus.RUNNING:
            return
        if order.stage is Stage.REWARD and run.is_reward_overdue:
            run.is_reward_overdue = False
            self._groups.catch_up(run)
        solo_s = self._orders.solo_s(order, event.seconds)
        _learn_switch(run, order, event.switch_s)
        self._orders.measure(run, order, solo_s, event.switch_s)
        if isinstance(order.work, Burst):
            self._bursts.finish(run, order)
            has_new_seconds = self._expectations.learn_bursts(run)
        else:
            if order.phase is Phase.ROLLOUT:
                run.history.end_shard(order.devices[0], solo_s)
            else:
                run.history.end_stage(order.stage, solo_s)
            self._steps.finish(run, order)
            is_trained = order.phase is Phase.TRAIN and run.trained_step == order.step
            has_new_seconds = is_trained and self._expectations.learn(run, order.step)
        if has_new_seconds:
            self._placing.place_waiting()
            self._placing.rebalance()
        if run.placement is not None and run.status is PipelineStatus.RUNNING:
            self._dispatch(self._state.group_of(run))

    def _on_work_told(self, event: WorkArrived | WorkWithdrawn) -> None:
        run = self._run(event.pipeline)
        self._bursts.hear(run, event)
        if run.status is PipelineStatus.RUNNING:
            self._dispatch(self._state.group_of(run))

    def _on_stage_paused(self, event: StagePaused) -> None:
        order, run = self._end_named(event.order)
        if run.status is not PipelineStatus.RUNNING:
            return
        _learn_switch(run, order, event.switch_s)
        solo_s = self._orders.solo_s(order, event.seconds)
        self._orders.measure(run, order, solo_s, event.switch_s)
        if isinstance(order.work, Burst):
            self._bursts.pause(run, order)
            self._dispatch(self._state.group_of(run))
            return
        if order.phase is Phase.ROLLOUT:
            run.history.add_pause(order.devices[0], solo_s)
        self._steps.pause(run, order, is_waiting=event.is_waiting)
        self._dispatch(self._state.group_of(run))
        self._steps.drop_asked_migration(run, order.devices[0])

    def _on_reply_arrived(self, event: ReplyArrived) -> None:
        run = self._run(event.pipeline)
        shard = run.shards.get(event.device)
        if run.status is not PipelineStatus.RUNNING or shard is None or shard.state is not WorkState.WAITING_FOR_ENV:
            return  # it has been started, migrated or begun anew since
        waited_s = self._state.now_s - shard.work.since_s
        run.history.add_wait(waited_s)
        run.measured.add_rollout(run.rollout_step, event.device, waited_s, 0.0)
        if run.waits_for_user_code:
            self._groups.catch_up(run)
        self._steps.reply(run, shard)
        self._dispatch(self._state.group_of(run))

    def _on_reward_overdue(self, event: RewardOverdue) -> None:
        order = self._orders.named(event.order)
        run = self._state.runs[order.pipeline]
        if run.status is not PipelineStatus.RUNNING:
            return
        run.is_reward_overdue = True
        self._dispatch(self._state.group_of(run))

    def _on_chunk_finished(self, event: ChunkFinished) -> None:
        order = self._orders.named(event.order)
        self._orders.note_progress(order, event)
        run = self._state.runs[order.pipeline]
        if order.stage is Stage.GENERATE:
            num_left = event.num_active + event.num_waiting + event.num_waiting_for_env
            run.history.add_progress(order.devices[0], num_left, self._orders.solo_s(order, event.seconds))
        if self.policy.reacts_to_progress:
            self._dispatch(self._state.group_of(run))

    def _on_trajectories_migrated(self, event: TrajectoriesMigrated) -> None:
        order, run = self._end_named(event.order)
        if run.status is not PipelineStatus.RUNNING:
            return
        source, target = order.migrates_from, order.devices[0]
        if source is None:
            raise self._journal.illegal(f"order {order.id} is no migration")
        run.measured.add_migration(order.step)
        run.history.add_migration(source, target, event.num_trajectories, event.seconds, is_fresh=order.is_fresh)
        self._steps.finish_migration(run, order)
        self._dispatch(self._state.group_of(run))

    def _end_named(self, order_id: OrderId) -> tuple[Order, PipelineRun]:
        """End the order that an event names. A cancelled pipeline is released with its last one."""
        order = self._orders.named(order_id)
        run = self._state.runs[order.pipeline]
        if run.status is PipelineStatus.RUNNING:
            self._orders.end(order)
        else:
            self._drain(run, [order])
        return order, run

    # ------------------------------------------------------------------ things break

    def _on_worker_lost(self, event: WorkerLost) -> None:
        run = self._run(event.pipeline)
        if run.placement is None:
            return  # it has ended, or waits for other nodes: nothing of it runs
        if run.status is not PipelineStatus.RUNNING:
            self._drain(run, [order for order in self._orders.of(run) if _runs_on(order, event.device)])
            return
        for phase in (Phase.ROLLOUT, Phase.TRAIN) if run.pipeline.work_arrives else (Phase.ROLLOUT,):
            self._leases.remove_state(run, phase, event.device)
            run.host_resident.discard((phase, event.device))
        self._bursts.lose_orders(run, event.device)
        if event.device in run.shards:
            if run.waits_for_user_code:
                self._groups.catch_up(run)
            self._steps.lose_worker(run, run.shards[event.device])
        self._dispatch(self._state.group_of(run))
        self._steps.drop_asked_migration(run, event.device)

    def _on_restarted(self, event: PipelineRestarted) -> None:
        run = self._run(event.pipeline)
        if run.placement is None:
            return  # as above
        if run.status is not PipelineStatus.RUNNING:
            self._drain(run, self._orders.of(run))
            return
        if run.is_leaving:  # its processes have ended for good
            run.published_version = run.trained_step = event.restored_step
            return
        if run.pipeline.is_filler:
            self._fillers.begin_again(run, event.restored_step)
            return
        self._orders.end_all(run)
        self._steps.withdraw(run)
        for phase, device in device_keys(run):
            self._leases.remove_state(run, phase, device)
        run.host_resident.clear()
        self._groups.rejoin_cycle(run)
        self._placing.begin(run, event.restored_step)
        self._ledger.renew(run.pipeline.id)
        self._dispatch(self._state.group_of(run))

    def _run(self, pipeline: PipelineId) -> PipelineRun:
        try:
            return self._state.runs[pipeline]
        except KeyError:
            raise self._journal.illegal(f"no pipeline {pipeline} was submitted") from None


def _runs_on(order: Order, device: DeviceId) -> bool:
    """Whether the order ended with the device's worker: it ran a shard or a burst there, or migrated from there."""
    if isinstance(order.work, Burst):
        return device in order.devices
    return order.migrates_from == device or (order.phase is Phase.ROLLOUT and device in order.devices)


def _learn_switch(run: PipelineRun, order: Order, switch_s: float) -> None:
    is_warm = order.switch is Switch.WARM
    if is_warm or (switch_s > 0.0 and order.devices and order.switch is Switch.NONE):
        run.history.add_switch(order.phase, switch_s, is_warm=is_warm)
