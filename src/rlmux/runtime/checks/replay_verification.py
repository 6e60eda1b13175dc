"""Replays a pipeline of a finished run alone, to verify that sharing changed nothing.

    run's log ── `step` notes ───────▶ checksum of the weights at each step ──┐
         ├────── `checkpoint` notes ─▶ SHA-256 at each checkpoint ────────────┤
         └── the pipeline alone, in a temporary folder ─▶ both at each step ──┴▶ equal, or the first step that differs

The pipeline is trained again from its first step, from the file in the log's header, alone on this machine. Replay ends
at the last step with a sum in the log, or at the first difference. A step is equal if every logged sum is: checksum,
SHA-256, or both. Published steps have a checksum, unless a crash came before the note; logs of rlmux 0.2 and before
have only SHA-256, at every step.

A sample replays only parts of a pipeline, each from the first step or from a checkpoint that the run kept:

    kept       0 . . . . . . . . . 10 . . . . . . . . . 20      0: the initial weights
    drawn          3                    12
    replayed     1 2 3                11 12                     each step is compared, by one sum

Steps whose work was disturbed by sharing or by a loss come first, one of each kind at least:

    tail       begun trajectories migrated        paused    an order was paused
    shard      a shard that had not begun did     shared    an order had a part of its device
    tool wait  a device was given away for one    redone    it was lost, or repeated after a restart or resume

Checkpoints that the replay restores, and the newest, are read and compared with the SHA-256 in the log.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlmux import plugins
from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event, PipelineFailed, PipelineRestarted
from rlmux.core.model import Cluster, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.log.folder_lock import FolderLock
from rlmux.log.notes import Note
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.report.timeline.history import History
from rlmux.report.timeline.records import Ending, OrderRecord
from rlmux.report.weight_sums import SUMS, weight_sums
from rlmux.runtime import launch
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.control.run_control import submitted_to
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend
from rlmux.runtime.machine_probe import describe_machine
from rlmux.runtime.memory.memory_budget import with_footprint, with_machine_memory
from rlmux.runtime.records.input_files import changed_input_notes
from rlmux.runtime.weights.checkpoints import CheckpointStore, checkpoint_folder, damage_of, is_due

PrintLine = Callable[[str], None]
"""Prints one line: progress of a pipeline, or a possible cause of a difference."""
STEPS_PER_SAMPLED = 20
"""A sample draws one of so many steps, rounded up."""
_REACH = 5
"""Steps after the beginning or a checkpoint that a sample draws from; more if they are too few."""
_DISTURBED_REACH = 20
"""The same for disturbed steps: their replay is worth more seconds."""
_SumsByStep = dict[int, dict[str, str]]
"""Sums of the weights by step and name."""


class Disturbance(StrEnum):
    """What happened to a step that a pipeline alone would not have seen."""

    TAIL = "tail"
    SHARD = "shard"
    TOOL_WAIT = "tool wait"
    PAUSED = "paused"
    SHARED = "shared"
    REDONE = "redone"


_Disturbed = Mapping[int, AbstractSet[Disturbance]]
"""Disturbances by step."""
NONE_DISTURBED: _Disturbed = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step whose weights differ from the log."""

    step: int
    compared: str
    """The differing sum, `checksum` or `sha256`, of the weights unless the reason names another cause."""
    logged: str
    """Sum in the log."""
    alone: str | None
    """Sum of the pipeline alone, or of the checkpoint; None if it did not reach the step, or cannot be read."""
    checkpoint: str = ""
    """Name of the damaged checkpoint; empty if the weights of the pipeline alone differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The steps of a pipeline that were replayed instead of all."""

    seed: int
    parts: Sequence[range]
    """Consecutive steps; each part begins at the first step or after a checkpoint."""
    num_reachable: int
    """Number of steps that the sample was drawn from."""
    num_logged: int
    """Steps with a sum in the log."""
    disturbed: Sequence[int] = ()
    """Disturbed steps with a sum in the log, in order."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Steps that are replayed, by what disturbed them."""

    @classmethod
    def draw(
        cls,
        seed: int,
        pipeline: str,
        steps: Sequence[int],
        starts: Sequence[int],
        disturbed: _Disturbed = NONE_DISTURBED,
    ) -> Sample:
        """A sample that depends only on its arguments.

        `steps`: steps with a sum, at least one. `starts`: steps after which training can begin, 0 among them. Both are
        in order. The steps between a start and a drawn step are part of the sample.
        """
        start_by_step = {step: starts[bisect_left(starts, step) - 1] for step in steps}
        num_drawn = -(-len(steps) // STEPS_PER_SAMPLED)
        nearest = sorted(steps, key=lambda step: step - start_by_step[step])
        furthest = nearest[num_drawn - 1]
        reach = max(_REACH, furthest - start_by_step[furthest])
        reachable = [step for step in steps if step - start_by_step[step] <= reach]
        generator = random.Random(f"{seed}:{pipeline}")
        near = [step for step in reachable if step in disturbed]
        far = [step for step in nearest if step in disturbed and step - start_by_step[step] <= _DISTURBED_REACH]
        first = _of_each_kind([*generator.sample(near, len(near)), *far], disturbed, num_drawn)
        others = [step for step in reachable if step not in first]
        drawn = sorted([*first, *generator.sample(others, min(len(others), max(0, num_drawn - len(first))))])
        last_by_start = {start_by_step[step]: step for step in drawn}
        parts = [range(start + 1, last + 1) for start, last in last_by_start.items()]
        replayed = [disturbed.get(step, frozenset()) for part in parts for step in part]
        return cls(
            seed=seed,
            parts=parts,
            num_reachable=len(reachable),
            num_logged=len(steps),
            disturbed=[step for step in steps if step in disturbed],
            kinds={kind.value: num for kind in Disturbance if (num := sum(kind in each for each in replayed))},
        )

    @property
    def steps(self) -> list[int]:
        """Steps that are replayed, in order."""
        return [step for part in self.parts for step in part]

    @property
    def num_disturbed_sampled(self) -> int:
        """Disturbed steps that are replayed."""
        return len(set(self.steps).intersection(self.disturbed))

    def words(self) -> str:
        """The sample for people."""
        is_part = self.num_reachable < self.num_logged
        reached = f" from the {self.num_reachable} steps near the start or a kept checkpoint" if is_part else ""
        if self.disturbed:
            reached += (
                f", with {self.num_disturbed_sampled} of the {len(self.disturbed)} steps in which work moved, paused, "
                "shared a device or was redone"
            )
            reached += "".join(f", {kind} {num}" for kind, num in self.kinds.items()).replace(",", ":", 1)
        return f"sample of 1 in {STEPS_PER_SAMPLED}{reached}, seed {self.seed}; --all compares every step"


def _of_each_kind(steps: Sequence[int], disturbed: _Disturbed, number: int) -> list[int]:
    """The first of the steps with each kind of disturbance, then the next ones until there are `number`."""
    chosen: list[int] = []
    steps = list(dict.fromkeys(steps))
    for kind in Disturbance:
        if not any(kind in disturbed[step] for step in chosen):
            chosen += [step for step in steps if kind in disturbed[step]][:1]
    return [*chosen, *[step for step in steps if step not in chosen][: max(0, number - len(chosen))]]


def disturbances(orders: Iterable[OrderRecord]) -> dict[PipelineId, dict[int, set[Disturbance]]]:
    """What disturbed the steps of each pipeline, from the orders of a run."""
    found: dict[PipelineId, dict[int, set[Disturbance]]] = {}
    for order in orders:
        kinds = {
            Disturbance.TAIL: order.moved is not None and order.moved.num_begun > 0,
            Disturbance.SHARD: order.is_migration and not (order.moved is not None and order.moved.num_begun),
            Disturbance.TOOL_WAIT: order.has_waited,
            Disturbance.PAUSED: order.ending is Ending.PAUSED and not order.has_waited,
            Disturbance.SHARED: 0.0 < order.least_fraction < 1.0,
            Disturbance.REDONE: not order.counts,
        }
        if any(kinds.values()):
            step = found.setdefault(order.pipeline, {}).setdefault(order.step, set())
            step.update(kind for kind, is_so in kinds.items() if is_so)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one pipeline."""

    pipeline: str
    num_equal: int
    """Steps that were compared and are equal."""
    num_steps: int
    """Last step that the log has."""
    difference: Difference | None
    determinism_class: str | None
    """Determinism class found in the run; None without a probe."""
    reason: str = ""
    """Why nothing was compared, or why replay ended early; empty otherwise."""
    num_equal_by_sum: Mapping[str, int] = field(default_factory=dict)
    """Steps that are equal by `checksum`, and by `sha256`: at checkpoints."""
    sample: Sample | None = None
    """None: every step was to be compared."""

    @property
    def is_equal(self) -> bool:
        """Whether all steps that were to be compared are equal, at least one."""
        return self.difference is None and self.num_equal > 0

    def line(self) -> str:
        """The verdict for people."""
        if self.difference is not None:
            return f"{self.pipeline}: differs at {self._difference(self.difference)}"
        if not self.num_equal:
            return f"{self.pipeline}: nothing to compare: {self.reason}"
        if self.num_equal == self.num_steps:
            return f"{self.pipeline}: equal at all {self.num_steps} steps ({self._sums()})"
        if self.sample is not None:
            return f"{self.pipeline}: equal at {self.num_equal} of {self.num_steps} steps ({self.sample.words()})"
        return (
            f"{self.pipeline}: equal at {self.num_equal} steps ({self._sums()}); the log has no sum of the other "
            f"{self.num_missing}"
        )

    def _difference(self, its: Difference) -> str:
        """Where the weights differ, with both sums."""
        logged = f"step {its.step} of {self.num_steps}: {its.compared} {its.logged[:12] or 'unknown'} in the log"
        found = self.reason or "no weights" if its.alone is None else its.alone[:12]
        if its.checkpoint:
            return f"{logged}, damaged checkpoint {its.checkpoint}: {found}"
        keeping = (
            f"; its engines promise {self.determinism_class}" if self.determinism_class not in (None, "exact") else ""
        )
        return f"{logged}, {found} alone{keeping}"

    def fields(self) -> dict[str, Any]:
        """The pipeline's keys of `rlmux verify --json`."""
        return {
            "is_equal": self.is_equal,
            "steps_equal": self.num_equal,
            "steps": self.num_steps,
            "steps_equal_by_sum": dict(self.num_equal_by_sum),
            "first_difference": asdict(self.difference) if self.difference else None,
            "promise": self.determinism_class,
            "reason": self.reason if not self.is_equal else "",
            "sampled_steps": self.sample.steps if self.sample else None,
            "seed": self.sample.seed if self.sample else None,
            "disturbed_steps": list(self.sample.disturbed) if self.sample else None,
            "sampled_kinds": dict(self.sample.kinds) if self.sample else None,
        }

    def _sums(self) -> str:
        """What was compared: at all steps, or at how many."""
        counts = {name: count for name, count in self.num_equal_by_sum.items() if count}
        return ", ".join(name if count == self.num_equal else f"{name} at {count}" for name, count in counts.items())

    @property
    def num_missing(self) -> int:
        """Steps without a sum in the log."""
        return self.num_steps - self.num_equal if self.difference is None else 0


def result_of(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The keys of `rlmux verify --json`."""
    is_equal = bool(verdicts) and all(verdict.is_equal for verdict in verdicts)
    return {"is_equal": is_equal, "pipelines": {verdict.pipeline: verdict.fields() for verdict in verdicts}}


def verify(
    folder: Path, names: Sequence[str], *, print_line: PrintLine, sample_seed: int | None = None
) -> list[Verdict]:
    """Train these pipelines of the run again, each alone; all pipelines if no name is given.

    `sample_seed`: seed of the sample of steps; None replays every step.
    Raises UserError, before anything starts, for a run that goes on, an unknown name, and a pipeline that this cannot
    replay.
    """
    with FolderLock.take(folder), LogReader(folder) as reader:
        history, state = History.of(reader.header, reader.entries()), reader.state()
    chosen = _chosen(folder, history, names)
    given = {submission.pipeline.id: submission for submission in submissions_of(folder)}
    missing = [name for name in chosen if name not in given]
    if missing:
        raise UserError(
            f"{folder}: its log does not keep the file of pipeline {missing[0]!r}; accepted: {', '.join(given)}"
        )
    spec = launch.spec_of(folder)
    plugins.look_in(spec.code_folder)
    sums, disturbed = _logged_sums(folder), disturbances(history.orders)
    verdicts = []
    for name in chosen:
        for note in changed_input_notes([given[name]], state):
            for words in note.changed:
                print_line(f"{name}: {words} since the run")
        recorded = _Recorded(
            submission=given[name],
            sums=sums.get(name, {}),
            determinism_class=history.pipelines[name].promise,
            disturbed=disturbed.get(name, {}),
            checkpoints=checkpoint_folder(given[name], folder.resolve()),
        )
        verdicts.append(_verify_one(spec.cluster, recorded, sample_seed, print_line))
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


def submissions_of(folder: Path) -> list[Submission]:
    """Every pipeline of the run's file, and of the files that were submitted while it ran."""
    spec = launch.spec_of(folder)
    parse = launch.parser(spec)
    late = [given for submitted in submitted_to(folder) for given in parse(submitted.resolved, submitted.source)]
    return [*launch.submissions(spec), *late]


def _logged_sums(folder: Path) -> dict[PipelineId, _SumsByStep]:
    """Sums of the weights by pipeline and step; the last ones of a repeated step."""
    found: dict[PipelineId, _SumsByStep] = {}
    with LogReader(folder) as reader:
        for entry in reader.entries():
            if isinstance(entry.value, PipelineRestarted):
                its, restored_step = found.get(entry.value.pipeline, {}), entry.value.restored_step
                found[entry.value.pipeline] = {step: sums for step, sums in its.items() if step <= restored_step}
            elif (sums := weight_sums(entry.note)) is not None:
                found.setdefault(sums.pipeline, {}).setdefault(sums.step, {}).update(sums.by_name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A pipeline as the run's folder has it."""

    submission: Submission
    sums: _SumsByStep
    determinism_class: str | None
    disturbed: _Disturbed
    checkpoints: CheckpointStore

    @property
    def num_steps(self) -> int:
        return max(self.sums, default=0)

    def starts(self) -> list[int]:
        """Steps after which training can begin: 0, and steps with every checkpoint that a resume reads, in order."""
        kept = self.checkpoints.steps()
        return sorted(
            {0, *(step for step in kept if all(path.is_dir() for path in self.checkpoints.needed_from(step)))}
        )

    def restored(self, start: int) -> list[Path]:
        """Checkpoints that training after this step begins from; none for the initial weights."""
        return [path for path in self.checkpoints.needed_from(start) if path.is_dir()]

    def damage(self, sample: Sample) -> tuple[Difference, str] | None:
        """The first damaged checkpoint of the sample, or the newest, and its damage; None if all are good."""
        newest = [self.checkpoints.path(step) for step in self.checkpoints.steps()[-1:]]
        read = {path for part in sample.parts for path in self.restored(part.start - 1)}
        for path in sorted({*read, *newest}, key=CheckpointStore.step_of):
            step = CheckpointStore.step_of(path)
            logged = self.sums.get(step, {}).get("sha256", "")
            damage = damage_of(path)
            found = None if damage else _sha256_of(self.checkpoints.weights(step))
            if damage or (logged and found != logged):
                difference = Difference(step=step, compared="sha256", logged=logged, alone=found, checkpoint=path.name)
                return difference, damage or ""
        return None


def _sha256_of(weights: Path) -> str:
    """SHA-256 of the tensors in a file, as logs have it."""
    from rlmux.engines.model.weights import read_tensors, weights_sha256

    tensors, _ = read_tensors(weights)
    return weights_sha256(tensors)


class _Comparison:
    """Listens to the pipeline as it runs alone."""

    def __init__(self, pipeline: PipelineId, logged: _SumsByStep, num_steps: int, print_line: PrintLine) -> None:
        """`logged`: sums to compare. `num_steps`: last step that the log has."""
        self._pipeline = pipeline
        self._logged = logged
        self._num_steps = num_steps
        self._left = {step: dict(sums) for step, sums in sorted(logged.items())}
        """Sums that have not been compared."""
        self._print_line = print_line
        self.num_equal_by_sum = dict.fromkeys(SUMS.values(), 0)
        self.difference: Difference | None = None
        self.failure = ""

    @property
    def num_equal(self) -> int:
        return len(self._logged) - len(self._left)

    def is_decided(self, last: int) -> bool:
        """Whether a step differs, or nothing is left to compare up to this step."""
        return self.difference is not None or min(self._left, default=math.inf) > last

    def steps_with(self, name: str) -> list[int]:
        """Steps to compare by this sum."""
        return [step for step, sums in self._logged.items() if name in sums]

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        for event in events:
            if isinstance(event, PipelineFailed):
                self.failure = event.reason
        for note in notes:
            sums = weight_sums(note)
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
            self._print_line(f"{self._pipeline}: step {step} of {self._num_steps} is equal")

    def first_missing(self) -> Difference | None:
        """The first logged step that the pipeline did not reach."""
        for step, left in self._left.items():
            name, logged = next(iter(left.items()))
            return Difference(step=step, compared=name, logged=logged, alone=None)
        return None


def _verify_one(cluster: Cluster, recorded: _Recorded, sample_seed: int | None, print_line: PrintLine) -> Verdict:
    submission, sums, num_steps = recorded.submission, recorded.sums, recorded.num_steps
    verdict = Verdict(
        pipeline=submission.pipeline.id, num_equal=0, num_steps=num_steps, difference=None,
        determinism_class=recorded.determinism_class,
        reason="its log has no checksum of any step",
    )  # fmt: skip
    if not sums:
        return verdict
    parts: Sequence[range] = [range(1, num_steps + 1)]
    if sample_seed is not None:
        sample = Sample.draw(sample_seed, verdict.pipeline, sorted(sums), recorded.starts(), recorded.disturbed)
        verdict = replace(verdict, sample=sample)
        if (damage := recorded.damage(sample)) is not None:
            return replace(verdict, difference=damage[0], reason=damage[1])
        parts, sums = sample.parts, {step: _one_of(sums[step]) for step in sample.steps if step in sums}
    comparison, reason = _Comparison(submission.pipeline.id, sums, num_steps, print_line), ""
    for part in parts:
        restored = () if sample_seed is None else recorded.restored(part.start - 1)
        reason = _replay(cluster, submission, part, restored, comparison)
        if comparison.difference is not None or not comparison.is_decided(part[-1]):
            break
    is_missing = comparison.difference is None and not comparison.is_decided(num_steps)
    return replace(
        verdict,
        num_equal=comparison.num_equal,
        num_equal_by_sum=comparison.num_equal_by_sum,
        difference=comparison.first_missing() if is_missing else comparison.difference,
        reason=reason,
    )


def _one_of(sums: Mapping[str, str]) -> dict[str, str]:
    """The checksum, else the SHA-256: that comes with the checkpoint, a step later."""
    name = "checksum" if "checksum" in sums else "sha256"
    return {name: sums[name]}


def _replay(
    cluster: Cluster, submission: Submission, part: range, restored: Sequence[Path], comparison: _Comparison
) -> str:
    """Train consecutive steps alone, from links to checkpoints; returns why it ended early, else nothing."""
    machine = describe_machine(cluster)
    alone = replace(with_footprint(submission, cluster, is_gpu=bool(machine.gpu_by_device)), submit_at_s=0.0)
    alone = replace(alone, pipeline=replace(alone.pipeline, first_step=part.start))
    alone = _with_hashes(alone, comparison.steps_with("sha256"))
    cluster = with_machine_memory(cluster, [alone], machine)
    scheduler = Scheduler(cluster, make_policy("solo"))
    with tempfile.TemporaryDirectory(prefix="rlmux-verify-") as scratch:
        for path in restored:
            shutil.copytree(path, Path(scratch, submission.config.name, path.name), copy_function=os.symlink)
        backend = local_backend(cluster, Path(scratch))
        try:
            Controller(scheduler, backend, None, [comparison]).run(
                [alone], until=lambda: comparison.is_decided(part[-1])
            )
        finally:
            backend.close()
    is_refused = scheduler.query.status(alone.pipeline.id) is PipelineStatus.REFUSED
    return comparison.failure or (scheduler.query.reason(alone.pipeline.id) if is_refused else "")


def _with_hashes(submission: Submission, steps: Sequence[int]) -> Submission:
    """A pipeline that makes a checkpoint at each of these steps, and with it the SHA-256."""
    every = submission.checkpoint_every or WorkerOptions().checkpoint_every
    is_enough = all(is_due(submission, step, every) for step in steps)
    return submission if is_enough else replace(submission, checkpoint_every=1)
