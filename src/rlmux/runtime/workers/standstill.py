"""Standstills: busy workers that are stopped or get no processor.

    call sent ── computes ── computes ── stands still ............ goes on ──▶ answer
                                         └─ warned once           └─ noted, with its seconds

Workers that wait (for the disk, user code, a lock) are not reported: some calls consist of waiting. Neither are workers
that show life, such as one that polls a starting server and needs hardly any processor. Nothing is decided here; the
supervisor ends a call that shows no life for its limit.

A module of its own: it is tested without processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlmux.log.notes import StandstillNote, WarningNote
from rlmux.runtime.workers.heartbeat import Activity
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers
from rlmux.runtime.workers.worker_pool import Worker

POLL_EVERY_S = 1.0
STANDS_STILL_S = 2.0
"""Seconds without progress after which a standstill is reported."""
_LEAST_SHARE = 0.05
"""Least processor time of a runnable worker, as part of the time between two polls."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A busy worker at the last poll."""

    called_s: float
    """Time at which that call was sent."""
    polled_s: float
    activity: Activity | None
    num_beats: int
    moved_s: float
    """Time of the last observed progress."""
    reason: str
    """Reported cause of the standstill; empty before a report."""


class StandstillWatch:
    """Polls every long busy worker once a second."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._watched: dict[Worker, _Watched] = {}

    def poll(self, all_workers: Iterable[PipelineWorkers]) -> None:
        """Warn of new standstills, and record finished ones."""
        for workers in all_workers:
            for worker in workers.processes:
                self._poll_worker(workers, worker, self._outbox.now_s())

    def end(self, workers: PipelineWorkers, worker: Worker) -> None:
        """Note a standstill's end: the call was answered, or the worker is about to be ended."""
        watched = self._watched.pop(worker, None)
        if watched is not None:
            self._note(workers, worker, watched)

    def forget(self, worker: Worker) -> None:
        """It was ended."""
        self._watched.pop(worker, None)

    def _poll_worker(self, workers: PipelineWorkers, worker: Worker, now_s: float) -> None:
        watched, called_s = self._watched.get(worker), worker.called_s
        if watched is not None and watched.called_s != called_s:
            self.end(workers, worker)
            watched = None
        if called_s is None or now_s - (watched.polled_s if watched else called_s) < POLL_EVERY_S:
            return
        now = self._watched[worker] = _Watched(
            called_s=called_s,
            polled_s=now_s,
            activity=worker.activity(),
            num_beats=worker.num_beats,
            moved_s=watched.moved_s if watched else called_s,
            reason=watched.reason if watched else "",
        )
        if watched is not None:
            self._compare(workers, worker, watched, now)

    def _compare(self, workers: PipelineWorkers, worker: Worker, before: _Watched, now: _Watched) -> None:
        reason = _why_still(before, now)
        if not reason:
            self._note(workers, worker, before)
            now.moved_s, now.reason = now.polled_s, ""
        elif not now.reason and now.polled_s - now.moved_s >= STANDS_STILL_S:
            now.reason = reason
            text = (
                f"{worker.name} (process {worker.pid}) stands still since {now.moved_s:.1f} s: {reason}; "
                f"it is replaced if it shows no life for {worker.call_limit_s:g} s (call_limit_s)"
            )
            self._outbox.add_note(WarningNote(pipeline=workers.id, reason=text))

    def _note(self, workers: PipelineWorkers, worker: Worker, watched: _Watched) -> None:
        """Note the seconds of a reported standstill."""
        if watched.reason:
            self._outbox.add_note(
                StandstillNote(
                    pipeline=workers.id,
                    worker=worker.name,
                    devices=list(workers.devices_of(worker)),
                    began_s=watched.moved_s,
                    seconds=self._outbox.now_s() - watched.moved_s,
                    reason=watched.reason,
                )
            )


def _why_still(before: _Watched, now: _Watched) -> str:
    """Cause of a standstill; empty for a worker that makes progress, shows life, waits, or cannot be observed."""
    was, does = before.activity, now.activity
    if was is None or does is None or now.num_beats > before.num_beats:
        return ""
    if does.is_stopped:
        return "it is stopped (SIGSTOP, or a debugger); SIGCONT lets it go on"
    if does.state == "R" and does.cpu_s - was.cpu_s < _LEAST_SHARE * (now.polled_s - before.polled_s):
        return "it gets no processor: others of this machine take it"
    return ""
