"""What the scheduler believes about a pipeline's sub-stages, learned from its own recent steps.

    scheduler ── progress, ends ──▶ StepHistory ── estimates() ──▶ StepEstimates ──▶ policies
                                    (mutable, the scheduler's)     (frozen)

A rollout shard leaves a curve: its active count, and the solo seconds at which each count was reported. Curves of
neighbouring steps are very alike, so the median of the last steps predicts where each sub-stage begins. The end of the
tail varies: `remaining_time` is a range, and takes the live active count, which shows how far down the curve the shard
is now. Before the first step the user's estimate stands in, with a typical shape.

Seconds are solo seconds: what the work would take with the device for itself. The wall seconds of an order that shares
its device are divided by the slowdown that was expected of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rlmux.core.estimation.decode_rate import DecodeCost, DecodeRate
from rlmux.core.events import DecodeSpan
from rlmux.core.model import (
    PHASE_BY_STAGE,
    DeviceId,
    Phase,
    PhaseSeconds,
    Pipeline,
    Stage,
    SubStage,
    dense_threshold_of,
)

WINDOW_STEPS = 3
"""Steps that an estimate looks back."""
TYPICAL_TAIL_PART = 0.5
"""Part of a rollout's seconds spent in its tail, before a step was seen (0.4 to 0.7 in recorded runs)."""
TAIL_PART = 0.25
"""Part of the sequences that a shard began with, at or below which it is in its tail."""
LEAST_PART = 0.05
"""Part of a shard's seconds below which a sub-stage of it is not distinguished."""
LEAST_WAIT = 0.01
"""Part of a step's seconds below which a reward or a publication is not a wait of its own."""
LEAST_TOOL_WAIT = 0.1
"""Part of a shard's seconds above which what it waited for is environments, and not control."""
SPREAD_WINDOW = 12
"""Shards and stages of training whose forecast is compared with what they took."""
LEAST_ERRORS = 4
"""Of them, at least, before the spread of forecasts counts as seen."""
_LEAST_SIBLINGS = 0.5
"""Whole siblings with which a shard grows by more than steps differ."""
UNKNOWN_S = 1.0
"""Seconds assumed for a stage that nothing is known about."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One shard's active count over time."""

    seconds: tuple[float, ...]
    """Solo seconds of each report since the shard began, ascending; the last is the end."""
    active: tuple[int, ...]
    """Active sequences from each of these seconds on; the last is 0."""
    prefill_s: float = 0.0
    """Solo seconds before its first decode step."""

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
    """Solo seconds until a shard ends, counted from now."""

    low_s: float
    median_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The sub-stages of a pipeline's next step, which are the same on each of its workers."""

    shard_s: float
    """Solo seconds of each shard."""
    sub_stages: tuple[tuple[float, SubStage], ...]
    """Sub-stages of a whole shard as (solo seconds left when it begins, sub-stage), in order."""
    training: tuple[tuple[Stage, float], ...]
    """Each stage of training with its solo seconds, in order."""
    waits: tuple[tuple[Stage, float], ...]
    """The reward and the publication with the seconds that they hold no device, without negligible ones."""

    def sub_stages_after(self, begun: SubStage, left_s: float) -> tuple[tuple[float, SubStage], ...]:
        """The later sub-stages of a shard that is in this one with so many solo seconds left, as `sub_stages`."""
        if begun is SubStage.TAIL_DECODE:
            return ()
        return tuple(later for later in self.sub_stages[1:] if later[0] < left_s and later[1] is not begun)


