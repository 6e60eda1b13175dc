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

from rlmux.runtime.orders.outbox import Outbox
from rlmux.runtime.workers.heartbeat import Activity
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers
from rlmux.runtime.workers.worker_pool import Worker

LOOK_EVERY_S = 1.0
STANDS_STILL_S = 2.0
"""Seconds without progress after which a worker is said to stand still."""
_LEAST_SHARE = 0.05
"""Part of the time between two looks in which a worker that wants the processor must have had it."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A worker whose present call takes longer than a look, as of the last one."""

    asked_s: float
    """Time at which that call was sent."""
    looked_s: float
    activity: Activity | None
    num_beats: int
    moved_s: float
    """Time at which it was last seen to make progress."""
    reason: str
    """Why it stands still; empty while that was not told."""


class StandstillWatch:
    """Looks at every worker that is busy for long, once a second."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._watched: dict[Worker, _Watched] = {}

    def look(self, all_workers: Iterable[PipelineWorkers]) -> None:
        """Tell of workers that have come to stand still, and note those that go on."""
        for workers in all_workers:
            for worker in workers.processes:
                self._look_at(workers, worker, self._outbox.now_s())

    def end(self, workers: PipelineWorkers, worker: Worker) -> None:
        """Its call was answered, or it is about to be ended."""
        watched = self._watched.pop(worker, None)
        if watched is not None:
            self._note(workers, worker, watched)

    def forget(self, worker: Worker) -> None:
        """It was ended."""
        self._watched.pop(worker, None)

    def _look_at(self, workers: PipelineWorkers, worker: Worker, now_s: float) -> None:
        watched, asked_s = self._watched.get(worker), worker.asked_s
        if watched is not None and watched.asked_s != asked_s:
            self.end(workers, worker)
            watched = None
        if asked_s is None or now_s - (watched.looked_s if watched else asked_s) < LOOK_EVERY_S:
            return
        now = self._watched[worker] = _Watched(
            asked_s=asked_s,
            looked_s=now_s,
            activity=worker.activity(),
            num_beats=worker.num_beats,
            moved_s=watched.moved_s if watched else asked_s,
            reason=watched.reason if watched else "",
        )
        if watched is not None:
            self._compare(workers, worker, watched, now)

    def _compare(self, workers: PipelineWorkers, worker: Worker, before: _Watched, now: _Watched) -> None:
        reason = _why_still(before, now)
        if not reason:
            self._note(workers, worker, before)
            now.moved_s, now.reason = now.looked_s, ""
        elif not now.reason and now.looked_s - now.moved_s >= STANDS_STILL_S:
            now.reason = reason
            text = (
                f"{worker.name} (process {worker.pid}) stands still since {now.moved_s:.1f} s: {reason}; "
                f"it is replaced if it shows no life for {worker.call_limit_s:g} s (call_limit_s)"
            )
            self._outbox.note("warning", pipeline=workers.id, reason=text)

    def _note(self, workers: PipelineWorkers, worker: Worker, watched: _Watched) -> None:
        """Note for how long it stood still, if that was told."""
        if watched.reason:
            self._outbox.note(
                "standstill",
                pipeline=workers.id,
                worker=worker.name,
                devices=list(workers.devices_of(worker)),
                began_s=watched.moved_s,
                seconds=self._outbox.now_s() - watched.moved_s,
                reason=watched.reason,
            )


def _why_still(before: _Watched, now: _Watched) -> str:
    """Empty where it makes progress, shows life, waits for something, or cannot be seen."""
    was, does = before.activity, now.activity
    if was is None or does is None or now.num_beats > before.num_beats:
        return ""
    if does.is_stopped:
        return "it is stopped (SIGSTOP, or a debugger); SIGCONT lets it go on"
    if does.state == "R" and does.cpu_s - was.cpu_s < _LEAST_SHARE * (now.looked_s - before.looked_s):
        return "it gets no processor: others of this machine take it"
    return ""
