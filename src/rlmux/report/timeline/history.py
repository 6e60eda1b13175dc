"""What happened, folded from the log into records. No arithmetic yet.

    entries ──▶ History.add ──▶ orders, pins, pipelines, instants, down     (records.py)

The state is a fold over the rows in their order: it can be read after any row, and a reader that follows a live log
adds the new rows only.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rlmux.core.actions import (
    Action,
    Admit,
    ExpectSteps,
    MigrateShard,
    Park,
    Queue,
    Refuse,
    Release,
    Relocate,
    ReportPolicyFault,
    RunStage,
    SetDeviceFraction,
)
from rlmux.core.events import (
    ChunkFinished,
    Event,
    NodeJoined,
    NodeLost,
    NoticeGiven,
    PipelineCancelled,
    PipelineFailed,
    PipelineParked,
    PipelineRestarted,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkArrived,
    WorkerLost,
    WorkWithdrawn,
)
from rlmux.core.model import PHASE_BY_STAGE, DeviceId, OrderId, Phase, PipelineId, PipelineStatus, Stage
from rlmux.log.notes import (
    AdapterRoomNote,
    AlertsNote,
    DeterminismNote,
    EndNote,
    HardwareNote,
    Note,
    PermitGrantedNote,
    PipelineEndNote,
    PipelineNote,
    ProgramMarkedNote,
    RemovedNote,
    ResumedNote,
    RetriedNote,
    RolloutNote,
    StandstillNote,
    StepNote,
    WorkerNote,
    WorkersNote,
)
from rlmux.log.progress_rows import Progress
from rlmux.log.run_log import Entry
from rlmux.report.timeline.batch_arrivals import Arrivals
from rlmux.report.timeline.records import (
    SHARD_MIGRATION,
    STOPPED,
    TAIL_MIGRATION,
    Ending,
    Instant,
    Move,
    OrderRecord,
    Pin,
    PipelineRecord,
    Standstill,
    removed_text,
    try_text,
)
from rlmux.report.timeline.run_clock import RunClock

_FINISHED = Ending.FINISHED
_PUBLISH = Stage.PUBLISH
_TRAIN = Phase.TRAIN
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""


_READINGS = 60
"""Readings of the machine's counters that are looked back on: a quarter of an hour."""


