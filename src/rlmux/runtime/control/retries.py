"""Failed pipelines that go on in the run in progress, from their newest checkpoints: by hand and by rule.

    rlmux retry ─▶ RunControl ── again ─┐
    PipelineFailed ─▶ update ─▶ rule? ──┴─▶ note `retried`, and the pipeline is submitted once more

A try is a submission like any other: it waits for its turn. What it goes on from is read from the log and the
checkpoints, as for a resumed run (`unfinished.py`), so a run that is killed after it knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event, PipelineFailed
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.core.query import SchedulerQuery
from rlmux.log.notes import Note, RetriedNote
from rlmux.log.run_log import LogReader
from rlmux.log.run_state import Failure, RunState
from rlmux.runtime.backend import Submission
from rlmux.runtime.control.unfinished import from_checkpoint, lost_step_notes, with_last_standing
from rlmux.runtime.records.input_files import changed_input_notes

_WORDS = {
    PipelineStatus.WAITING: "waits, and starts without it",
    PipelineStatus.RUNNING: "is running",
    PipelineStatus.FINISHED: "is finished",
    PipelineStatus.CANCELLED: "was cancelled",
    PipelineStatus.REFUSED: "was refused",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTry:
    """A pipeline that is to be submitted again, and what the log is to have of that."""

    submission: Submission
    notes: Sequence[Note]
    outcome: str
    """What is to come, in words."""


class Retries:
    """See the module."""

    def __init__(self, folder: Path, query: SchedulerQuery, earlier: Mapping[PipelineId, tuple[str, Submission]] = {}):
        """`earlier`: (status, submission) of pipelines that ended in earlier parts of the run."""
        self._folder = folder
        self._query = query
        self._earlier = dict(earlier)
        self._submissions: dict[PipelineId, Submission] = {}
        """Pipelines of this part, as they came first."""
        self._due = [name for name, (_, submission) in self._earlier.items() if submission.retries.total]
        """Pipelines whose rule may give them another try: of earlier parts, where one was stopped before that."""

    def add(self, submission: Submission) -> None:
        """A pipeline comes to this part of the run, or comes again."""
        self._submissions.setdefault(submission.pipeline.id, submission)

    def find(self, name: PipelineId) -> Submission | None:
        """A pipeline of any part of the run; None for one that another program brought, and for an unknown one."""
        earlier = self._earlier.get(name)
        return self._submissions.get(name) or (None if earlier is None else earlier[1])

    def status(self, name: PipelineId) -> PipelineStatus:
        """How a pipeline of any part of the run stands; one that has yet to come waits."""
        if name in self._query:
            return self._query.status(name)
        return PipelineStatus(self._earlier[name][0]) if name in self._earlier else PipelineStatus.WAITING

    def submissions(self) -> list[Submission]:
        """Pipelines of all parts of the run."""
        earlier = {name: submission for name, (_, submission) in self._earlier.items()}
        return list((earlier | self._submissions).values())

    def knows(self, name: PipelineId) -> bool:
        """Whether the run has a pipeline of this name, another program's too."""
        return name in self._query or self.find(name) is not None

    def is_due(self, name: PipelineId) -> bool:
        """Whether its rule is about to be looked at."""
        return name in self._due

    def again(self, name: str, upcoming: Sequence[Submission], now_s: float) -> NextTry:
        """What a user's retry comes to. Raises UserError for a pipeline that has not failed."""
        pipeline = PipelineId(name)
        submission = self.find(pipeline)
        accepted = "accepted: a failed pipeline"
        if any(each.pipeline.id == pipeline for each in upcoming):
            raise UserError(f"pipeline {name!r} has yet to come; {accepted}")
        if submission is None:
            if pipeline in self._query:
                raise UserError(f"pipeline {name!r} is another program's; accepted: one whose steps rlmux trains")
            raise UserError(f"no pipeline {name!r}{self._nearest(name)}; {accepted}: {self._failed_words()}")
        status = self.status(pipeline)
        if status is not PipelineStatus.FAILED:
            raise UserError(f"pipeline {name!r} {_WORDS[status]}; {accepted}")
        state = self._state()
        if "all" in state.removals.get(name, ()):
            raise UserError(f"pipeline {name!r} is removed; accepted: a failed pipeline whose files are there")
        return self._retry(submission, state, now_s, by_rule=False)

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        """Note the failures whose rule may say something; they are in the log by the next tick."""
        self._due += [
            event.pipeline
            for event in events
            if isinstance(event, PipelineFailed)
            and event.pipeline in self._submissions
            and self._submissions[event.pipeline].retries.total
        ]

    def take(self, upcoming: Sequence[Submission], now_s: float) -> list[NextTry]:
        """The tries that rules give pipelines that have failed since the last tick."""
        coming = {submission.pipeline.id for submission in upcoming}
        due = [name for name in self._due if self.status(name) is PipelineStatus.FAILED and name not in coming]
        self._due.clear()
        if not due:
            return []
        state = self._state()
        given = [submission for name in dict.fromkeys(due) if (submission := self.find(name)) is not None]
        given = [one for one in given if "all" not in state.removals.get(one.pipeline.id, ())]
        return [self._retry(one, state, now_s, by_rule=True) for one in given if _is_allowed(one, state)]

    # ------------------------------------------------------------------ helpers, in the order they are called

    def _nearest(self, name: str) -> str:
        known = [*self._earlier, *self._query.pipelines()]
        close = get_close_matches(name, known, n=1)
        return f"; nearest: {close[0]}" if close else ""

    def _failed_words(self) -> str:
        known = dict.fromkeys((*self._earlier, *self._submissions))
        return ", ".join(name for name in known if self.status(name) is PipelineStatus.FAILED) or "none has failed"

    def _state(self) -> RunState:
        with LogReader(self._folder) as log:
            return log.state()

    def _retry(self, submission: Submission, state: RunState, now_s: float, *, by_rule: bool) -> NextTry:
        again = with_last_standing(from_checkpoint(submission, self._folder, state), state)
        note = retried_note(submission, state, by_rule=by_rule)
        tried = f"try {try_words(note)}"
        if "checkpoints" in state.removals.get(submission.pipeline.id, ()):
            tried += ", its checkpoints are removed"
        return NextTry(
            submission=replace(again, submit_at_s=now_s),
            notes=[note, *changed_input_notes([again], state), *lost_step_notes([again], self._folder, state)],
            outcome=f"goes on at step {again.pipeline.first_step} as soon as there is room ({tried})",
        )


def retried_note(submission: Submission, state: RunState, *, by_rule: bool) -> RetriedNote:
    """The note of a pipeline's next try."""
    name = submission.pipeline.id
    tries, failure = state.retries.get(name, []), state.failures.get(name)
    if failure is None:  # of an older rlmux
        failure = Failure(reason=state.ended[name].reason if name in state.ended else "")
    by_hand = sum(not each.by_rule for each in tries) + (not by_rule)
    return RetriedNote(
        pipeline=name,
        number=len(tries) + 2,
        of=1 + submission.retries.total + by_hand if submission.retries.total else None,
        by_rule=by_rule,
        cause=failure.cause,
        reason=failure.reason,
        failed_s=failure.at_s,
    )


def _is_allowed(submission: Submission, state: RunState) -> bool:
    """Whether the pipeline's rule gives it another try after its last failure."""
    name = submission.pipeline.id
    tries = [each.cause for each in state.retries.get(name, ()) if each.by_rule]
    return submission.retries.allows(state.failures.get(name, Failure()).cause, tries)


def try_words(note: RetriedNote) -> str:
    """Which try it is: `2 of 3`."""
    return f"{note.number}" if note.of is None else f"{note.number} of {note.of}"
