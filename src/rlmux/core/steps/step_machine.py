"""The legal moves of a shard, a training stage, a batch and a pipeline, as tables; and the life of a step.

    step n, staleness k:
    version max(0, n-1-k) published ─▶ one shard a device ─▶ REWARD ─▶ training stages, one by one ─▶ PUBLISH n
                                       SHARD_MOVES                     TRAINING_MOVES

A table lists for every state the legal inputs and the state each leads to. An input that the table does not have
raises IllegalTransitionError with the recent events. `docs/how-it-works/design.md` shows the tables as `diagrams`
draws them.

Invariant: work is in its group's ready work exactly while it is READY or WAITING_FOR_ENV, and has an order exactly
while it is RUNNING, PAUSING or MIGRATING.

What this module does not do: it leases no device and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from rlmux.core.actions import Action, MigrateShard, Pause, RunStage
from rlmux.core.journal import Journal
from rlmux.core.model import DeviceId, Phase, PipelineStatus, Stage
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.state import GroupState, SchedulerState
from rlmux.core.steps.orders import Orders, rollout_version
from rlmux.core.work import Order, ReadyWork, RequestBatch, RolloutShard, TrainingStage, Work, WorkState


class WorkInput(StrEnum):
    """What can happen to a rollout shard or to a training stage."""

    __hash__ = str.__hash__  # an Enum's own is Python code, and these are the keys of every move

    STARTED = "started"
    PAUSE_ORDERED = "pause ordered"
    PAUSED = "paused"
    PAUSED_FOR_ENV = "paused with nothing to compute"
    REPLY_ARRIVED = "reply arrived"
    FINISHED = "finished"
    NEXT_OPENED = "next stage opened"
    MIGRATION_ORDERED = "migration ordered"
    MIGRATED = "migrated"
    RECEIVED = "received trajectories"
    WORKER_LOST = "worker lost"
    ARRIVED = "work arrived"
    WITHDRAWN = "withdrawn"


class PipelineInput(StrEnum):
    """What can happen to a pipeline."""

    PLACED = "placed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    NODE_LOST = "node lost"
    PARKED = "parked"
    LAST_STEP_PUBLISHED = "last step published"
    CLIENT_FINISHED = "client finished"


SHARD_MOVES: Mapping[WorkState, Mapping[WorkInput, WorkState]] = {
    WorkState.READY: {
        WorkInput.STARTED: WorkState.RUNNING,
        WorkInput.MIGRATION_ORDERED: WorkState.MIGRATING,
        WorkInput.RECEIVED: WorkState.READY,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
    WorkState.WAITING_FOR_ENV: {
        WorkInput.REPLY_ARRIVED: WorkState.READY,
        WorkInput.STARTED: WorkState.RUNNING,
        WorkInput.MIGRATION_ORDERED: WorkState.MIGRATING,
        WorkInput.RECEIVED: WorkState.WAITING_FOR_ENV,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
    WorkState.RUNNING: {
        WorkInput.FINISHED: WorkState.DONE,
        WorkInput.PAUSE_ORDERED: WorkState.PAUSING,
        WorkInput.PAUSED: WorkState.READY,
        WorkInput.PAUSED_FOR_ENV: WorkState.WAITING_FOR_ENV,
        WorkInput.RECEIVED: WorkState.RUNNING,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
    WorkState.PAUSING: {
        WorkInput.FINISHED: WorkState.DONE,
        WorkInput.PAUSED: WorkState.READY,
        WorkInput.PAUSED_FOR_ENV: WorkState.WAITING_FOR_ENV,
        WorkInput.RECEIVED: WorkState.PAUSING,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
    WorkState.MIGRATING: {
        WorkInput.MIGRATED: WorkState.DONE,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
    WorkState.DONE: {
        WorkInput.RECEIVED: WorkState.READY,
        WorkInput.WORKER_LOST: WorkState.DONE,
    },
}
"""A shard begins READY, when its step's rollout opens."""

TRAINING_MOVES: Mapping[WorkState, Mapping[WorkInput, WorkState]] = {
    WorkState.DONE: {WorkInput.NEXT_OPENED: WorkState.READY},
    WorkState.READY: {WorkInput.STARTED: WorkState.RUNNING},
    WorkState.RUNNING: {
        WorkInput.FINISHED: WorkState.DONE,
        WorkInput.PAUSE_ORDERED: WorkState.PAUSING,
        WorkInput.PAUSED: WorkState.READY,
    },
    WorkState.PAUSING: {
        WorkInput.FINISHED: WorkState.DONE,
        WorkInput.PAUSED: WorkState.READY,
    },
}
"""A pipeline's training begins DONE, and is DONE again between any two stages."""

