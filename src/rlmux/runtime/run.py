"""One run from start to end: the folder, the log, the scheduler, a backend, the reports.

    run_pipelines      a new folder ──▶ log ──▶ backend ─┬▶ Prepared ──▶ drive: controller until all is over
    resume_pipelines   a folder's log ──▶ backend ───────┘                └──▶ summary, timeline

A resumed pipeline continues from its newest checkpoint. If no backend can be made, the new folder is removed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlmux.config.shares import parse_shares
from rlmux.config.tree import KeepConfig
from rlmux.core.actions import Action, Queue, Refuse, Release
from rlmux.core.decision.policy import Policy
from rlmux.core.errors import IllegalTransitionError, LogError, PolicyError, RlmuxError, StorageError, ThreadDiedError
from rlmux.core.events import AlikeRestored, ClientFinished, Event, PipelineCancelled, PipelineFailed, WaitsRestored
from rlmux.core.model import AlikeSeconds, Cluster, PipelineId, PipelineStatus
from rlmux.core.queue_order import PipelineWait, ShareSettings
from rlmux.core.scheduler import Scheduler
from rlmux.log import value_codec
from rlmux.log.folder_lock import FolderLock
from rlmux.log.notes import DefectNote, EndNote, Note, PipelineEndNote, ResumedNote, RetriedNote, StartReservedNote
from rlmux.log.restored_shares import shares_events
from rlmux.log.run_log import LOG_NAME, LogReader, RunLog, run_header, utc_now
from rlmux.log.run_state import RunState
from rlmux.policies.max_min_fairness import FairShares
from rlmux.report.reports import write_report
from rlmux.rl.memory.footprint import BOTH_PHASES
from rlmux.runtime.backend import Backend, Submission, WorkerOptions
from rlmux.runtime.control.control_socket import ControlServer
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.control.removals import Removals, finish
from rlmux.runtime.control.retries import Retries, retried_note
from rlmux.runtime.control.run_control import ParseSubmission, RunControl
from rlmux.runtime.control.unfinished import from_checkpoint, lost_step_notes, with_last_standing
from rlmux.runtime.controller import Controller, Listener
from rlmux.runtime.local import local_backend
from rlmux.runtime.machine_probe import describe_machine
from rlmux.runtime.memory.memory_budget import (
    check_each_fits,
    own_bases,
    with_footprint,
    with_machine_memory,
)
from rlmux.runtime.orders.determinism_check import check_determinism
from rlmux.runtime.records.end_records import keep_end, keep_ends, keep_header
from rlmux.runtime.records.hardware import HardwareNotes
from rlmux.runtime.records.input_files import changed_input_notes, input_notes, retried
from rlmux.runtime.records.live_trackers import LiveTrackers
from rlmux.runtime.records.metrics_writer import MetricsWriter
from rlmux.runtime.records.run_folder import FolderWatch, prepare_folder
from rlmux.runtime.records.usage_notes import UsageNotes
from rlmux.runtime.weights.origins import plan_notes, with_origin
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.processes import raise_file_limit

LOCAL = "local"
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe without a reader, or to a closed terminal."""


class MakeBackend(Protocol):
    """A factory of backends, such as `local_backend`."""

    def __call__(
        self, cluster: Cluster, folder: Path, *, options: WorkerOptions | None, start_s: float = 0.0
    ) -> WorkerBackend: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run. The defaults train on this machine, without listeners."""

    backend: str = LOCAL
    """Name of the backend in the log."""
    make_backend: MakeBackend = local_backend
    workers: WorkerOptions | None = None
    """None: the backend's default."""
    listeners: Sequence[Listener] = ()
    """Notified of every event, action and note."""
    parse: ParseSubmission | None = None
    """Parser of submissions to the run in progress; None: submissions are refused."""
    is_kept_open: bool = False
    """Whether the run waits for submissions when its pipelines are over."""
    inbox: Inbox | None = None
    """Commands of other threads, for on-demand pipelines and programs."""
    shares: ShareSettings | None = None
    """Entitlements of users; None: equal."""
    trackers: Sequence[str] = ()
    """Trackers that get each step while the run goes on."""
    keep: KeepConfig | None = None
    """How long files of pipelines that are over are kept; None: until a user removes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    summary: Mapping[str, Any]
    is_complete: bool
    """False: the run was stopped and can be resumed."""
    was_over: bool = False
    """True: there was nothing left to resume."""
    trackers: Mapping[str, str] = field(default_factory=dict)
    """Why a tracker may lack steps, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is ready to start: folder locked, log open, backend made."""

    cluster: Cluster
    submissions: Sequence[Submission]
    policy: Policy
    folder: Path
    log: RunLog
    backend: WorkerBackend
    run_id: str | None = None
    is_gpu: bool = False
    ended: Mapping[PipelineId, PipelineEndNote] = field(default_factory=dict)
    """Pipelines that ended in earlier parts of the run, with the fields of their ends."""
    earlier: Mapping[PipelineId, tuple[str, Submission]] = field(default_factory=dict)
    """(status, submission) of these."""
    taken: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the pipelines of each submission with an id."""
    first: Sequence[Event] = ()
    """Events before all others."""


