"""The scheduler: facts in, orders out. The only door through which state changes.

    driver ── event ──▶ handle ──▶ apply the fact ──▶ place who waits ──▶ dispatch the groups it touched ──▶ [actions]
                                        │                    │                        │
                                   state, ledger       Policy.place            Policy.dispatch

Two tiers. *Placement* pins a pipeline to nodes and thereby to a co-execution group. *Dispatch* decides, inside one
group, which ready work starts on which free device. A policy answers both questions and touches nothing: every
choice is checked here, recorded as intended, and becomes an action.

The same object serves the simulator (virtual time) and the runtime's controller (real time); they are its only
callers. It never asks what time it is: time is a field of the event. Replaying the events of a log gives the same
actions again, which is how a run is resumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlmux.core.actions import (
    Action,
    Admit,
    MigrateShard,
    Pause,
    Prefetch,
    Queue,
    Refuse,
    Release,
    Relocate,
    RunStage,
    SetDeviceFraction,
    Switch,
)
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import (
    ChunkFinished,
    Event,
    NodeJoined,
    NodeLost,
    PipelineCancelled,
    PipelineFailed,
    PipelineRestarted,
    PipelineSubmitted,
    ReplyArrived,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkerLost,
)
from rlmux.core.model import (
    Cluster,
    DeviceId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    PipelineStatus,
    Placement,
    Resident,
    Stage,
)
from rlmux.core.placement import FruitlessSearch, PlacementLedger, Refusal
from rlmux.core.policy import Policy
from rlmux.core.state import (
    DeviceState,
    GroupState,
    Order,
    OrderStatus,
    PipelineRun,
    ReadyWork,
    SchedulerState,
)
from rlmux.core.transitions import check_move
from rlmux.core.views import ChangeFraction, GroupView, MarkPlanned, MigrateWork, PauseOrder, RunWork

_STORY_LENGTH = 12
_SHARE_TOLERANCE = 1e-9


class Scheduler:
    """Decides for a whole cluster; see the module's picture.

    Raises IllegalTransitionError, with the recent events, when an event does not fit the state or a policy
    chooses what is not allowed; the state is then not to be used further.
    """

    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self.cluster = cluster
        self.policy = policy
        self.ledger = PlacementLedger(cluster)
        self._placement_view = self.ledger.view()
        self._state = SchedulerState()
        self._waiting: dict[PipelineId, PipelineRun] = {}
        self._views: dict[int, GroupView] = {}
        self._actions: list[Action] = []
        self._spills = any(pool.spills_to_disk for pool in cluster.pools.values())
        self._story: deque[Event] = deque(maxlen=_STORY_LENGTH)
        self._handlers: dict[type, Callable[[Any], None]] = {
            PipelineSubmitted: self._on_submitted,
            PipelineCancelled: self._on_cancelled,
            PipelineFailed: self._on_failed,
            PipelineRestarted: self._on_restarted,
            StageFinished: self._on_stage_finished,
            StagePaused: self._on_stage_paused,
            ReplyArrived: self._on_reply_arrived,
            ChunkFinished: self._on_chunk_finished,
            TrajectoriesMigrated: self._on_trajectories_moved,
            WorkerLost: self._on_worker_lost,
            NodeLost: self._on_node_lost,
            NodeJoined: self._on_node_joined,
        }

    def handle(self, event: Event) -> list[Action]:
        """Apply one fact and return the orders that follow from it, in the order they are to be carried out."""
        state = self._state
        self._story.append(event)
        if event.time_s < state.now_s:
            raise self._illegal(f"time goes back from {state.now_s}")
        state.now_s = event.time_s
        actions: list[Action] = []
        self._actions = actions
        self._handlers[type(event)](event)
        return actions

    # ------------------------------------------------------------------ what a driver may read

    @property
    def state(self) -> SchedulerState:
        """For invariant checks and reports. Not to be changed."""
        return self._state

    def status(self, pipeline: PipelineId) -> PipelineStatus:
        return self._state.runs[pipeline].status

    def is_idle(self) -> bool:
        """Every pipeline that was submitted is over."""
        return not self._waiting and not any(group.members for group in self._state.groups.values())

    # ------------------------------------------------------------------ pipelines come and go

    def _on_submitted(self, event: PipelineSubmitted) -> None:
        pipeline = event.pipeline
        if pipeline.id in self._state.runs:
            raise self._illegal(f"pipeline {pipeline.id} was submitted before")
        run = PipelineRun(pipeline, event.time_s, self._next_sequence())
        run.restart_step = -1 if pipeline.has_sft_warmup and pipeline.first_step == 1 else pipeline.first_step - 1
        self._state.runs[pipeline.id] = run
        self._waiting[pipeline.id] = run
        self._try_to_place(run)
        self._rebalance()

    def _on_cancelled(self, event: PipelineCancelled) -> None:
        run = self._run(event.pipeline)
        if run.status is PipelineStatus.WAITING:
            del self._waiting[event.pipeline]
            self._set_status(run, PipelineStatus.CANCELLED)
            return
        self._set_status(run, PipelineStatus.CANCELLED)
        self._forget_ready_work(run)
        orders = self._orders_of(run)
        for order in orders:
            self._pause(order)
        if not orders:
            self._leave(run)

    def _on_failed(self, event: PipelineFailed) -> None:
        run = self._run(event.pipeline)
        run.reason = event.reason
        if run.status is PipelineStatus.WAITING:
            del self._waiting[event.pipeline]
            self._set_status(run, PipelineStatus.FAILED)
            return
        self._set_status(run, PipelineStatus.FAILED)
        for order in self._orders_of(run):
            self._end_order(order)
        self._leave(run)

    def _try_to_place(self, run: PipelineRun) -> None:
        choice = self.policy.place(run.pipeline, self._placement_view)
        if isinstance(choice, Refusal):
            if choice.is_final:
                del self._waiting[run.pipeline.id]
                self._set_status(run, PipelineStatus.REFUSED)
                run.reason = choice.reason
                self._actions.append(Refuse(pipeline=run.pipeline.id, reason=choice.reason))
            elif choice.reason != run.reason:
                run.reason = choice.reason
                self._actions.append(Queue(pipeline=run.pipeline.id, reason=choice.reason))
            return
        placement = self.ledger.admit(run.pipeline, choice)
        del self._waiting[run.pipeline.id]
        self._set_status(run, PipelineStatus.RUNNING)
        run.reason = ""
        run.admitted_s = self._state.now_s
        self._actions.append(Admit(pipeline=run.pipeline.id, placement=placement, kind=choice.kind))
        self._join(run, placement)
        self._begin_from(run, run.restart_step)
        self._dispatch(self._state.groups[placement.group])

    def _join(self, run: PipelineRun, placement: Placement) -> None:
        pools = self.cluster.pools
        run.placement = placement
        run.rollout_devices = tuple(d for node in placement.rollout_nodes for d in pools[node.pool].devices(node))
        run.train_devices = tuple(d for node in placement.train_nodes for d in pools[node.pool].devices(node))
        group = self._state.groups.setdefault(placement.group, GroupState(placement.group))
        if placement.group not in self._views:
            self._views[placement.group] = GroupView(self._state, group)
        present = _phases_started_before(group)
        for key in self._device_keys(run):
            run.phases_started[key] = present
            group.members_by_device.setdefault(key, {})[run.pipeline.id] = run
            if key[1] not in self._state.devices:
                memory_bytes = pools[key[1].pool].device_memory_bytes
                self._state.devices[key[1]] = DeviceState(key[1], memory_bytes=memory_bytes)
        group.members[run.pipeline.id] = run
        self._refresh_cycle(group, has_newcomer=True)

    def _refresh_cycle(self, group: GroupState, *, has_newcomer: bool = False) -> None:
        """Learn the members' steps per cycle and order from the books; the meta-iteration begins anew where they changed.

        What a member is ahead with its rollout (begun, not yet trained) it stays ahead with. Who has fewer steps per cycle
        than others and no trajectories to train on yet comes last: the others lap it while it rolls out.
        """
        if not self.ledger.has_group(group.id):
            return  # in the books all have moved on; the last steps end here
        has_changed = False
        for place, member in enumerate(self.ledger.group(group.id).members):
            run = group.members.get(member.pipeline.id)
            if run is not None:
                has_changed |= run.steps_per_cycle != member.steps_per_cycle
                run.cycle_index, run.steps_per_cycle = place, member.steps_per_cycle
        most_steps_per_cycle = max((run.steps_per_cycle for run in group.members.values()), default=1)
        if has_changed or (most_steps_per_cycle > 1 and has_newcomer):
            for run in group.members.values():
                is_last = run.steps_per_cycle < most_steps_per_cycle and run.train_work is None
                shift = (run.steps_per_cycle if is_last else 0) - min(run.phases_started.values())
                run.phases_started = {key: count + shift for key, count in run.phases_started.items()}

    def _leave(self, run: PipelineRun) -> None:
        """The pipeline is over: its nodes go back, whoever waits is tried again, its group goes on."""
        group = self._unpin(run)
        self.ledger.depart(run.pipeline.id)
        self._refresh_cycle(group)
        self._actions.append(Release(pipeline=run.pipeline.id))
        self._place_waiting()
        self._rebalance()
        if group.members:
            self._dispatch(group)

    def _rebalance(self) -> None:
        """Let the policy move pipelines into what has become free. The move itself waits for a step boundary."""
        relocations = []
        for choice in self.policy.rebalance(self._placement_view):
            if isinstance(choice, FruitlessSearch):
                self.ledger.note_fruitless_search(choice.pipelines)
            else:
                relocations.append(choice)
        for relocation in relocations:  # all in the books first: later ones count on the nodes of earlier ones
            placement, _ = self.ledger.move(relocation.pipeline, relocation.choice)
            self._state.runs[relocation.pipeline].next_placement = placement
        for pipeline in dict.fromkeys(relocation.pipeline for relocation in relocations):
            run = self._state.runs[pipeline]
            if run.next_placement == run.placement:
                run.next_placement = None
                self.ledger.settle(pipeline)
            elif not run.open_shares:
                self._open_rollout(run)

    def _relocate(self, run: PipelineRun) -> None:
        """Between two steps: leave the old nodes, join the new ones."""
        placement = run.next_placement
        assert placement is not None
        run.next_placement = None
        old = self._unpin(run)
        self.ledger.settle(run.pipeline.id)
        self._refresh_cycle(old)
        self._join(run, placement)
        self._actions.append(Relocate(pipeline=run.pipeline.id, placement=placement))
        if old.members:
            self._dispatch(old)

    def _unpin(self, run: PipelineRun) -> GroupState:
        assert run.placement is not None
        group = self._state.groups[run.placement.group]
        self._forget_ready_work(run)
        for key in self._device_keys(run):
            pinned = group.members_by_device[key]
            del pinned[run.pipeline.id]
            if not pinned:
                del group.members_by_device[key]
            self._state.devices[key[1]].residents.pop((run.pipeline.id, key[0]), None)
        del group.members[run.pipeline.id]
        if not group.members:
            del self._state.groups[group.id]
            del self._views[group.id]
        run.placement = None
        run.phases_started.clear()
        run.steps_per_cycle = 1
        run.host_resident.clear()
        return group

    def _place_waiting(self) -> None:
        for run in sorted(self._waiting.values(), key=lambda run: run.sequence):
            self._try_to_place(run)

    # ------------------------------------------------------------------ a pipeline goes through its steps

    def _begin_from(self, run: PipelineRun, restored_step: int) -> None:
        """Open what follows a restored step; -1 is before the warm start."""
        run.rollout_step = run.generated_step = run.train_step = max(restored_step, 0)
        run.trained_step = run.published_version = restored_step
        run.open_shares.clear()
        run.train_stage = run.train_work = None
        if restored_step < 0:
            self._add_training_work(run, step=0, stage=Stage.SFT_WARMUP, is_continuation=False)
        else:
            self._open_rollout(run)

    def _open_rollout(self, run: PipelineRun) -> None:
        """Open the next step's rollout as soon as the version that it must sample from is published."""
        pipeline = run.pipeline
        step = run.rollout_step + 1
        if run.next_placement is not None:
            if run.open_shares or run.train_work is not None or self._orders_of(run):
                return  # a later end of one of these comes back here
            self._relocate(run)
        if run.open_shares or (pipeline.num_steps is not None and step > pipeline.num_steps):
            return
        if run.published_version < _rollout_version(pipeline, step):
            return
        run.rollout_step = step
        is_colocated = set(run.train_devices) <= set(run.rollout_devices)
        run.history.open_rollout(step, run.rollout_devices, self._state.now_s, is_colocated=is_colocated)
        for device in run.rollout_devices:
            self._add_share(run, device, is_continuation=False)

    def _add_share(
        self,
        run: PipelineRun,
        device: DeviceId,
        *,
        is_continuation: bool,
        is_waiting: bool = False,
        migrate_to: DeviceId | None = None,
    ) -> None:
        work = ReadyWork(
            run.pipeline.id, run.rollout_step, Stage.GENERATE, Phase.ROLLOUT, (device,),
            self._state.now_s, self._next_sequence(), is_continuation, is_waiting, migrate_to,
        )  # fmt: skip
        run.open_shares[device] = work
        self._group_of(run).ready[work.sequence] = work

    def _open_training(self, run: PipelineRun) -> None:
        step = run.trained_step + 1
        if run.train_stage is None and run.train_work is None and 1 <= step <= run.generated_step:
            run.train_stage = 0
            self._add_training_work(run, step=step, stage=run.train_stages[0], is_continuation=False)

    def _add_training_work(self, run: PipelineRun, *, step: int, stage: Stage, is_continuation: bool) -> None:
        run.train_step = step
        work = ReadyWork(
            run.pipeline.id, step, stage, Phase.TRAIN, run.train_devices,
            self._state.now_s, self._next_sequence(), is_continuation,
        )  # fmt: skip
        run.train_work = work
        self._group_of(run).ready[work.sequence] = work

    def _on_stage_finished(self, event: StageFinished) -> None:
        order, run = self._end_named(event.order)
        if run.status is not PipelineStatus.RUNNING:
            return
        solo_s = self._solo_s(order, event.seconds)
        self._learn_switch(run, order, event.switch_s)
        if order.phase is Phase.ROLLOUT:
            run.history.share_ended(order.devices[0], solo_s)
            self._finish_share(run, order.devices[0])
        else:
            run.history.stage_ended(order.stage, solo_s)
            if order.phase is Phase.TRAIN:
                self._finish_train_stage(run, order)
            elif order.phase is Phase.ENV:
                self._finish_generating(run)
            else:
                self._publish(run, order.step)
        if run.placement is not None and run.status is PipelineStatus.RUNNING:
            self._dispatch(self._group_of(run))

    @staticmethod
    def _learn_switch(run: PipelineRun, order: Order, switch_s: float) -> None:
        is_warm = order.switch is Switch.WARM
        if is_warm or (switch_s > 0.0 and order.devices and order.switch is Switch.NONE):
            run.history.switched(order.phase, switch_s, is_warm=is_warm)

    def _finish_share(self, run: PipelineRun, device: DeviceId) -> None:
        run.open_shares[device] = None
        if any(share is not None for share in run.open_shares.values()):
            return
        if Stage.REWARD in run.pipeline.stages:
            self._order_work(run, run.rollout_step, Stage.REWARD, Phase.ENV, (), device_fraction=0.0)
        else:
            self._finish_generating(run)

    def _finish_generating(self, run: PipelineRun) -> None:
        run.open_shares.clear()
        run.generated_step = run.rollout_step
        self._open_training(run)
        self._open_rollout(run)

    def _finish_train_stage(self, run: PipelineRun, order: Order) -> None:
        run.train_work = None
        if order.stage is not Stage.SFT_WARMUP:
            assert run.train_stage is not None
            run.train_stage += 1
            if run.train_stage < len(run.train_stages):
                stage = run.train_stages[run.train_stage]
                self._add_training_work(run, step=order.step, stage=stage, is_continuation=True)
                return
            run.train_stage = None
        run.trained_step = order.step
        if Stage.PUBLISH in run.pipeline.stages:
            self._order_work(run, order.step, Stage.PUBLISH, Phase.SYNC, (), device_fraction=0.0)
        else:
            self._publish(run, order.step)
        self._open_training(run)

    def _publish(self, run: PipelineRun, version: int) -> None:
        run.published_version = max(run.published_version, version)
        if run.published_version == run.pipeline.num_steps:
            self._set_status(run, PipelineStatus.FINISHED)
            self._leave(run)
        else:
            self._open_rollout(run)

    def _on_stage_paused(self, event: StagePaused) -> None:
        order, run = self._end_named(event.order)
        if run.status is not PipelineStatus.RUNNING:
            return
        self._learn_switch(run, order, event.switch_s)
        if order.phase is Phase.ROLLOUT:
            run.history.paused(order.devices[0], self._solo_s(order, event.seconds))
            self._add_share(
                run,
                order.devices[0],
                is_continuation=True,
                is_waiting=event.is_waiting,
                migrate_to=order.migrate_to,
            )
        else:
            self._add_training_work(run, step=order.step, stage=order.stage, is_continuation=True)
        self._dispatch(self._group_of(run))
        self._forget_asked_migration(run, order.devices[0])

    def _forget_asked_migration(self, run: PipelineRun, device: DeviceId) -> None:
        """A shard that was paused to be migrated, and that its policy then left where it is, is ready like any other."""
        shard = run.open_shares.get(device)
        if isinstance(shard, ReadyWork) and shard.migrate_to is not None:
            stays = replace(shard, migrate_to=None)
            run.open_shares[device] = self._group_of(run).ready[shard.sequence] = stays

    def _on_reply_arrived(self, event: ReplyArrived) -> None:
        run = self._run(event.pipeline)
        work = run.open_shares.get(event.device)
        if run.status is PipelineStatus.RUNNING and isinstance(work, ReadyWork) and work.is_waiting:
            run.history.waited(self._state.now_s - work.since_s)
            self._wake(run, work)
            self._dispatch(self._group_of(run))

    def _wake(self, run: PipelineRun, work: ReadyWork) -> None:
        """A waiting share has something to compute."""
        awake = replace(work, is_waiting=False, since_s=self._state.now_s)
        run.open_shares[work.devices[0]] = self._group_of(run).ready[work.sequence] = awake

    def _on_chunk_finished(self, event: ChunkFinished) -> None:
        order = self._order(event.order)
        order.num_active = event.num_active
        order.num_waiting = event.num_waiting
        order.num_waiting_for_env = event.num_waiting_for_env
        order.tokens = event.tokens
        if order.stage is Stage.GENERATE:
            run = self._state.runs[order.pipeline]
            num_left = event.num_active + event.num_waiting + event.num_waiting_for_env
            run.history.progress(order.devices[0], num_left, self._solo_s(order, event.seconds))
        if self.policy.reacts_to_progress:
            self._dispatch(self._group_of(self._state.runs[order.pipeline]))

    def _on_trajectories_moved(self, event: TrajectoriesMigrated) -> None:
        order, run = self._end_named(event.order)
        if run.status is not PipelineStatus.RUNNING:
            return
        source, target = order.migrates_from, order.devices[0]
        assert source is not None
        run.history.moved(source, target, event.num_trajectories, event.seconds, is_fresh=order.is_fresh)
        if run.open_shares[target] is None:
            self._add_share(run, target, is_continuation=True)
        self._finish_share(run, source)
        self._dispatch(self._group_of(run))

    def _end_named(self, order_id: OrderId) -> tuple[Order, PipelineRun]:
        """End the order that an event names. A cancelled pipeline leaves with its last one."""
        order = self._order(order_id)
        run = self._state.runs[order.pipeline]
        self._end_order(order)
        if run.status is not PipelineStatus.RUNNING and not self._orders_of(run):
            self._leave(run)
        return order, run

    # ------------------------------------------------------------------ things break

    def _on_worker_lost(self, event: WorkerLost) -> None:
        run = self._run(event.pipeline)
        if run.status is not PipelineStatus.RUNNING:
            return
        self._state.devices[event.device].residents.pop((event.pipeline, Phase.ROLLOUT), None)
        run.host_resident.discard((Phase.ROLLOUT, event.device))
        share = run.open_shares.get(event.device)
        if isinstance(share, ReadyWork) and share.is_waiting:
            self._wake(run, share)  # its trajectories begin anew
        if isinstance(share, int):
            order = self._state.orders[share]
            self._end_order(order)
            self._add_share(run, event.device, is_continuation=True, migrate_to=order.migrate_to)
        self._dispatch(self._group_of(run))
        self._forget_asked_migration(run, event.device)

    def _on_restarted(self, event: PipelineRestarted) -> None:
        run = self._run(event.pipeline)
        if run.status is not PipelineStatus.RUNNING:
            return
        for order in self._orders_of(run):
            self._end_order(order)
        self._forget_ready_work(run)
        for phase, device in self._device_keys(run):
            self._state.devices[device].residents.pop((event.pipeline, phase), None)
        run.host_resident.clear()
        run.phases_started.update(dict.fromkeys(run.phases_started, _phases_started_before(self._group_of(run))))
        self._refresh_cycle(self._group_of(run), has_newcomer=True)
        self._begin_from(run, event.restored_step)
        self._dispatch(self._group_of(run))

    def _on_node_lost(self, event: NodeLost) -> None:
        """Pipelines pinned to the node go back to waiting, from their last published version."""
        lost = dict.fromkeys(self.ledger.lose_node(event.node))
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
            for order in self._orders_of(run):
                self._end_order(order)
            if run.status is not PipelineStatus.RUNNING:  # it was waiting for these orders to end
                cancelled.append(run)
                continue
            group = self._unpin(run)
            groups[group.id] = group
            self.ledger.depart(run.pipeline.id)
            run.restart_step = run.published_version
            self._set_status(run, PipelineStatus.WAITING)
            self._waiting[run.pipeline.id] = run
        for run in cancelled:
            self._leave(run)
        self._place_waiting()
        for group in groups.values():
            if group.members:
                self._dispatch(group)

    def _on_node_joined(self, event: NodeJoined) -> None:
        self.ledger.regain_node(event.node)
        self._place_waiting()

    # ------------------------------------------------------------------ dispatch: choices become orders

    def _dispatch(self, group: GroupState) -> None:
        if not group.ready and not (self.policy.reacts_to_progress and group.running):
            return
        for choice in self.policy.dispatch(self._views[group.id]):
            if isinstance(choice, RunWork):
                self._start(group, choice)
            elif isinstance(choice, PauseOrder):
                self._pause_as_chosen(choice)
            elif isinstance(choice, MigrateWork):
                self._move(group, choice)
            elif isinstance(choice, MarkPlanned):
                group.planned = self._views[group.id].look
            else:
                self._change_fraction(self._order(choice.order), choice)
        if self._spills:
            self._announce(group)

    def _announce(self, group: GroupState) -> None:
        """Tell the driver which states are likely next on devices that others hold: those of the oldest ready work."""
        group.announced = {sequence: None for sequence in group.announced if sequence in group.ready}
        spoken_for: dict[DeviceId, None] = {}
        for work in sorted(group.ready.values(), key=lambda work: (not work.is_continuation, work.sequence)):
            if work.is_waiting or any(device in spoken_for for device in work.devices):
                continue
            spoken_for.update(dict.fromkeys(work.devices))
            run = self._state.runs[work.pipeline]
            is_elsewhere = any(
                (work.phase, device) in run.host_resident
                and (work.pipeline, work.phase) not in self._state.devices[device].residents
                for device in work.devices
            )
            spills = any(self.cluster.pools[device.pool].spills_to_disk for device in work.devices)
            if spills and is_elsewhere and work.sequence not in group.announced:
                group.announced[work.sequence] = None
                self._actions.append(Prefetch(pipeline=work.pipeline, phase=work.phase, devices=work.devices))

    def _start(self, group: GroupState, choice: RunWork) -> None:
        work = choice.work
        if group.ready.pop(work.sequence, None) is not work:
            raise self._illegal(f"policy {self.policy.name} starts {work}, which is not ready")
        run = self._state.runs[work.pipeline]
        order = self._order_work(run, work.step, work.stage, work.phase, work.devices, choice.device_fraction)
        self._state.orders[order].slowdown = choice.slowdown
        if work.phase is Phase.ROLLOUT:
            run.open_shares[work.devices[0]] = order
        else:
            run.train_work = order
        if not work.is_continuation and work.step > 0:
            for device in work.devices:
                run.phases_started[work.phase, device] += 1

    def _order_work(
        self,
        run: PipelineRun,
        step: int,
        stage: Stage,
        phase: Phase,
        devices: tuple[DeviceId, ...],
        device_fraction: float,
    ) -> OrderId:
        state = self._state
        pipeline = run.pipeline
        order_id = OrderId(state.next_order)
        state.next_order += 1
        switch, evicted = self._take_devices(run, phase, devices, order_id, device_fraction)
        order = Order(
            order_id,
            pipeline.id,
            step,
            stage,
            phase,
            devices,
            device_fraction,
            state.now_s,
            switch=switch,
            paced_s=state.now_s,
        )
        state.orders[order_id] = order
        if devices:
            self._group_of(run).running[order_id] = order
        version = _rollout_version(pipeline, step) if phase is Phase.ROLLOUT else step - (phase is Phase.TRAIN)
        self._actions.append(
            RunStage(
                order=order_id,
                pipeline=pipeline.id,
                step=step,
                stage=stage,
                devices=devices,
                weight_version=max(version, 0),
                device_fraction=device_fraction,
                switch=switch,
                evicted=evicted,
            )
        )
        return order_id

    def _take_devices(
        self, run: PipelineRun, phase: Phase, devices: tuple[DeviceId, ...], order: OrderId, device_fraction: float
    ) -> tuple[Switch, tuple[Resident, ...]]:
        """Lease the devices; make room there for the pipeline's state. The worst switch of all devices counts."""
        key = (run.pipeline.id, phase)
        footprint = run.pipeline.footprint
        need = footprint.rollout_device_bytes if phase is Phase.ROLLOUT else footprint.train_device_bytes
        switch = Switch.NONE
        evicted: dict[Resident, None] = {}
        for device_id in devices:
            device = self._state.devices[device_id]
            if device_fraction <= 0.0 or sum(device.orders.values()) + device_fraction > 1.0 + _SHARE_TOLERANCE:
                raise self._illegal(
                    f"policy {self.policy.name} leases {device_fraction} of {device_id}, held by {device.orders}"
                )
            device.orders[order] = device_fraction
            if key in device.residents:
                device.residents[key] = device.residents.pop(key)  # most recently used last
                continue
            evicted.update(dict.fromkeys(self._make_room(device, order, need)))
            device.residents[key] = need
            if (phase, device_id) not in run.host_resident:
                run.host_resident.add((phase, device_id))
                switch = Switch.COLD
            elif switch is Switch.NONE:
                switch = Switch.WARM
        return switch, tuple(evicted)

    def _make_room(self, device: DeviceState, order: OrderId, need: float | None) -> list[Resident]:
        """Evict least recently used states until `need` bytes fit beside the rest."""
        if not device.residents:
            return []
        computing = {
            (self._state.orders[other].pipeline, self._state.orders[other].phase)
            for other in device.orders if other != order
        }  # fmt: skip
        evicted: list[Resident] = []
        for resident in tuple(device.residents):
            if _fits(device, need):
                return evicted
            if resident not in computing:
                del device.residents[resident]
                evicted.append(Resident(*resident))
        if not _fits(device, need):
            raise self._illegal(f"{need} bytes do not fit on {device.id} beside {sorted(computing)}")
        return evicted

    def _pause(self, order: Order) -> None:
        if order.status is OrderStatus.RUNNING and order.device_fraction > 0.0:
            order.status = OrderStatus.PAUSING
            self._actions.append(Pause(order=order.id))

    def _pause_as_chosen(self, choice: PauseOrder) -> None:
        order = self._order(choice.order)
        target = choice.migrate_to
        if target is not None:
            shards = self._state.runs[order.pipeline].open_shares
            if order.phase is not Phase.ROLLOUT or target not in shards or target in order.devices:
                raise self._illegal(f"policy {self.policy.name} pauses {order} to migrate its shard to {target}")
        self._pause(order)
        if order.status is OrderStatus.PAUSING:
            order.migrate_to = target

    def _change_fraction(self, order: Order, choice: ChangeFraction) -> None:
        device_fraction = choice.device_fraction
        for device in order.devices:
            others = sum(held for other, held in self._state.devices[device].orders.items() if other != order.id)
            if (
                device_fraction <= 0.0
                or order.device_fraction == 0.0
                or others + device_fraction > 1.0 + _SHARE_TOLERANCE
            ):
                raise self._illegal(f"policy {self.policy.name} gives order {order.id} {device_fraction} of {device}")
        now_s = self._state.now_s
        order.solo_s += (now_s - order.paced_s) / order.slowdown
        order.paced_s, order.slowdown = now_s, choice.slowdown
        if device_fraction != order.device_fraction:
            order.device_fraction = device_fraction
            for device in order.devices:
                self._state.devices[device].orders[order.id] = device_fraction
            self._actions.append(SetDeviceFraction(order=order.id, device_fraction=device_fraction))

    def _solo_s(self, order: Order, seconds: float) -> float:
        """The driver's seconds of an order without what sharing added to them."""
        since_s = self._state.now_s - order.started_s
        if since_s <= 0.0:
            return seconds
        solo_s = order.solo_s + (self._state.now_s - order.paced_s) / order.slowdown
        return seconds * solo_s / since_s

    def _move(self, group: GroupState, choice: MigrateWork) -> None:
        run = self._run(choice.pipeline)
        share = run.open_shares.get(choice.source)
        if not isinstance(share, ReadyWork) or choice.target not in run.open_shares or choice.target == choice.source:
            raise self._illegal(f"policy {self.policy.name} moves {choice}: the source must be a paused or ready share")
        del group.ready[share.sequence]
        order_id = OrderId(self._state.next_order)
        self._state.next_order += 1
        run.open_shares[choice.source] = order_id
        self._state.orders[order_id] = Order(
            order_id, choice.pipeline, run.rollout_step, Stage.GENERATE, Phase.SYNC, (choice.target,), 0.0,
            self._state.now_s, migrates_from=choice.source, is_fresh=not share.is_continuation,
        )  # fmt: skip
        self._actions.append(
            MigrateShard(
                order=order_id,
                pipeline=choice.pipeline,
                step=run.rollout_step,
                source=choice.source,
                target=choice.target,
                copies_kv=choice.copies_kv,
            )
        )

    # ------------------------------------------------------------------ helpers

    def _end_order(self, order: Order) -> None:
        del self._state.orders[order.id]
        if order.device_fraction == 0.0:  # rewards, a publication, a migration: it leases nothing
            return
        del self._group_of(self._state.runs[order.pipeline]).running[order.id]
        for device in order.devices:
            del self._state.devices[device].orders[order.id]

    def _forget_ready_work(self, run: PipelineRun) -> None:
        ready = self._group_of(run).ready
        for work in (*run.open_shares.values(), run.train_work):
            if isinstance(work, ReadyWork):
                del ready[work.sequence]
        run.open_shares.clear()
        run.train_work = run.train_stage = None

    def _orders_of(self, run: PipelineRun) -> list[Order]:
        return [order for order in self._state.orders.values() if order.pipeline == run.pipeline.id]

    def _device_keys(self, run: PipelineRun) -> list[tuple[Phase, DeviceId]]:
        rollout = [(Phase.ROLLOUT, device) for device in run.rollout_devices]
        return rollout + [(Phase.TRAIN, device) for device in run.train_devices]

    def _group_of(self, run: PipelineRun) -> GroupState:
        assert run.placement is not None
        return self._state.groups[run.placement.group]

    def _run(self, pipeline: PipelineId) -> PipelineRun:
        try:
            return self._state.runs[pipeline]
        except KeyError:
            raise self._illegal(f"no pipeline {pipeline} was submitted") from None

    def _order(self, order: OrderId) -> Order:
        try:
            return self._state.orders[order]
        except KeyError:
            raise self._illegal(f"order {order} is not running") from None

    def _next_sequence(self) -> int:
        self._state.next_sequence += 1
        return self._state.next_sequence - 1

    def _set_status(self, run: PipelineRun, status: PipelineStatus) -> None:
        check_move(run.pipeline.id, run.status, status)
        run.status = status

    def _illegal(self, what: str) -> IllegalTransitionError:
        story = "\n  ".join(str(event) for event in self._story)
        return IllegalTransitionError(f"{what}\nrecent events, newest last:\n  {story}")


def _phases_started_before(group: GroupState) -> int:
    """What a newcomer counts as begun: it takes the last turn of the cycle under way.

    One number for all its devices, so that its steps per cycle in rollout and in training belong to the same cycle: were
    its first training phase counted into another cycle than its first rollout, each pool would wait for the
    other and the group would run one phase at a time for ever.
    """
    begun = [
        count
        for run in group.members.values()
        for (phase, _), count in run.phases_started.items()
        if phase is Phase.ROLLOUT
    ]
    return max(0, min(max(begun) - 1, min(begun))) if begun else 0  # who filled gaps is ahead of the cycle


def _rollout_version(pipeline: Pipeline, step: int) -> int:
    """The one version that step's rollout samples from: staleness is a constant lag, not whatever was newest."""
    return max(0, step - 1 - pipeline.staleness)


def _fits(device: DeviceState, need: float | None) -> bool:
    """None stands for a state of unknown size: it fills the device."""
    if not device.residents:
        return True
    total = need
    for size in device.residents.values():
        if total is None or size is None:
            return False
        total += size
    return total is not None and total <= device.memory_bytes
