"""On-demand pipelines: their request batches open, run, end, and are withdrawn.

    WorkArrived ─▶ READY ── RunStage, as for planned work ─▶ RUNNING ── StageFinished ─▶ DONE: the client thinks
       │             ▲ └── WorkWithdrawn ─▶ DONE               │
       │             └────────── StagePaused, a lost worker ───┘
       └── while a batch of its kind runs ─▶ kept: the next batch, which opens when that one ends

A batch is the work of one kind that a client has announced: one order at a time, over all devices of its phases. There
is at most one of each kind; its number, from 1, is the step of its orders. Work that arrives while a batch of its kind
is READY joins that batch; so does what waits when a batch is paused. Where no batch is open the client thinks: the
pipeline holds no device and no cycle slot.

A pipeline without nodes (it waits for admission, or its node was lost) keeps its work: it opens, under its number, when
the pipeline is placed. `BATCH_MOVES` in `step_machine` is the table.
"""

from __future__ import annotations

from rlmux.core.estimation.estimates import UNKNOWN_S
from rlmux.core.events import WorkArrived, WorkWithdrawn
from rlmux.core.journal import Journal
from rlmux.core.model import DeviceId, Phase, PhaseSeconds, PipelineStatus, Stage
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.state import SchedulerState
from rlmux.core.steps.groups import Groups
from rlmux.core.steps.orders import Orders
from rlmux.core.steps.step_machine import StepMachine, WorkInput
from rlmux.core.work import Order, ReadyWork, RequestBatch

_UNKNOWN = PhaseSeconds(rollout_s=UNKNOWN_S, train_s=UNKNOWN_S)
_ALIVE = (PipelineStatus.WAITING, PipelineStatus.RUNNING)


