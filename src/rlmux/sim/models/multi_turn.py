"""One worker's share of a rollout whose trajectories have turns, with waits for their environment between them.

    fresh ──slot free──▶ decoding ──turn ends──▶ waiting for its tool ──answer──▶ (slot free) ──▶ decoding ... ended
                              at the share's pace           in seconds that pass, paused or not

While a trajectory waits for its tool it decodes nothing, and holds no slot unless the engine keeps it (`keeps_slots`:
this project's own engine does). When all wait, the share computes nothing: pausing it loses nothing, since the waits
go on.

Moves from one moment (a turn ends, a tool answers) to the next; between two the same sequences decode.
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
from rlmux.core.model import SubStage
from rlmux.sim.models.decoder import REPORT_AT, DecodeSeconds, Turn, Unfinished, decode_kind
from rlmux.sim.models.work import DONE_S

_ROUNDING = 1e-6
"""Of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How trajectories use tools. Waits are exponential; all is a function of (seed, step)."""

    mean_calls: float = 1.0
    """Calls of a trajectory, Poisson."""
    wait_s: float = 1.0
    """Mean wait of a call."""
    reply_tokens: int = 32
    """Prefilled before a trajectory goes on."""
    keeps_slots: bool = False
    """A trajectory that waits keeps its slot."""

    def __post_init__(self) -> None:
        if self.mean_calls < 0.0 or self.wait_s < 0.0 or self.reply_tokens < 0:
            raise UserError(f"{self}: calls, waits and reply tokens are at least 0")

    def turns_of(self, lengths: Sequence[int], generator: np.random.Generator) -> list[tuple[int, tuple[Turn, ...]]]:
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
                Turn(float(wait_s), self.reply_tokens, end - begin)
                for wait_s, begin, end in zip(waits, cuts, ends, strict=True)
            )
            found.append((cuts[0] if cuts else length, later))
        return found


class TurnDecoder:
    """A `Remaining`; see the module."""

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
        self._group_size = group_size
        self._keeps_slots = keeps_slots
        self._prefill_s = first_s
        """Solo seconds before decoding goes on."""
        self._clock_s = 0.0
        self._iteration = 0.0
        """Tokens that a sequence would have by now had it decoded all along; in parts while an iteration goes on."""
        self._active: list[tuple[float, int, float, Unfinished]] = []
        """Heap of (iteration at which its turn ends, number, context less its first iteration, as it was)."""
        self._contexts = 0.0
        """Sum of the active ones' third fields."""
        self._parked: list[tuple[float, int, Unfinished]] = []
        """Heap of (when its tool answers by `_clock_s`, number, as it was)."""
        self._queue: deque[Unfinished] = deque()
        self._num_entries = 0
        self._add(trajectories)
        self._admit()

    @property
    def is_over(self) -> bool:
        return not (self._active or self._queue or self._parked)

    @property
    def kind(self) -> str:
        if not self._active:
            return "tool"
        if self._prefill_s > 0.0 and self._iteration == 0.0:  # a reply's is over at once
            return SubStage.PREFILL
        return decode_kind(len(self._active))

    @property
    def idle_s(self) -> float:
        if self._active or self._prefill_s > 0.0 or not self._parked:
            return 0.0
        return max(0.0, self._parked[0][0] - self._clock_s)

    def report(self) -> tuple[int, int, int]:
        return len(self._active), len(self._queue), len(self._parked)

    def until_over(self, pace: float) -> float:
        future, total_s = self._copy(), 0.0
        while not future.is_over:
            total_s += future._move_to_moment(pace)
        return total_s

    def until_news(self, pace: float) -> float:
        """Until fewer are unfinished than one of `REPORT_AT`, or the character of what is done changes."""
        future, total_s, before = self._copy(), 0.0, self._news()
        while not future.is_over and future._news() == before:
            total_s += future._move_to_moment(pace)
        return total_s

    def advance(self, seconds: float, pace: float) -> float:
        computed_s = 0.0
        while seconds > 0.0 and not self.is_over:
            step_s = min(seconds, self._until_moment(pace))
            if pace > 0.0 and (self._prefill_s > 0.0 or self._active):
                computed_s += step_s
            self._move(step_s, pace)
            seconds -= step_s
        return computed_s

    def take(self) -> list[Unfinished]:
        taken = self.sequences()
        self._active, self._parked, self._contexts, self._prefill_s = [], [], 0.0, 0.0
        self._queue.clear()
        return taken

    def give(self, trajectories: Sequence[Unfinished], cost_s: float) -> None:
        self._add(trajectories)
        self._prefill_s += cost_s
        self._admit()

    def sequences(self) -> list[Unfinished]:
        active = [
            replace(one, left=end - self._iteration, context=base + self._iteration)
            for end, _, base, one in sorted(self._active, key=lambda entry: entry[1])
        ]
        parked = [replace(one, wait_s=at_s - self._clock_s) for at_s, _, one in sorted(self._parked)]
        return [*active, *parked, *self._queue]

    # ------------------------------------------------------------------ from moment to moment

    def _news(self) -> tuple[int, str]:
        num_left = len(self._active) + len(self._queue) + len(self._parked)
        return sum(num_left <= count for count in REPORT_AT), self.kind

    def _until_moment(self, pace: float) -> float:
        """Seconds until a turn ends, a tool answers, or what is being prefilled is."""
        answer_s = max(0.0, self._parked[0][0] - self._clock_s) if self._parked else math.inf
        if pace <= 0.0:
            return answer_s
        if self._prefill_s > 0.0:
            return min(answer_s, self._prefill_s / pace)
        if self._active:
            return min(answer_s, (self._active[0][0] - self._iteration) * self._iteration_s() / pace)
        return answer_s

    def _move_to_moment(self, pace: float) -> float:
        seconds = self._until_moment(pace)
        self._move(seconds, pace)
        return seconds

    def _move(self, seconds: float, pace: float) -> None:
        """At most to the next moment."""
        if pace > 0.0 and self._prefill_s > 0.0:
            self._prefill_s -= seconds * pace
            if self._prefill_s <= DONE_S:
                self._prefill_s = 0.0
        elif pace > 0.0 and self._active:
            self._iteration += seconds * pace / self._iteration_s()
        self._clock_s += seconds
        while self._active and self._active[0][0] <= self._iteration + _ROUNDING:
            self._end_turn()
        answered = []
        while self._parked and self._parked[0][0] <= self._clock_s + DONE_S:
            one = replace(heappop(self._parked)[2], wait_s=0.0)
            if one.left > 0.0:  # else it was only to be let go
                answered.append(one)
        if answered:
            self._add(answered)
        self._admit()

    def _end_turn(self) -> None:
        end, _, base, one = heappop(self._active)
        self._contexts -= base
        if one.later:
            turn = one.later[0]
            context = base + end
            self._park(Unfinished(turn.tokens, context, one.later[1:], wait_s=turn.wait_s, unread=turn.reply_tokens))

    def _park(self, one: Unfinished) -> None:
        self._num_entries += 1
        heappush(self._parked, (self._clock_s + one.wait_s, self._num_entries, one))

    def _iteration_s(self) -> float:
        """Of one token of everybody who decodes."""
        num_active = len(self._active)
        return self._costs.decode_span_s(num_active, self._contexts / num_active + self._iteration, 1)

    def _add(self, trajectories: Sequence[Unfinished]) -> None:
        """Those with a context go before those without: they keep their place."""
        begun = [one for one in self._queue if one.context > 0]
        fresh = [one for one in self._queue if one.context <= 0]
        for one in trajectories:
            if one.wait_s > 0.0:
                self._park(one)
            else:
                (begun if one.context > 0 else fresh).append(one)
        self._queue = deque([*begun, *fresh])

    def _admit(self) -> None:
        """Fill the free slots; what the admitted bring is prefilled before decoding goes on."""
        tokens = 0.0
        num_kept = len(self._parked) if self._keeps_slots else 0
        while self._queue and len(self._active) + num_kept < self._slots:
            one = self._queue.popleft()
            if one.context <= 0:
                tokens -= one.context / self._group_size
            tokens += one.unread
            base = abs(one.context) + one.unread - self._iteration
            self._contexts += base
            self._num_entries += 1
            heappush(self._active, (self._iteration + one.left, self._num_entries, base, replace(one, unread=0)))
        if tokens:
            self._prefill_s += self._costs.prefill_s(tokens)

    def _copy(self) -> TurnDecoder:
        other = copy(self)
        other._active, other._parked = list(self._active), list(self._parked)
        other._queue = deque(self._queue)
        return other
