"""The past of a run to resume: a small fold over the log, with snapshots in the log.

    rows ──add──▶ RunState ──dumps──▶ snapshot in the log        read back: the snapshot, then the rows after it

A state read from any snapshot equals the one folded from the first row on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from rlmux.core.actions import Admit, ExpectSteps, Queue
from rlmux.core.estimation.alike_seconds import MAX_KEPT
from rlmux.core.events import PipelineFailed, PipelineParked, PipelineSubmitted, SharesSet
from rlmux.core.model import FailureCause
from rlmux.log.block_codec import Entry
from rlmux.log.notes import (
    AccountsNote,
    InputsNote,
    Note,
    PipelineEndNote,
    PlanNote,
    RemovedNote,
    ResumedNote,
    RetriedNote,
    StandingNote,
    StartReservedNote,
    StepNote,
    SubmittedNote,
    UsageNote,
)
from rlmux.log.value_codec import Record, dumps, encode, loads, reader

_EVENTS = (PipelineSubmitted, PipelineParked, PipelineFailed, SharesSet)
_READ = {each.__name__ for each in (*_EVENTS, ExpectSteps, Admit, Queue)} | {
    *(PipelineEndNote.type, StartReservedNote.type, PlanNote.type, StepNote.type, InputsNote.type, UsageNote.type),
    *(AccountsNote.type, StandingNote.type, SubmittedNote.type, ResumedNote.type, RetriedNote.type),
    RemovedNote.type,
}
"""Types of rows whose value is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Record):
    """How a pipeline failed."""

    at_s: float = 0.0
    cause: FailureCause = FailureCause.OTHER
    reason: str = ""


@dataclass(slots=True)
class RunState:
    """Fold rows in with `add`, in the log's order."""

    seq: int = 0
    """The last row that is folded in; 0 before the first."""
    last_time_s: float = 0.0
    """Time of that row, in seconds since the run began."""
    ended: dict[str, PipelineEndNote] = field(default_factory=dict)
    """Pipelines that are over."""
    ended_s: dict[str, float] = field(default_factory=dict)
    """Time at which each of them ended; a state that an older rlmux kept lacks those before it."""
    removals: dict[str, dict[str, RemovedNote]] = field(default_factory=dict)
    """What was removed of pipelines that are over, by pipeline and `RemovedNote.parts`."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """Last failure of each pipeline that ever failed."""
    retries: dict[str, list[RetriedNote]] = field(default_factory=dict)
    """Tries of each pipeline that was retried, after its first one."""
    plans: dict[str, str] = field(default_factory=dict)
    """Hash of each pipeline's plan, from the note `plan`."""
    steps: dict[str, int] = field(default_factory=dict)
    """Last step of each pipeline with a note `step`."""
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Hash of each file that a pipeline reads, by pipeline and path, from its last note `inputs`."""
    submitted: list[SubmittedNote] = field(default_factory=list)
    """Files that were submitted to the run in progress, oldest first."""
    standings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Users' settings of each waiting pipeline, `is_held` and `rank`, from the notes `standing`."""
    measured: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Seconds of the phases that each pipeline without a given estimate was last planned with: `estimate` and `held`,
    as in `Pipeline`."""

    bounded: dict[str, Any] = field(default_factory=dict)
    """Newest bounds and steps of each pipeline with a probability, as the log writes `Pipeline.bounded`."""

    alike: list[dict[str, Any]] = field(default_factory=list)
    """What steps of pipelines took, for those alike, as the log writes `AlikeSeconds`: one of each key and numbers of
    nodes, the oldest first."""

    waits: dict[str, dict[str, float]] = field(default_factory=dict)
    """`since_s` of each pipeline that waits, and `promised_s` of one with a reserved start (note `start_promised`)."""

    usage: UsageNote | None = None
    """Last usage of projects and users."""
    accounts: AccountsNote | None = None
    """The same for people, with shares, quotas and charges."""
    shares: dict[str, Any] | None = None
    """Fields of the last `SharesSet`, as the log writes them; None where there was none."""

    @staticmethod
    def reads(type: str) -> bool:
        """Whether `add` looks at the value of such a row."""
        return type in _READ

    def add(self, row: Entry) -> None:
        """Fold in one row."""
        self.seq, self.last_time_s = row.seq, row.time_s
        if row.type not in _READ:
            return
        match row.value if row.kind != "note" else row.note:
            case ExpectSteps() as expected:
                self._expect(expected)
            case SharesSet() as settings:
                self.shares = loads(encode(settings))
            case PipelineSubmitted(pipeline=pipeline):
                self.waits.setdefault(str(pipeline.id), {"since_s": row.time_s})
            case PipelineFailed() as failed:
                failure = Failure(at_s=row.time_s, cause=failed.cause, reason=failed.reason)
                self.failures[str(failed.pipeline)] = failure
            case Queue(pipeline=name) | PipelineParked(pipeline=name):
                self.waits.setdefault(str(name), {"since_s": row.time_s})
            case Admit(pipeline=name):
                self.waits.pop(str(name), None)
            case Note() as note:
                self._add_note(row.time_s, note)

    def _expect(self, action: ExpectSteps) -> None:
        if action.measured is not None:
            seconds = {"estimate": asdict(action.measured.median), "held": asdict(action.measured.held)}
            self.measured[str(action.pipeline)] = seconds
        if action.bounded is not None:
            self.bounded[str(action.pipeline)] = loads(dumps(action.bounded))
        if action.alike is not None:
            self._keep_for_alike(loads(dumps(action.alike)))

    def _add_note(self, time_s: float, note: Note) -> None:
        match note:
            case PipelineEndNote():
                self.ended[note.pipeline] = note
                self.ended_s[note.pipeline] = time_s
                self.waits.pop(note.pipeline, None)
            case StartReservedNote() if note.pipeline in self.waits:
                self.waits[note.pipeline]["promised_s"] = note.start_s
            case PlanNote():
                self.plans[note.pipeline] = note.plan_sha256
            case StepNote():
                self.steps[note.pipeline] = max(note.step, self.steps.get(note.pipeline, 0))
            case InputsNote():
                self.inputs[note.pipeline] = dict(note.files)
            case UsageNote():
                self.usage = note
            case AccountsNote():
                self.accounts = note
            case StandingNote():
                changes = {"is_held": note.is_held, "rank": note.rank}
                standing = self.standings.setdefault(note.pipeline, {})
                standing |= {name: value for name, value in changes.items() if value is not None}
            case SubmittedNote():
                self.submitted.append(note)
            case ResumedNote():
                for name in note.retried:
                    self._goes_on(name)
            case RemovedNote():
                self.removals.setdefault(note.pipeline, {})[note.parts] = note
            case RetriedNote():
                self._goes_on(note.pipeline)
                self.retries.setdefault(note.pipeline, []).append(note)

    def _goes_on(self, name: str) -> None:
        """A pipeline that was over is so no longer, and has new files."""
        for kept in (self.ended, self.ended_s, self.removals):
            kept.pop(name, None)

    def _keep_for_alike(self, newest: dict[str, Any]) -> None:
        """As the scheduler keeps it (`core/estimation/alike_seconds.py`)."""

        def key(seconds: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(seconds[name] for name in ("alike", "num_rollout_nodes", "num_train_nodes", "is_colocated"))

        others = [seconds for seconds in self.alike if key(seconds) != key(newest)]
        self.alike = [*others, newest][-MAX_KEPT:]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunState:
        """The state whose JSON text was read; an empty value of an older snapshot has the field's default."""
        hints = get_type_hints(cls)
        return cls(**{name: reader(hints[name])(value, name) for name, value in fields.items() if value})
