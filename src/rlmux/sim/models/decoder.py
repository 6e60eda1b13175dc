"""A rollout shard of trajectories with one turn, by sequences, slots and contexts.

    lengths ──▶ waiting ──slot free──▶ decoding ──▶ ended      active count over time in closed form between endings

Slots stand for the cache: so many sequences decode at once, the others wait for one to end. The sequences can be taken
out and given to another decoder: none is lost.

Two models of continuous batching are here, and they agree within a percent where both apply. This one has its whole
future when it begins, since nothing but a migration changes it: a progress report or a rate costs a look-up, and long
simulations are made of these. Trajectories with waits for an environment have a future that depends on the rate, so
`TurnDecoder` (multi_turn.py) goes from one moment to the next, at ten times the cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlmux.core.model import SubStage, decode_sub_stage, dense_threshold_of
from rlmux.sim.models.costs import RolloutCosts
from rlmux.sim.models.work import DONE_S

REPORT_AT = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Counts of unfinished trajectories that are worth a progress report when reached: the border between dense and tail
decoding, and steps within each."""
_MOMENT_S = 1e-7
"""Seconds that count as rounding."""


class DecodeSeconds(Protocol):
    """The costs that a decoder needs."""

    def decode_span_s(self, active: float, context: float, num_iterations: float) -> float:
        """Seconds of consecutive decode iterations of the same sequences."""

    def prefill_s(self, tokens: float) -> float: ...


@dataclass(frozen=True, slots=True)
class LaterTurn:
    """A later turn of a trajectory."""

    wait_s: float
    """Seconds that the environment takes to reply, before the turn."""
    reply_tokens: int
    tokens: int
    """Tokens that the model generates; 0: the trajectory ends when the environment replies."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One unfinished trajectory."""

    left: float
    """Tokens still to generate in the present turn."""
    context: float
    """Tokens in the cache; before the first admission, minus the tokens of the prompt."""
    later: tuple[LaterTurn, ...] = ()
    wait_s: float = 0.0
    """Seconds until the environment replies; until then nothing is decoded."""
    unread: int = 0
    """Tokens of a reply that are not in the cache yet."""


@dataclass(slots=True)
class _Span:
    """A stretch between two endings: the same sequences decode."""

    begin_s: float
    end_s: float
    begin_iteration: float
    num_iterations: float
    num_active: int
    num_admitted: int
    """Sequences of the queue that have been admitted when the span begins."""


