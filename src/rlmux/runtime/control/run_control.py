"""Serves requests from outside (`control_requests.py`) to a running controller.

    request ─▶ checked ─▶ events and notes of this tick ─▶ log ─▶ the answer, once its effect is in the log

A submission refused for its text leaves no trace. An accepted one is logged before any of its work starts, so that a
resumed run has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.actions import Action, Admit, Queue, Refuse
from rlmux.core.errors import OverQuotaError, UserError
from rlmux.core.events import (
    Event,
    HoldReleased,
    ParkRequested,
    PipelineCancelled,
    PipelineHeld,
    PipelineRanked,
    SharesSet,
)
from rlmux.core.model import Pipeline, PipelineId, PipelineStatus
from rlmux.core.queue.wait_reasons import Wait, WaitToken
from rlmux.core.queue_order import ShareSettings
from rlmux.core.scheduler import Scheduler
from rlmux.core.settle.parking import PARKED
from rlmux.log.notes import Note, PipelineEndNote, RemovedNote, StandingNote, SubmittedNote, encode
from rlmux.log.run_log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.control.control_requests import (
    AccountOf,
    Cancel,
    Check,
    ExplainWait,
    GetStatus,
    GetUsage,
    Hold,
    ListQueue,
    NodeBack,
    Notice,
    ParkPipeline,
    ReleaseHold,
    Remove,
    Retry,
    SetRank,
    SetShares,
    Submit,
    Unpark,
    record_of,
)
from rlmux.runtime.control.control_socket import ControlServer, Request
from rlmux.runtime.control.notices import notice_of, return_of
from rlmux.runtime.control.removals import Removals
from rlmux.runtime.control.retries import Retries
from rlmux.runtime.records.input_files import input_notes
from rlmux.runtime.records.usage_notes import usage_of
from rlmux.runtime.weights.origins import plan_notes

ParseSubmission = Callable[[str, str], Sequence[Submission]]
"""Pipelines of (text of a file, its name), `submit_at_s` counted from now. Raises UserError."""

ParseShares = Callable[[str, str], ShareSettings]
"""Section `shares` of (text of a file, its name). Raises UserError."""


def refuse_shares(text: str, source: str) -> ShareSettings:
    """The parser of a run whose shares cannot be set."""
    raise UserError(f"{source}: this run takes no shares")


Standing = PipelineHeld | HoldReleased | PipelineRanked | ParkRequested
"""A user's change to a pipeline that waits, or is to wait."""

_MAX_QUEUE = 500
"""Most waiting pipelines in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """Effects of one tick's requests, for the controller to carry out."""

    submissions: Sequence[Submission] = ()
    """Pipelines to take in, `submit_at_s` counted from the start of the run."""
    withdrawn: Sequence[PipelineId] = ()
    """Upcoming pipelines that were cancelled."""
    events: Sequence[Event] = ()
    """Facts for the scheduler."""
    notes: Sequence[Note] = ()
    """Notes for the log."""


@dataclass(slots=True)
class _Tick:
    """`Requested` in the making."""

    now_s: float
    upcoming: Sequence[Submission]
    """Submissions that are not due yet."""
    submissions: list[Submission] = field(default_factory=list)
    withdrawn: list[PipelineId] = field(default_factory=list)
    cancelled: list[PipelineId] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


class _Answer(NamedTuple):
    """The answer to a submission, possibly still incomplete."""

    request: Request
    outcome_by_pipeline: dict[PipelineId, dict[str, Any] | None]


