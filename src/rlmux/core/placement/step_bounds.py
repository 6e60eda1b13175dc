"""Expected seconds of a pipeline's coming steps, and how far their mean may exceed them: what its SLO keeps in hand.

    submitted       the estimate, with its phases in the proportion that they have at the token limit, and the prior's
                    spread
    3 steps seen    the mean of the last `_MEAN_STEPS` steps, and a spread: an upper bound on the mean of the coming
                    steps, as a factor on it

An SLO binds the mean of a pipeline's steps: of those made beside others over the same steps made alone. A step at the
token limit is longer on both sides, so before any step is seen the SLO is checked with every member at its limit, over
T_solo at the limit. Afterwards each side is a mean of several steps, and what may be wrong is how far those of members
deviate from the means that are planned with: the spread. Plans with means, times the spread, keep within the SLO.

Seconds of a phase are taken to be log-normal, each step like the `WINDOW_STEPS` before it. With standard deviation s of
the logarithms of k steps, the mean of the next n is below the mean of these times

    exp(t(q, k - 1 + v) s' sqrt(1 / n + 1 / k)),    s'^2 = (v s0^2 + (k - 1) s^2) / (v + k - 1)

with probability q, if s0 is what such steps deviate by; the prior counts for v of them. Before any step is seen only
the coming ones deviate: exp(t(q, v) s0 sqrt(1 / n)). For the stated probability p, q = 1 - (1 - p) /
MAX_PIPELINES_PER_GROUP: that leaves room for the other members of a group (Bonferroni), and for steps that vary more
than the prior's. n is the number of steps left, at most `_MAX_STEPS_AHEAD`: later ones may be unlike these. The spread
tightens as steps are done; steps that drift widen s, and so the spread. Steps that are all alike have none.

Ratios to the estimate as submitted are kept, so that a pipeline that moves between pools keeps what was seen. A mean
that differs by less than `_NOTCH`, or by less than two standard errors, is not news. The first step starts processes,
and counts for the SLO alone. `benchmarks/slo_probability.py` measures how often the bound holds.

Example: steps of 1.0, then 1.2 times a rollout of 100 s, 64 or more steps left, a stated probability of 0.95.
    submitted                         rollout_s 100     spread 1.03
    (1.0) 1.0 1.0 1.0                 rollout_s 100     spread 1.00
    (1.0) 1.0 1.0 1.0 1.2 1.2 1.2     rollout_s 110     spread 1.11
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rlmux.core.estimation.measured_steps import MEASURED_STEPS, over
from rlmux.core.model import BoundedSteps, PhaseSeconds, Pipeline
from rlmux.core.placement.group_load import MAX_PIPELINES_PER_GROUP

WINDOW_STEPS = 16
"""Steps that a spread looks back."""
_MEAN_STEPS = 8
"""Steps whose mean is the estimate."""
_MAX_STEPS_AHEAD = 64
"""Coming steps that are taken to be like the last ones, at most."""
_PRIOR_STEPS = 3
"""Steps that the prior of the variation counts for."""
_PRIOR_DEVIATION = 0.05
"""Standard deviation of the logarithms of the prior's steps."""
_STANDARD_ERRORS = 2.0
"""Standard errors by which a mean differs from the planned one at least."""
_NOTCH = 1.05
"""Least factor between two estimates that count as different: like pipelines stay alike for a search."""
_NOTICEABLE = 0.01
"""Least change of a spread that counts."""
_ROUNDING = 1e-9
_ONE_SECOND = PhaseSeconds(rollout_s=1.0, train_s=1.0)

Notches = tuple[int, int]
"""Powers of `_NOTCH` that the seconds of rollout and training are of those that the ratios are to."""