@dataclass(frozen=True)
class StepEstimates:
    """A pipeline's next step, as estimated now. What a look-ahead reads of every order is kept, hence no slots."""

    seconds_by_stage: tuple[tuple[Stage, float], ...]
    """Each stage other than GENERATE with its solo seconds."""
    curves: tuple[Curve, ...]
    """Curves of all whole shards of the last steps: those of one pipeline are alike, whichever device they ran on."""
    rollout_s: float
    """Solo seconds of a shard while no curve is known."""
    migrate_s: float | None = None
    """Seconds to migrate one trajectory, as the last migrations took; None before the first."""
    whole_migration_growth: float | None = None
    """Part of its own seconds by which a shard lasted longer after a whole sibling had migrated to it before either
    began; None before the first. It is 0 to 1, since steps differ by more than that: beside others a shard costs at
    most what it costs after them."""
    tail_growth: float | None = None
    """Part of the longest shard's seconds by which a rollout lasted longer after its tail had migrated; None before the
    first. It is 0 to 1, as above."""
    decode_cost: DecodeCost | None = None
    """What decode iterations cost by their rows; None until it was seen."""
    slots: int | None = None
    """Sequences that a worker decodes at once; None: unknown."""
    spread: float | None = None
    """Part of their forecast by which shards and stages of training lasted longer or shorter, in the median; None until
    enough were seen."""
    wait_s: float | None = None
    """Seconds between the pause of a shard that had nothing to compute and the first reply; None before the first."""
    shard_wait_s: float = 0.0
    """Seconds in which a whole shard computes nothing, since its trajectories wait for environments; 0 for negligible
    ones."""
    rollout_switch_s: float = 0.0
    """Seconds of a warm switch to its rollout state: as the last ones took, before them as it was measured, else 0."""
    train_switch_s: float = 0.0
    """Seconds of a warm switch to its training state, likewise."""

    def switch_s(self, phase: Phase) -> float:
        """Seconds of a warm switch to its state for the phase."""
        return self.rollout_switch_s if phase is Phase.ROLLOUT else self.train_switch_s

    def stage_s(self, stage: Stage) -> float:
        """Solo seconds of a stage other than GENERATE; 0 where nothing is known."""
        for known, seconds in self.seconds_by_stage:
            if known is stage:
                return seconds
        return 0.0

    @property
    def train_s(self) -> float:
        """Solo seconds of all training stages."""
        return sum(s for stage, s in self.seconds_by_stage if PHASE_BY_STAGE[stage] is Phase.TRAIN)

    @property
    def shard_s(self) -> float:
        """Solo seconds of a whole shard."""
        return _median([curve.end_s for curve in self.curves]) if self.curves else self.rollout_s

    @property
    def longest_s(self) -> float:
        """Solo seconds of the longest shard of a rollout."""
        return max((curve.end_s for curve in self.curves), default=self.rollout_s)

    @property
    def tail_s(self) -> float:
        """Solo seconds of a shard after its tail has begun; 0 where it reports nothing of its trajectories."""
        if not self.curves:
            return TYPICAL_TAIL_PART * self.rollout_s
        reported = [curve for curve in self.curves if len(curve.seconds) > 2]
        if not reported:
            return 0.0
        return _median([curve.end_s - curve.time_to(tail_count(curve.peak)) for curve in reported])

    def sub_stages(self, dense_threshold: int | None) -> tuple[tuple[float, SubStage], ...]:
        """Sub-stages of a whole shard as (solo seconds left when it begins, sub-stage), in order (JigsawRL section 3).

        `dense_threshold`: as in `Pipeline`. One that would last less than `LEAST_PART` of the shard belongs to its
        neighbour.
        """
        if dense_threshold not in self._sub_stages:
            self._sub_stages[dense_threshold] = self._find_sub_stages(dense_threshold)
        return self._sub_stages[dense_threshold]

    @cached_property
    def _sub_stages(self) -> dict[int | None, tuple[tuple[float, SubStage], ...]]:
        """Sub-stages by threshold."""
        return {}

    @cached_property
    def largest_peak(self) -> int:
        """Most sequences of a whole shard; 0 where no curve is known."""
        return max((curve.peak for curve in self.curves), default=0)

    def _find_sub_stages(self, dense_threshold: int | None) -> tuple[tuple[float, SubStage], ...]:
        if not self.curves:
            return (
                (self.rollout_s, SubStage.DENSE_DECODE),
                (TYPICAL_TAIL_PART * self.rollout_s, SubStage.TAIL_DECODE),
            )
        curve = sorted(self.curves, key=lambda curve: curve.end_s)[len(self.curves) // 2]
        threshold = dense_threshold or dense_threshold_of(curve.peak)
        tail_from_s = max(curve.prefill_s, curve.time_to(threshold - 1))
        begins = (
            (0.0, SubStage.PREFILL), (curve.prefill_s, SubStage.DENSE_DECODE), (tail_from_s, SubStage.TAIL_DECODE)
        )  # fmt: skip
        ends = (*[begin_s for begin_s, _ in begins[1:]], curve.end_s)
        long = [
            (curve.end_s - begin_s, sub_stage)
            for (begin_s, sub_stage), end_s in zip(begins, ends, strict=True)
            if end_s - begin_s >= LEAST_PART * curve.end_s
        ]
        return ((curve.end_s, long[0][1]), *long[1:])

    def plan(self, train_stages: Sequence[Stage], dense_threshold: int | None) -> StepPlan:
        """The next step of a pipeline with these stages of training; `dense_threshold`: as for `sub_stages`."""
        least_s = LEAST_WAIT * (self.shard_s + self.train_s)
        waits = [(stage, self.stage_s(stage)) for stage in (Stage.REWARD, Stage.PUBLISH)]
        return StepPlan(
            shard_s=self.shard_s,
            sub_stages=self.sub_stages(dense_threshold),
            training=tuple((stage, self.stage_s(stage)) for stage in train_stages),
            waits=tuple((stage, seconds) for stage, seconds in waits if seconds >= least_s),
        )

    def whole_migration_s(self, num_targets: int = 1) -> float:
        """Solo seconds that a shard adds to each of the siblings over which it is spread before it begins: by what
        decode iterations cost, else as seen, else what is not tail.

        Tails decode side by side; what comes before them fills the sibling's slots already.
        """
        shard_s, part = self.shard_s, 1.0 / num_targets
        if self.decode_cost is not None:
            return self.decode_cost.growth(part, self.slots) * shard_s
        growth = self.whole_migration_growth
        return part * (shard_s - self.tail_s if growth is None else growth * shard_s)

    def tail_migration_s(self, left_s: Sequence[float]) -> float:
        """Solo seconds by which a rollout ends later if shards with so much left leave for the last one: their rows in
        its iterations. 0 until it is known what rows cost."""
        return 0.0 if self.decode_cost is None else self.decode_cost.row_part * sum(left_s)

    @property
    def peak(self) -> int | None:
        """Sequences that a shard begins with; None where no curve is known."""
        return max((curve.peak for curve in self.curves), default=None)

    def remaining_time(self, num_active: int | None, run_s: float) -> RemainingTime:
        """What is left of a shard that has run for `run_s` and has `num_active` sequences (None: no report yet)."""
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
    """Active sequences at which the tail of a shard that began with `peak` begins."""
    return max(1, math.floor(peak * TAIL_PART))


@dataclass(slots=True)
class _ShardProgress:
    """What the shard of the open rollout on one device has reported."""

    step: int
    before_s: float = 0.0
    """Solo seconds of its earlier orders."""
    waited_s: float = 0.0
    """Seconds in which it computed nothing: of its earlier orders, and of waits for environments between them."""
    prefill_s: float = 0.0
    """Those of `before_s` before its first decode step."""
    seconds: list[float] = field(default_factory=list)
    """Solo seconds of each report since the shard began."""
    active: list[int] = field(default_factory=list)
    """Active sequences at each report."""
    is_whole: bool = True
    """Whether no trajectory has migrated to it; otherwise its curve is not a shard's."""
    num_whole_siblings: float = 0.0
    """Whole siblings that migrated to it before they began; one that was spread counts in parts."""
    has_moved: bool = False
    """Whether it migrated to an idle device before it began."""


class StepHistory:
    """One pipeline's recent steps. Fed by the scheduler."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._curves: list[tuple[int, Curve]] = []
        """Curves of the last steps in which a shard ended whole, each with its step."""
        self._stages: dict[Stage, deque[float]] = {}
        """Solo seconds of the last runs of each stage."""
        self._open: dict[DeviceId, _ShardProgress] = {}
        """Unfinished shards of the open rollout."""
        self._has_tail_left = False
        """Whether trajectories of the open rollout that had begun have migrated: only short shards of it end whole."""
        self._estimates: StepEstimates | None = None
        self._migrate_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Seconds for each trajectory of the last migrations."""
        self._growth: deque[float] = deque(maxlen=WINDOW_STEPS)
        """`whole_migration_growth` of the last shards that whole siblings migrated to."""
        self._tail_growth: deque[float] = deque(maxlen=WINDOW_STEPS)
        """`tail_growth` of the last shards that others' tails migrated to."""
        self._decode_rate = DecodeRate()
        self._errors: deque[float] = deque(maxlen=SPREAD_WINDOW)
        """Part of its forecast by which each of the last shards and stages of training was off."""
        self._wait_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Seconds of the last waits for an environment."""
        self._shard_waits: deque[float] = deque(maxlen=SPREAD_WINDOW)
        """Seconds in which each of the last whole shards computed nothing."""
        self._switch_s: dict[tuple[Phase, bool], deque[float]] = {}
        """Seconds before computing, by phase and whether there was a warm switch: weights come in without one too."""
        self._expected: PhaseSeconds | None = None
        self.step_began_s = 0.0
        """Time at which the open, or last, rollout was opened."""
        self.due_s = math.inf
        """Time by which the open step must end for the mean of all steps to keep the SLO; infinite without one."""
        self._last_step = math.inf
        self._first_open_s = 0.0
        """Time from which the mean of all steps counts."""
        self._num_opened = 0
        """Steps opened since then."""

    def plan_with(self, pipeline: Pipeline) -> None:
        """Other seconds are believed of the pipeline from now on. All its steps count for the SLO, those before too."""
        self._pipeline = pipeline
        self._estimates = None
        self.due_s = self._first_open_s + self._num_opened * self._budget_s()

    def open_rollout(self, step: int, devices: Sequence[DeviceId], now_s: float) -> None:
        """A step's rollout begins, with a shard on each of the devices.

        The step is due after SLO times T_solo on the requested nodes, wherever the pipeline is placed.
        """
        if step <= self._last_step:  # the first one, or again from a restored step
            self.due_s = self._first_open_s = now_s
            self._num_opened = 0
        self._last_step = step
        self._num_opened += 1
        self.due_s += self._budget_s()
        self.step_began_s = now_s
        self._open = {device: _ShardProgress(step) for device in devices}
        self._has_tail_left = False

    def expect(self, seconds: PhaseSeconds) -> None:
        """Take a stage that has not been seen yet to last so long, whatever the pipeline's estimate."""
        if seconds != self._expected:
            self._expected = seconds
            self._estimates = None

    def add_progress(self, device: DeviceId, num_active: int, solo_s: float) -> None:
        """Take in a progress report of the shard's running order; `solo_s` counts from the order's begin."""
        shard = self._open.get(device)
        if shard is not None and (not shard.active or shard.active[-1] != num_active):
            shard.seconds.append(shard.before_s + solo_s)
            shard.active.append(num_active)

    def add_pause(self, device: DeviceId, solo_s: float, prefill_s: float = 0.0, waited_s: float = 0.0) -> None:
        """The shard's order was paused after so many solo seconds, `prefill_s` of them before its first decode step,
        and `waited_s` in which it computed nothing."""
        shard = self._open.get(device)
        if shard is not None:
            shard.waited_s += waited_s
            shard.prefill_s = shard.prefill_s or prefill_s
            shard.before_s += solo_s

    def add_decoded(self, spans: Sequence[DecodeSpan]) -> None:
        """An order of its rollout that ended made these decode iterations."""
        self._decode_rate.add(spans)
        self._estimates = None

    def add_migration(
        self,
        source: DeviceId,
        targets: Sequence[DeviceId],
        num_trajectories: int,
        seconds: float,
        *,
        is_fresh: bool = False,
    ) -> None:
        """The source's unfinished trajectories have migrated; `is_fresh`: it had not begun and had no context."""
        if num_trajectories and not is_fresh:
            self._migrate_s.append(seconds / num_trajectories)
            self._estimates = None
            self._forget_short_shards()
        left = self._open.pop(source, None)
        for target in targets:
            if target in self._open:
                self._open[target].is_whole = False
                self._open[target].num_whole_siblings += is_fresh / len(targets)
            elif left is not None and len(targets) == 1:
                # The target's own has ended or migrated before: the source's goes on there.
                self._open[target] = left
                left.has_moved = left.has_moved or is_fresh
            elif left is not None:
                self._open[target] = _ShardProgress(left.step, is_whole=False)

    def _forget_short_shards(self) -> None:
        """Leave out the shards of a rollout whose tail migrates, where others are known: long ones do not end whole."""
        self._has_tail_left = True
        step = max((shard.step for shard in self._open.values()), default=0)
        others = [entry for entry in self._curves if entry[0] != step]
        self._curves = others or self._curves

    def add_wait(self, device: DeviceId, seconds: float) -> None:
        """A paused shard had nothing to compute for so long."""
        if (shard := self._open.get(device)) is not None:
            shard.waited_s += seconds
        self._wait_s.append(seconds)
        self._estimates = None

    def add_switch(self, phase: Phase, seconds: float, *, is_warm: bool) -> None:
        """An order spent so long before its computing; one without a switch only on what every order needs."""
        self._switch_s.setdefault((phase, is_warm), deque(maxlen=WINDOW_STEPS)).append(seconds)
        self._estimates = None

    def end_shard(self, device: DeviceId, solo_s: float, prefill_s: float = 0.0, waited_s: float = 0.0) -> None:
        """The shard is done; its last order computed for so many solo seconds, `prefill_s` of them before its first
        decode step, and waited for so many."""
        shard = self._open.pop(device, None)
        if shard is None:
            return
        if shard.is_whole:
            self._shard_waits.append(shard.waited_s + waited_s)
        if not shard.is_whole and self._curves:  # the curve of a shard that nothing migrated to predicts better
            if shard.num_whole_siblings:
                if shard.num_whole_siblings >= _LEAST_SIBLINGS:
                    alone_s = _median([curve.end_s for _, curve in self._curves])
                    growth = (shard.before_s + solo_s) / max(alone_s, 1e-9) - 1.0
                    self._growth.append(growth / shard.num_whole_siblings)
            else:
                longest_s = max(curve.end_s for _, curve in self._curves)
                self._tail_growth.append((shard.before_s + solo_s) / max(longest_s, 1e-9) - 1.0)
            self._estimates = None
            return
        if self._has_tail_left and self._curves:
            return
        if self._curves:
            self._note_error(shard.before_s + solo_s, self.estimates().shard_s)
        peak = max(shard.active, default=1)
        seconds = (0.0, *shard.seconds, shard.before_s + solo_s)
        curve = Curve(seconds, (peak, *shard.active, 0), shard.prefill_s or prefill_s)
        self._curves.append((shard.step, curve))
        if len(self._curves) > WINDOW_STEPS:
            steps = sorted({step for step, _ in self._curves})[-WINDOW_STEPS:]
            self._curves = [entry for entry in self._curves if entry[0] in steps]
        self._estimates = None

    def end_stage(self, stage: Stage, solo_s: float) -> None:
        """A stage other than GENERATE is done."""
        if stage in self._stages and PHASE_BY_STAGE[stage] is Phase.TRAIN:
            self._note_error(solo_s, self.estimates().stage_s(stage))
        self._stages.setdefault(stage, deque(maxlen=WINDOW_STEPS)).append(solo_s)
        self._estimates = None

    def _note_error(self, solo_s: float, forecast_s: float) -> None:
        if forecast_s > 0.0:
            self._errors.append(abs(solo_s / forecast_s - 1.0))

    def has_moved(self, device: DeviceId) -> bool:
        """Whether the shard there migrated to an idle device before it began."""
        shard = self._open.get(device)
        return shard is not None and shard.has_moved

    @property
    def largest_shard(self) -> int:
        """Most sequences of a shard that were reported; 0 before any."""
        open_counts = [shard.active[0] for shard in self._open.values() if shard.active]
        return max([self.estimates().largest_peak, *open_counts])

    def live_shard(self, device: DeviceId) -> tuple[int | None, float]:
        """Sequences active at the last report, None before the first, and solo seconds of earlier orders."""
        shard = self._open.get(device)
        if shard is None:
            return None, 0.0
        return (shard.active[-1] if shard.active else None), shard.before_s

    def wall_left_s(self, device: DeviceId, run_s: float) -> float:
        """Seconds until a shard that has run for so many is over, its waits for environments included; 0 where it has
        none to speak of."""
        estimates, shard = self.estimates(), self._open.get(device)
        if not estimates.shard_wait_s or shard is None:
            return 0.0
        return max(0.0, estimates.shard_s + estimates.shard_wait_s - shard.waited_s - run_s)

    def estimates(self) -> StepEstimates:
        """Forecast from the last steps; cached until something new is known."""
        if self._estimates is None:
            self._estimates = self._estimate()
        return self._estimates

    def _budget_s(self) -> float:
        """The longest step that keeps the SLO; infinite where there is none, or nothing is known."""
        pipeline = self._pipeline
        return pipeline.slo_slowdown * pipeline.estimate.solo_s if pipeline.estimate else math.inf

    def _estimate(self) -> StepEstimates:
        pipeline = self._pipeline
        prior = self._expected or pipeline.estimate
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
            migrate_s=_median(self._migrate_s) if self._migrate_s else None,
            whole_migration_growth=min(max(_median(self._growth), 0.0), 1.0) if self._growth else None,
            tail_growth=min(max(_median(self._tail_growth), 0.0), 1.0) if self._tail_growth else None,
            decode_cost=self._decode_rate.cost(),
            spread=_median(self._errors) if len(self._errors) >= LEAST_ERRORS else None,
            slots=None if pipeline.dense_threshold is None else 2 * pipeline.dense_threshold,
            wait_s=_median(self._wait_s) if self._wait_s else None,
            shard_wait_s=self._shard_wait_s(),
            rollout_switch_s=self._warm_switch_s(Phase.ROLLOUT),
            train_switch_s=self._warm_switch_s(Phase.TRAIN),
        )

    def _shard_wait_s(self) -> float:
        if not (self._shard_waits and self._curves):
            return 0.0
        waits_s = _median(self._shard_waits)
        return waits_s if waits_s > LEAST_TOOL_WAIT * _median([curve.end_s for _, curve in self._curves]) else 0.0

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
