"""What the scheduler believes about a pipeline's sub-stages, learned from its own recent steps.

    scheduler ── progress, ends ──▶ StepHistory ── estimates() ──▶ StepEstimates ──▶ policies
                                    (mutable, the scheduler's)     (frozen)

A rollout share leaves a curve: solo seconds at which its active count was reported. Curves of neighbouring steps are
very alike, so where a band starts is predicted by the median of the last steps. Where the tail *ends* is not stable:
`remaining_s` is a distribution, and is asked with the live active count, which says how far down the curve the share
is now. Before the first step the user's estimate stands in, with a typical shape.

Seconds are solo seconds: what the work would take with the device for itself. A shared order's wall seconds are
divided by the slowdown that was expected of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.model import PHASE_BY_STAGE, DeviceId, Phase, Pipeline, Stage

WINDOW_STEPS = 3
"""Steps that a prediction looks back."""
TYPICAL_TAIL_SHARE = 0.5
"""Part of a rollout spent in its tail, before a step was seen (0.4 to 0.7 in recorded runs)."""
TAIL_PART = 0.25
"""A share is in its tail when at most this part of what it began with is active."""
UNKNOWN_S = 1.0
"""Seconds of a stage of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One share's way down, in solo seconds."""

    seconds: tuple[float, ...]
    """When each report came, ascending; the last is the end."""
    active: tuple[int, ...]
    """Active sequences from then on; the last is 0."""

    @property
    def end_s(self) -> float:
        return self.seconds[-1]

    @property
    def peak(self) -> int:
        return max(self.active)

    def time_to(self, count: int) -> float:
        """Seconds until at most `count` are active for good."""
        for index in range(len(self.active) - 1, -1, -1):
            if self.active[index] > count:
                return self.seconds[index + 1]
        return 0.0


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """When a share will end, as solo seconds from now."""

    low_s: float
    median_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class StepEstimates:
    """A pipeline's next step as predicted now."""

    seconds_by_stage: tuple[tuple[Stage, float], ...]
    curves: tuple[Curve, ...]
    """Of all whole shares of the last steps: those of one pipeline are alike, wherever they were."""
    rollout_s: float
    """Of a share of which no curve is known."""
    move_s: float | None = None
    """Of one trajectory to another device, as the last moves took; None before the first."""
    gather_growth: float | None = None
    """A share that took over a whole sibling, before either had begun, lasted longer by this part of its own
    seconds; None before the first. From 0 to 1, since steps differ by more than that: beside others a share
    costs at most what it costs after them."""
    wait_s: float | None = None
    """From the pause of a share that had nothing to compute to the first reply; None before the first."""
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    """Of a warm switch to its state: as the last ones took, before them as it was measured, 0 where it was not."""

    def switch_s(self, phase: Phase) -> float:
        """Of a warm switch to its state for the phase."""
        return self.rollout_switch_s if phase is Phase.ROLLOUT else self.train_switch_s

    def stage_s(self, stage: Stage) -> float:
        """Of a stage other than GENERATE."""
        for known, seconds in self.seconds_by_stage:
            if known is stage:
                return seconds
        return 0.0

    @property
    def train_s(self) -> float:
        return sum(s for stage, s in self.seconds_by_stage if PHASE_BY_STAGE[stage] is Phase.TRAIN)

    @property
    def share_s(self) -> float:
        """A whole share."""
        return _median([curve.end_s for curve in self.curves]) if self.curves else self.rollout_s

    @property
    def tail_s(self) -> float:
        """The part of a share's seconds after its tail has begun."""
        if not self.curves:
            return TYPICAL_TAIL_SHARE * self.rollout_s
        return _median([curve.end_s - curve.time_to(tail_count(curve.peak)) for curve in self.curves])

    @property
    def gathered_s(self) -> float:
        """What a share adds to a sibling that takes all of it over: as seen, else what is not tail.

        Tails decode side by side; what comes before them fills the sibling's slots already.
        """
        share_s = self.share_s
        return share_s - self.tail_s if self.gather_growth is None else self.gather_growth * share_s

    @property
    def peak(self) -> int | None:
        """Sequences that a share begins with."""
        return max((curve.peak for curve in self.curves), default=None)

    def remaining_time(self, num_active: int | None, run_s: float) -> RemainingTime:
        """Until the end, of a share that has run `run_s` and has `num_active` left (None: no report yet)."""
        curves = self.curves
        if not curves:
            left_s = max(self.rollout_s - run_s, 0.05 * self.rollout_s)
            return RemainingTime(0.5 * left_s, left_s, 2.0 * left_s)
        if num_active is None:
            ends = sorted(max(curve.end_s - run_s, 0.02 * curve.end_s) for curve in curves)
        else:
            ends = sorted(curve.end_s - curve.time_to(num_active) for curve in curves)
        return RemainingTime(ends[0], _median(ends), ends[-1])


def tail_count(peak: int) -> int:
    """Active sequences at which the tail of a share that began with `peak` begins."""
    return max(1, math.floor(peak * TAIL_PART))


@dataclass(slots=True)
class _Share:
    """The share of the step under way on one device."""

    step: int
    before_s: float = 0.0
    """Solo seconds of its earlier orders."""
    seconds: list[float] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    is_whole: bool = True
    """False after a move: its curve is no longer that of a share."""
    num_gathered: int = 0
    """Whole siblings that it took over before it began."""