def run_pipelines(
    cluster: Cluster,
    submissions: Sequence[Submission],
    policy: Policy,
    folder: Path,
    options: RunOptions = RunOptions(),
    *,
    spec: Mapping[str, Any],
    is_overwriting: bool = False,
) -> RunResult:
    """Train every pipeline under a policy, by default on this machine. `spec`: the log's part of the user's file.

    Raises UserError for an unusable folder, StorageError if a file of the run cannot be written. A pipeline's own
    failure is in the summary, not raised.
    """
    cluster, submissions, is_gpu = fitted(cluster, submissions, options)
    _probe_determinism(cluster, submissions, options)
    lock = prepare_folder(folder, is_overwriting=is_overwriting)
    header = run_header(policy=policy.name, backend=options.backend, cluster=cluster, sharing=policy.sharing, spec=spec)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.callback(lock.release)
        log = undo.enter_context(_new_log(folder, header, lock))
        backend = options.make_backend(cluster, folder, options=_sharing(options.workers, policy))
        undo.pop_all()  # without a backend there is no run
    with log:
        marked = [with_origin(submission, header["run_id"]) for submission in submissions]
        _append(log, [*plan_notes(marked), *input_notes(marked)])
        prepared = Prepared(
            cluster=cluster, submissions=marked, policy=policy, folder=folder, log=log, backend=backend,
            run_id=header["run_id"], is_gpu=is_gpu, first=shares_events(options.shares, None, 0.0),
        )  # fmt: skip
        return drive(prepared, options)


def _new_log(folder: Path, header: Mapping[str, Any], lock: FolderLock) -> RunLog:
    """The log of a new run, with what is kept beside it. Raises StorageError."""
    try:
        log = RunLog.create(folder, header, lock=lock)
        keep_header(folder, header)
        keep_ends(folder, ())
    except (OSError, LogError) as error:
        raise StorageError(f"the run cannot be begun: {error}") from error
    return log


def fitted(
    cluster: Cluster, submissions: Sequence[Submission], options: RunOptions = RunOptions()
) -> tuple[Cluster, list[Submission], bool]:
    """The cluster with this machine's memory, the submissions with footprints, and whether devices are GPUs.

    Raises RefusedError for a worker that needs more memory than a device has.
    """
    cluster, known, is_gpu = _on_machine(cluster, submissions, options)
    check_each_fits(cluster, known, is_gpu=is_gpu, on_machine=options.backend == LOCAL)
    return cluster, known, is_gpu


