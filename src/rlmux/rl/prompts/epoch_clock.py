"""The clock of interruptible rollouts: a rollout engine in ticks that never waits for training (AReaL's epochs).

    step n  ── first leg: `overlap_ticks` by version n-2, beside the update of step n-1 ──▶ weights n-1 arrive
            ── last leg: by version n-1, until a batch is complete ──▶ step n trains on it, step n + 1 begins

`num_slots` virtual slots are filled in id order; a tick is a token for every seated trajectory; a freed slot goes to
the next id. What a leg has not ended stays seated in the next one, so a trajectory has tokens of several versions.
Where there is no overlap, and in step 1, a step is its last leg.

Admission (AReaL): version v may seat prompt group number g, from 0, where

    g < (v + staleness + 1) x groups_per_step

A group with a token of version v is due by step v + staleness + 1: later it would be too old. A batch is complete at
the first tick at which `groups_per_step` groups are done without which all others can still be trained on in time:

    of the groups due by step k that have begun, at most (k - n) x groups_per_step are left after step n, for each k

It is the first such groups in the order in which they were done; ties go to the lower id.

Invariants: a batch always completes, since at most (k - n + 1) x groups_per_step of them have begun before step n: that
many are admitted by version k - staleness - 1, less what is trained on, and no batch leaves more. No trained token is
older than the bound, and each group is trained on once. All is a function of the trajectories' lengths and the sizes
above: the order in which news comes decides only when it is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import TrajectoryId


class GroupId(NamedTuple):
    """Names a prompt group; sorts in the order of submission."""

    step: int
    """Step that would sample it without interruptions."""
    prompt: int
    """Position of the prompt within that step, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSizes:
    """Parameters of the clock's decisions, beside lengths."""

    num_steps: int
    groups_per_step: int
    group_size: int
    staleness: int
    """Largest staleness of a trained token, in versions."""
    num_slots: int
    overlap_ticks: int
    """Ticks from the completion of a batch to the arrival of its weights."""

    @classmethod
    def of(cls, config: TrainingConfig) -> EpochSizes:
        """Sizes of a pipeline with interruptible rollouts."""
        algorithm, interruptible = config.algorithm, config.rollout.interruptible
        assert interruptible is not None
        return cls(
            num_steps=config.num_steps,
            groups_per_step=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            staleness=algorithm.staleness,
            num_slots=interruptible.num_slots or config.rollout.num_slots,
            overlap_ticks=interruptible.overlap_ticks,
        )

    def ids_until(self, num_groups: int) -> Sequence[TrajectoryId]:
        """All trajectories of the first groups, in id order."""
        return [self.id_at(number) for number in range(num_groups * self.group_size)]

    def id_at(self, number: int) -> TrajectoryId:
        """The trajectory of this number, from 0, in id order."""
        group, sample = divmod(number, self.group_size)
        step, prompt = divmod(group, self.groups_per_step)
        return TrajectoryId(step + 1, prompt, sample)

    def num_admitted(self, version: int) -> int:
        """Groups that may be seated by this version and those before it."""
        return min(version + self.staleness + 1, self.num_steps) * self.groups_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """State of the clock between two steps, part of the checkpoint."""

    num_begun: int = 0
    """Trajectories that had a slot: the first so many in id order."""
    tokens_by_seated: Mapping[TrajectoryId, int] = field(default_factory=dict)
    """Tokens of each trajectory that has a slot."""
    ended: tuple[TrajectoryId, ...] = ()
    """Trajectories that have ended and are not trained on, in the order of their ends."""
    oldest_versions: Mapping[GroupId, int] = field(default_factory=dict)
    """Version of the first token of each group that has begun and is not trained on."""

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "num_begun": self.num_begun,
            "tokens_by_seated": [[*id[:3], tokens] for id, tokens in self.tokens_by_seated.items()],
            "ended": [list(id[:3]) for id in self.ended],
            "oldest_versions": [[*group, version] for group, version in self.oldest_versions.items()],
        }

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> ClockState:
        return cls(
            num_begun=fields["num_begun"],
            tokens_by_seated={TrajectoryId(*row[:3]): row[3] for row in fields["tokens_by_seated"]},
            ended=tuple(TrajectoryId(*row) for row in fields["ended"]),
            oldest_versions={GroupId(*row[:2]): row[2] for row in fields["oldest_versions"]},
        )


