"""The plan clock: decides a race in ticks of a virtual rollout engine instead of by wall-clock time.

    lengths, lower bounds ──▶ PlanClock ── advance ──▶ prompt groups that are done, in the order of their ticks

`num_slots` virtual slots are filled in id order; a tick is a token for every seated trajectory; a freed slot goes to
the next id. A prompt group is done at the tick at which `group_size` of its trajectories have ended: those are kept,
and its others give up their slots. The first `num_groups` groups that are done are the batch. Ties go to the lower id.

    unfinished, 12 tokens made   it ends later than 12 ticks after its start
    ended after 17 tokens        it ends 17 ticks after its start

Decisions are a function of the trajectories' lengths and the sizes above. Devices, pauses, migrations and the order of
reports only affect when a decision is made: the clock advances as far as the sampled tokens allow.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence

from rlmux.rl.types import TrajectoryId


class PlanClock:
    """The race of one step's trajectories. Fed with what was sampled, in any order."""

    def __init__(self, ids: Sequence[TrajectoryId], *, num_groups: int, group_size: int, num_slots: int) -> None:
        """`ids`: of all trajectories that are launched, in id order."""
        self._num_groups = num_groups
        self._group_size = group_size
        self._num_slots = num_slots
        self._waiting = deque(ids)
        self._now = 0
        """Tick up to which everything is decided."""
        self._start_by_seated: dict[TrajectoryId, int] = {}
        """Tick at which each seated trajectory got its slot."""
        self._made = dict.fromkeys(ids, 0)
        """Tokens that each trajectory has at least."""
        self._length: dict[TrajectoryId, int] = {}
        """Tokens of finished trajectories."""
        self._ended_by_prompt: dict[int, list[TrajectoryId]] = {id.prompt: [] for id in ids}
        """Trajectories of each prompt that have ended on this clock, in order; none of a prompt whose group is done."""
        self._num_done = 0
        self._lost: dict[TrajectoryId, None] = {}

    @property
    def is_decided(self) -> bool:
        """Whether the batch is complete."""
        return self._num_done == self._num_groups

    def is_lost(self, id: TrajectoryId) -> bool:
        """Whether the trajectory is excluded, whatever its length."""
        return id in self._lost

    def note_progress(self, id: TrajectoryId, num_tokens: int) -> None:
        """Record the tokens of an unfinished trajectory. After a restart it reports fewer, and will have them again."""
        self._made[id] = max(self._made[id], num_tokens)

    def note_end(self, id: TrajectoryId, num_tokens: int) -> None:
        """Record the tokens of a finished trajectory; the first call counts."""
        self._length.setdefault(id, max(num_tokens, self._made[id]))

    def advance(self) -> list[list[TrajectoryId]]:
        """Advance as far as is decided. Returns the kept trajectories of each group that is done now, in id order."""
        done: list[list[TrajectoryId]] = []
        while not self.is_decided and (ended := self._next_end()) is not None:
            self._now, id = ended
            del self._start_by_seated[id]
            group = self._ended_by_prompt[id.prompt]
            group.append(id)
            if len(group) == self._group_size:
                done.append(sorted(group))
                self._close(id.prompt)
        self._lose_those_too_late()
        return done

    def _next_end(self) -> tuple[int, TrajectoryId] | None:
        """The next trajectory to end and its tick; None if undecided."""
        while self._waiting and len(self._start_by_seated) < self._num_slots:
            self._start_by_seated[self._waiting.popleft()] = self._now
        first: tuple[float, TrajectoryId] | None = None
        decided_until: float = math.inf
        for id, start in self._start_by_seated.items():
            if id not in self._length:
                decided_until = min(decided_until, start + self._made[id])
            elif first is None or (start + self._length[id], id) < first:
                first = (start + self._length[id], id)
        return (int(first[0]), first[1]) if first is not None and first[0] <= decided_until else None

    def _close(self, prompt: int) -> None:
        """A prompt's group is done: its other trajectories are lost."""
        self._num_done += 1
        kept = self._ended_by_prompt.pop(prompt)
        self._lose(id for id in self._made if id.prompt == prompt and id not in kept)
        if self.is_decided:
            self._lose(id for id in self._made if id.prompt in self._ended_by_prompt)

    def _lose(self, ids: Iterable[TrajectoryId]) -> None:
        for id in ids:
            self._lost[id] = None
            self._start_by_seated.pop(id, None)
        self._waiting = deque(id for id in self._waiting if id not in self._lost)

    def _lose_those_too_late(self) -> None:
        """Mark trajectories as lost, once all have a slot, that are past the latest tick at which their group or the
        batch is done. They stay on the clock, as the lateness of others may depend on them."""
        if self.is_decided or self._waiting:
            return
        ticks: dict[int, list[int]] = {prompt: [] for prompt in self._ended_by_prompt}
        for id, start in self._start_by_seated.items():
            if id in self._length:
                ticks[id.prompt].append(start + self._length[id])
        latest = {prompt: self._latest_done(prompt, known) for prompt, known in ticks.items()}
        batch = heapq.nsmallest(self._num_groups - self._num_done, latest.values())[-1]
        for id, start in self._start_by_seated.items():
            if id not in self._length and start + self._made[id] >= min(latest[id.prompt], batch):
                self._lost[id] = None

    def _latest_done(self, prompt: int, ticks: list[int]) -> float:
        """Tick at which a prompt's group is done at the latest; infinite where too few of it have ended."""
        missing = self._group_size - len(self._ended_by_prompt[prompt])
        return math.inf if len(ticks) < missing else heapq.nsmallest(missing, ticks)[-1]
