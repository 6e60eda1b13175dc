"""Replays a pipeline of a finished run alone, to verify that sharing changed nothing.

    run's log ── `step` notes ───────▶ checksum of the weights at each step ──┐
         ├────── `checkpoint` notes ─▶ SHA-256 at each checkpoint ────────────┤
         └── the pipeline alone, in a temporary folder ─▶ both at each step ──┴▶ equal, or the first step that differs

The pipeline is trained again from its first step, from the file in the log's header, alone on this machine. Replay ends
at the last step with a sum in the log, or at the first difference. A step is equal if every logged sum is: checksum,
SHA-256, or both. Published steps have a checksum, unless a crash came before the note; logs of rlmux 0.2 and before
have only SHA-256, at every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event, PipelineFailed, PipelineRestarted
from rlmux.core.model import Cluster, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.log.folder_lock import FolderLock
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.report.timeline.history import History
from rlmux.report.weight_sums import SUMS, weight_sums
from rlmux.runtime import launch
from rlmux.runtime.backend import Note, Submission
from rlmux.runtime.control.run_control import submitted_to
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend
from rlmux.runtime.memory.machine_probe import describe_machine
from rlmux.runtime.memory.memory_budget import with_footprint, with_machine_memory
from rlmux.runtime.records.input_files import changed_input_notes
from rlmux.runtime.weights.checkpoints import is_due
from rlmux.runtime.workers.worker_pool import WorkerOptions

PrintLine = Callable[[str], None]
"""Prints one line: progress of a pipeline, or a possible cause of a difference."""
_SumsByStep = dict[int, dict[str, str]]
"""Sums of the weights by step and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step whose weights differ from the log."""

    step: int
    compared: str
    """The differing sum, `checksum` or `sha256`, of the weights unless the reason names another cause."""
    logged: str
    """Sum in the log."""
    alone: str | None
    """Sum of the pipeline alone; None if it did not reach the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one pipeline."""

    pipeline: str
    num_equal: int
    """Steps that were compared and are equal."""
    num_steps: int
    """Last step that the log has."""
    difference: Difference | None
    promise: str | None
    """Determinism class found in the run; None without a probe."""
    reason: str = ""
    """Why nothing was compared, or why replay ended early; empty otherwise."""
    num_equal_by_sum: Mapping[str, int] = field(default_factory=dict)
    """Steps that are equal by `checksum`, and by `sha256`: at checkpoints."""

    @property
    def is_equal(self) -> bool:
        """Whether all steps with a sum in the log are equal, at least one."""
        return self.difference is None and self.num_equal > 0

    def line(self) -> str:
        """The verdict for people."""
        if self.difference is not None:
            alone = self.difference.alone
            found = self.reason or "no weights" if alone is None else alone[:12]
            promised = f"; its engines promise {self.promise}" if self.promise not in (None, "exact") else ""
            return (
                f"{self.pipeline}: differs at step {self.difference.step} of {self.num_steps}: "
                f"{self.difference.compared} {self.difference.logged[:12]} in the log, {found} alone{promised}"
            )
        if not self.num_equal:
            return f"{self.pipeline}: nothing to compare: {self.reason}"
        if self.num_equal == self.num_steps:
            return f"{self.pipeline}: equal at all {self.num_steps} steps ({self._sums()})"
        return (
            f"{self.pipeline}: equal at {self.num_equal} steps ({self._sums()}); the log has no sum of the other "
            f"{self.num_missing}"
        )

    def _sums(self) -> str:
        """What was compared: at all steps, or at how many."""
        counts = {name: count for name, count in self.num_equal_by_sum.items() if count}
        return ", ".join(name if count == self.num_equal else f"{name} at {count}" for name, count in counts.items())

    @property
    def num_missing(self) -> int:
        """Steps without a sum in the log."""
        return self.num_steps - self.num_equal if self.difference is None else 0


def verify(folder: Path, names: Sequence[str], *, print_line: PrintLine) -> list[Verdict]:
    """Train these pipelines of the run again, each alone; all pipelines if no name is given.

    Raises UserError, before anything starts, for a run that goes on, an unknown name, and a pipeline that this cannot
    replay.
    """
    with FolderLock.take(folder), LogReader(folder) as reader:
        history, state = History.of(reader.header, reader.entries()), reader.state()
    chosen = _chosen(folder, history, names)
    given = {one.pipeline.id: one for one in _submissions(folder)}
    missing = [name for name in chosen if name not in given]
    if missing:
        raise UserError(
            f"{folder}: its log does not keep the file of pipeline {missing[0]!r}; accepted: {', '.join(given)}"
        )
    spec = launch.spec_of(folder)
    launch.make_importable(spec.code_folder)
    sums = _logged_sums(folder)
    verdicts = []
    for name in chosen:
        for note in changed_input_notes([given[name]], state):
            for words in note.fields.get("changed", ()):
                print_line(f"{name}: {words} since the run")
        promise = history.pipelines[name].promise
        verdicts.append(_verify_one(spec.cluster, given[name], sums.get(name, {}), promise, print_line))
    return verdicts


def _chosen(folder: Path, history: History, names: Sequence[str]) -> list[PipelineId]:
    known = {name: record for name, record in history.pipelines.items() if not record.pipeline.work_arrives}
    for name in names:
        if PipelineId(name) in history.pipelines and name not in known:
            raise UserError(
                f"{folder}: the work of {name!r} arrived from another program; accepted: {', '.join(known) or 'none'}"
            )
        if name not in known:
            raise UserError(f"{folder}: no pipeline {name!r}; accepted: {', '.join(known) or 'none'}")
    return [PipelineId(name) for name in dict.fromkeys(names)] or list(known)


def _submissions(folder: Path) -> list[Submission]:
    """Every pipeline of the run's file, and of the files that were submitted while it ran."""
    spec = launch.spec_of(folder)
    parse = launch.parser(spec)
    late = [one for submitted in submitted_to(folder) for one in parse(submitted.resolved, submitted.source)]
    return [*launch.submissions(spec), *late]