class RequestBatches:
    """Takes the batches of every pipeline through their lives; see the module."""

    def __init__(
        self, state: SchedulerState, orders: Orders, steps: StepMachine, groups: Groups, journal: Journal
    ) -> None:
        self._state = state
        self._orders = orders
        self._steps = steps
        self._groups = groups
        self._journal = journal

    def check(self, run: PipelineRun) -> None:
        """Raises IllegalTransitionError for a pipeline whose work is planned."""
        if not run.pipeline.work_arrives:
            raise self._journal.illegal(f"pipeline {run.pipeline.id} has planned steps, and no client")

    def handle(self, run: PipelineRun, event: WorkArrived | WorkWithdrawn) -> None:
        """The client announces work or takes it back. Raises IllegalTransitionError where work is planned."""
        self.check(run)
        if run.status not in _ALIVE:
            return  # it was reported before the client knew of the end
        if isinstance(event, WorkArrived):
            self._arrive(run, event)
        else:
            self._withdraw(run, event.phases)
            self._mark_boundary(run)

    def open_due(self, run: PipelineRun) -> None:
        """The pipeline is placed: what it kept opens."""
        for batch in run.step.batches.values():
            if batch.is_due:
                self._open(run, batch)

    def finish(self, run: PipelineRun, order: Order) -> None:
        """A batch's order has ended with all of its work done."""
        batch = order.work
        assert isinstance(batch, RequestBatch)
        self._steps.move(batch, WorkInput.FINISHED)
        run.estimates.batch_seconds.end(batch.kind, batch.units, batch.solo_s, batch.held_s, batch.step)
        if batch.next_units is not None:
            units, batch.next_units = batch.next_units, None
            self._open_next(run, batch, units)
        elif not any(other.is_open for other in run.step.batches.values()):
            run.estimates.batch_seconds.begin_thinking(batch.kind, self._state.now_s)
        self._mark_boundary(run)

    def pause(self, run: PipelineRun, order: Order) -> None:
        """A batch's order has ended with work left: it is ready again."""
        batch = order.work
        assert isinstance(batch, RequestBatch)
        self._steps.move(batch, WorkInput.PAUSED)
        self._make_ready(run, batch, is_continuation=True)

    def lose_orders(self, run: PipelineRun, device: DeviceId) -> None:
        """The orders on the device ended without their work done: the batches are to be done again."""
        for batch in run.step.batches.values():
            if batch.order is None:
                continue
            order = self._orders.named(batch.order)
            if device in order.devices:
                self._orders.end(order)
                self._steps.move(batch, WorkInput.WORKER_LOST)
                self._make_ready(run, batch, is_continuation=True)

    def are_between(self, run: PipelineRun) -> bool:
        """Whether nothing of the pipeline runs or is paused."""
        is_begun = any(batch.is_open and batch.is_begun for batch in run.step.batches.values())
        return not (self._orders.of(run) or is_begun)

    # ------------------------------------------------------------------ helpers, in the order they are called

    def _mark_boundary(self, run: PipelineRun) -> None:
        if run.nodes.next_placement is not None:
            self._state.dirty.boundaries[run.pipeline.id] = run

    def _arrive(self, run: PipelineRun, arrived: WorkArrived) -> None:
        kind, units = arrived.phases, arrived.units
        run.estimates.batch_seconds.end_thinking(self._state.now_s)
        batch = run.step.batches.setdefault(kind, RequestBatch(kind))
        if batch.order is not None:
            self._steps.move(batch, WorkInput.ARRIVED)
            batch.next_units = (batch.next_units or 0) + units
            return
        batch.step = arrived.step
        if batch.is_open or batch.is_due:
            batch.units += units
            if batch.is_open:
                self._steps.move(batch, WorkInput.ARRIVED)
                self._expect(run)
        else:
            self._open_next(run, batch, units)

    def _withdraw(self, run: PipelineRun, kind: tuple[Phase, ...]) -> None:
        batch = run.step.batches.get(kind)
        if batch is None:
            return
        batch.next_units = None
        batch.is_due = False
        if batch.is_open:
            if batch.order is None and batch.work is not None:
                del self._state.group_of(run).ready[batch.work.sequence]
            self._steps.move(batch, WorkInput.WITHDRAWN)

    def _open_next(self, run: PipelineRun, batch: RequestBatch, units: int) -> None:
        batch.number += 1
        batch.units, batch.solo_s, batch.held_s = units, 0.0, 0.0
        batch.is_due = True
        if run.nodes.placement is not None:
            self._open(run, batch)

    def _open(self, run: PipelineRun, batch: RequestBatch) -> None:
        batch.is_due = False
        self._steps.move(batch, WorkInput.ARRIVED)
        work = self._make_ready(run, batch, is_continuation=False)
        self._expect(run)
        if work.takes_slot:
            self._groups.level(run, work)

    def _make_ready(self, run: PipelineRun, batch: RequestBatch, *, is_continuation: bool) -> ReadyWork:
        train = run.nodes.train_devices if Phase.TRAIN in batch.kind else ()
        rollout = tuple(d for d in run.nodes.rollout_devices if d not in train) if Phase.ROLLOUT in batch.kind else ()
        work = ReadyWork(
            run.pipeline.id, batch.number, Stage.UPDATE if train else Stage.GENERATE, batch.kind[-1], rollout + train,
            self._state.now_s, self._state.next_in_sequence(), is_continuation,
            kind=batch.kind, rollout_devices=rollout if train else (),
        )  # fmt: skip
        batch.work = work
        batch.units += batch.next_units or 0
        batch.next_units = None
        self._state.group_of(run).ready[work.sequence] = work
        return work

    def _expect(self, run: PipelineRun) -> None:
        """Tell its estimates how long the open batches, or those that were last open, take."""
        seconds = {}
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            batch = run.step.batches.get((phase,))
            seconds[phase] = None if batch is None else run.estimates.batch_seconds.expected_s(batch.kind, batch.units)
        rollout_s, train_s = seconds[Phase.ROLLOUT], seconds[Phase.TRAIN]
        prior = run.pipeline.estimate or _UNKNOWN
        run.estimates.history.expect(
            PhaseSeconds(
                rollout_s=prior.rollout_s if rollout_s is None else rollout_s,
                train_s=prior.train_s if train_s is None else train_s,
            )
        )