class Admitted:
    """The prompts that a pipeline's rollouts may sample, from step to step."""

    def __init__(self, config: TrainingConfig, state: ClockState) -> None:
        """`state`: of the clock before the first step."""
        self._sizes = EpochSizes.of(config)
        self._first_new = state.num_begun
        """Number of the first trajectory that has not begun."""
        self._begun = set(state.oldest_versions)
        groups = [*self._begun, GroupId(*self._sizes.id_at(self._first_new)[:2])]
        self._last_step = min(groups).step - 1
        """The newest step whose prompts were admitted, or none of whose is left."""

    def steps_new_in(self, step: int) -> Sequence[int]:
        """Steps whose prompts may be sampled in this one, and not in those before."""
        newest = self._sizes.num_admitted(step - 1) // self._sizes.groups_per_step
        new = range(self._last_step + 1, newest + 1)
        self._last_step = max(self._last_step, newest)
        return new

    def is_open(self, id: TrajectoryId) -> bool:
        """Whether it is not trained on yet."""
        return id >= self._sizes.id_at(self._first_new) or GroupId(id.step, id.prompt) in self._begun


class EpochClock:
    """One pipeline's rollouts, from step to step. Fed with what was sampled, in any order.

    Legs    begin_step, begin_leg, is_leg_over, is_step_over, end_step
    News    note_progress, note_end, advance
    """

    def __init__(self, sizes: EpochSizes, state: ClockState | None = None) -> None:
        state = state or ClockState()
        self._sizes = sizes
        self._step = 0
        self._version = 0
        self._ticks: float = math.inf
        """Length of the leg; infinite for one that ends with a complete batch."""
        self._now = 0
        """Tick of the leg up to which everything is decided."""
        self._num_begun = state.num_begun
        self._start_by_seated: dict[TrajectoryId, int] = {}
        """Tick of the leg from which on each seated trajectory gets tokens."""
        self._had = dict(state.tokens_by_seated)
        """Tokens that each seated trajectory had at that tick."""
        self._made: dict[TrajectoryId, int] = {}
        """Tokens that trajectories have at least."""
        self._length: dict[TrajectoryId, int] = {}
        """Tokens of finished trajectories on a device."""
        self._ended: list[TrajectoryId] = []
        """Trajectories that are not trained on and have ended on this clock, in order."""
        self._num_ended: dict[GroupId, int] = {}
        """How many of each group those are."""
        self._done: list[GroupId] = []
        """Groups of which all have ended, in that order."""
        for id in state.ended:
            self._end(id)
        self._oldest = dict(state.oldest_versions)
        self._reported: set[GroupId] = set()
        """Groups of the step's batch that `advance` has returned (membership tests only)."""
        self.is_leg_over = False

    # ------------------------------------------------------------------ legs

    @property
    def version(self) -> int:
        """The weight version of the leg."""
        return self._version

    @property
    def is_last_leg(self) -> bool:
        return math.isinf(self._ticks)

    @property
    def ticks(self) -> int:
        """Ticks of the leg that are decided."""
        return self._now

    @property
    def is_step_over(self) -> bool:
        """The step's batch is complete with the leg, be it the first one: the last one then has no ticks."""
        return self.is_leg_over and self._is_complete()

    def begin_step(self, step: int) -> None:
        """Open the first leg of a step."""
        self._step, self._reported = step, set()
        has_overlap = self._sizes.overlap_ticks > 0 and step > 1
        self._begin_leg(step - 2 if has_overlap else step - 1, self._sizes.overlap_ticks if has_overlap else math.inf)

    def begin_last_leg(self) -> None:
        """Begin the last leg: the weights of the previous step have arrived."""
        self._begin_leg(self._step - 1, math.inf)

    def _begin_leg(self, version: int, ticks: float) -> None:
        self._version, self._ticks, self._now, self.is_leg_over = version, ticks, 0, False
        self._start_by_seated = dict.fromkeys(self._had, 0)
        self._made, self._length = dict(self._had), {}

    def wanted(self) -> list[TrajectoryId]:
        """Trajectories for this leg: the seated ones, then admitted ones that wait for a slot."""
        last = self._sizes.num_admitted(self._version) * self._sizes.group_size
        return [*self._start_by_seated, *map(self._sizes.id_at, range(self._num_begun, last))]

    def standing(self) -> dict[TrajectoryId, int]:
        """Tokens of each seated trajectory at the end of the leg."""
        return {id: self._had[id] + self._now - start for id, start in self._start_by_seated.items()}

    def end_leg(self) -> None:
        """End the leg: seated trajectories start the next one with their present tokens."""
        self._had = self.standing()

    def end_step(self) -> list[TrajectoryId]:
        """Remove and return the step's batch, in id order."""
        batch = self._batch()
        for group in batch:
            del self._oldest[group], self._num_ended[group]
            self._done.remove(group)
        taken = sorted(id for id in self._ended if id[:2] in batch)
        self._ended = [id for id in self._ended if id[:2] not in batch]
        return taken

    def state(self) -> ClockState:
        """State of the clock, between two steps."""
        return ClockState(
            num_begun=self._num_begun,
            tokens_by_seated=dict(self._had),
            ended=tuple(self._ended),
            oldest_versions=dict(self._oldest),
        )

    def untrained(self) -> set[GroupId]:
        """Groups that have begun and are not trained on (membership tests only)."""
        return set(self._oldest)

    # ------------------------------------------------------------------ news

    def note_progress(self, id: TrajectoryId, num_tokens: int) -> None:
        """Record the tokens of an unfinished trajectory. After a restart it reports fewer, and will have them again."""
        self._made[id] = max(self._made.get(id, 0), num_tokens)

    def note_end(self, id: TrajectoryId, num_tokens: int) -> None:
        """Record the tokens of a finished trajectory; the first call counts."""
        self._length.setdefault(id, num_tokens)

    def ended(self) -> set[TrajectoryId]:
        """Trajectories that have ended on this clock and are not trained on (membership tests only)."""
        return set(self._ended)

    def has_enough(self, made: Mapping[TrajectoryId, int]) -> bool:
        """Whether each of these unfinished trajectories has as many tokens as its leg, which is over, gave it."""
        standing = self.standing()
        return all(num_tokens >= standing.get(id, 0) for id, num_tokens in made.items())

    def ticks_left(self) -> float:
        """Ticks of the leg that the slowest trajectory has not made; infinite in a last leg."""
        behind = [
            start + self._made.get(id, 0) - self._had[id]
            for id, start in self._start_by_seated.items()
            if id not in self._length
        ]
        return self._ticks - min(behind, default=self._now)

    def advance(self) -> list[list[TrajectoryId]]:
        """Advance as far as is decided. Returns the trajectories of each newly decided group of the batch."""
        while not self.is_leg_over:
            if self.is_last_leg and self._is_complete():
                self.is_leg_over = True
            elif (tick := self._next_end()) is None:
                break
            elif tick > self._ticks:
                self._now, self.is_leg_over = int(self._ticks), True
            else:
                self._now = int(tick)
                self._end_those_due_now()
        return self._newly_in_batch()

    def _next_end(self) -> float | None:
        """Tick at which the next trajectory ends, infinite if none is seated, None if undecided. A leg's last tick
        stands for all later ones."""
        self._fill_slots()
        first, decided_until = math.inf, math.inf
        for id, start in self._start_by_seated.items():
            if id in self._length:
                first = min(first, start + self._length[id] - self._had[id])
            else:
                decided_until = min(decided_until, start + self._made.get(id, 0) - self._had[id])
        if first <= decided_until and first <= self._ticks:
            return first
        return math.inf if min(first, decided_until) >= self._ticks else None

    def _fill_slots(self) -> None:
        if self._now >= self._ticks:
            return  # what is seated now has its first token in the next leg
        last = self._sizes.num_admitted(self._version) * self._sizes.group_size
        while len(self._start_by_seated) < self._sizes.num_slots and self._num_begun < last:
            id = self._sizes.id_at(self._num_begun)
            self._num_begun += 1
            self._start_by_seated[id], self._had[id] = self._now, 0
            self._oldest.setdefault(GroupId(id.step, id.prompt), self._version)

    def _end_those_due_now(self) -> None:
        ending = [
            id
            for id, start in self._start_by_seated.items()
            if id in self._length and start + self._length[id] - self._had[id] == self._now
        ]
        for id in sorted(ending):
            del self._start_by_seated[id], self._had[id]
            self._end(id)

    def _end(self, id: TrajectoryId) -> None:
        group = GroupId(id.step, id.prompt)
        self._ended.append(id)
        self._num_ended[group] = self._num_ended.get(group, 0) + 1
        if self._num_ended[group] == self._sizes.group_size:
            self._done.append(group)

    # ------------------------------------------------------------------ the batch

    def _is_complete(self) -> bool:
        size = self._sizes.groups_per_step
        return len(self._done) >= size and len(self._batch()) == size

    def _batch(self) -> list[GroupId]:
        """Groups that are certain to be in the batch, now and when more are done."""
        size = self._sizes.groups_per_step
        due_by = {group: version + self._sizes.staleness + 1 for group, version in self._oldest.items()}
        batch: dict[GroupId, None] = {}
        num_missing = 0
        """Places reserved for unfinished groups."""
        for step in sorted({*due_by.values()}):
            num_begun = sum(due <= step for due in due_by.values())
            num_needed = num_begun - (step - self._step) * size - len(batch) - num_missing
            if num_needed > 0:
                found = [group for group in self._done if due_by[group] <= step and group not in batch][:num_needed]
                batch.update(dict.fromkeys(found))
                num_missing += num_needed - len(found)
        rest = [group for group in self._done if group not in batch]
        return [*batch, *rest[: size - len(batch) - num_missing]]

    def _newly_in_batch(self) -> list[list[TrajectoryId]]:
        new = [group for group in self._batch() if group not in self._reported]
        self._reported.update(new)
        return [sorted(id for id in self._ended if id[:2] == group) for group in new]
