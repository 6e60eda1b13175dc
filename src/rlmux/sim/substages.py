"""The truth at the grain of sub-stages: one pipeline's rollouts by worker and sequence, its training by stage.

    lengths of a step ──dealt to workers──▶ Decoder (one share) ──advance, take, merge──▶ active count over time
    tokens of a step ──▶ seconds of reference, old log-probs, update, publish

A `Decoder` is an engine's state between two admissions or endings: which sequences decode, how long their contexts
are, who waits for a slot. It moves on by solo seconds; whoever drives it knows how much slower it runs beside another.
Its sequences can be taken out and given to another one: none is lost, which `num_left` and `tokens_left` let one check.

What a step contains is a function of (seed, step) only. Slots stand for the cache: so many sequences decode at once,
the others wait for one to end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from rlmux.core.errors import UserError
from rlmux.core.model import PhaseSeconds, Stage
from rlmux.sim.costs import MEASURED_GPU, RolloutCosts, TrainCosts, rollout_costs, train_costs
from rlmux.sim.lengths import length_distribution
from rlmux.sim.world import TrueSeconds

COST_NAME_BY_STAGE = {
    Stage.REFERENCE_LOGPROBS: "reference",
    Stage.OLD_LOGPROBS: "old_log_probs",
    Stage.UPDATE: "update",
    Stage.PUBLISH: "publish",
}
STAGES = (Stage.GENERATE, *COST_NAME_BY_STAGE)
REPORT_AT = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Active counts whose undershooting is reported: the bands' borders, and steps within the tail."""
_MOMENT_S = 1e-7
"""Less than this is rounding."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One unfinished trajectory."""

    left: int
    """Tokens still to generate."""
    context: float
    """Tokens it has in the cache; before its admission, minus those of its prompt."""


@dataclass(slots=True)
class _Span:
    """Between two endings: the same sequences decode."""

    begin_s: float
    end_s: float
    begin_iteration: int
    num_iterations: int
    num_active: int
    num_admitted: int
    """Of all that waited, at its begin."""


class Decoder:
    """One worker's share of a rollout, moved on by solo seconds."""

    def __init__(self, costs: RolloutCosts, waiting: Sequence[Unfinished], *, slots: int, group_size: int = 1) -> None:
        self._costs = costs
        self._slots = slots
        self._group_size = group_size
        self._now_s = 0.0
        self._end_s = 0.0
        self._begin(list(waiting), 0.0)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end_s - self._now_s)

    @property
    def num_active(self) -> int:
        """Decoding now; those that wait for a slot are not."""
        span = self._span()
        return span.num_active if span else 0

    @property
    def num_waiting(self) -> int:
        span = self._span()
        return len(self._queue) - span.num_admitted if span else 0

    @property
    def is_prefilling(self) -> bool:
        return self._now_s < self._prefill_s - _MOMENT_S

    def until_report(self) -> float:
        """Seconds until the active count next falls to one of `REPORT_AT`, or the prefill ends, or all ends."""
        if self.is_prefilling:
            return self._prefill_s - self._now_s
        for at_s in self._reports:
            if at_s > self._now_s + _MOMENT_S:
                return at_s - self._now_s
        return self.seconds_left

    def advance(self, seconds: float) -> None:
        self._now_s = min(self._now_s + seconds, self._end_s)

    def take(self) -> list[Unfinished]:
        """Everything that is not finished; the decoder is empty afterwards."""
        taken = self.sequences()
        self._begin([], 0.0)
        return taken

    def give(self, sequences: Sequence[Unfinished], cost_s: float) -> None:
        """Take over trajectories of another worker; `cost_s` is spent on their contexts before decoding goes on."""
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
        running = [one for one in sequences if one.context > 0]
        fresh = [one for one in sequences if one.context <= 0]
        self._queue = running + fresh
        """In the order of admission: those with a context go on first."""
        self._runs: list[tuple[int, float, int]] = []
        """(iteration of its end, context less its begin iteration, place in the queue) of each admitted one."""
        self._spans: list[_Span] = []
        self._prefill_s = cost_s
        self._play(len(running))
        self._end_s = self._spans[-1].end_s if self._spans else 0.0
        self._begins = [span.begin_s for span in self._spans]
        self._reports = self._report_times()

    def _play(self, num_with_context: int) -> None:
        queue, costs = self._queue, self._costs
        active: list[tuple[int, float]] = []
        iteration, admitted, now_s = 0, 0, self._prefill_s
        context_sum = 0.0
        while active or admitted < len(queue):
            fresh_tokens, before = 0.0, admitted
            while admitted < len(queue) and len(active) < self._slots:
                one = queue[admitted]
                context = one.context
                if context <= 0:
                    context = -one.context
                    fresh_tokens += context / self._group_size
                active.append((iteration + one.left, context - iteration))
                context_sum += context - iteration
                self._runs.append((iteration + one.left, context - iteration, admitted))
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
        """When the count of unfinished sequences falls to each of `REPORT_AT`, ascending."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SubStageWorld(TrueSeconds):
    """One pipeline's truth. `by_stage` is not used: every second follows from the lengths."""

    by_stage: dict[Stage, float] = field(default_factory=dict)
    model: str
    lengths_of: str
    """A recorded run whose answer lengths are drawn from."""
    num_sequences: int
    """Trajectories of a step."""
    num_rollout_devices: int
    num_train_devices: int
    """Devices of the pipeline alone, which its solo time refers to."""
    seed: int = 0
    gpu: str = MEASURED_GPU
    tp: int = 4
    """GPUs that act as one device."""
    slots: int = 512
    """Sequences that a worker decodes at once."""
    is_colocated: bool = True
    """Training takes all devices; else only those of the training pool."""

    def __post_init__(self) -> None:
        if self.num_sequences < 1 or self.slots < 1:
            raise UserError(
                f"pipeline of {self.lengths_of!r}: num_sequences is {self.num_sequences} and slots {self.slots}; "
                "both must be at least 1"
            )

    def decoder(self, step: int, index: int, num_devices: int) -> Decoder:
        """The share of one of the devices, fresh."""
        distribution = length_distribution(self.lengths_of)
        group = distribution.group_size
        lengths = self.lengths(step)
        sequences = [
            Unfinished(int(length), -distribution.prompt_tokens)
            for number, length in enumerate(lengths)
            if number // group % num_devices == index
        ]
        return Decoder(rollout_costs(self.model, self.gpu, self.tp), sequences, slots=self.slots, group_size=group)

    def lengths(self, step: int) -> tuple[int, ...]:
        return _lengths(self.lengths_of, self.num_sequences, self.seed, step)

    def tokens(self, step: int) -> int:
        """Prompt and response tokens of a step."""
        prompt = length_distribution(self.lengths_of).prompt_tokens
        return int(sum(self.lengths(step)) + prompt * self.num_sequences)

    def stage_s(self, stage: Stage, step: int, num_devices: int) -> float:
        """Of a training stage, or publishing, on so many devices."""
        costs = _train_costs(self.model, self.gpu, self.tp * max(1, num_devices))
        return costs.stage_s(COST_NAME_BY_STAGE[stage], self.tokens(step))

    def rollout_s(self, step: int) -> float:
        """Alone: until the slowest share ends."""
        return _rollout_s(self, step)

    def train_s(self, step: int) -> float:
        stages = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE)
        return sum(self.stage_s(stage, step, self.num_train_devices) for stage in stages)

    def seconds(self, stage: Stage, step: int) -> float:
        if stage is Stage.GENERATE:
            return self.rollout_s(step)
        return self.stage_s(stage, step, self.num_train_devices) if stage in COST_NAME_BY_STAGE else 0.0

    def solo_s(self, step: int) -> float:
        return sum(self.seconds(stage, step) for stage in STAGES)

    def mean_phases(self, num_steps: int = 3) -> PhaseSeconds:
        """What its owner would have measured: means over a few steps of another seed."""
        other = _reseeded(self)
        steps = range(1, num_steps + 1)
        return PhaseSeconds(
            rollout_s=sum(other.rollout_s(step) for step in steps) / num_steps,
            train_s=sum(other.train_s(step) for step in steps) / num_steps,
        )


