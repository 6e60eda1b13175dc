"""Upper bounds of a pipeline's next step, for pipelines with an `slo_probability`: its load where nodes are shared.

    at first         the file's seconds of a step whose answers all reach the token limit
    then             the upper prediction bound of the last `WINDOW_STEPS` steps, never above the limit

The bound of one phase holds with q = 1 - (1 - p) / MAX_PIPELINES_PER_GROUP for the stated probability p. Both phases of
a step grow with its tokens, so they are beyond their bounds together; then all of a group's members are within theirs
with p or more (Bonferroni), whatever ties them together, and no meta-iteration takes longer than planned. More members
than that, or phases that vary apart, may make it less; that a cycle adds several makes it more: it is measured by
`benchmarks/slo_probability.py`.

Seconds of a phase are taken to be log-normal, each step like the `WINDOW_STEPS` before it: with mean m and standard
deviation s of n logarithms the next is below m + t(q, n - 1) s sqrt(1 + 1/n) with probability q. Steps that drift widen
s, so the bound runs ahead of them; steps that are all alike are their own bound. Ratios to the estimate as submitted
are kept, so that a pipeline that moves between pools keeps what was seen. The first step starts processes, and counts
for the SLO alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rlmux.core.estimation.measured_steps import MEASURED_STEPS, over, quantile
from rlmux.core.model import BoundedSteps, PhaseSeconds, Pipeline
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP

WINDOW_STEPS = 16
"""Steps that a bound looks back."""
_MEDIAN_STEPS = 8
"""Steps whose median is the estimate."""
_NOTCH = 1.05
"""Least factor between two estimates or bounds that count as different: like pipelines stay alike for a search."""
_ROUNDING = 1e-9
_ONE_SECOND = PhaseSeconds(rollout_s=1.0, train_s=1.0)

Notches = tuple[int, int]
"""Powers of `_NOTCH` that the seconds of rollout and training are of those that the ratios are to."""


class StepBounds:
    """What is expected of one pipeline's next step, and what it surely stays below. Fed by the scheduler."""

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: as it was submitted, with an `slo_probability`."""
        assert pipeline.slo_probability is not None
        self.given = pipeline
        self.has_base = pipeline.estimate is not None and pipeline.held is None
        """Whether its user gave an estimate; without one ratios are to a second."""
        self._base = pipeline.estimate if pipeline.estimate is not None and self.has_base else _ONE_SECOND
        """Seconds that the ratios are to."""
        self._level = phase_level(pipeline.slo_probability)
        self._ratios: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self._has_begun = False
        self._num_nodes = 0
        self._is_limit_broken = False
        self._medians: Notches = (0, 0)
        self._bounds: Notches | None = None
        if pipeline.bounded is not None:
            self._take_up(pipeline.bounded)

    def _take_up(self, before: BoundedSteps) -> None:
        """Go on from the steps of an earlier part of the run. The first step of this part starts processes again."""
        base = self._base
        self._ratios.extend((over(one[0], base.rollout_s), over(one[1], base.train_s)) for one in before.seen)
        self._num_nodes, self._is_limit_broken = before.num_rollout_nodes, before.is_limit_exceeded

    @property
    def is_known(self) -> bool:
        """Whether the bounds hold with their probability: by enough steps, or by a limit that no step was above."""
        return self._bounds is not None or (self.given.limit is not None and not self._is_limit_broken)

    def first_plan(self) -> Pipeline:
        """The pipeline as it is planned with before its first step: its load is that at the token limit, or follows
        from the steps of an earlier part of the run."""
        given = self.given
        planned = self.plan(given)
        if planned is not None:
            return planned
        if given.estimate is None or given.limit is None:
            return given
        loaded = given.held or given.estimate
        held = PhaseSeconds(
            rollout_s=max(loaded.rollout_s, given.limit.rollout_s),
            train_s=max(loaded.train_s, given.limit.train_s),
            sync_s=loaded.sync_s,
        )
        return replace(given, held=held)

    def add(self, measured: PhaseSeconds, given: PhaseSeconds | None) -> None:
        """A step is trained. `measured`: its solo seconds; `given`: those that were given for the nodes where it ran,
        None where none were."""
        base = given or _ONE_SECOND
        ratios = over(measured.rollout_s, base.rollout_s), over(measured.train_s, base.train_s)
        if not self._has_begun:
            self._has_begun = True
            return
        self._ratios.append(ratios)
        limits = self._limits()
        self._is_limit_broken |= any(
            ratio > limit * (1.0 + _ROUNDING) for ratio, limit in zip(ratios, limits, strict=True)
        )

    def known(self, planned: Pipeline) -> BoundedSteps | None:
        """What a later part of the run goes on from. `planned`: the pipeline as it is planned with now."""
        bound, base = planned.held or planned.estimate, self._base
        if bound is None:
            return None
        return BoundedSteps(
            bound=bound,
            seen=tuple((rollout * base.rollout_s, train * base.train_s) for rollout, train in self._ratios),
            num_rollout_nodes=self._num_nodes,
            is_limit_exceeded=self._is_limit_broken,
        )

    def forget(self, num_nodes: int) -> None:
        """Its rollout has so many devices from now on: without given estimates, steps on others do not count."""
        if num_nodes != self._num_nodes:
            if self._num_nodes and not self.has_base:
                self._ratios.clear()
            self._num_nodes = num_nodes

    def plan(self, now: Pipeline) -> Pipeline | None:
        """The pipeline as it is to be planned with from now on; None where that is as it is, or is not known yet."""
        if len(self._ratios) < MEASURED_STEPS:
            return None
        recent = list(self._ratios)[-_MEDIAN_STEPS:]
        medians = tuple(round(_notch_of(quantile([one[phase] for one in recent], 0.5)) + _ROUNDING) for phase in (0, 1))
        bounds = tuple(
            max(median, math.ceil(_notch_of(self._bound(phase)) - 1e-6))
            for phase, median in zip((0, 1), medians, strict=True)
        )
        if not self._is_news(medians, bounds):
            return None
        self._medians, self._bounds = (medians[0], medians[1]), (bounds[0], bounds[1])
        given = self.given
        base = self._base
        known = now.estimate or base
        estimate = replace(_times(base, self._medians), sync_s=known.sync_s)
        colocated = given.colocated_estimate
        if colocated is not None and self.has_base:
            colocated = _times(colocated, self._medians)
        return replace(
            now,
            estimate=estimate,
            held=replace(_times(base, self._bounds), sync_s=known.sync_s),
            colocated_estimate=colocated,
        )

    def _is_news(self, medians: Sequence[int], bounds: Sequence[int]) -> bool:
        """Whether a bound is wider, or anything else has moved by two notches."""
        if self._bounds is None or any(abs(new - old) > 1 for new, old in zip(medians, self._medians, strict=True)):
            return True
        return any(new > old or new < old - 1 for new, old in zip(bounds, self._bounds, strict=True))

    def _bound(self, phase: int) -> float:
        """Ratio that the phase of the next step is below at the level, if the limit allows as much."""
        bound = prediction_bound([one[phase] for one in self._ratios], self._level)
        return bound if self._is_limit_broken else min(bound, self._limits()[phase])

    def _limits(self) -> tuple[float, float]:
        limit = self.given.limit
        if limit is None:
            return math.inf, math.inf
        base = self._base
        return over(limit.rollout_s, base.rollout_s), over(limit.train_s, base.train_s)


def phase_level(probability: float) -> float:
    """Probability with which one phase is to be within its bound, so that a whole meta-iteration is with this one."""
    return 1.0 - (1.0 - probability) / MAX_PIPELINES_PER_GROUP


def prediction_bound(values: Sequence[float], level: float) -> float:
    """What the next value is below with this probability, if it is log-normal like these, two or more of them."""
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
    if deviation < _ROUNDING:
        return max(values)
    return math.exp(mean + student_t(level, len(logs) - 1) * deviation * math.sqrt(1.0 + 1.0 / len(logs)))


@lru_cache(maxsize=1024)
def student_t(level: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for levels of one half or more."""
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < level:
        low, high = high, 2.0 * high
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _student_cdf(middle, degrees) < level else (low, middle)
    return high


def _student_cdf(t: float, degrees: int) -> float:
    """Abramowitz and Stegun, 26.7.3 and 26.7.4, for t of 0 or more."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    inside = 2.0 / math.pi * (angle + sine * total) if is_odd else sine * total
    return (1.0 + inside) / 2.0


def _notch_of(ratio: float) -> float:
    return math.log(ratio, _NOTCH)


def _times(seconds: PhaseSeconds, notches: Notches) -> PhaseSeconds:
    return replace(
        seconds, rollout_s=seconds.rollout_s * _NOTCH ** notches[0], train_s=seconds.train_s * _NOTCH ** notches[1]
    )
