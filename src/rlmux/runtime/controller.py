"""The loop in real time: what happened, what to do about it, do it.

    backend ── events ──▶ date ──▶ scheduler.handle ──▶ log (event and its actions, one transaction) ──▶ backend.execute
       ▲                                                                                                     │
       └─────────────────────────────────────────────────────────────────────────────────────────────────────┘

A pass of the loop is a tick. Events get their time as they enter one, whichever thread or process they come from.
Nothing is done before it is in the log. The loop holds no state of its own beyond the
submissions that are not due yet; requests from outside reach it through `run_api`, between two ticks.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from rlmux.core.actions import Action, MigrateShard, Remind, RunStage
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import Event, PipelineSubmitted, TimeReached
from rlmux.core.scheduler import Scheduler
from rlmux.log.notes import Note
from rlmux.log.run_log import RunLog
from rlmux.runtime.backend import Backend, Submission
from rlmux.runtime.control.removals import Removals
from rlmux.runtime.control.retries import Retries
from rlmux.runtime.control.run_control import Requested, RunControl

_POLL_S = 0.25


class Listener(Protocol):
    """A part that watches a run, such as a live display or a metrics writer.

    A display raises BrokenPipeError where nothing reads it any more.
    """

    def update(
        self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]
    ) -> None: ...


class Controller:
    """Drives one scheduler with one backend until every pipeline is over or the run is stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        log: RunLog | None,
        listeners: Sequence[Listener] = (),
        run_api: RunControl | None = None,
        has_news: Callable[[], bool] = lambda: False,
        retries: Retries | None = None,
        removals: Removals | None = None,
    ) -> None:
        """`run_api`: adds and removes pipelines during the run. `has_news`: whether the backend has unreported input
        from outside. `retries`: submits pipelines again that fail. `removals`: of files of pipelines that are over."""
        self._scheduler = scheduler
        self._backend = backend
        self._log = log
        parts: tuple[Listener | None, ...] = (removals, run_api, retries)
        self._listeners = [*listeners, *(part for part in parts if part is not None)]
        self._run_api = run_api
        self._retries = retries
        self._removals = removals
        self._has_news = has_news
        self._is_stopping = False
        self._tick_s = 0.0
        """Time of the newest events."""
        self._reminders: list[float] = []
        """A heap of the times at which the scheduler gets a timer event."""
        self.control_s = 0.0
        """CPU seconds of deciding, logging and dispatch, without waits."""

    def stop(self) -> None:
        """End the loop at the next safe point. May be called from a signal handler."""
        self._is_stopping = True

    def run(
        self,
        submissions: Sequence[Submission],
        *,
        first: Sequence[Event] = (),
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Returns True when every pipeline is over, False when the run was stopped.

        A run that is kept open continues until it is stopped. `first`: events before all others.
        """
        upcoming = sorted(submissions, key=lambda submission: submission.submit_at_s)
        for submission in upcoming:
            self._add_pipeline(submission)
        if first:
            self._tick(first, ())
        while not self._is_stopping and not until():
            requested, requested_notes = self._take_requests(upcoming)
            due = [*requested, *self._take_due(upcoming)]
            is_over = not upcoming and not due and not requested_notes and self._scheduler.query.is_idle()
            if is_over and not self._is_kept_open():
                return True
            events, notes = ((), ()) if due or requested_notes else self._backend.poll(self._seconds_to_wait(upcoming))
            self._tick([*due, *events], [*requested_notes, *notes])
        return not upcoming and self._scheduler.query.is_idle()

    def _is_kept_open(self) -> bool:
        return (self._run_api is not None and self._run_api.is_kept_open) or self._has_news()

    def _take_requests(self, upcoming: list[Submission]) -> tuple[Sequence[Event], Sequence[Note]]:
        """Add clients' submissions and due retries to `upcoming`, and drop withdrawn ones."""
        now_s = self._backend.now_s()
        requested = Requested() if self._run_api is None else self._run_api.take_requests(now_s, upcoming)
        given, notes = [*requested.submissions], [*requested.notes]
        for retry in () if self._retries is None else self._retries.take([*upcoming, *given], now_s):
            given.append(retry.submission)
            notes += retry.notes
        if self._removals is not None:
            notes += self._removals.take(now_s, [*upcoming, *given])
        for submission in given:
            self._add_pipeline(submission)
        if given or requested.withdrawn:
            upcoming += given
            upcoming[:] = [submission for submission in upcoming if submission.pipeline.id not in requested.withdrawn]
            upcoming.sort(key=lambda submission: submission.submit_at_s)
        return requested.events, notes

    def _add_pipeline(self, submission: Submission) -> None:
        self._backend.add_pipeline(submission)
        if self._retries is not None:
            self._retries.add(submission)

    def _take_due(self, upcoming: list[Submission]) -> list[Event]:
        """Submissions whose time has come, as events."""
        now_s = self._backend.now_s()
        due: list[Event] = []
        while upcoming and upcoming[0].submit_at_s <= now_s:
            due.append(PipelineSubmitted(pipeline=upcoming.pop(0).pipeline))
        while self._reminders and self._reminders[0] <= now_s:
            due.append(TimeReached())
            heapq.heappop(self._reminders)
        return due

    def _seconds_to_wait(self, upcoming: Sequence[Submission]) -> float:
        """Most seconds until the next tick is due."""
        if not upcoming:
            return _POLL_S
        return min(_POLL_S, max(0.0, upcoming[0].submit_at_s - self._backend.now_s()))

    def _tick(self, events: Sequence[Event], notes: Sequence[Note]) -> None:
        start_s = time.thread_time()
        events = self._date(events)
        actions = self._decide(events)
        now_s = self._backend.now_s()
        if self._log is not None:
            for note in notes:
                self._log.append_note(now_s, note)
            self._log.commit()
        for action in sorted(actions, key=_needs_no_device):  # a device waits for its order, user code for none
            if isinstance(action, Remind):
                heapq.heappush(self._reminders, action.at_s)
            elif not self._is_overtaken(action):
                self._backend.execute(action)
        for listener in self._listeners:
            listener.update(now_s, events, actions, notes)
        self.control_s += time.thread_time() - start_s
        if not events and not self._scheduler.query.has_orders():
            self._check_not_stuck()

    def _date(self, events: Sequence[Event]) -> list[Event]:
        """The one gate that dates events: with the time of their tick, which never decreases."""
        self._tick_s = max(self._tick_s, self._backend.now_s())
        return [replace(event, time_s=self._tick_s) for event in events]

    def _decide(self, events: Sequence[Event]) -> list[Action]:
        """Handle every event; events and their actions go to the log."""
        actions: list[Action] = []
        for event in events:
            orders = self._scheduler.handle(event)
            if self._log is not None:
                self._log.append_event(event)
                self._log.append_actions(orders)
            actions += orders
        return actions

    def _is_overtaken(self, action: Action) -> bool:
        """Whether a later event of the same tick ended the order: its pipeline failed or was restarted."""
        return isinstance(action, RunStage | MigrateShard) and not self._scheduler.query.has_order(action.order)

    def _check_not_stuck(self) -> None:
        """Raises IllegalTransitionError where work is ready, nothing runs and nothing will happen by itself."""
        ready = self._scheduler.query.ready_work()
        stuck = [work for work in ready if not work.is_waiting]  # waiting work: its environment replies or times out
        if stuck:
            raise IllegalTransitionError(f"policy {self._scheduler.policy.name} leaves ready work lying: {stuck[0]}")


def _needs_no_device(action: Action) -> bool:
    return isinstance(action, RunStage) and not action.devices