def recompute_s(costs: RolloutCosts, sequences: Sequence[Unfinished]) -> float:
    """Seconds to build the moved contexts again on the target."""
    tokens = sum(one.context for one in sequences if one.context > 0)
    return costs.prefill_s(tokens) if tokens else 0.0


def copy_s(costs: RolloutCosts, sequences: Sequence[Unfinished]) -> float:
    """Seconds to copy their caches."""
    return costs.kv_copy_s(sum(one.context for one in sequences if one.context > 0))


@lru_cache(maxsize=4096)
def _lengths(run: str, num_sequences: int, seed: int, step: int) -> tuple[int, ...]:
    generator = np.random.default_rng([seed, step])
    return tuple(int(n) for n in length_distribution(run).sample(generator, num_sequences))


@lru_cache(maxsize=256)
def _train_costs(model: str, gpu: str, num_gpus: int) -> TrainCosts:
    return train_costs(model, gpu, num_gpus)


@lru_cache(maxsize=4096)
def _seconds_alone(
    model: str, gpu: str, tp: int, run: str, num_sequences: int, slots: int, seed: int, step: int, num_devices: int
) -> float:
    world = SubStageWorld(
        model=model, lengths_of=run, num_sequences=num_sequences, num_rollout_devices=num_devices,
        num_train_devices=num_devices, seed=seed, gpu=gpu, tp=tp, slots=slots,
    )  # fmt: skip
    return max(world.decoder(step, index, num_devices).seconds_left for index in range(num_devices))


def _rollout_s(world: SubStageWorld, step: int) -> float:
    return _seconds_alone(
        world.model, world.gpu, world.tp, world.lengths_of, world.num_sequences, world.slots, world.seed, step,
        world.num_rollout_devices,
    )  # fmt: skip


def _reseeded(world: SubStageWorld) -> SubStageWorld:
    return SubStageWorld(
        model=world.model, lengths_of=world.lengths_of, num_sequences=world.num_sequences,
        num_rollout_devices=world.num_rollout_devices, num_train_devices=world.num_train_devices,
        seed=world.seed + 7919, gpu=world.gpu, tp=world.tp, slots=world.slots, is_colocated=world.is_colocated,
    )  # fmt: skip
