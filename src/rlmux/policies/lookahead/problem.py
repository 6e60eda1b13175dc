"""A look-ahead problem and its answer, as values: work items of the next steps in, a schedule of all of them out.

    Problem ── work items, what runs, which shards may migrate ──▶ lookahead.plan ──▶ Schedule

A work item is a chain of nodes of the Sub-Stage Graph (JigsawRL section 3) that holds its devices in one piece: a shard
of a rollout with its prefill, dense decode and tail, or one stage of training. Work items are known by their index in
the problem, devices by their number.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmux.core.estimation.colocation import NO_SHARING, SharingTable
from rlmux.core.model import SubStage

NOT_YET, BEFORE_NOW = -1.0, -0.5
"""Stand-ins for a time in a schedule: it has not come; it was before the present moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One uninterrupted piece of a pipeline on its devices."""

    pipeline: int
    sub_stage: SubStage
    """The one that it is in, or begins with."""
    devices: tuple[int, ...]
    """Numbers of the devices that it needs all at once; () for work that holds no device."""
    seconds: float
    """Solo seconds left."""
    later: tuple[tuple[float, SubStage], ...] = ()
    """Its sub-stages after that as (solo seconds left when it begins, sub-stage), in order."""
    tail_s: float = 0.0
    """The part of `seconds`, at the end, that is tail decoding and may migrate. 0.0 without one."""
    needs: tuple[int, ...] = ()
    """Indices of work items that must have ended; they come earlier in the problem."""
    base: str = ""
    """Base on which its pipeline computes it (`Pipeline.base_of`)."""
    is_running: bool = False
    deadline_s: float | None = None
    """Seconds from now by which it has to end; None without a deadline."""
    state: int = -1
    """Number of the pipeline state that it needs on its devices."""
    switch_s: float = 0.0
    """Seconds to bring that state to a device that does not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingMigration:
    """A possible migration of a shard to the device of another shard of the same rollout: its tail, or all of it, then
    to several as well."""

    source: int
    """Index of the work item that leaves its device."""
    target: int
    """Index of the work item that takes it over."""
    others: tuple[int, ...] = ()
    """Indices of those that take as much of it over besides."""
    cost_s: float = 0.0
    """Seconds added to each target: contexts computed again, or copied; of a whole shard, its work too."""
    stretch: float = 1.0
    """Factor by which the target's tail grows: more sequences in each iteration."""
    is_whole: bool = False
    """True: the source migrates before it begins, and the target grows by `cost_s` alone. False: its tail does."""
    is_later: bool = False
    """True for a rollout to come: it can be planned, and not yet made."""

    @property
    def targets(self) -> tuple[int, ...]:
        return (self.target, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleMigration:
    """A possible migration of a shard to an idle device: it runs there from now on."""

    item: int
    """Index of a work item that is ready or runs."""
    device: int
    cost_s: float = 0.0
    """Seconds added to it: its contexts go along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that is planned at one moment."""

    work_items: tuple[WorkItem, ...]
    sibling_migrations: tuple[SiblingMigration, ...] = ()
    idle_migrations: tuple[IdleMigration, ...] = ()
    """Possible migrations to idle devices, at most one of each work item."""
    sharing: SharingTable = NO_SHARING
    kept: tuple[tuple[int, ...], ...] = ()
    """Numbers of the states on each device, most recently used first; () counts no switches."""
    num_kept: tuple[float, ...] = ()
    """Count of states that fit on each device at once."""
    mean_weight: float = 0.1
    """Weight of the mean completion time beside the makespan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When each work item of a problem runs, in seconds from now, and which shards migrate."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    sibling_migrations: tuple[int, ...]
    """Indices of the migrations to siblings that are made, now or later."""
    sibling_migrations_now: tuple[int, ...]
    """Indices of the migrations to siblings that are made at this moment."""
    idle_migrations_now: tuple[int, ...]
    """Indices of the migrations to idle devices whose work item starts at this moment, or runs."""
    score: tuple[float, float]
    """Seconds by which deadlines are missed, then weighted makespan; the smaller the better."""
    mean_end_s: float
    """Mean over the pipelines of when their last work item ends."""
    num_tried: int
    """Schedules that were played out to find this one."""

    @property
    def missed_s(self) -> float:
        """Seconds by which deadlines are missed."""
        return self.score[0]

    @property
    def makespan_s(self) -> float:
        return max(self.end_s, default=0.0)

    @property
    def starts_now(self) -> tuple[int, ...]:
        """Indices of the work items that start at this moment, running ones left out."""
        return tuple(index for index, start in enumerate(self.start_s) if start == 0.0)


EMPTY_SCHEDULE = Schedule(
    start_s=(),
    end_s=(),
    sibling_migrations=(),
    sibling_migrations_now=(),
    idle_migrations_now=(),
    score=(0.0, 0.0),
    mean_end_s=0.0,
    num_tried=0,
)