class RunControl:
    """Serves remote clients' requests, and observes the run to answer them."""

    def __init__(
        self,
        server: ControlServer,
        scheduler: Scheduler,
        parse: ParseSubmission,
        *,
        over: Mapping[PipelineId, Any],
        is_kept_open: bool,
        taken: Mapping[str, Sequence[str]] | None = None,
        parse_shares: ParseShares = refuse_shares,
        retries: Retries | None = None,
        removals: Removals | None = None,
    ) -> None:
        """`over`: pipelines that ended in earlier parts of the run; their names stay reserved. `taken`: names by
        submission id."""
        self._server = server
        self._scheduler = scheduler
        self._parse = parse
        self._over = set(over)
        self._parse_shares = parse_shares
        self._retries = retries
        self._removals = removals
        self._taken = {id: [PipelineId(name) for name in names] for id, names in (taken or {}).items()}
        self._answers: list[_Answer] = []
        self._done: list[tuple[Request, dict[str, Any]]] = []
        """Requests of this tick and their answers, sent once the changes are in the log."""
        self.is_kept_open = is_kept_open
        """Whether the run waits for submissions when all its pipelines are over."""

    def take_requests(self, now_s: float, upcoming: Sequence[Submission]) -> Requested:
        """Serve the requests since the last tick; never waits."""
        tick = _Tick(now_s, upcoming)
        for request in self._server.requests():
            try:
                self._serve(request, tick)
            except UserError as error:
                request.refuse(error)
        return Requested(
            submissions=tick.submissions,
            withdrawn=tick.withdrawn,
            events=[
                *(PipelineCancelled(pipeline=pipeline) for pipeline in tick.cancelled),
                *tick.events,
            ],
            notes=tick.notes,
        )

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        """Answer the requests whose effects are in the log, submissions once their pipelines are decided."""
        for action in actions if self._answers else ():
            decided = _outcome(action)
            if decided is not None:
                pipeline, outcome = decided
                for answer in self._answers:
                    if answer.outcome_by_pipeline.get(pipeline, outcome) is None:
                        answer.outcome_by_pipeline[pipeline] = outcome
        self._give_answers()

    def close(self) -> None:
        self._server.close()

    def _serve(self, request: Request, tick: _Tick) -> None:
        """Raises UserError for a request that is refused."""
        record = record_of(request.words)
        match record:
            case Submit():
                self._submit(request, record, tick)
            case Check():
                self._check(self._parse(record.text, record.source), record.source, tick)
                request.answer()
            case Cancel():
                self._cancel(request, PipelineId(record.name), tick)
            case Retry():
                self._retry(request, record.name, tick)
            case Remove():
                self._remove(request, record, tick)
            case Hold():
                event: Standing = PipelineHeld(pipeline=self._waiting(record.name))
                self._change_standing(request, event, "held until it is released", tick)
            case ReleaseHold():
                event = HoldReleased(pipeline=self._waiting(record.name))
                self._change_standing(request, event, "may start", tick)
            case SetRank():
                event = PipelineRanked(pipeline=self._waiting(record.name), rank=record.rank)
                outcome = f"has rank {record.rank} among its user's own"
                self._change_standing(request, event, outcome, tick)
            case ParkPipeline():
                self._park(request, self._checked_id(record.name), tick)
            case Unpark():
                self._unpark(request, self._checked_id(record.name), tick)
            case Notice():
                notice, outcome = notice_of(self._scheduler, record.name, record.seconds, tick.now_s)
                self._apply(request, notice, outcome, tick)
            case NodeBack():
                joined, outcome = return_of(self._scheduler, record.name)
                self._apply(request, joined, outcome, tick)
            case SetShares():
                shares = self._parse_shares(record.text, record.source)
                self._apply(request, SharesSet(shares=shares), "holds from now on", tick)
            case _:
                request.answer(**self._found(record, tick))

    def _found(self, record: AccountOf | GetUsage | ExplainWait | ListQueue | GetStatus, tick: _Tick) -> dict[str, Any]:
        """The answer to a request that changes nothing."""
        match record:
            case AccountOf():
                return _account_fields(self._pipeline(record.name, tick))
            case GetUsage():
                return encode(usage_of(self._scheduler))
            case ExplainWait():
                name = self._checked_id(record.name)
                return wait_fields(name, self._scheduler.query.status(name), self._scheduler.wait_of(name))
        to_come = [_upcoming_fields(submission) for submission in tick.upcoming]
        if isinstance(record, GetStatus):
            return {"pid": os.getpid(), "now_s": tick.now_s, "is_kept_open": self.is_kept_open, "upcoming": to_come}
        waiting = self._scheduler.waits(_MAX_QUEUE)
        items = [wait_fields(name, PipelineStatus.WAITING, wait) for name, wait in waiting]
        for item in items:
            del item["would_start_now_if"]
        return {"now_s": tick.now_s, "items": items, "upcoming": to_come}

    def _apply(self, request: Request, event: Event, outcome: str, tick: _Tick) -> None:
        tick.events.append(event)
        self._done.append((request, {"outcome": outcome}))

    def _unpark(self, request: Request, name: PipelineId, tick: _Tick) -> None:
        if not self._scheduler.query.is_held(name):
            raise UserError(f"pipeline {str(name)!r} is not parked; accepted: one that `park` or `hold` keeps")
        outcome = "goes on as soon as there is room"
        self._change_standing(request, HoldReleased(pipeline=name), outcome, tick)

    def _park(self, request: Request, name: PipelineId, tick: _Tick) -> None:
        query = self._scheduler.query
        status = query.status(name)
        if status not in (PipelineStatus.WAITING, PipelineStatus.RUNNING):
            raise UserError(f"pipeline {str(name)!r} is {status.value}; accepted: one that waits or runs")
        if query.pipeline(name).pipeline.work_arrives:
            raise UserError(f"pipeline {str(name)!r} is another program's; accepted: one whose steps rlmux trains")
        is_running = status is PipelineStatus.RUNNING
        outcome = "gives its devices back at its next step boundary" if is_running else "held until it is unparked"
        self._change_standing(request, ParkRequested(pipeline=name), outcome, tick)

    def _submit(self, request: Request, record: Submit, tick: _Tick) -> None:
        if record.id is not None and record.id in self._taken:
            self._repeat(request, self._taken[record.id], tick)
            return
        parsed = self._parse(record.text, record.source)
        self._check(parsed, record.source, tick)
        outcomes: dict[PipelineId, dict[str, Any] | None] = {}
        for submission in parsed:
            at_s = tick.now_s + submission.submit_at_s
            tick.submissions.append(replace(submission, submit_at_s=at_s))
            is_later = submission.submit_at_s > 0.0
            outcomes[submission.pipeline.id] = {"outcome": "upcoming", "at_s": at_s} if is_later else None
        names = [submission.pipeline.id for submission in parsed]
        if record.id is not None:
            self._taken[record.id] = names
        tick.notes.append(
            SubmittedNote(pipelines=names, at_s=tick.now_s, source=record.source, resolved=record.text, id=record.id)
        )
        tick.notes += [*plan_notes(parsed), *input_notes(parsed)]
        self._answers.append(_Answer(request, outcomes))

    def _repeat(self, request: Request, names: Sequence[PipelineId], tick: _Tick) -> None:
        """Answer a repeated submission: its sender got no answer, or sent it twice."""
        due_s = {submission.pipeline.id: submission.submit_at_s for submission in (*tick.upcoming, *tick.submissions)}
        outcomes: dict[PipelineId, dict[str, Any] | None] = {}
        for name in names:
            if name in self._scheduler.query:
                query = self._scheduler.query
                outcomes[name] = {"outcome": query.status(name).value, "reason": query.reason(name)}
            elif name in due_s:
                outcomes[name] = {"outcome": "upcoming", "at_s": due_s[name]}
            else:
                outcomes[name] = {"outcome": "over", "reason": "it ended before"}
        self._answers.append(_Answer(request, outcomes))

    def _check(self, parsed: Sequence[Submission], source: str, tick: _Tick) -> None:
        """Raises UserError for a name that this run has used, OverQuotaError where too many pipelines would wait."""
        self._check_names(parsed, source, tick)
        expected = [
            given.pipeline for given in (*tick.upcoming, *tick.submissions) if given.pipeline.id not in tick.withdrawn
        ]
        reason = self._scheduler.query.too_many_waiting([submission.pipeline for submission in parsed], expected)
        if reason:
            raise OverQuotaError(f"{source}: {reason}; accepted: fewer at once, or the same again when fewer wait")

    def _check_names(self, parsed: Sequence[Submission], source: str, tick: _Tick) -> None:
        """Raises UserError for a pipeline whose name this run has used."""
        taken = {*self._scheduler.query.pipelines(), *self._over}
        taken.update(submission.pipeline.id for submission in (*tick.upcoming, *tick.submissions))
        for submission in parsed:
            if submission.pipeline.id in taken:
                raise UserError(
                    f"{source}: pipeline {submission.pipeline.id!r} is in this run already; accepted: a name of its "
                    f"own (--set pipelines.{submission.pipeline.id}.name=...)"
                )

    def _cancel(self, request: Request, name: PipelineId, tick: _Tick) -> None:
        query = self._scheduler.query
        upcoming = [submission.pipeline.id for submission in tick.upcoming]
        if name not in query and name in upcoming and name not in tick.withdrawn:
            tick.withdrawn.append(name)
            self._over.add(name)
            end = PipelineStatus.CANCELLED.value
            note = PipelineEndNote(pipeline=name, status=end, reason="before it came", weights_sha256=None)
            tick.notes.append(note)
            self._done.append((request, {"pipeline": name, "outcome": "struck off"}))
            return
        if name not in query:
            known = ", ".join(query.pipelines()) or "none"
            over = f"pipeline {name!r} is over" if name in self._over else f"no pipeline {name!r}"
            raise UserError(f"{over}; accepted: one that waits or runs, of: {known}")
        status = query.status(name)
        if status not in (PipelineStatus.WAITING, PipelineStatus.RUNNING) or name in tick.cancelled:
            raise UserError(f"pipeline {name!r} is {status.value}; accepted: one that waits or runs")
        tick.cancelled.append(name)
        outcome = "ends at its next safe point" if status is PipelineStatus.RUNNING else "waits no longer"
        self._done.append((request, {"pipeline": name, "outcome": outcome}))

    def _retry(self, request: Request, name: str, tick: _Tick) -> None:
        if self._retries is None:
            raise UserError(f"pipeline {name!r}: nothing is retried in this run")
        if any(isinstance(note, RemovedNote) and note.pipeline == name for note in tick.notes):
            raise UserError(f"pipeline {name!r} is being removed; accepted: a failed pipeline whose files are there")
        again = self._retries.again(name, [*tick.upcoming, *tick.submissions], tick.now_s)
        tick.submissions.append(again.submission)
        tick.notes += again.notes
        self._over.discard(again.submission.pipeline.id)
        self._done.append((request, {"pipeline": name, "outcome": again.outcome}))

    def _remove(self, request: Request, record: Remove, tick: _Tick) -> None:
        if self._removals is None:
            raise UserError(f"pipeline {record.name!r}: nothing is removed in this run")
        upcoming = [*tick.upcoming, *tick.submissions]
        note = self._removals.requested(record.name, record.parts, record.by, upcoming, tick.notes)
        if not record.dry_run:
            tick.notes.append(note)
        self._done.append((request, removal_fields(note, is_dry=record.dry_run)))

    def _pipeline(self, name: str, tick: _Tick) -> Pipeline:
        """A pipeline of the run, possibly an upcoming one, or one of an earlier part that may be retried. Raises
        UserError for an unknown name."""
        to_come = next((submission.pipeline for submission in tick.upcoming if submission.pipeline.id == name), None)
        if to_come is None and self._retries is not None and PipelineId(name) not in self._scheduler.query:
            earlier = self._retries.find(PipelineId(name))
            to_come = None if earlier is None else earlier.pipeline
        return to_come or self._scheduler.query.pipeline(self._checked_id(name)).pipeline

    def _checked_id(self, name: str) -> PipelineId:
        """The id of this name. Raises UserError if no pipeline of this part of the run has it."""
        pipeline = PipelineId(name)
        if pipeline not in self._scheduler.query:
            known = ", ".join(self._scheduler.query.pipelines()) or "none"
            raise UserError(f"no pipeline {name!r} waits or runs here; accepted: one of: {known}")
        return pipeline

    def _change_standing(self, request: Request, event: Standing, outcome: str, tick: _Tick) -> None:
        """Add a user's change to a waiting pipeline as an event, and as a note for resumed runs."""
        tick.events.append(event)
        if isinstance(event, PipelineRanked):
            tick.notes.append(StandingNote(pipeline=event.pipeline, rank=event.rank))
        else:
            tick.notes.append(StandingNote(pipeline=event.pipeline, is_held=not isinstance(event, HoldReleased)))
        self._done.append((request, {"pipeline": event.pipeline, "outcome": outcome}))

    def _waiting(self, name: str) -> PipelineId:
        """The id of a waiting pipeline. Raises UserError for any other."""
        status = self._scheduler.query.status(self._checked_id(name))
        if status is not PipelineStatus.WAITING:
            raise UserError(f"pipeline {name!r} is {status.value}; accepted: one that waits")
        return PipelineId(name)

    def _give_answers(self) -> None:
        for request, fields in self._done:
            request.answer(**fields)
        self._done.clear()
        for answer in list(self._answers):
            outcomes = answer.outcome_by_pipeline
            if all(outcome is not None for outcome in outcomes.values()):
                self._answers.remove(answer)
                answer.request.answer(pipelines=[{"pipeline": name, **(outcomes[name] or {})} for name in outcomes])