class Decoder:
    """`Work` whose future is played once and then looked up."""

    idle_s = 0.0

    def __init__(
        self,
        costs: DecodeSeconds,
        waiting: Sequence[Unfinished],
        *,
        slots: int,
        group_size: int = 1,
        first_s: float = 0.0,
    ) -> None:
        """`first_s`: solo seconds before anything is decoded."""
        self._costs = costs
        self._slots = slots
        self._dense_threshold = dense_threshold_of(slots)
        self._group_size = group_size
        self._now_s = 0.0
        self._end_s = 0.0
        self._begin(list(waiting), first_s)

    @property
    def seconds_left(self) -> float:
        """Solo seconds until all is done."""
        return max(0.0, self._end_s - self._now_s)

    @property
    def is_over(self) -> bool:
        return self._end_s - self._now_s <= DONE_S

    @property
    def sub_stage(self) -> SubStage:
        if self.is_prefilling:
            return SubStage.PREFILL
        return decode_sub_stage(self.num_active, self._dense_threshold)

    @property
    def num_active(self) -> int:
        """Sequences that decode; those that wait for a slot do not."""
        span = self._span()
        return span.num_active if span else 0

    @property
    def num_waiting(self) -> int:
        span = self._span()
        return len(self._queue) - span.num_admitted if span else 0

    @property
    def is_prefilling(self) -> bool:
        return self._now_s < self._prefill_s - _MOMENT_S

    def until_over(self, rate: float) -> float:
        return self.seconds_left / rate

    def until_report(self, rate: float) -> float:
        """Seconds until the active count next falls to one of `REPORT_AT`, or the prefill ends, or all ends."""
        if self.is_prefilling:
            return (self._prefill_s - self._now_s) / rate
        for at_s in self._reports:
            if at_s > self._now_s + _MOMENT_S:
                return (at_s - self._now_s) / rate
        return self.seconds_left / rate

    def advance(self, seconds: float, rate: float = 1.0) -> float:
        self._now_s = min(self._now_s + seconds * rate, self._end_s)
        return seconds

    def report(self) -> tuple[int, int, int] | None:
        return None if self.is_prefilling else (self.num_active, self.num_waiting, 0)

    def take(self) -> list[Unfinished]:
        """Remove and return everything that is unfinished."""
        taken = self.sequences()
        self._begin([], 0.0)
        return taken

    def give(self, sequences: Sequence[Unfinished], cost_s: float) -> None:
        """Add trajectories of another device; `cost_s` is spent on their contexts before decoding continues."""
        self._begin([*self.sequences(), *sequences], cost_s)

    def sequences(self) -> list[Unfinished]:
        span = self._span()
        if span is None:
            return []
        iteration = span.begin_iteration
        if self._now_s > span.begin_s and span.end_s > span.begin_s:
            part = (self._now_s - span.begin_s) / (span.end_s - span.begin_s)
            iteration += min(int(part * span.num_iterations), span.num_iterations - 1)
        running = [
            Unfinished(end - iteration, base + iteration)
            for end, base, number in self._runs
            if number < span.num_admitted and end > iteration
        ]
        return running + self._queue[span.num_admitted :]

    # ------------------------------------------------------------------ the future, until something changes

    def _begin(self, sequences: list[Unfinished], cost_s: float) -> None:
        self._now_s = 0.0
        running = [sequence for sequence in sequences if sequence.context > 0]
        fresh = [sequence for sequence in sequences if sequence.context <= 0]
        self._queue = running + fresh
        """Sequences in the order of admission: those with a context come first."""
        self._runs: list[tuple[float, float, int]] = []
        """(iteration of its end, context minus its first iteration, index in the queue) of each admitted sequence."""
        self._spans: list[_Span] = []
        self._prefill_s = cost_s
        self._play(len(running))
        self._end_s = self._spans[-1].end_s if self._spans else 0.0
        self._begins = [span.begin_s for span in self._spans]
        self._reports = self._report_times()

    def _play(self, num_with_context: int) -> None:
        queue, costs = self._queue, self._costs
        active: list[tuple[float, float]] = []
        iteration, admitted, now_s = 0.0, 0, self._prefill_s
        context_sum = 0.0
        while active or admitted < len(queue):
            fresh_tokens, before = 0.0, admitted
            while admitted < len(queue) and len(active) < self._slots:
                sequence = queue[admitted]
                context = sequence.context
                if context <= 0:
                    context = -sequence.context
                    fresh_tokens += context / self._group_size
                active.append((iteration + sequence.left, context - iteration))
                context_sum += context - iteration
                self._runs.append((iteration + sequence.left, context - iteration, admitted))
                admitted += 1
            if fresh_tokens:
                seconds = costs.prefill_s(fresh_tokens)
                if not self._spans and not before:
                    self._prefill_s += seconds
                now_s += seconds
            active.sort(reverse=True)
            end = active[-1][0]
            num_active = len(active)
            context = context_sum / num_active + iteration
            seconds = costs.decode_span_s(num_active, context, end - iteration)
            self._spans.append(_Span(now_s, now_s + seconds, iteration, end - iteration, num_active, admitted))
            now_s += seconds
            iteration = end
            while active and active[-1][0] <= iteration:
                context_sum -= active.pop()[1]

    def _report_times(self) -> list[float]:
        """Moments at which the count of unfinished sequences falls to each of `REPORT_AT`, ascending."""
        times: list[float] = []
        total = len(self._queue)
        left = [span.num_active + total - span.num_admitted for span in self._spans]
        index = 0
        for count in REPORT_AT:
            if count >= total:
                continue
            while index < len(left) and left[index] > count:
                index += 1
            if index < len(left) and (not times or self._spans[index].begin_s > times[-1]):
                times.append(self._spans[index].begin_s)
        return times

    def _span(self) -> _Span | None:
        if not self._spans or self._now_s >= self._end_s - _MOMENT_S:
            return None
        return self._spans[max(0, bisect_right(self._begins, self._now_s + _MOMENT_S) - 1)]


def recompute_s(costs: RolloutCosts, sequences: Sequence[Unfinished]) -> float:
    """Seconds to compute the contexts of migrated sequences again on the target."""
    tokens = sum(sequence.context for sequence in sequences if sequence.context > 0)
    return costs.prefill_s(tokens) if tokens else 0.0


def copy_s(costs: RolloutCosts, sequences: Sequence[Unfinished]) -> float:
    """Seconds to copy the caches of migrated sequences to the target."""
    return costs.kv_copy_s(sum(sequence.context for sequence in sequences if sequence.context > 0))