def _logged_sums(folder: Path) -> dict[PipelineId, _SumsByStep]:
    """Sums of the weights by pipeline and step; the last ones of a repeated step."""
    found: dict[PipelineId, _SumsByStep] = {}
    with LogReader(folder) as reader:
        for entry in reader.entries():
            if isinstance(entry.value, PipelineRestarted):
                its, restored_step = found.get(entry.value.pipeline, {}), entry.value.restored_step
                found[entry.value.pipeline] = {step: sums for step, sums in its.items() if step <= restored_step}
            elif entry.kind == "note" and (sums := weight_sums(entry.type, cast(Any, entry.value))) is not None:
                found.setdefault(sums.pipeline, {}).setdefault(sums.step, {}).update(sums.by_name)
    return found


class _Comparison:
    """Listens to the pipeline as it runs alone; `is_decided` once nothing is left to compare, or a step differs."""

    def __init__(self, pipeline: PipelineId, logged: _SumsByStep, print_line: PrintLine) -> None:
        self._pipeline = pipeline
        self._logged = logged
        self._left = {step: dict(sums) for step, sums in sorted(logged.items())}
        """Sums that have not been compared."""
        self._print_line = print_line
        self.num_equal_by_sum = dict.fromkeys(SUMS.values(), 0)
        self.difference: Difference | None = None
        self.failure = ""

    @property
    def num_equal(self) -> int:
        return len(self._logged) - len(self._left)

    @property
    def is_decided(self) -> bool:
        return self.difference is not None or not self._left

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        for event in events:
            if isinstance(event, PipelineFailed):
                self.failure = event.reason
        for note in notes:
            sums = weight_sums(note.type, note.fields)
            if sums is not None and self.difference is None:
                self._compare(sums.step, sums.by_name)

    def _compare(self, step: int, alone: Mapping[str, str]) -> None:
        left = self._left.get(step, {})
        for name in [name for name in alone if name in left]:
            logged = left.pop(name)
            if logged != alone[name]:
                self.difference = Difference(step=step, compared=name, logged=logged, alone=alone[name])
                return
            self.num_equal_by_sum[name] += 1
        if step in self._left and not left:
            del self._left[step]
            self._print_line(f"{self._pipeline}: step {step} of {max(self._logged)} is equal")

    def first_missing(self) -> Difference | None:
        """The first logged step that the pipeline did not reach."""
        for step, left in self._left.items():
            name, logged = next(iter(left.items()))
            return Difference(step=step, compared=name, logged=logged, alone=None)
        return None


def _verify_one(
    cluster: Cluster, submission: Submission, logged: _SumsByStep, promise: str | None, print_line: PrintLine
) -> Verdict:
    name = submission.pipeline.id
    verdict = Verdict(
        pipeline=name, num_equal=0, num_steps=max(logged, default=0), difference=None, promise=promise,
        reason="its log has no checksum of any step",
    )  # fmt: skip
    if not logged:
        return verdict
    machine = describe_machine(cluster)
    alone = replace(with_footprint(submission, cluster, is_gpu=bool(machine.gpu_by_device)), submit_at_s=0.0)
    alone = _with_hashes(alone, [step for step, sums in logged.items() if "sha256" in sums])
    cluster = with_machine_memory(cluster, [alone], machine)
    scheduler, comparison = Scheduler(cluster, make_policy("solo")), _Comparison(name, logged, print_line)
    with tempfile.TemporaryDirectory(prefix="rlmux-verify-") as scratch:
        backend = local_backend(cluster, Path(scratch))
        try:
            Controller(scheduler, backend, None, [comparison]).run([alone], until=lambda: comparison.is_decided)
        finally:
            backend.close()
    difference, reason = comparison.difference, comparison.failure
    if not comparison.is_decided:
        difference = comparison.first_missing()
        is_refused = scheduler.query.status(name) is PipelineStatus.REFUSED
        reason = reason or (scheduler.query.reason(name) if is_refused else "")
    return replace(
        verdict,
        num_equal=comparison.num_equal,
        num_equal_by_sum=comparison.num_equal_by_sum,
        difference=difference,
        reason=reason,
    )


def _with_hashes(submission: Submission, steps: Sequence[int]) -> Submission:
    """A pipeline that makes a checkpoint at each of these steps, and with it the SHA-256."""
    every = submission.checkpoint_every or WorkerOptions().checkpoint_every
    is_enough = all(is_due(submission, step, every) for step in steps)
    return submission if is_enough else replace(submission, checkpoint_every=1)