def wait_fields(name: str, status: PipelineStatus, wait: Wait | None) -> dict[str, Any]:
    """What `rlmux why --json` prints; `token` is null for a pipeline that does not wait."""
    fields: dict[str, Any] = {"pipeline": name, "status": status.value, "token": None, "would_start_now_if": []}
    if wait is None:
        return fields
    return {
        **fields,
        "token": wait.token.value,
        "reason": wait.reason,
        "position": wait.position,
        "num_waiting": wait.num_waiting,
        "waited_s": wait.waited_s,
        "first": wait.first,
        "starts_s": wait.starts_s,
        "project": wait.project,
        "share": wait.share,
        "fair_share": wait.fair_share,
        "is_over_share": wait.is_over_share,
        "released_by": _release_command(wait),
        "would_start_now_if": [
            {"key": change.key, "was": change.was, "to": change.to} for change in wait.would_start_now_if
        ],
    }


def removal_fields(note: RemovedNote, *, is_dry: bool) -> dict[str, Any]:
    """The answer to a removal."""
    outcome = "would be removed" if is_dry else "removed"
    return {"pipeline": note.pipeline, "outcome": outcome, "parts": note.parts, "freed_bytes": note.freed_bytes}


def _release_command(wait: Wait) -> str | None:
    """The command after which a held pipeline may start; None for one that is not held."""
    if wait.token is not WaitToken.HELD:
        return None
    return "unpark" if wait.reason == PARKED.reason else "release"


def _outcome(action: Action) -> tuple[PipelineId, dict[str, Any]] | None:
    """A submitted pipeline and its outcome; None for actions that decide none."""
    match action:
        case Admit():
            placement = action.placement
            return action.pipeline, {
                "outcome": "placed",
                "kind": action.kind.value,
                "group": placement.group if placement.train_nodes else None,
                "rollout_nodes": [str(node) for node in placement.rollout_nodes],
                "train_nodes": [str(node) for node in placement.train_nodes],
            }
        case Refuse():
            return action.pipeline, {"outcome": "refused", "reason": action.reason}
        case Queue():
            return action.pipeline, {"outcome": "waiting", "reason": action.reason}
    return None


def submitted_to(folder: Path) -> list[SubmittedNote]:
    """Files submitted to a run in progress, oldest first."""
    with LogReader(folder) as reader:
        return reader.state().submitted


def _upcoming_fields(submission: Submission) -> dict[str, Any]:
    return {"pipeline": submission.pipeline.id, "at_s": submission.submit_at_s, **_account_fields(submission.pipeline)}


def _account_fields(pipeline: Pipeline) -> dict[str, str]:
    return {"project": pipeline.account.project, "user": pipeline.account.user, "visibility": pipeline.visibility.value}