BATCH_MOVES: Mapping[WorkState, Mapping[WorkInput, WorkState]] = {
    WorkState.DONE: {WorkInput.ARRIVED: WorkState.READY},
    WorkState.READY: {
        WorkInput.ARRIVED: WorkState.READY,
        WorkInput.STARTED: WorkState.RUNNING,
        WorkInput.WITHDRAWN: WorkState.DONE,
    },
    WorkState.RUNNING: {
        WorkInput.ARRIVED: WorkState.RUNNING,
        WorkInput.WITHDRAWN: WorkState.RUNNING,
        WorkInput.FINISHED: WorkState.DONE,
        WorkInput.PAUSE_ORDERED: WorkState.PAUSING,
        WorkInput.PAUSED: WorkState.READY,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
    WorkState.PAUSING: {
        WorkInput.ARRIVED: WorkState.PAUSING,
        WorkInput.WITHDRAWN: WorkState.PAUSING,
        WorkInput.FINISHED: WorkState.DONE,
        WorkInput.PAUSED: WorkState.READY,
        WorkInput.WORKER_LOST: WorkState.READY,
    },
}
"""A batch begins DONE. Work that arrives while it runs is the next batch; what is withdrawn then is that."""

_MOVES: Mapping[type, Mapping[WorkState, Mapping[WorkInput, WorkState]]] = {
    RolloutShard: SHARD_MOVES,
    TrainingStage: TRAINING_MOVES,
    RequestBatch: BATCH_MOVES,
}

PIPELINE_MOVES: Mapping[PipelineStatus, Mapping[PipelineInput, PipelineStatus]] = {
    PipelineStatus.WAITING: {
        PipelineInput.PLACED: PipelineStatus.RUNNING,
        PipelineInput.REFUSED: PipelineStatus.REFUSED,
        PipelineInput.CANCELLED: PipelineStatus.CANCELLED,
        PipelineInput.FAILED: PipelineStatus.FAILED,
        PipelineInput.CLIENT_FINISHED: PipelineStatus.FINISHED,
    },
    PipelineStatus.RUNNING: {
        PipelineInput.LAST_STEP_PUBLISHED: PipelineStatus.FINISHED,
        PipelineInput.CLIENT_FINISHED: PipelineStatus.FINISHED,
        PipelineInput.CANCELLED: PipelineStatus.CANCELLED,
        PipelineInput.FAILED: PipelineStatus.FAILED,
        PipelineInput.NODE_LOST: PipelineStatus.WAITING,
        PipelineInput.PARKED: PipelineStatus.WAITING,
    },
    **{
        over: {PipelineInput.CANCELLED: over, PipelineInput.FAILED: over, PipelineInput.CLIENT_FINISHED: over}
        for over in (
            PipelineStatus.FINISHED,
            PipelineStatus.CANCELLED,
            PipelineStatus.FAILED,
            PipelineStatus.REFUSED,
        )
    },
}
"""A pipeline begins WAITING, when it is submitted. What was on its way when it ended changes nothing. One that FAILED
may be submitted again, and then begins anew."""


def diagrams() -> str:
    """The tables as Markdown for `docs/how-it-works/design.md`: a heading and a Mermaid state diagram each."""
    tables: list[tuple[str, StrEnum, Mapping[Any, Mapping[Any, Any]]]] = [
        ("A rollout shard", WorkState.READY, SHARD_MOVES),
        ("A pipeline's training", WorkState.DONE, TRAINING_MOVES),
        ("A request batch of an on-demand pipeline", WorkState.DONE, BATCH_MOVES),
        ("A pipeline", PipelineStatus.WAITING, PIPELINE_MOVES),
    ]
    return "\n\n".join(f"### {name}\n\n{_diagram(first, moves)}" for name, first, moves in tables)


def _diagram(first: StrEnum, moves: Mapping[Any, Mapping[Any, Any]]) -> str:
    """One line for each pair of states, with the inputs that lead from one to the other."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    for state, targets in moves.items():
        inputs_by_target: dict[StrEnum, list[str]] = {}
        for what, target in targets.items():
            inputs_by_target.setdefault(target, []).append(what.value)
        for target, inputs in inputs_by_target.items():
            lines.append(f"    {state.name} --> {target.name}: {' or '.join(inputs)}")
        if set(targets.values()) <= {state}:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


class StepMachine:
    """Takes every pipeline through its steps and its life; the only place where their states change."""

    def __init__(self, state: SchedulerState, orders: Orders, journal: Journal) -> None:
        self._state = state
        self._orders = orders
        self._journal = journal

    # ------------------------------------------------------------------ a pipeline's life

    def move_pipeline(self, run: PipelineRun, what: PipelineInput) -> None:
        """Change the pipeline's status by its table."""
        status = PIPELINE_MOVES[run.status].get(what)
        if status is None:
            accepted = ", ".join(PIPELINE_MOVES[run.status]) or "nothing: it is over"
            raise self._journal.illegal(
                f"pipeline {run.pipeline.id} is {run.status}: {what.value!r} does not fit; accepted: {accepted}"
            )
        run.status = status

    def note_reward(self, run: PipelineRun, *, is_overdue: bool) -> None:
        """The pipeline's group waits for its rewards no longer, or it has them."""
        run.step.is_reward_overdue = is_overdue

    def note_left(self, run: PipelineRun, restored_step: int) -> None:
        """The processes of a pipeline that parks have ended, with this step's result kept."""
        run.step.published_version = run.step.trained_step = restored_step

    def move(self, work: Work, what: WorkInput) -> None:
        """Change the state by its table; work without an order forgets the one it had.

        Raises IllegalTransitionError for an input that the table does not have.
        """
        moves = _MOVES[type(work)]
        state = moves[work.state].get(what)
        if state is None:
            accepted = ", ".join(moves[work.state])
            raise self._journal.illegal(
                f"{work.work} is {work.state}: {what.value!r} does not fit; accepted: {accepted}"
            )
        work.state = state
        if state is WorkState.READY or state is WorkState.WAITING_FOR_ENV or state is WorkState.DONE:
            work.order = None

    # ------------------------------------------------------------------ a step's life, in order

    def begin_after(self, run: PipelineRun, restored_step: int) -> None:
        """Open what follows a restored step; -1 is before the SFT warm-up."""
        run.step.rollout_step = run.step.generated_step = run.step.train_step = max(restored_step, 0)
        run.step.trained_step = run.step.published_version = restored_step
        run.step.shards.clear()
        run.step.is_reward_overdue = False
        run.step.training = TrainingStage()
        if restored_step < 0:
            self._open_training_stage(run, 0, Stage.SFT_WARMUP, None, is_continuation=False)
        else:
            self._mark_boundary(run)

    def open_rollout(self, run: PipelineRun) -> None:
        """Open the next step's rollout, where none is open and the version that it must sample from is published."""
        pipeline = run.pipeline
        step = run.step.rollout_step + 1
        if run.step.shards or (pipeline.num_steps is not None and step > pipeline.num_steps):
            return
        if run.step.published_version < rollout_version(pipeline, step):
            return
        run.step.rollout_step = step
        run.estimates.history.open_rollout(step, run.nodes.rollout_devices, self._state.now_s)
        run.estimates.measured.open_rollout(step, run.nodes.rollout_devices)
        for device in run.nodes.rollout_devices:
            run.step.shards[device] = RolloutShard(self._shard_work(run, device, is_continuation=False))

    def start(self, run: PipelineRun, ready: ReadyWork, device_fraction: float, slowdown: float) -> RunStage:
        """Order ready work to run. The group's ready work no longer has it."""
        work: Work
        if ready.kind:
            work = run.step.batches[ready.kind]
        else:
            work = run.step.shards[ready.devices[0]] if ready.phase is Phase.ROLLOUT else run.step.training
        self.move(work, WorkInput.STARTED)
        action = self._orders.run_ready(run, work, ready, device_fraction, slowdown)
        work.order = action.order
        return action

    def order_pause(self, order: Order, *, migrate_to: DeviceId | None = None) -> list[Action]:
        """Pause the order at its next safe point; its shard is to migrate to that device then.

        An order that is pausing already is not paused again, and one that cannot be paused goes on.
        """
        work = order.work
        actions: list[Action] = []
        if work is not None and work.state is WorkState.RUNNING:
            self.move(work, WorkInput.PAUSE_ORDERED)
            actions.append(Pause(order=order.id))
        if isinstance(work, RolloutShard) and work.state is WorkState.PAUSING:
            work.migrate_to = migrate_to
        return actions

    def pause(self, run: PipelineRun, order: Order, *, is_waiting: bool) -> None:
        """The order has been paused: what it worked on is ready again."""
        work = order.work
        if work is None:
            raise self._journal.illegal(f"order {order.id} is a {order.stage}, which is never paused")
        self.move(work, WorkInput.PAUSED_FOR_ENV if is_waiting else WorkInput.PAUSED)
        if isinstance(work, RolloutShard):
            self._ready_after_pause(run, work)
        else:
            work.work = self._training_work(run, order.step, order.stage, is_continuation=True)

    def reply(self, run: PipelineRun, shard: RolloutShard) -> None:
        """An environment has replied to a shard that had nothing to compute."""
        self.move(shard, WorkInput.REPLY_ARRIVED)
        self._ready_again(run, shard)

    def lose_worker(self, run: PipelineRun, shard: RolloutShard) -> None:
        """The worker of the shard's device was replaced: its order has ended, and the shard is to be done again."""
        was_waiting, order = shard.state is WorkState.WAITING_FOR_ENV, shard.order
        self.move(shard, WorkInput.WORKER_LOST)
        if was_waiting:
            self._ready_again(run, shard)  # its trajectories begin anew
        elif order is not None:
            self._orders.end(self._orders.named(order))
            self._ready_after_pause(run, shard)

    def drop_requested_migrations(self, group: GroupState) -> None:
        """Shards that were paused to migrate, and that the policy left where they are, are ready like any other."""
        for ready in [work for work in group.ready.values() if work.migrate_to is not None]:
            shard = group.members[ready.pipeline].step.shards[ready.devices[0]]
            shard.work = group.ready[ready.sequence] = replace(ready, migrate_to=None)
        group.has_requested_migrations = False

    def order_migration(self, run: PipelineRun, shard: RolloutShard, targets: tuple[DeviceId, ...]) -> MigrateShard:
        """Move a ready shard's trajectories to the targets, which have shards of the same rollout."""
        self.move(shard, WorkInput.MIGRATION_ORDERED)
        del self._state.group_of(run).ready[shard.work.sequence]
        action = self._orders.migrate(run, shard, targets)
        shard.order = action.order
        return action

    def finish_migration(self, run: PipelineRun, order: Order) -> list[Action]:
        """The trajectories have arrived: the source is done, and a target that was done is ready again."""
        source = order.work
        assert isinstance(source, RolloutShard)
        self.move(source, WorkInput.MIGRATED)
        for device in order.devices:
            target = run.step.shards[device]
            was_done = target.state is WorkState.DONE
            self.move(target, WorkInput.RECEIVED)
            if was_done:
                target.work = self._shard_work(run, target.device, is_continuation=True)
        return self._reward_if_done(run)

    def finish(self, run: PipelineRun, order: Order) -> list[Action]:
        """The order's work is complete: open what follows it."""
        if order.work is not None:
            self.move(order.work, WorkInput.FINISHED)
        if isinstance(order.work, RolloutShard):
            order.work.migrate_to = None
            return self._reward_if_done(run)
        if order.phase is Phase.TRAIN:
            return self._finish_training_stage(run, order)
        if order.phase is Phase.ENV:
            self._finish_rollout(run)
        else:
            self._publish(run, order.step)
        return []

    def withdraw(self, run: PipelineRun) -> None:
        """Forget the open rollout and the training under way; open batches are due again. Their orders end by
        themselves or are ended."""
        ready = self._state.group_of(run).ready
        for shard in run.step.shards.values():
            if shard.is_ready:
                del ready[shard.work.sequence]
        training = run.step.training
        if training.state is WorkState.READY and training.work is not None:
            del ready[training.work.sequence]
        for kind, batch in run.step.batches.items():
            if batch.is_open and batch.work is not None:
                ready.pop(batch.work.sequence, None)
                run.step.batches[kind] = replace(batch, work=None, state=WorkState.DONE, order=None, is_due=True)
        run.step.shards.clear()
        run.step.is_reward_overdue = False
        run.step.training = TrainingStage()

    # ------------------------------------------------------------------ helpers, in the order they are called

    def _ready_after_pause(self, run: PipelineRun, shard: RolloutShard) -> None:
        """A shard that ran is ready, with the migration for which it was paused."""
        is_waiting, migrate_to = shard.state is WorkState.WAITING_FOR_ENV, shard.migrate_to
        shard.migrate_to = None
        if migrate_to is not None:
            self._state.group_of(run).has_requested_migrations = True
        shard.work = self._shard_work(
            run, shard.device, is_continuation=True, is_waiting=is_waiting, migrate_to=migrate_to
        )

    def _shard_work(
        self,
        run: PipelineRun,
        device: DeviceId,
        *,
        is_continuation: bool,
        is_waiting: bool = False,
        migrate_to: DeviceId | None = None,
    ) -> ReadyWork:
        ready = ReadyWork(
            run.pipeline.id, run.step.rollout_step, Stage.GENERATE, Phase.ROLLOUT, (device,),
            self._state.now_s, self._state.next_in_sequence(), is_continuation, is_waiting, migrate_to,
        )  # fmt: skip
        self._state.group_of(run).ready[ready.sequence] = ready
        return ready

    def _training_work(self, run: PipelineRun, step: int, stage: Stage, *, is_continuation: bool) -> ReadyWork:
        ready = ReadyWork(
            run.pipeline.id, step, stage, Phase.TRAIN, run.nodes.train_devices,
            self._state.now_s, self._state.next_in_sequence(), is_continuation,
        )  # fmt: skip
        self._state.group_of(run).ready[ready.sequence] = ready
        return ready

    def _ready_again(self, run: PipelineRun, shard: RolloutShard) -> None:
        """A waiting shard has something to compute; it keeps its place in the order of becoming ready."""
        shard.work = replace(shard.work, is_waiting=False, since_s=self._state.now_s)
        self._state.group_of(run).ready[shard.work.sequence] = shard.work

    def _reward_if_done(self, run: PipelineRun) -> list[Action]:
        if any(shard.state is not WorkState.DONE for shard in run.step.shards.values()):
            return []
        if Stage.REWARD in run.pipeline.stages:
            return [self._orders.run_without_device(run, run.step.rollout_step, Stage.REWARD, Phase.ENV)]
        self._finish_rollout(run)
        return []

    def _finish_rollout(self, run: PipelineRun) -> None:
        run.step.shards.clear()
        run.step.generated_step = run.step.rollout_step
        if not run.train_stages:  # nothing is trained: the step is over
            run.step.trained_step = run.step.rollout_step
            self._publish(run, run.step.rollout_step)
            return
        self._open_training(run)
        self._mark_boundary(run)

    def _open_training(self, run: PipelineRun) -> None:
        step = run.step.trained_step + 1
        if not run.step.training.is_open and 1 <= step <= run.step.generated_step:
            self._open_training_stage(run, step, run.train_stages[0], 0, is_continuation=False)

    def _open_training_stage(
        self, run: PipelineRun, step: int, stage: Stage, index: int | None, *, is_continuation: bool
    ) -> None:
        self.move(run.step.training, WorkInput.NEXT_OPENED)
        run.step.train_step, run.step.training.index = step, index
        run.step.training.work = self._training_work(run, step, stage, is_continuation=is_continuation)

    def _finish_training_stage(self, run: PipelineRun, order: Order) -> list[Action]:
        if order.stage is not Stage.SFT_WARMUP:
            assert run.step.training.index is not None
            index = run.step.training.index + 1
            if index < len(run.train_stages):
                self._open_training_stage(run, order.step, run.train_stages[index], index, is_continuation=True)
                return []
            run.step.training.index = None
        run.step.trained_step = order.step
        actions: list[Action] = []
        if Stage.PUBLISH in run.pipeline.stages:
            actions.append(self._orders.run_without_device(run, order.step, Stage.PUBLISH, Phase.SYNC))
        else:
            self._publish(run, order.step)
        self._open_training(run)
        return actions

    def _publish(self, run: PipelineRun, version: int) -> None:
        run.step.published_version = max(run.step.published_version, version)
        if run.step.published_version == run.pipeline.num_steps:
            self.move_pipeline(run, PipelineInput.LAST_STEP_PUBLISHED)
            self._state.dirty.over[run.pipeline.id] = run
        else:
            self._mark_boundary(run)

    def _mark_boundary(self, run: PipelineRun) -> None:
        self._state.dirty.boundaries[run.pipeline.id] = run
