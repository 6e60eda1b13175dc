"""A rollout shard of trajectories with several turns, and waits for their environment between the turns.

    fresh ──slot free──▶ decoding ──turn ends──▶ waiting for a reply ──reply──▶ (slot free) ──▶ decoding ... ended
                    at the order's rate          in seconds that pass, paused or not

A trajectory that waits decodes nothing, and holds no slot that another could use, unless the engine keeps it
(`keeps_slots`; this project's own engine does not). When all trajectories wait, the shard computes nothing: pausing it
loses nothing, since the waits go on.

The decoder goes from one moment (a turn ends, an environment replies) to the next; in between the same sequences
decode. `Decoder` (decoder.py) is the cheaper model without waits, and explains why both exist.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from rlmux.core.errors import UserError
from rlmux.core.model import SubStage, decode_sub_stage, dense_threshold_of
from rlmux.sim.models.decoder import REPORT_AT, DecodeSeconds, LaterTurn, Unfinished
from rlmux.sim.models.work import DONE_S

_ROUNDING = 1e-6
"""Tokens that count as rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How trajectories use tools: the waits between their turns. Everything drawn is a function of (seed, step)."""

    mean_calls: float = 1.0
    """Mean calls of a trajectory; the counts are drawn from a Poisson distribution."""
    wait_s: float = 1.0
    """Mean seconds of a call; the waits are drawn from an exponential distribution."""
    reply_tokens: int = 32
    """Tokens of a reply, prefilled before the next turn is decoded."""
    keeps_slots: bool = False
    """Whether a trajectory that waits keeps its slot."""

    def __post_init__(self) -> None:
        if self.mean_calls < 0.0 or self.wait_s < 0.0 or self.reply_tokens < 0:
            raise UserError(f"{self}: calls, waits and reply tokens are at least 0")

    def turns_of(
        self, lengths: Sequence[int], generator: np.random.Generator
    ) -> list[tuple[int, tuple[LaterTurn, ...]]]:
        """(tokens of the first turn, the later turns) of each trajectory: its tokens cut at random places."""
        numbers = generator.poisson(self.mean_calls, len(lengths))
        found = []
        for length, number in zip(lengths, numbers, strict=True):
            num_calls = min(int(number), length - 1)
            places = generator.choice(length - 1, num_calls, replace=False) + 1 if num_calls else ()
            cuts = sorted(int(place) for place in places)
            waits = generator.exponential(self.wait_s, num_calls)
            ends = [*cuts, length][1:]
            later = tuple(
                LaterTurn(float(wait_s), self.reply_tokens, end - begin)
                for wait_s, begin, end in zip(waits, cuts, ends, strict=True)
            )
            found.append((cuts[0] if cuts else length, later))
        return found


class TurnDecoder:
    """`Work` that goes from moment to moment; see the module."""

    def __init__(
        self,
        costs: DecodeSeconds,
        trajectories: Sequence[Unfinished],
        *,
        slots: int,
        group_size: int = 1,
        keeps_slots: bool = False,
        first_s: float = 0.0,
    ) -> None:
        """`first_s`: solo seconds before anything is decoded."""
        self._costs = costs
        self._slots = slots
        self._dense_threshold = dense_threshold_of(slots)
        self._group_size = group_size
        self._keeps_slots = keeps_slots
        self._prefill_s = first_s
        """Solo seconds of prefill before decoding continues."""
        self._clock_s = 0.0
        self._iteration = 0.0
        """Decode iterations so far, with the fraction of the present one."""
        self._active: list[tuple[float, int, float, Unfinished]] = []
        """Heap of (last iteration of its turn, number, context minus its first iteration, trajectory as admitted)."""
        self._contexts = 0.0
        """Sum of the third fields of `_active`."""
        self._waiting: list[tuple[float, int, Unfinished]] = []
        """Heap of (`_clock_s` at which its environment replies, number, trajectory)."""
        self._queue: deque[Unfinished] = deque()
        self._num_entries = 0
        self._add(trajectories)
        self._admit()

    @property
    def is_over(self) -> bool:
        return not (self._active or self._queue or self._waiting)

    @property
    def sub_stage(self) -> SubStage:
        if not self._active:
            return SubStage.TOOL_WAIT
        if self._prefill_s > 0.0 and self._iteration == 0.0:  # a reply's prefill is over at once
            return SubStage.PREFILL
        return decode_sub_stage(len(self._active), self._dense_threshold)

    @property
    def idle_s(self) -> float:
        if self._active or self._prefill_s > 0.0 or not self._waiting:
            return 0.0
        return max(0.0, self._waiting[0][0] - self._clock_s)

    def report(self) -> tuple[int, int, int]:
        return len(self._active), len(self._queue), len(self._waiting)

    def until_over(self, rate: float) -> float:
        future, total_s = self._copy(), 0.0
        while not future.is_over:
            total_s += future._advance_to_moment(rate)
        return total_s

    def until_report(self, rate: float) -> float:
        """Seconds until the unfinished trajectories are as few as one of `REPORT_AT`, or the sub-stage changes."""
        future, total_s, before = self._copy(), 0.0, self._report_state()
        while not future.is_over and future._report_state() == before:
            total_s += future._advance_to_moment(rate)
        return total_s

    def advance(self, seconds: float, rate: float) -> float:
        computed_s = 0.0
        while seconds > 0.0 and not self.is_over:
            step_s = min(seconds, self._until_moment(rate))
            if rate > 0.0 and (self._prefill_s > 0.0 or self._active):
                computed_s += step_s
            self._advance_within(step_s, rate)
            seconds -= step_s
        return computed_s

    def take(self) -> list[Unfinished]:
        taken = self.sequences()
        self._active, self._waiting, self._contexts, self._prefill_s = [], [], 0.0, 0.0
        self._queue.clear()
        return taken

    def give(self, trajectories: Sequence[Unfinished], cost_s: float) -> None:
        self._add(trajectories)
        self._prefill_s += cost_s
        self._admit()

    def sequences(self) -> list[Unfinished]:
        active = [
            replace(trajectory, left=end - self._iteration, context=base + self._iteration)
            for end, _, base, trajectory in sorted(self._active, key=lambda entry: entry[1])
        ]
        waiting = [replace(trajectory, wait_s=at_s - self._clock_s) for at_s, _, trajectory in sorted(self._waiting)]
        return [*active, *waiting, *self._queue]

    # ------------------------------------------------------------------ from moment to moment

    def _report_state(self) -> tuple[int, SubStage]:
        """A value whose change is worth a progress report."""
        num_left = len(self._active) + len(self._queue) + len(self._waiting)
        return sum(num_left <= count for count in REPORT_AT), self.sub_stage

    def _until_moment(self, rate: float) -> float:
        """Seconds until a turn ends, an environment replies, or the prefill is done."""
        reply_s = max(0.0, self._waiting[0][0] - self._clock_s) if self._waiting else math.inf
        if rate <= 0.0:
            return reply_s
        if self._prefill_s > 0.0:
            return min(reply_s, self._prefill_s / rate)
        if self._active:
            return min(reply_s, (self._active[0][0] - self._iteration) * self._iteration_s() / rate)
        return reply_s

    def _advance_to_moment(self, rate: float) -> float:
        seconds = self._until_moment(rate)
        self._advance_within(seconds, rate)
        return seconds

    def _advance_within(self, seconds: float, rate: float) -> None:
        """Let seconds pass, at most until the next moment."""
        if rate > 0.0 and self._prefill_s > 0.0:
            self._prefill_s -= seconds * rate
            if self._prefill_s <= DONE_S:
                self._prefill_s = 0.0
        elif rate > 0.0 and self._active:
            self._iteration += seconds * rate / self._iteration_s()
        self._clock_s += seconds
        while self._active and self._active[0][0] <= self._iteration + _ROUNDING:
            self._end_turn()
        replied = []
        while self._waiting and self._waiting[0][0] <= self._clock_s + DONE_S:
            trajectory = replace(heappop(self._waiting)[2], wait_s=0.0)
            if trajectory.left > 0.0:  # else it ends with the reply
                replied.append(trajectory)
        if replied:
            self._add(replied)
        self._admit()

    def _end_turn(self) -> None:
        end, _, base, trajectory = heappop(self._active)
        self._contexts -= base
        if trajectory.later:
            turn = trajectory.later[0]
            context = base + end
            self._wait_for_env(
                Unfinished(turn.tokens, context, trajectory.later[1:], wait_s=turn.wait_s, unread=turn.reply_tokens)
            )

    def _wait_for_env(self, trajectory: Unfinished) -> None:
        self._num_entries += 1
        heappush(self._waiting, (self._clock_s + trajectory.wait_s, self._num_entries, trajectory))

    def _iteration_s(self) -> float:
        """Seconds of one decode iteration of the active sequences."""
        num_active = len(self._active)
        return self._costs.decode_span_s(num_active, self._contexts / num_active + self._iteration, 1)

    def _add(self, trajectories: Sequence[Unfinished]) -> None:
        """Queue trajectories: those with a context come before those without, in the order in which they were added."""
        begun = [trajectory for trajectory in self._queue if trajectory.context > 0]
        fresh = [trajectory for trajectory in self._queue if trajectory.context <= 0]
        for trajectory in trajectories:
            if trajectory.wait_s > 0.0:
                self._wait_for_env(trajectory)
            else:
                (begun if trajectory.context > 0 else fresh).append(trajectory)
        self._queue = deque([*begun, *fresh])

    def _admit(self) -> None:
        """Fill the free slots; prompts and replies of the admitted are prefilled before decoding continues."""
        tokens = 0.0
        num_kept = len(self._waiting) if self._keeps_slots else 0
        while self._queue and len(self._active) + num_kept < self._slots:
            trajectory = self._queue.popleft()
            if trajectory.context <= 0:
                tokens -= trajectory.context / self._group_size
            tokens += trajectory.unread
            base = abs(trajectory.context) + trajectory.unread - self._iteration
            self._contexts += base
            self._num_entries += 1
            admitted = replace(trajectory, unread=0)
            heappush(self._active, (self._iteration + trajectory.left, self._num_entries, base, admitted))
        if tokens:
            self._prefill_s += self._costs.prefill_s(tokens)

    def _copy(self) -> TurnDecoder:
        other = copy(self)
        other._active, other._waiting = list(self._active), list(self._waiting)
        other._queue = deque(self._queue)
        return other