class StepBounds:
    """Expected seconds and spread of one pipeline's coming steps. Fed by the scheduler."""

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: as it was submitted, with an `slo_probability`."""
        assert pipeline.slo_probability is not None
        self.given = pipeline
        self.has_base = pipeline.estimate is not None and pipeline.held is None
        """Whether its user gave an estimate; without one ratios are to a second."""
        self._base = pipeline.estimate if pipeline.estimate is not None and self.has_base else _ONE_SECOND
        """Seconds that the ratios are to."""
        self._level = member_level(pipeline.slo_probability)
        self._ratios: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self._has_begun = False
        self._num_nodes = 0
        self._is_limit_broken = False
        self._means: Notches | None = (0, 0) if self.has_base else None
        """Planned means; None before any are known."""
        self._spread: float | None = None
        """Planned spread; None before enough steps were seen."""
        if pipeline.bounded is not None:
            self._take_up(pipeline.bounded)

    def _take_up(self, before: BoundedSteps) -> None:
        """Go on from the steps of an earlier part of the run. The first step of this part starts processes again."""
        base = self._base
        self._ratios.extend(
            (over(seconds[0], base.rollout_s), over(seconds[1], base.train_s)) for seconds in before.seen
        )
        self._num_nodes, self._is_limit_broken = before.num_rollout_nodes, before.is_limit_exceeded

    @property
    def is_known(self) -> bool:
        """Whether an SLO can be stated with its probability: by enough steps, or by a limit that no step exceeded."""
        return self._spread is not None or (self.given.limit is not None and not self._is_limit_broken)

    def first_plan(self) -> Pipeline:
        """The pipeline as it is planned with before its first step: by its estimate and token limit, or by the steps of
        an earlier part of the run."""
        given = self.given
        num_left = None if given.num_steps is None else given.num_steps - given.first_step + 1
        planned = self.plan(given, num_left)
        if planned is not None:
            return planned
        mean, limit = given.estimate, given.limit
        if mean is None:
            return given
        now = replace(given, spread=prior_bound(_steps_ahead(num_left), self._level))
        if limit is None or given.held is not None:
            return now
        scale = (mean.rollout_s + mean.train_s) / (limit.rollout_s + limit.train_s)
        held = replace(mean, rollout_s=scale * limit.rollout_s, train_s=scale * limit.train_s)
        return replace(now, held=held)

    def add(self, measured: PhaseSeconds, given: PhaseSeconds | None) -> None:
        """Record a trained step. `measured`: its solo seconds; `given`: the user's estimate for these nodes, or
        None."""
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
        mean, base, spread = planned.estimate, self._base, planned.spread
        if mean is None:
            return None
        return BoundedSteps(
            bound=replace(mean, rollout_s=spread * mean.rollout_s, train_s=spread * mean.train_s),
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

    def plan(self, now: Pipeline, num_left: int | None) -> Pipeline | None:
        """The pipeline as it is to be planned with from now on; None where that is as it is, or is not known yet.

        `num_left`: steps that are left, None without a number of them.
        """
        if len(self._ratios) < MEASURED_STEPS:
            return None
        num_ahead = _steps_ahead(num_left)
        (rollout, rollout_spread), (train, train_spread) = (self._phase(phase, num_ahead) for phase in (0, 1))
        means, spread = (rollout, train), max(rollout_spread, train_spread)
        is_known = self._spread is not None and abs(spread - self._spread) < _NOTICEABLE
        if is_known and means == self._means:
            return None
        self._means, self._spread = means, spread
        base = self._base
        known = now.estimate or base
        estimate = replace(_times(base, means), sync_s=known.sync_s)
        colocated = self.given.colocated_estimate
        if colocated is not None and self.has_base:
            colocated = _times(colocated, means)
        held = None if self.has_base else estimate
        return replace(now, estimate=estimate, held=held, colocated_estimate=colocated, spread=spread)

    def _phase(self, phase: int, num_ahead: int) -> tuple[int, float]:
        """Power of `_NOTCH` that the phase's mean is, and its spread."""
        ratios = [by_phase[phase] for by_phase in self._ratios]
        recent = ratios[-_MEAN_STEPS:]
        deviation = deviation_of(ratios)
        found = _notch_of(math.fsum(recent) / len(recent))
        mean = None if self._means is None else self._means[phase]
        noticeable = max(1.0, _STANDARD_ERRORS * deviation / math.sqrt(len(recent)) / math.log(_NOTCH))
        if mean is None or abs(found - mean) > noticeable:
            mean = round(found + _ROUNDING)
        spread = mean_bound(deviation, len(ratios), num_ahead, self._level)
        limit = self._limits()[phase]
        if limit < math.inf and not self._is_limit_broken:
            spread = min(spread, max(1.0, limit / _NOTCH**mean))
        return mean, spread

    def _limits(self) -> tuple[float, float]:
        limit = self.given.limit
        if limit is None:
            return math.inf, math.inf
        base = self._base
        return over(limit.rollout_s, base.rollout_s), over(limit.train_s, base.train_s)


def member_level(probability: float) -> float:
    """Probability with which one member is to be within its spread, so that a whole group is with this one."""
    return 1.0 - (1.0 - probability) / MAX_PIPELINES_PER_GROUP


def _steps_ahead(num_left: int | None) -> int:
    """Coming steps that a spread is of."""
    return max(1, min(num_left or _MAX_STEPS_AHEAD, _MAX_STEPS_AHEAD))


def prior_bound(num_ahead: int, level: float) -> float:
    """As `mean_bound` before any step is seen: the coming ones deviate from the given mean as the prior's do."""
    return math.exp(student_t(level, _PRIOR_STEPS) * _PRIOR_DEVIATION / math.sqrt(num_ahead))


def mean_bound(deviation: float, num_seen: int, num_ahead: int, level: float) -> float:
    """Factor on the mean of the steps seen that the mean of the coming ones is below with this probability.

    `deviation`: standard deviation of the logarithms of the steps seen, the prior in it.
    """
    degrees = num_seen - 1 + _PRIOR_STEPS
    return math.exp(student_t(level, degrees) * deviation * math.sqrt(1.0 / num_ahead + 1.0 / num_seen))


def deviation_of(values: Sequence[float]) -> float:
    """Standard deviation of the logarithms of two or more values, the prior in it; 0 where all are alike."""
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    squares = math.fsum((log - mean) ** 2 for log in logs)
    if squares < _ROUNDING**2:
        return 0.0
    return math.sqrt((_PRIOR_STEPS * _PRIOR_DEVIATION**2 + squares) / (_PRIOR_STEPS + len(logs) - 1))


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
