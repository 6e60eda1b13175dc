"""Pipelines whose work arrives: their bursts open, run, end, and are taken back.

    WorkArrived ─▶ READY ── RunStage, as for planned work ─▶ RUNNING ── StageFinished ─▶ DONE: the client thinks
       │             ▲ └── WorkWithdrawn ─▶ DONE               │
       │             └────────── StagePaused, a lost worker ───┘
       └── while a burst of its kind runs ─▶ kept: the next burst, which opens when that one ends

A burst is the work of one kind that a client has announced: one order at a time, over all devices of its phases. There
is at most one of each kind; its number, from 1, is the step of its orders. Work that arrives while a burst of its kind
is READY joins that burst; so does what waits when a burst is paused. Where no burst is open the client thinks: the
pipeline holds no device and no cycle slot.

A pipeline without nodes (it waits for admission, or its node was lost) keeps its work: it opens, under its number, when
the pipeline is placed. `BURST_MOVES` in `step_machine` is the table.
"""

from __future__ import annotations

from rlmux.core.estimates import UNKNOWN_S
from rlmux.core.events import WorkArrived, WorkWithdrawn
from rlmux.core.groups import Groups
from rlmux.core.journal import Journal
from rlmux.core.model import DeviceId, Phase, PhaseSeconds, PipelineStatus, Stage
from rlmux.core.orders import Orders
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.state import SchedulerState
from rlmux.core.step_machine import StepMachine, WorkInput
from rlmux.core.work import Burst, Order, ReadyWork

_UNKNOWN = PhaseSeconds(rollout_s=UNKNOWN_S, train_s=UNKNOWN_S)
_ALIVE = (PipelineStatus.WAITING, PipelineStatus.RUNNING)


class Bursts:
    """Takes the bursts of every pipeline through their lives; see the module."""

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

    def hear(self, run: PipelineRun, event: WorkArrived | WorkWithdrawn) -> None:
        """The client announces work or takes it back. Raises IllegalTransitionError where work is planned."""
        self.check(run)
        if run.status not in _ALIVE:
            return  # it was said before the client heard of the end
        if isinstance(event, WorkArrived):
            self._arrive(run, event.phases, event.units)
        else:
            self._withdraw(run, event.phases)
            self._mark_boundary(run)

    def open_due(self, run: PipelineRun) -> None:
        """The pipeline is placed: what it kept opens."""
        for burst in run.step.bursts.values():
            if burst.is_due:
                self._open(run, burst)

    def finish(self, run: PipelineRun, order: Order) -> None:
        """A burst's order has ended with all of its work done."""
        burst = order.work
        assert isinstance(burst, Burst)
        self._steps.move(burst, WorkInput.FINISHED)
        run.estimates.burst_seconds.end(burst.kind, burst.units, burst.solo_s, burst.held_s)
        if burst.next_units is not None:
            units, burst.next_units = burst.next_units, None
            self._open_next(run, burst, units)
        elif not any(other.is_open for other in run.step.bursts.values()):
            run.estimates.burst_seconds.begin_thinking(burst.kind, self._state.now_s)
        self._mark_boundary(run)

    def pause(self, run: PipelineRun, order: Order) -> None:
        """A burst's order has ended with work left: it is ready again."""
        burst = order.work
        assert isinstance(burst, Burst)
        self._steps.move(burst, WorkInput.PAUSED)
        self._make_ready(run, burst, is_continuation=True)

    def lose_orders(self, run: PipelineRun, device: DeviceId) -> None:
        """The orders on the device ended without their work done: the bursts are to be done again."""
        for burst in run.step.bursts.values():
            if burst.order is None:
                continue
            order = self._orders.named(burst.order)
            if device in order.devices:
                self._orders.end(order)
                self._steps.move(burst, WorkInput.WORKER_LOST)
                self._make_ready(run, burst, is_continuation=True)

    def are_between(self, run: PipelineRun) -> bool:
        """Whether nothing of the pipeline runs or is paused."""
        return not (self._orders.of(run) or any(burst.is_open and burst.is_begun for burst in run.step.bursts.values()))

    # ------------------------------------------------------------------ helpers, in the order they are called

    def _mark_boundary(self, run: PipelineRun) -> None:
        if run.nodes.next_placement is not None:
            self._state.dirty.boundaries[run.pipeline.id] = run

    def _arrive(self, run: PipelineRun, kind: tuple[Phase, ...], units: int) -> None:
        run.estimates.burst_seconds.end_thinking(self._state.now_s)
        burst = run.step.bursts.setdefault(kind, Burst(kind))
        if burst.order is not None:
            self._steps.move(burst, WorkInput.ARRIVED)
            burst.next_units = (burst.next_units or 0) + units
        elif burst.is_open or burst.is_due:
            burst.units += units
            if burst.is_open:
                self._steps.move(burst, WorkInput.ARRIVED)
                self._expect(run)
        else:
            self._open_next(run, burst, units)

    def _withdraw(self, run: PipelineRun, kind: tuple[Phase, ...]) -> None:
        burst = run.step.bursts.get(kind)
        if burst is None:
            return
        burst.next_units = None
        burst.is_due = False
        if burst.is_open:
            if burst.order is None and burst.work is not None:
                del self._state.group_of(run).ready[burst.work.sequence]
            self._steps.move(burst, WorkInput.WITHDRAWN)

    def _open_next(self, run: PipelineRun, burst: Burst, units: int) -> None:
        burst.number += 1
        burst.units, burst.solo_s, burst.held_s = units, 0.0, 0.0
        burst.is_due = True
        if run.nodes.placement is not None:
            self._open(run, burst)

    def _open(self, run: PipelineRun, burst: Burst) -> None:
        burst.is_due = False
        self._steps.move(burst, WorkInput.ARRIVED)
        work = self._make_ready(run, burst, is_continuation=False)
        self._expect(run)
        if work.takes_slot:
            self._groups.level(run, work)

    def _make_ready(self, run: PipelineRun, burst: Burst, *, is_continuation: bool) -> ReadyWork:
        train = run.nodes.train_devices if Phase.TRAIN in burst.kind else ()
        rollout = tuple(d for d in run.nodes.rollout_devices if d not in train) if Phase.ROLLOUT in burst.kind else ()
        work = ReadyWork(
            run.pipeline.id, burst.number, Stage.UPDATE if train else Stage.GENERATE, burst.kind[-1], rollout + train,
            self._state.now_s, self._state.next_in_sequence(), is_continuation,
            kind=burst.kind, rollout_devices=rollout if train else (),
        )  # fmt: skip
        burst.work = work
        burst.units += burst.next_units or 0
        burst.next_units = None
        self._state.group_of(run).ready[work.sequence] = work
        return work

    def _expect(self, run: PipelineRun) -> None:
        """Tell its estimates how long the open bursts, or those that were last open, take."""
        seconds = {}
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            burst = run.step.bursts.get((phase,))
            seconds[phase] = None if burst is None else run.estimates.burst_seconds.expected_s(burst.kind, burst.units)
        rollout_s, train_s = seconds[Phase.ROLLOUT], seconds[Phase.TRAIN]
        prior = run.pipeline.estimate or _UNKNOWN
        run.estimates.history.expect(
            PhaseSeconds(
                rollout_s=prior.rollout_s if rollout_s is None else rollout_s,
                train_s=prior.train_s if train_s is None else train_s,
            )
        )
