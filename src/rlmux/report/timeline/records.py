"""Orders, pins and pipelines as the log has them: the values that `history.py` folds it into.

    OrderRecord      RunStage … ChunkFinished* … StageFinished | StagePaused
    Pin              Admit … Release, on one set of nodes
    PipelineRecord   status, steps, metrics, tries
    Instant          a failure, a loss, a migration

An order that no event ended is *open*: it lasts to the last known time. One whose worker, pipeline or node went away is
*lost*: its reports stand, the rest is to be done again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlmux.core.actions import ExpectSteps, Switch
from rlmux.core.events import TrajectoriesMigrated
from rlmux.core.model import DeviceId, OrderId, Phase, Pipeline, PipelineId, PipelineStatus, Placement, Stage
from rlmux.log.notes import RemovedNote, RetriedNote, RolloutNote
from rlmux.log.progress_rows import Reports
from rlmux.report.timeline.delivery import Deliveries, StepDelivery

STOPPED = "stopped"
"""Status of a pipeline whose run ended on purpose before it was over: it can be resumed."""


class Ending(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    PAUSED = "paused"
    LOST = "lost"


TAIL_MIGRATION, SHARD_MIGRATION = "tail migration", "shard migration"
"""Instants at which trajectories that had begun, or a shard that had not, came to other devices."""
MIGRATIONS = (TAIL_MIGRATION, SHARD_MIGRATION)
_LOST = Ending.LOST
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""


@dataclass(slots=True)
class OrderRecord:
    """A RunStage or MigrateShard and what became of it."""

    id: OrderId
    pipeline: PipelineId
    step: int
    stage: Stage
    phase: Phase
    devices: tuple[DeviceId, ...]
    start_s: float
    switch: Switch = Switch.NONE
    device_fraction: float = 1.0
    weight_version: int = 0
    arrived_s: float | None = None
    """Time at which its work arrived; None for work that was planned."""
    kind: tuple[Phase, ...] = ()
    """Kind of the work that arrived; empty for work that was planned."""
    is_migration: bool = False
    moved: TrajectoriesMigrated | None = None
    """What a migration moved, once it has; None for other orders."""
    end_s: float = math.inf
    ending: Ending = Ending.OPEN
    seconds: float = 0.0
    """Seconds of computing; for an open or lost order, from its last progress report."""
    switch_s: float = 0.0
    tokens: int = 0
    chunks: Reports = field(default_factory=Reports)
    has_waited: bool = False
    """Whether it is a shard that was paused since it could compute nothing until an environment replied."""
    least_fraction: float = 1.0
    """The smallest part of its devices that it had."""
    is_redone: bool = False
    """True where its pipeline went back to an earlier step: the time was spent, the result does not count."""

    @property
    def counts(self) -> bool:
        """Whether its result is part of the run's."""
        return not self.is_redone and self.ending is not _LOST


@dataclass(frozen=True, slots=True)
class Standstill:
    """A worker stood still in the middle of a call: stopped, or given no processor."""

    pipeline: PipelineId
    devices: tuple[DeviceId, ...]
    start_s: float
    end_s: float


@dataclass(slots=True)
class Pin:
    """A pipeline holds nodes, from its admission to its release."""

    pipeline: PipelineId
    placement: Placement
    start_s: float
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Move:
    """A relocation of a pipeline."""

    time_s: float
    expected_step_s: float | None
    """Seconds that its steps were expected to take there; None where nothing was known of them."""