class HardwareReading(NamedTuple):
    """One reading of the machine's counters."""

    time_s: float
    note: HardwareNote


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Nothing that a fold makes is garbage before its end: looking for garbage among it costs half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class History:
    """Fold entries in with `add`, in the log's order; read the attributes at any time."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.header = header
        self.orders: list[OrderRecord] = []
        """Every order, in the order of the log."""
        self.pins: list[Pin] = []
        self.pipelines: dict[PipelineId, PipelineRecord] = {}
        self.instants: list[Instant] = []
        self.standstills: list[Standstill] = []
        self.adapter_rooms: dict[tuple[str, Phase, str], AdapterRoomNote] = {}
        """Last note by device, phase and base (`Pipeline.base_of`)."""
        self.clock = RunClock(header.get("created"))
        self.down: list[tuple[float, float]] = []
        """Stretches (begin, end) from the last row of a process to the first row of the one that resumed its run."""
        self.ready_s: list[float] = [math.inf]
        """Times at which the first worker process was there, of the run and after each resume; infinite before."""
        self.decisions_s: list[float] = []
        """Times at which the scheduler handled an event and could order work, ascending; without progress reports,
        which their orders hold."""
        self._decided_s = -math.inf
        """The last of them."""
        self.start_s: float | None = None
        self.last_s = 0.0
        self.alert_rules: dict[PipelineId, dict[str, dict[str, Any]]] = {}
        """Rules of alerts that a pipeline's file has otherwise."""
        self.policy_faults: list[ReportPolicyFault] = []
        """Errors of the policy's decisions since the run was last started or resumed, in order."""
        self.hardware: deque[HardwareReading] = deque(maxlen=_READINGS)
        """Newest readings of the machine's counters, since the run was last started or resumed."""
        self.control_s: float | None = None
        """CPU seconds of the controller, over all its processes; None before the run has ended."""
        self._running: dict[OrderId, OrderRecord] = {}
        """Orders that have not ended, by their id in the log."""
        self._first_order = self._last_order = 0
        self._pin_by_pipeline: dict[PipelineId, Pin] = {}
        self._arrivals: dict[PipelineId, Arrivals] = {}
        """Announced work of every pipeline whose work arrives."""
        self._handlers = self._handler_by_type()

    def __getstate__(self) -> dict[str, Any]:
        """Without the handlers, which are methods of this object."""
        return {name: value for name, value in vars(self).items() if name != "_handlers"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._handlers = self._handler_by_type()

    @classmethod
    def of(cls, header: Mapping[str, Any], parts: Iterable[Entry | Progress]) -> History:
        history = cls(header)
        for part in parts:
            history.add(part)
        return history

    def add(self, part: Entry | Progress) -> None:
        if isinstance(part, Progress):
            self._add_progress(part)
            return
        _, time_s, kind, _, value = part
        if kind == "event" or kind == "action":
            self.fold(time_s, value)  # type: ignore[arg-type]
            return
        if kind == "note":
            self._on_note(time_s, part.note)
        self.last_s = max(self.last_s, time_s)

    def fold(self, time_s: float, value: Event | Action) -> None:
        """Fold in one event, or an action at the time of the event that it answers."""
        handler = self._handlers.get(type(value))
        if handler is not None:
            handler(time_s, value)
        if time_s > self._decided_s and type(value) is not ChunkFinished:
            self.decisions_s.append(time_s)
            self._decided_s = time_s
        if time_s > self.last_s:
            self.last_s = time_s

    @property
    def is_over(self) -> bool:
        return bool(self.pipelines) and all(record.is_over for record in self.pipelines.values())

    @property
    def running(self) -> list[OrderRecord]:
        """Orders that have not ended, in the order they were given."""
        return list(self._running.values())

    def _handler_by_type(self) -> dict[type, Callable[[float, Any], None]]:
        return {
            PipelineSubmitted: self._on_submitted,
            PipelineCancelled: self._on_cancelled,
            PipelineFailed: self._on_failed,
            PipelineParked: self._on_parked,
            PipelineRestarted: self._on_restarted,
            WorkArrived: self._on_work_arrived,
            WorkWithdrawn: self._on_work_withdrawn,
            StageFinished: self._on_stage_ended,
            StagePaused: self._on_stage_ended,
            ChunkFinished: self._on_chunk,
            TrajectoriesMigrated: self._on_migrated,
            WorkerLost: self._on_worker_lost,
            NodeLost: self._on_node_lost,
            NoticeGiven: self._on_notice_given,
            NodeJoined: self._on_node_joined,
            Admit: self._on_admit,
            Relocate: self._on_admit,
            ExpectSteps: self._on_expect_steps,
            ReportPolicyFault: self._on_policy_fault,
            Park: self._on_park,
            Refuse: self._on_refuse,
            Queue: self._on_queue,
            Release: self._on_release,
            RunStage: self._on_run_stage,
            MigrateShard: self._on_migrate,
            SetDeviceFraction: self._on_set_device_fraction,
        }

    # ------------------------------------------------------------------ pipelines come and go

    def _on_submitted(self, time_s: float, event: PipelineSubmitted) -> None:
        if self.start_s is None:
            self.start_s = time_s
        before = self.pipelines.get(event.pipeline.id)
        if event.pipeline.work_arrives:
            self._arrivals[event.pipeline.id] = Arrivals()
        if before is None:
            self.pipelines[event.pipeline.id] = PipelineRecord(event.pipeline, time_s)
            return
        before.pipeline, before.status, before.reason, before.ended_s = event.pipeline, "waiting", "", None
        if event.pipeline.work_arrives:
            return  # what its client had is done; it announces what follows
        self._forget_steps_after(before, event.pipeline.first_step - 1)

    def _on_cancelled(self, time_s: float, event: PipelineCancelled) -> None:
        self._set_over(time_s, event.pipeline, PipelineStatus.CANCELLED)
        self.instants.append(Instant(time_s, "cancelled", event.pipeline))

    def _on_failed(self, time_s: float, event: PipelineFailed) -> None:
        self._set_over(time_s, event.pipeline, PipelineStatus.FAILED, event.reason)
        self._lose_orders(time_s, event.pipeline)
        self.instants.append(Instant(time_s, "failure", event.pipeline, text=event.reason))

    def _on_refuse(self, time_s: float, action: Refuse) -> None:
        self._set_over(time_s, action.pipeline, PipelineStatus.REFUSED, action.reason)
        self.instants.append(Instant(time_s, "refused", action.pipeline, text=action.reason))

    def _on_queue(self, time_s: float, action: Queue) -> None:
        record = self.pipelines.get(action.pipeline)
        if record is not None:
            record.reason = action.reason

    def _set_over(self, time_s: float, pipeline: PipelineId, status: PipelineStatus, reason: str = "") -> None:
        record = self.pipelines.get(pipeline)
        if record is not None:
            record.status, record.reason, record.ended_s = status, reason, time_s

    def _on_admit(self, time_s: float, action: Admit | Relocate) -> None:
        self._unpin(time_s, action.pipeline)
        pin = self._pin_by_pipeline[action.pipeline] = Pin(action.pipeline, action.placement, time_s)
        self.pins.append(pin)
        record = self.pipelines.get(action.pipeline)
        if record is not None:
            record.status, record.reason = PipelineStatus.RUNNING, ""
            if record.admitted_s is None:
                record.admitted_s = time_s
            if isinstance(action, Relocate):
                record.moves.append(Move(time_s, action.expected_step_s))
            self._note_thinking(time_s, record)

    def _on_release(self, time_s: float, action: Release) -> None:
        self._unpin(time_s, action.pipeline)
        record = self.pipelines.get(action.pipeline)
        if record is None:
            return
        if record.status == PipelineStatus.RUNNING:
            record.status = PipelineStatus.FINISHED
        record.ended_s = time_s

    def _on_expect_steps(self, time_s: float, action: ExpectSteps) -> None:
        record = self.pipelines.get(action.pipeline)
        if record is None:
            return
        is_news = action.reason and not (record.expected and record.expected.reason)
        record.expected = action
        if is_news:
            self.instants.append(Instant(time_s, "slo", action.pipeline, text=action.reason))

    def _on_policy_fault(self, time_s: float, action: ReportPolicyFault) -> None:
        self.policy_faults.append(action)
        self.instants.append(Instant(time_s, "policy fault", text=f"{action.method}: {action.error}"))

    def _unpin(self, time_s: float, pipeline: PipelineId) -> None:
        pin = self._pin_by_pipeline.pop(pipeline, None)
        if pin is not None:
            pin.end_s = time_s

    # ------------------------------------------------------------------ orders

    def _on_run_stage(self, time_s: float, action: RunStage) -> None:
        stage = action.stage
        order = OrderRecord(
            action.order,
            action.pipeline,
            action.step,
            stage,
            PHASE_BY_STAGE[stage],
            action.devices,
            time_s,
            action.switch,
            action.device_fraction,
            action.weight_version,
        )
        order.least_fraction = action.device_fraction if action.devices else 1.0
        if self._arrivals:
            order.arrived_s, order.kind = self._arrival_of(action)
        self._begin(order)

    def _on_migrate(self, time_s: float, action: MigrateShard) -> None:
        self._begin(
            OrderRecord(
                id=action.order,
                pipeline=action.pipeline,
                step=action.step,
                stage=Stage.GENERATE,
                phase=Phase.ROLLOUT,
                devices=(action.source, *action.targets),
                start_s=time_s,
                device_fraction=0.0,
                is_migration=True,
            )
        )

    def _begin(self, order: OrderRecord) -> None:
        """Add an order under an id of its own: a resumed run counts its orders from 1 again."""
        self._running[order.id] = order
        order.id = OrderId(order.id + self._first_order)
        if order.id > self._last_order:
            self._last_order = order.id
        self.orders.append(order)

    def _on_set_device_fraction(self, time_s: float, action: SetDeviceFraction) -> None:
        order = self._running.get(action.order)
        if order is not None:
            order.device_fraction = action.device_fraction
            order.least_fraction = min(order.least_fraction, action.device_fraction)

    def _on_chunk(self, time_s: float, event: ChunkFinished) -> None:
        order = self._running.get(event.order)
        if order is not None:
            order.chunks.append(event)
            order.seconds = max(order.seconds, event.seconds)
            order.tokens = event.tokens

    def _add_progress(self, progress: Progress) -> None:
        order = self._running.get(progress.order)
        if order is not None:
            order.chunks.extend(progress)
            order.seconds = max(order.seconds, max(progress.seconds))
            order.tokens = progress.tokens[-1]
        self.last_s = max(self.last_s, max(progress.time_s))

    def _on_stage_ended(self, time_s: float, event: StageFinished | StagePaused) -> None:
        order = self._running.pop(event.order, None)
        if order is None:
            return
        is_finished = isinstance(event, StageFinished)
        order.end_s, order.ending = time_s, _FINISHED if is_finished else Ending.PAUSED
        order.has_waited = isinstance(event, StagePaused) and event.is_waiting
        order.seconds, order.switch_s, order.tokens = event.seconds, event.switch_s, event.tokens
        record = self.pipelines.get(order.pipeline)
        if is_finished and record is not None:
            if order.arrived_s is not None:
                self._arrivals[order.pipeline].end(order.stage)
                self._note_thinking(time_s, record)
            self._note_version(time_s, record, order)

    def _note_version(self, time_s: float, record: PipelineRecord, order: OrderRecord) -> None:
        """Note the end of a step: its version is published, or its training ended where no stage publishes."""
        stages = record.pipeline.stages
        if record.pipeline.work_arrives:
            if order.phase is _TRAIN:  # a client's training ends a step of its own, whatever its rollouts
                record.published[max(record.published, default=0) + 1] = time_s
        elif order.step >= 1 and order.stage is (_PUBLISH if _PUBLISH in stages else stages[-1]):
            record.published[order.step] = time_s

    def _on_work_arrived(self, time_s: float, event: WorkArrived) -> None:
        record = self.pipelines.get(event.pipeline)
        if record is not None:
            self._arrivals[event.pipeline].announce(time_s, event.phases)
            self._note_thinking(time_s, record)

    def _on_work_withdrawn(self, time_s: float, event: WorkWithdrawn) -> None:
        record = self.pipelines.get(event.pipeline)
        if record is not None:
            self._arrivals[event.pipeline].withdraw(event.phases)
            self._note_thinking(time_s, record)

    def _arrival_of(self, action: RunStage) -> tuple[float | None, tuple[Phase, ...]]:
        """When the work that the order begins, or goes on with, arrived, and its kind; (None, ()) for planned work."""
        arrivals, pin = self._arrivals.get(action.pipeline), self._pin_by_pipeline.get(action.pipeline)
        if arrivals is None or pin is None:
            return None, ()
        return arrivals.begin(action, pin.placement)

    def _note_thinking(self, time_s: float, record: PipelineRecord) -> None:
        """Begin or end a stretch in which the client of a placed pipeline has requested nothing."""
        arrivals = self._arrivals.get(record.pipeline.id)
        if arrivals is None or record.pipeline.id not in self._pin_by_pipeline:
            return
        record.note_thinking(time_s, is_thinking=not arrivals.has_work)

    def _on_migrated(self, time_s: float, event: TrajectoriesMigrated) -> None:
        order = self._running.pop(event.order, None)
        if order is None:
            return
        order.end_s, order.ending, order.seconds = time_s, _FINISHED, event.seconds
        order.moved = event
        source, *targets = order.devices
        what = TAIL_MIGRATION if event.num_begun else SHARD_MIGRATION
        text = f"{_moved_words(event)} from {source} to {', '.join(map(str, targets))}"
        self.instants.append(Instant(time_s, what, order.pipeline, targets[0], text))

    # ------------------------------------------------------------------ things break

    def _on_worker_lost(self, time_s: float, event: WorkerLost) -> None:
        self._lose_orders(time_s, event.pipeline, event.device)
        self.instants.append(Instant(time_s, "loss", event.pipeline, event.device, f"its worker on {event.device}"))

    def _on_restarted(self, time_s: float, event: PipelineRestarted) -> None:
        self._lose_orders(time_s, event.pipeline)
        record = self.pipelines.get(event.pipeline)
        if record is not None and not record.pipeline.work_arrives:  # what a client had is done, as above
            self._forget_steps_after(record, event.restored_step)
        self.instants.append(
            Instant(time_s, "restart", event.pipeline, text=f"from step {max(event.restored_step, 0)}")
        )

    def _forget_steps_after(self, record: PipelineRecord, last_step: int) -> None:
        """Drop the results of steps that are done again; the time they took stays."""
        for step in [step for step in record.published if step > last_step]:
            del record.published[step]
            record.metrics.pop(step, None)
        record.deliveries.forget_after(last_step)
        for order in self.orders:
            if order.pipeline == record.pipeline.id and order.step > last_step:
                order.is_redone = True

    def _on_node_lost(self, time_s: float, event: NodeLost) -> None:
        for pipeline, pin in list(self._pin_by_pipeline.items()):
            if event.node in pin.placement.nodes:
                self._stop_and_wait(time_s, pipeline)
        self.instants.append(Instant(time_s, "node lost", text=str(event.node)))

    def _on_park(self, time_s: float, action: Park) -> None:
        if action.pipeline in self._pin_by_pipeline and not action.is_awaited:
            self._stop_and_wait(time_s, action.pipeline)

    def _on_parked(self, time_s: float, event: PipelineParked) -> None:
        if event.pipeline in self._pin_by_pipeline:
            self._stop_and_wait(time_s, event.pipeline)
            self.instants.append(Instant(time_s, "parked", event.pipeline, text="at a step boundary"))

    def _stop_and_wait(self, time_s: float, pipeline: PipelineId) -> None:
        """Its orders have ended, and it waits for a placement."""
        self._lose_orders(time_s, pipeline)
        self._unpin(time_s, pipeline)
        self.pipelines[pipeline].status = PipelineStatus.WAITING

    def _on_notice_given(self, time_s: float, event: NoticeGiven) -> None:
        text = f"{event.node}, gone in {event.gone_at_s - time_s:g} s"
        self.instants.append(Instant(time_s, "notice", text=text))

    def _on_node_joined(self, time_s: float, event: NodeJoined) -> None:
        self.instants.append(Instant(time_s, "node joined", text=str(event.node)))

    def _lose_orders(self, time_s: float, pipeline: PipelineId, device: DeviceId | None = None) -> None:
        for order in list(self._running.values()):
            if order.pipeline == pipeline and (device is None or device in order.devices):
                del self._running[OrderId(order.id - self._first_order)]
                order.end_s, order.ending = time_s, Ending.LOST

    # ------------------------------------------------------------------ notes

    def _on_note(self, time_s: float, note: Note | None) -> None:
        match note:
            case WorkerNote():
                self.ready_s[-1] = min(self.ready_s[-1], time_s)
            case StandstillNote():
                end_s = note.began_s + note.seconds
                self.standstills.append(Standstill(note.pipeline, tuple(note.devices), note.began_s, end_s))
            case AlertsNote():
                self.alert_rules[note.pipeline] = {rule: dict(changes) for rule, changes in note.rules.items()}
            case ResumedNote():
                self.clock.resume(time_s, note.utc)
                self._on_resumed(time_s)
            case HardwareNote():
                self.hardware.append(HardwareReading(time_s, note))
            case EndNote():
                self._on_end(note)
            case PipelineNote() if (record := self.pipelines.get(note.pipeline)) is not None:
                self._on_pipeline_note(time_s, note, record)

    def _on_pipeline_note(self, time_s: float, note: PipelineNote, record: PipelineRecord) -> None:
        match note:
            case StepNote():
                numbers = ((name, value) for name, value in note.metrics.items() if value is not None)
                record.metrics[note.step] = {name: float(value) for name, value in numbers}
                if note.from_checkpoint:  # its publication was under way when the run or a worker was killed
                    record.published.setdefault(note.step, time_s)
                if note.delivery is not None:
                    record.deliveries.add(note.step, note.delivery)
            case DeterminismNote():
                record.promise = note.promise
            case AdapterRoomNote():
                self.adapter_rooms[note.device, note.phase, record.pipeline.base_of(note.phase)] = note
            case RolloutNote():
                record.rollouts[note.step] = note
            case PipelineEndNote():
                record.status, record.reason = note.status or record.status, note.reason or record.reason
                record.weights_sha256 = note.weights_sha256
            case RemovedNote():
                record.removals.append((time_s, note))
                text = removed_text(record.removed[-1])
                self.instants.append(Instant(time_s, "removed", note.pipeline, text=text))
            case RetriedNote():
                record.removals.clear()
                record.retries.append(note)
                self.instants.append(
                    Instant(time_s, "retried", note.pipeline, text=try_text(note.number, note.of, note.reason))
                )
            case ProgramMarkedNote():
                record.reason = note.reason
            case PermitGrantedNote(step=int(step)):
                record.program_step = step
            case WorkersNote():
                record.hosts = tuple(sorted({*record.hosts, *(worker.rpartition("/")[0] for worker in note.workers)}))

    def _on_resumed(self, time_s: float) -> None:
        self.ready_s.append(math.inf)
        self.policy_faults.clear()
        self.hardware.clear()
        for order in list(self._running.values()):
            order.end_s, order.ending = self.last_s, Ending.LOST
        self._running.clear()
        self._first_order = self._last_order
        for pipeline in list(self._pin_by_pipeline):
            self._unpin(self.last_s, pipeline)
        if time_s > self.last_s:
            self.down.append((self.last_s, time_s))
        self.instants.append(Instant(time_s, "resumed", text="after a stop or crash"))

    def _on_end(self, note: EndNote) -> None:
        """Stop the pipelines that are not over: the run ended on purpose."""
        if note.control_s is not None:
            self.control_s = (self.control_s or 0.0) + note.control_s
        for record in self.pipelines.values():
            if record.status in (PipelineStatus.RUNNING, PipelineStatus.WAITING):
                record.status = STOPPED


def _moved_words(event: TrajectoriesMigrated) -> str:
    """What a migration moved, in words."""
    if not event.num_begun:
        return f"{event.num_trajectories} trajectories that had not begun"
    kv = f"{event.kv_bytes / 1e6:.3g} MB of KV" if event.kv_bytes else "KV computed again"
    return f"{event.num_begun} begun trajectories, {event.tokens:,} tokens, {kv}, in {event.seconds:.3g} s,"
