"""Whether a pipeline of a finished run comes out the same alone: the receipt that sharing changed nothing.

    run's log ── the file, `step` notes ─▶ hash of the weights at each step ──┐
         └── the pipeline alone, in a temporary folder ─▶ hash at each step ──┴▶ equal, or the first step that differs

The pipeline is trained again from its first step, by the file in the log's header, on this machine, with nothing beside
it. It ends at the last step that the log has a hash of, or at the first that differs. Every published step has a hash,
but one whose batch a crash took before it was noted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event, PipelineFailed
from rlmux.core.model import Cluster, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.report.folder_lock import FolderLock
from rlmux.report.history import History
from rlmux.report.log import LogReader
from rlmux.runtime import launch
from rlmux.runtime.backend import Note, Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.inputs import changed_input_notes
from rlmux.runtime.local import local_backend
from rlmux.runtime.machine import describe_machine
from rlmux.runtime.memory import with_footprint, with_machine_memory
from rlmux.runtime.run_api import submitted_to

Say = Callable[[str], None]
"""Told of a pipeline's progress, and of what may explain a difference; one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step whose weights are not those of the log."""

    step: int
    logged: str
    """sha256 of the weights, as the log has it."""
    alone: str | None
    """sha256 of the weights when the pipeline ran alone; None where it did not get so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one pipeline."""

    pipeline: str
    num_equal: int
    """Steps that were compared and are equal."""
    num_steps: int
    """Last step that the log has."""
    difference: Difference | None
    promise: str | None
    """Class of promise that its engines kept in the run; None where none was probed."""
    reason: str = ""
    """Why there is nothing to compare, or why it ended before it was compared; empty otherwise."""

    @property
    def is_equal(self) -> bool:
        """Every step that has a hash is equal, and there is one."""
        return self.difference is None and self.num_equal > 0

    def line(self) -> str:
        """The verdict for people."""
        if self.difference is not None:
            alone = self.difference.alone
            found = self.reason or "no weights" if alone is None else alone[:12]
            promised = f"; its engines promise {self.promise}" if self.promise not in (None, "exact") else ""
            return (
                f"{self.pipeline}: differs at step {self.difference.step} of {self.num_steps}: "
                f"{self.difference.logged[:12]} in the log, {found} alone{promised}"
            )
        if not self.num_equal:
            return f"{self.pipeline}: nothing to compare: {self.reason}"
        if self.num_equal == self.num_steps:
            return f"{self.pipeline}: equal at all {self.num_steps} steps"
        return f"{self.pipeline}: equal at {self.num_equal} steps; the log has no hash of the other {self.num_missing}"

    @property
    def num_missing(self) -> int:
        """Steps without a hash in the log."""
        return self.num_steps - self.num_equal if self.difference is None else 0


def verify(folder: Path, names: Sequence[str], *, say: Say) -> list[Verdict]:
    """Train these pipelines of the run again, one after another, each alone; all of them where no name is given.

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
    hashes = _logged_hashes(folder)
    verdicts = []
    for name in chosen:
        for note in changed_input_notes([given[name]], state):
            for words in note.fields.get("changed", ()):
                say(f"{name}: {words} since the run")
        promise = history.pipelines[name].promise
        verdicts.append(_verify_one(spec.cluster, given[name], hashes.get(name, {}), promise, say))
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


def _logged_hashes(folder: Path) -> dict[PipelineId, dict[int, str]]:
    """Hash of the weights by pipeline and step; of a step that was done again, the last."""
    hashes: dict[PipelineId, dict[int, str]] = {}
    with LogReader(folder) as reader:
        for entry in reader.entries():
            if entry.kind == "note" and entry.type == "step":
                fields: Any = entry.value
                if fields.get("weights_sha256"):
                    of_pipeline = hashes.setdefault(PipelineId(fields["pipeline"]), {})
                    of_pipeline[int(fields["step"])] = str(fields["weights_sha256"])
    return hashes


class _Comparison:
    """Listens to the pipeline as it runs alone; `is_decided` once nothing is left to compare, or a step differs."""

    def __init__(self, pipeline: PipelineId, logged: Mapping[int, str], say: Say) -> None:
        self._pipeline = pipeline
        self._logged = logged
        self._say = say
        self.num_equal = 0
        self.difference: Difference | None = None
        self.failure = ""

    @property
    def is_decided(self) -> bool:
        return self.difference is not None or self.num_equal == len(self._logged)

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        for event in events:
            if isinstance(event, PipelineFailed):
                self.failure = event.reason
        for note in notes:
            if note.type == "step" and self.difference is None:
                self._compare(int(note.fields["step"]), str(note.fields["weights_sha256"]))

    def _compare(self, step: int, alone: str) -> None:
        logged = self._logged.get(step)
        if logged is None:
            return
        if logged != alone:
            self.difference = Difference(step=step, logged=logged, alone=alone)
            return
        self.num_equal += 1
        self._say(f"{self._pipeline}: step {step} of {max(self._logged)} is equal")

    def first_missing(self) -> Difference | None:
        """The first logged step that the pipeline did not come to."""
        left = sorted(self._logged)[self.num_equal :]
        return Difference(step=left[0], logged=self._logged[left[0]], alone=None) if left else None


def _verify_one(
    cluster: Cluster, submission: Submission, logged: Mapping[int, str], promise: str | None, say: Say
) -> Verdict:
    name = submission.pipeline.id
    verdict = Verdict(
        pipeline=name, num_equal=0, num_steps=max(logged, default=0), difference=None, promise=promise,
        reason="its log has no hash of any step",
    )  # fmt: skip
    if not logged:
        return verdict
    machine = describe_machine(cluster)
    alone = replace(with_footprint(submission, cluster, is_gpu=bool(machine.gpu_by_device)), submit_at_s=0.0)
    cluster = with_machine_memory(cluster, [alone], machine)
    scheduler, comparison = Scheduler(cluster, make_policy("solo")), _Comparison(name, logged, say)
    with tempfile.TemporaryDirectory(prefix="rlmux-verify-") as scratch:
        backend = local_backend(cluster, Path(scratch))
        try:
            Controller(scheduler, backend, None, [comparison]).run([alone], until=lambda: comparison.is_decided)
        finally:
            backend.close()
    difference, reason = comparison.difference, comparison.failure
    if difference is None and comparison.num_equal < len(logged):
        difference = comparison.first_missing()
        is_refused = scheduler.query.status(name) is PipelineStatus.REFUSED
        reason = reason or (scheduler.query.reason(name) if is_refused else "")
    return replace(verdict, num_equal=comparison.num_equal, difference=difference, reason=reason)