def resume_pipelines(
    cluster: Cluster,
    submissions: Sequence[Submission],
    policy: Policy,
    folder: Path,
    options: RunOptions = RunOptions(),
    *,
    retry: Sequence[str] = (),
) -> RunResult:
    """Continue a run that was stopped or killed. Pipelines that are over stay over.

    `retry`: failed pipelines to resume from their newest checkpoint.
    Raises UserError, with the process, for a run in progress, and for a name in `retry` that did not fail.
    """
    with contextlib.ExitStack() as held:
        lock = FolderLock.take(folder)
        held.callback(lock.release)
        run_id, state = _read_state(folder)
        again = retried(retry, state, [submission.pipeline.id for submission in submissions])
        ended = {end.pipeline: end for name, end in state.ended.items() if name not in again}
        unfinished = [submission for submission in submissions if submission.pipeline.id not in ended]
        if not unfinished and not options.is_kept_open:
            _fill_metrics(folder)
            return RunResult(folder=folder, summary=write_report(folder), is_complete=True, was_over=True)
        cluster, unfinished, is_gpu = _on_machine(cluster, unfinished, options)
        _probe_determinism(cluster, unfinished, options)
        unfinished = [with_origin(submission, run_id, state.plans) for submission in unfinished]
        unfinished = [from_checkpoint(submission, folder, state) for submission in unfinished]
        unfinished = [with_last_standing(submission, state) for submission in unfinished]
        log = held.enter_context(RunLog.open(folder, lock=lock))
        keep_ends(folder, ended.values())
        finish(folder, state)
        notes = [
            *plan_notes([submission for submission in unfinished if submission.pipeline.id not in state.plans]),
            *changed_input_notes(unfinished, state),
        ]
        notes += [retried_note(each, state, by_rule=False) for each in unfinished if each.pipeline.id in again]
        _append(log, [*notes, *lost_step_notes(unfinished, folder, state)])
        log.commit()
        _fill_metrics(folder)
        names = [submission.pipeline.id for submission in unfinished]
        resumed = ResumedNote(pipelines=names, retried=again, machines=cluster.machines or None, utc=utc_now())
        log.append_note(log.last_time_s, resumed)
        for listener in options.listeners:
            listener.update(log.last_time_s, (), (), notes)
        workers = _sharing(options.workers, policy)
        backend = options.make_backend(cluster, folder, options=workers, start_s=log.last_time_s)
        shares = shares_events(state.shares or options.shares, state.usage, log.last_time_s)
        first = [*shares, *_waits_events(state), *_alike_events(state)]
        prepared = Prepared(
            cluster=cluster, submissions=unfinished, policy=policy, folder=folder, log=log, backend=backend,
            run_id=run_id, is_gpu=is_gpu, ended=ended, first=first,
            earlier={
                each.pipeline.id: (
                    ended[each.pipeline.id].status,
                    with_origin(with_footprint(each, cluster, is_gpu=is_gpu), run_id, state.plans),
                )
                for each in submissions
                if each.pipeline.id in ended
            },
            taken={each.id: each.pipelines for each in state.submitted if each.id is not None},
        )  # fmt: skip
        return drive(prepared, options)


def _on_machine(
    cluster: Cluster, submissions: Sequence[Submission], options: RunOptions
) -> tuple[Cluster, list[Submission], bool]:
    """The cluster with this machine's memory, unless the backend is of other machines, the submissions with
    footprints, and whether devices are this machine's GPUs."""
    machine = describe_machine(cluster) if options.backend == LOCAL else None
    is_gpu = machine is not None and bool(machine.gpu_by_device)
    known = [
        with_footprint(
            submission,
            cluster,
            is_gpu=is_gpu,
            own_bases=BOTH_PHASES if machine is None else own_bases(submission, submissions, is_gpu=is_gpu),
        )
        for submission in submissions
    ]
    return cluster if machine is None else with_machine_memory(cluster, known, machine), known, is_gpu


def _sharing(workers: WorkerOptions | None, policy: Policy) -> WorkerOptions:
    """The options with whether the policy may give a device to several pipelines at once."""
    return replace(workers or WorkerOptions(), shares_devices=policy.sharing is not None and policy.sharing.allows_any)


def _probe_determinism(cluster: Cluster, submissions: Sequence[Submission], options: RunOptions) -> None:
    """Raises UserError for a pipeline that requires more than its engines keep; the run's folder is not touched."""
    to_probe = [submission for submission in submissions if submission.determinism_class is not None]
    if not to_probe:
        return
    with tempfile.TemporaryDirectory(prefix="rlmux-probe-") as scratch:
        backend = options.make_backend(cluster, Path(scratch), options=options.workers)
        try:
            check_determinism(backend.workplace, cluster, to_probe, Path(scratch))
        finally:
            backend.close()


def _read_state(folder: Path) -> tuple[str | None, RunState]:
    """(id of the run, its state from the log)."""
    with LogReader(folder) as reader:
        return reader.header.get("run_id"), reader.state()


