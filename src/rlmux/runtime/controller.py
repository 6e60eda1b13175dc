"""The loop in real time: what happened, what to do about it, do it.

    backend ── events ──▶ scheduler.handle ──▶ log (event and its actions, one transaction) ──▶ backend.execute
       ▲                                                                                            │
       └────────────────────────────────────────────────────────────────────────────────────────────┘

Nothing is done before it is in the log. The loop holds no state of its own beyond the submissions that
are not due yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rlmux.core.actions import Action, MigrateShard, RunStage
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import Event, PipelineSubmitted
from rlmux.core.scheduler import Scheduler
from rlmux.report.log import RunLog
from rlmux.runtime.backend import Backend, Note, Submission
from rlmux.runtime.run_api import Desk

_POLL_S = 0.25


class Listener(Protocol):
    """Someone who watches a run: a live display, a metrics writer."""

    def update(
        self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]
    ) -> None: ...


class Controller:
    """Drives one scheduler with one backend until every pipeline is over or someone asks it to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        log: RunLog | None,
        listeners: Sequence[Listener] = (),
        desk: Desk | None = None,
    ) -> None:
        """`desk`: through which pipelines come and go while it runs."""
        self._scheduler = scheduler
        self._backend = backend
        self._log = log
        self._listeners = [*listeners, desk] if desk is not None else listeners
        self._desk = desk
        self._is_stopping = False
        self.control_s = 0.0
        """CPU seconds of deciding, logging and passing on; waiting left out."""

    def stop(self) -> None:
        """End the loop at the next safe point. May be called from a signal handler."""
        self._is_stopping = True

    def run(self, submissions: Sequence[Submission], *, until: Callable[[], bool] = lambda: False) -> bool:
        """Returns True when every pipeline is over, False when it was stopped before.

        With a desk that is kept open it goes on until it is stopped.
        """
        waiting = sorted(submissions, key=lambda submission: submission.submit_at_s)
        for submission in waiting:
            self._backend.add_pipeline(submission)
        while not self._is_stopping and not until():
            asked, asked_notes = self._see_to_desk(waiting)
            due = [*asked, *self._due(waiting)]
            if not waiting and not due and self._scheduler.is_idle() and not self._is_kept_open():
                return True
            events, notes = ((), ()) if due else self._backend.poll(self._patience(waiting))
            self._step([*due, *events], [*asked_notes, *notes])
        return not waiting and self._scheduler.is_idle()

    def _is_kept_open(self) -> bool:
        return self._desk is not None and self._desk.is_kept_open

    def _see_to_desk(self, waiting: list[Submission]) -> tuple[Sequence[Event], Sequence[Note]]:
        """Let visitors' pipelines in among those that wait, and those withdrawn out."""
        if self._desk is None:
            return (), ()
        asked = self._desk.open(self._backend.now_s(), waiting)
        for submission in asked.submissions:
            self._backend.add_pipeline(submission)
        if asked.submissions or asked.withdrawn:
            waiting += asked.submissions
            waiting[:] = [one for one in waiting if one.pipeline.id not in asked.withdrawn]
            waiting.sort(key=lambda submission: submission.submit_at_s)
        return asked.events, asked.notes

    def _step(self, events: Sequence[Event], notes: Sequence[Note]) -> None:
        """One turn of the loop."""
        start_s = time.thread_time()
        actions: list[Action] = []
        for event in events:
            orders = self._scheduler.handle(event)
            if self._log is not None:
                self._log.append_event(event)
                self._log.append_actions(orders)
            actions += orders
        now_s = self._backend.now_s()
        if self._log is not None:
            for note in notes:
                self._log.note(note.type, now_s, **note.fields)
            self._log.commit()
        for action in actions:
            if not self._is_overtaken(action):
                self._backend.execute(action)
        for listener in self._listeners:
            listener.update(now_s, events, actions, notes)
        self.control_s += time.thread_time() - start_s
        if not events and not self._scheduler.state.orders:
            self._check_not_stuck()

    def _is_overtaken(self, action: Action) -> bool:
        """A later event of the same turn has ended the order already: its pipeline failed or began again."""
        return isinstance(action, RunStage | MigrateShard) and action.order not in self._scheduler.state.orders

    def _due(self, waiting: list[Submission]) -> list[Event]:
        """Submissions whose time has come."""
        now_s = self._backend.now_s()
        due: list[Event] = []
        while waiting and waiting[0].submit_at_s <= now_s:
            due.append(PipelineSubmitted(time_s=now_s, pipeline=waiting.pop(0).pipeline))
        return due

    def _patience(self, waiting: Sequence[Submission]) -> float:
        nexts = [_POLL_S + self._backend.now_s()]
        if waiting:
            nexts.append(waiting[0].submit_at_s)
        return max(0.0, min(nexts) - self._backend.now_s())

    def _check_not_stuck(self) -> None:
        """Nothing runs and nothing will happen by itself: a policy that leaves work lying would hang the run."""
        ready = [work for group in self._scheduler.state.groups.values() for work in group.ready.values()]
        stuck = [work for work in ready if not work.is_waiting]  # for its environment, which replies or is out of time
        if stuck:
            raise IllegalTransitionError(f"policy {self._scheduler.policy.name} leaves ready work lying: {stuck[0]}")
