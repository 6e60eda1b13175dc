"""Workers that stand still: stopped, or given no processor, while a call of theirs is under way.

    call sent ── computes ── computes ── stands still ............ goes on ──▶ answer
                                         └─ told once, here       └─ noted, with its seconds

A worker that waits (for the disk, for user code, for a lock) is not told of: that is what some calls are for. Neither
is one that shows life: while a server starts beside it, it wakes to look, and needs hardly any processor. Nothing is
decided here; a call that shows no life for its limit is ended by the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlmux.runtime.activity import Activity
from rlmux.runtime.outbox import Outbox
from rlmux.runtime.pipeline_workers import PipelineWorkers
from rlmux.runtime.workplace import Worker

LOOK_EVERY_S = 1.0
STANDS_STILL_S = 2.0
"""Seconds without progress after which a worker is said to stand still."""
_LEAST_SHARE = 0.05
"""Part of the time between two looks in which a worker that wants the processor must have had it."""


@dataclass(slots=True)
class _Watched:
    """A worker whose present call takes longer than a look."""

    asked_s: float
    """Time at which that call was sent."""
    looked_s: float
    activity: Activity | None
    num_beats: int
    """Signs of life of the worker's calls at the last look."""
    moved_s: float
    """Time at which it was last seen to make progress."""
    reason: str = ""
    """Why it stands still; empty while that was not told."""


class StandstillWatch:
    """Looks at every worker that is busy for long, once a second."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._watched: dict[Worker, _Watched] = {}

    def look(self, all_workers: Iterable[PipelineWorkers]) -> None:
        """Tell of workers that have come to stand still, and note those that go on."""
        now_s = self._outbox.now_s()
        for workers in all_workers:
            for worker in workers.processes:
                watched = self._watched.get(worker)
                if watched is not None and watched.asked_s != worker.asked_s:
                    self.end(workers, worker)
                    watched = None
                if worker.asked_s is None:
                    continue
                if watched is None:
                    if now_s - worker.asked_s >= LOOK_EVERY_S:
                        self._watched[worker] = _watched(worker, worker.asked_s, now_s)
                elif now_s - watched.looked_s >= LOOK_EVERY_S:
                    self._look_again(workers, worker, watched)

    def end(self, workers: PipelineWorkers, worker: Worker) -> None:
        """Its call was answered, or it is about to be ended."""
        watched = self._watched.pop(worker, None)
        if watched is not None and watched.reason:
            self._note(workers, worker, watched)

    def forget(self, worker: Worker) -> None:
        """It was ended."""
        self._watched.pop(worker, None)

    def _look_again(self, workers: PipelineWorkers, worker: Worker, watched: _Watched) -> None:
        now_s, activity = self._outbox.now_s(), worker.activity()
        has_shown_life = worker.num_beats > watched.num_beats
        reason = "" if has_shown_life else _why_still(watched.activity, activity, now_s - watched.looked_s)
        watched.looked_s, watched.activity, watched.num_beats = now_s, activity, worker.num_beats
        if not reason:
            if watched.reason:
                self._note(workers, worker, watched)
            watched.moved_s, watched.reason = now_s, ""
        elif not watched.reason and now_s - watched.moved_s >= STANDS_STILL_S:
            watched.reason = reason
            text = (
                f"{worker.name} (process {worker.pid}) stands still since {watched.moved_s:.1f} s: {reason}; "
                f"it is replaced if it shows no life for {worker.call_limit_s:g} s (call_limit_s)"
            )
            self._outbox.note("warning", pipeline=workers.id, reason=text)

    def _note(self, workers: PipelineWorkers, worker: Worker, watched: _Watched) -> None:
        seconds = self._outbox.now_s() - watched.moved_s
        self._outbox.note(
            "standstill",
            pipeline=workers.id,
            worker=worker.name,
            devices=list(workers.devices_of(worker)),
            began_s=watched.moved_s,
            seconds=seconds,
            reason=watched.reason,
        )


def _watched(worker: Worker, asked_s: float, now_s: float) -> _Watched:
    return _Watched(
        asked_s=asked_s,
        looked_s=now_s,
        activity=worker.activity(),
        num_beats=worker.num_beats,
        moved_s=asked_s,
    )


def _why_still(before: Activity | None, now: Activity | None, elapsed_s: float) -> str:
    """Empty where it makes progress, waits for something, or cannot be seen."""
    if before is None or now is None:
        return ""
    if now.is_stopped:
        return "it is stopped (SIGSTOP, or a debugger); SIGCONT lets it go on"
    if now.is_runnable and now.cpu_s - before.cpu_s < _LEAST_SHARE * elapsed_s:
        return "it gets no processor: others of this machine take it"
    return ""