class StepHistory:
    """One pipeline's recent steps. Fed by the scheduler."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._curves: list[tuple[int, Curve]] = []
        """With their steps: of the last ones in which a share ended whole."""
        self._stages: dict[Stage, deque[float]] = {}
        self._open: dict[DeviceId, _Share] = {}
        self._estimates: StepEstimates | None = None
        self._move_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._growth: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._wait_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._switch_s: dict[tuple[Phase, bool], deque[float]] = {}
        """By phase, of orders with a warm switch and of those without one: weights come in with both."""
        self.step_began_s = 0.0
        self.due_s = math.inf
        """When the open step must have ended for the mean of all steps to keep the SLO; infinite without one."""
        self._last_step = math.inf

    def open_rollout(self, step: int, devices: Sequence[DeviceId], now_s: float, *, is_colocated: bool = False) -> None:
        pipeline = self._pipeline
        estimate = (pipeline.colocated_estimate if is_colocated else None) or pipeline.estimate
        if step <= self._last_step:  # the first one, or again from a restored step
            self.due_s = now_s
        self._last_step = step
        self.due_s += pipeline.slo_slowdown * estimate.solo_s if estimate else math.inf
        self.step_began_s = now_s
        self._open = {device: _Share(step) for device in devices}

    def progress(self, device: DeviceId, num_active: int, solo_s: float) -> None:
        """A running order's report; `solo_s` since the order began."""
        share = self._open.get(device)
        if share is not None and (not share.active or share.active[-1] != num_active):
            share.seconds.append(share.before_s + solo_s)
            share.active.append(num_active)

    def paused(self, device: DeviceId, solo_s: float) -> None:
        share = self._open.get(device)
        if share is not None:
            share.before_s += solo_s

    def moved(
        self, source: DeviceId, target: DeviceId, num_trajectories: int, seconds: float, *, is_fresh: bool = False
    ) -> None:
        """`is_fresh`: the source had not begun, so there was no context to carry over."""
        if num_trajectories and not is_fresh:
            self._move_s.append(seconds / num_trajectories)
            self._estimates = None
        left = self._open.pop(source, None)
        if target in self._open:
            self._open[target].is_whole = False
            self._open[target].num_gathered += is_fresh
        elif left is not None:  # its own has ended, or left before: the source's goes on there
            self._open[target] = left

    def waited(self, seconds: float) -> None:
        """A paused share had nothing to compute for so long."""
        self._wait_s.append(seconds)
        self._estimates = None

    def switched(self, phase: Phase, seconds: float, *, is_warm: bool) -> None:
        """An order spent so long before its computing; without a switch only on what every order needs."""
        self._switch_s.setdefault((phase, is_warm), deque(maxlen=WINDOW_STEPS)).append(seconds)
        self._estimates = None

    def share_ended(self, device: DeviceId, solo_s: float) -> None:
        share = self._open.pop(device, None)
        if share is None:
            return
        if not share.is_whole and self._curves:  # an untouched share's curve is the better predictor
            if share.num_gathered:
                alone_s = _median([curve.end_s for _, curve in self._curves])
                growth = (share.before_s + solo_s) / max(alone_s, 1e-9) - 1.0
                self._growth.append(growth / share.num_gathered)
                self._estimates = None
            return
        peak = max(share.active, default=1)
        curve = Curve((0.0, *share.seconds, share.before_s + solo_s), (peak, *share.active, 0))
        steps = sorted({share.step, *(step for step, _ in self._curves)})[-WINDOW_STEPS:]
        self._curves = [one for one in (*self._curves, (share.step, curve)) if one[0] in steps]
        self._estimates = None

    def stage_ended(self, stage: Stage, solo_s: float) -> None:
        self._stages.setdefault(stage, deque(maxlen=WINDOW_STEPS)).append(solo_s)
        self._estimates = None

    def live(self, device: DeviceId) -> tuple[int | None, float]:
        """(active at the last report or None, solo seconds of earlier orders) of the open share."""
        share = self._open.get(device)
        if share is None:
            return None, 0.0
        return (share.active[-1] if share.active else None), share.before_s

    def estimates(self) -> StepEstimates:
        """What the last steps say; cached until something new is known."""
        if self._estimates is None:
            self._estimates = self._predict()
        return self._estimates

    def _predict(self) -> StepEstimates:
        pipeline = self._pipeline
        prior = pipeline.estimate
        train = pipeline.train_stages
        prior_train_s = prior.train_s / max(len(train), 1) if prior else UNKNOWN_S
        seconds = []
        for stage in pipeline.stages:
            if stage is Stage.GENERATE:
                continue
            if stage in self._stages:
                seconds.append((stage, _median(self._stages[stage])))
            elif stage in train:
                seconds.append((stage, prior_train_s))
        return StepEstimates(
            seconds_by_stage=tuple(seconds),
            curves=tuple(curve for _, curve in self._curves),
            rollout_s=prior.rollout_s if prior else UNKNOWN_S,
            move_s=_median(self._move_s) if self._move_s else None,
            gather_growth=min(max(_median(self._growth), 0.0), 1.0) if self._growth else None,
            wait_s=_median(self._wait_s) if self._wait_s else None,
            rollout_switch_s=self._warm_switch_s(Phase.ROLLOUT),
            train_switch_s=self._warm_switch_s(Phase.TRAIN),
        )

    def _warm_switch_s(self, phase: Phase) -> float:
        spent = self._switch_s.get((phase, True))
        if spent is None:
            prior = self._pipeline.switch
            return 0.0 if prior is None else prior.rollout_s if phase is Phase.ROLLOUT else prior.train_s
        return max(0.0, _median(spent) - _median(self._switch_s.get((phase, False), (0.0,))))


def _median(values: Sequence[float] | deque[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