def _fill_metrics(folder: Path) -> None:
    """Bring the files of numbers to what the log has."""
    with contextlib.closing(MetricsWriter(folder)) as metrics, LogReader(folder) as reader:
        metrics.fill(reader)


def _append(log: RunLog, notes: Sequence[Note]) -> None:
    for note in notes:
        log.append_note(log.last_time_s, note)


def _waits_events(state: RunState) -> list[Event]:
    """A scheduler's events about pipelines that waited when the run was stopped or killed."""
    waits = tuple(PipelineWait(pipeline=PipelineId(name), **fields) for name, fields in sorted(state.waits.items()))
    return [WaitsRestored(waits=waits)] if waits else []


def _alike_events(state: RunState) -> list[Event]:
    """A scheduler's events about what steps took for pipelines alike."""
    seconds = value_codec.reader(tuple[AlikeSeconds, ...])(state.alike, "alike")
    return [AlikeRestored(seconds=seconds)] if seconds else []


def drive(run: Prepared, options: RunOptions) -> RunResult:
    """Run a scheduler on a backend until every pipeline is over or a signal stops the run; then close the backend, log
    the end, and write the reports. Raises StorageError.
    """
    raise_file_limit()
    folder, log, backend, inbox = run.folder, run.log, run.backend, options.inbox or Inbox()
    backend.connect(inbox)
    scheduler = Scheduler(run.cluster, run.policy, FairShares())
    metrics, watch, usage = MetricsWriter(folder), FolderWatch(log.lock), UsageNotes(scheduler, log)
    endings, starts = _Endings(scheduler, backend, log, folder, dict(run.ended)), _ReservedStarts(scheduler, log)
    retries = Retries(folder, scheduler.query, run.earlier)
    removals = Removals(folder, log, retries, options.keep)
    run_api = None
    if options.parse is not None:
        run_api = RunControl(
            ControlServer(folder, backend.workplace.wake),
            scheduler,
            _checked(options.parse, run),
            over=endings.by_pipeline,
            is_kept_open=options.is_kept_open,
            taken=run.taken,
            parse_shares=partial(parse_shares, cluster=run.cluster),
            retries=retries,
            removals=removals,
        )
    displays = [_UntilClosed(listener, lambda: controller.stop()) for listener in options.listeners]
    trackers, hardware = LiveTrackers(folder, options.trackers), HardwareNotes(log, backend.workplace.parts)
    controller = Controller(
        scheduler, backend, log, [watch, metrics, endings, usage, starts, trackers, hardware, *displays], run_api,
        inbox.has_commands, retries, removals,
    )  # fmt: skip
    try:
        with _private_files(), _without_old_garbage(), _stop_on_interrupt(controller.stop):
            is_complete = controller.run(run.submissions, first=run.first)
            watch.check()
    except (OSError, LogError, StorageError) as error:
        watch.check()  # a missing folder is the cause, and nothing can be resumed
        raise StorageError(_with_resume_hint(folder, str(error))) from error
    except (IllegalTransitionError, ThreadDiedError) as error:  # a run must not continue from a wrong state
        log.append_note(backend.now_s(), DefectNote(text=str(error)))
        raise type(error)(_as_defect(folder, error)) from error
    finally:
        if run_api is not None:
            run_api.close()
        backend.close()
        hardware.close()
        removals.close()
        usage.write(backend.now_s())
        _write_end(log, backend.now_s(), metrics, endings.by_pipeline, controller.control_s)
        late = trackers.finish()
    return RunResult(folder=folder, summary=write_report(folder), is_complete=is_complete, trackers=late)


def _write_end(
    log: RunLog,
    now_s: float,
    metrics: MetricsWriter,
    ended: Mapping[PipelineId, PipelineEndNote],
    control_s: float,
) -> None:
    """Log that the process ended on purpose. On a full disk, earlier commits stay."""
    with contextlib.suppress(OSError, LogError):
        metrics.close()
        log.append_note(now_s, EndNote(pipelines=ended, control_s=control_s))
        log.commit()


def _with_resume_hint(folder: Path, problem: str) -> str:
    return f"{problem}; stopped, nothing that was finished is lost; resume with: rlmux resume {folder}"