@dataclass(slots=True)
class PipelineRecord:
    pipeline: Pipeline
    submitted_s: float
    status: str = PipelineStatus.WAITING
    reason: str = ""
    admitted_s: float | None = None
    ended_s: float | None = None
    published: dict[int, float] = field(default_factory=dict)
    """Time at which each version from 1 on was last published."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Figures of each step's `step` note, by step."""
    rollouts: dict[int, RolloutNote] = field(default_factory=dict)
    """Rollout of each step (runtime/orders/rollout_record.py)."""
    deliveries: Deliveries = field(default_factory=Deliveries)
    """Versions and checksums of the weights that sampled each step."""
    weights_sha256: str | None = None
    promise: str | None = None
    """Determinism class that a probe of its engines found; None before there was one."""
    expected: ExpectSteps | None = None
    """Expected slowdown as last emitted; None if none was."""
    program_step: int | None = None
    """Step of a program under permits, by its own count; None of any other, and where it names none."""
    hosts: tuple[str, ...] = ()
    """Machines of a program's workers, as they named them."""
    retries: list[RetriedNote] = field(default_factory=list)
    """Its tries after the first one, each with the failure before, in order."""
    removals: list[tuple[float, RemovedNote]] = field(default_factory=list)
    """When which of its files were removed since it last ended, in order."""
    moves: list[Move] = field(default_factory=list)
    """Its relocations, in order."""
    thinking: list[tuple[float, float]] = field(default_factory=list)
    """Stretches (begin, end) in which the client of an on-demand pipeline had requested nothing; the end of the
    last is infinite while it thinks."""

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each of its steps in order; steps without a reward are skipped."""
        every = (self.metrics[step].get("reward_mean", math.nan) for step in sorted(self.metrics))
        return [reward for reward in every if math.isfinite(reward)]

    def delivery(self, step: int) -> StepDelivery | None:
        """Delivery of the weights that sampled a step; None if the log has none."""
        gap = self.metrics.get(step, {}).get("logprob_gap", math.nan)
        return self.deliveries.of(step, logprob_gap=gap if math.isfinite(gap) else None)

    @property
    def score(self) -> float | None:
        """Mean reward of all its steps, the result of a filler; None before the first."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def rounds(self) -> dict[str, int] | None:
        """Its rounds so far under tail batching, counted; None without it."""
        steps = [self.metrics[step] for step in sorted(self.metrics) if "is_long_round" in self.metrics[step]]
        if not steps:
            return None
        num_long = int(sum(each["is_long_round"] for each in steps))
        return {
            "short": len(steps) - num_long,
            "long": num_long,
            "cut_trajectories": int(sum(each["cut_trajectories"] for each in steps)),
            "queued_prompts": int(steps[-1]["queued_prompts"]),
        }

    @property
    def tries(self) -> dict[str, Any] | None:
        """Which try it is in, of how many, and the failures before; None in its first one."""
        if not self.retries:
            return None
        failures = [{"at_s": each.failed_s, "cause": each.cause.value, "reason": each.reason} for each in self.retries]
        return {"number": self.retries[-1].number, "of": self.retries[-1].of, "failures": failures}

    @property
    def removed(self) -> list[dict[str, Any]]:
        """What was removed of it since it last ended: when, by whom, and the bytes."""
        return [
            {"parts": note.parts, "at_s": at_s, "by": note.by, "by_rule": note.by_rule, "freed_bytes": note.freed_bytes}
            for at_s, note in self.removals
        ]

    def note_thinking(self, time_s: float, *, is_thinking: bool) -> None:
        """Its client begins to think, or requests something; nothing changes if that is so already."""
        was_thinking = bool(self.thinking) and math.isinf(self.thinking[-1][1])
        if is_thinking and not was_thinking:
            self.thinking.append((time_s, math.inf))
        elif was_thinking and not is_thinking:
            self.thinking[-1] = (self.thinking[-1][0], time_s)

    def client_s(self, start_s: float, end_s: float) -> float:
        """Seconds between two times in which its client had requested nothing."""
        end_s = min(end_s, math.inf if self.ended_s is None else self.ended_s)
        return math.fsum(max(0.0, min(end, end_s) - max(begin, start_s)) for begin, end in self.thinking)


@dataclass(frozen=True, slots=True)
class Instant:
    """A fact of one moment that the timeline marks."""

    time_s: float
    what: str
    """`failure`, `loss`, `restart`, `tail migration`, `shard migration`, `refused`, `cancelled`, `node lost`,
    `node joined`, `notice`, `resumed`, `slo` (it cannot be promised), `policy fault` (a decision failed)."""
    pipeline: PipelineId | None = None
    device: DeviceId | None = None
    text: str = ""


def tries_text(tries: Mapping[str, Any]) -> str:
    """Which try a pipeline is in, and how the last one ended."""
    return try_text(tries["number"], tries["of"], tries["failures"][-1]["reason"])


def try_text(number: int, of: int | None, reason: str) -> str:
    """The same of one try. `reason`: the failure before it."""
    return f"try {number}{'' if of is None else f' of {of}'}, after: {reason or 'a failure'}"


def is_removed(removed: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether all files of a pipeline are removed: lists leave it out unless they are asked for it."""
    return any(each["parts"] == "all" for each in removed or ())


def removed_text(removed: Mapping[str, Any]) -> str:
    """What was removed, and by whom."""
    what = "all of its files were" if removed["parts"] == "all" else f"its {removed['parts']} were"
    by = "the rule keep" if removed["by_rule"] else removed["by"] or "the owner"
    return f"{what} removed at {removed['at_s']:.0f} s by {by} ({size_words(removed['freed_bytes'])})"


def size_words(num_bytes: float) -> str:
    """`1.5 GB`: bytes in units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