def _as_defect(folder: Path, error: RlmuxError) -> str:
    """One line with the defective part and the remedy. The recent events are in the log."""
    part = "the policy" if isinstance(error, PolicyError) else "rlmux"
    found = str(error).partition("\n")[0]
    text = f"this is a defect of {part}, not of your file: {found}; to report it, send {folder / LOG_NAME}"
    return _with_resume_hint(folder, text)


@contextlib.contextmanager
def _without_old_garbage() -> Iterator[None]:
    """Look for garbage among what is made in the body alone: all that is imported would take 0.1 s to look through, in
    which no device gets its next order."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Make new files readable only by the user."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def _checked(parse: ParseSubmission, run: Prepared) -> ParseSubmission:
    """The parser, with the checks and origin marks of the run's first pipelines."""

    def parse_and_check(text: str, source: str) -> Sequence[Submission]:
        submissions = [with_footprint(submission, run.cluster, is_gpu=run.is_gpu) for submission in parse(text, source)]
        check_each_fits(run.cluster, submissions, is_gpu=run.is_gpu)
        return [with_origin(submission, run.run_id) for submission in submissions]

    return parse_and_check


class _Endings:
    """Writes each pipeline's end to the log, and to a file beside it in case the log is damaged."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        log: RunLog,
        folder: Path,
        ended: dict[PipelineId, PipelineEndNote],
    ) -> None:
        self._folder = folder
        self._scheduler = scheduler
        self._backend = backend
        self._log = log
        self.by_pipeline: dict[PipelineId, PipelineEndNote] = ended

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        for note in notes:
            if isinstance(note, PipelineEndNote):  # of one that was cancelled before it came
                keep_end(self._folder, note)
            elif isinstance(note, RetriedNote):
                self.by_pipeline.pop(note.pipeline, None)
                keep_ends(self._folder, self.by_pipeline.values())
        ends = PipelineFailed | PipelineCancelled | ClientFinished | Release | Refuse
        if not any(isinstance(entry, ends) for entry in [*events, *actions]):
            return
        query = self._scheduler.query
        for pipeline in query.pipelines():
            status = query.status(pipeline)
            is_over = status not in (PipelineStatus.WAITING, PipelineStatus.RUNNING)
            if is_over and pipeline not in self.by_pipeline:
                end = self.by_pipeline[pipeline] = PipelineEndNote(
                    pipeline=pipeline,
                    status=status.value,
                    reason=query.reason(pipeline),
                    weights_sha256=self._backend.weights_sha256(pipeline),
                )
                self._log.append_note(now_s, end)
                keep_end(self._folder, end)


class _ReservedStarts:
    """Logs the reserved start of each waiting pipeline, so that a resumed run keeps it."""

    def __init__(self, scheduler: Scheduler, log: RunLog) -> None:
        self._query = scheduler.query
        self._log = log

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: object) -> None:
        for name in dict.fromkeys(action.pipeline for action in actions if isinstance(action, Queue)):
            reserved_start_s = self._query.reserved_start_s(name)
            if math.isfinite(reserved_start_s):
                self._log.append_note(now_s, StartReservedNote(pipeline=name, start_s=reserved_start_s))


class _UntilClosed:
    """Forwards a run's updates to a display. When the display's output is closed, the run ends as by Ctrl-C."""

    def __init__(self, listener: Listener, stop: Callable[[], None]) -> None:
        self._listener: Listener | None = listener
        self._stop = stop

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        if self._listener is None:
            return
        try:
            self._listener.update(now_s, events, actions, notes)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            self._listener = None
            self._stop()


@contextlib.contextmanager
def _stop_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the run at the next safe point; a second Ctrl-C ends it at once.

    SIGHUP stays ignored if it is, as under `nohup`. SIGINT does not: shells ignore it for background jobs, and
    `kill -INT` must still end such a run.
    """
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [each for each in _STOPPING if each != signal.SIGHUP or not is_hangup_ignored]

    def on_signal(number: int, _: object) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        previous = {number: signal.signal(number, on_signal) for number in numbers}
    except ValueError:  # not the main thread: its caller stops the run otherwise
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
