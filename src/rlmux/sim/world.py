"""What really happens: the seconds each stage takes, which the scheduler can only estimate.

    TrueSeconds = seconds by stage  x  variation(step)        sync is not scaled: its bytes do not change

    Steady          1 at every step
    RandomVariation log-normal of mean 1, a function of (seed, step) only
    Drifting        a measured curve over the steps, its excursion stretched by `amplitude`
    Product         one times the other

A variation is a function of the step and never of when or where the step runs: so every policy meets the same world,
and two runs of one workload differ by their policies alone. Training time is linear in tokens, so
one factor scales rollout and training of a step together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

from rlmux.core.model import PHASE_BY_STAGE, Phase, PhaseSeconds, RolloutTail, Stage, SubStage, SwitchEstimate
from rlmux.sim import data_tables
from rlmux.sim.models.work import SoloSeconds, TailedSeconds, TrajectorySeconds, Work

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


class Variation(Protocol):
    """How a step's work differs from the first step's."""

    def factor(self, step: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Steady:
    """Every step like the first."""

    def factor(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomVariation:
    """Steps drawn from a log-normal distribution of mean 1."""

    seed: int
    cv: float
    """Standard deviation over mean."""

    def factor(self, step: int) -> float:
        sigma = math.sqrt(math.log1p(self.cv * self.cv))
        return math.exp(sigma * _NORMAL.inv_cdf(uniform(self.seed, step)) - sigma * sigma / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting:
    """A curve of ratios to the first step; the last value holds for all later steps."""

    ratios: tuple[float, ...]
    amplitude: float = 1.0
    """Factor on the curve's distance from 1: 0.5 drifts half as far, a negative one turns a fall into a rise."""
    steps_per_value: int = 1
    """Consecutive steps that have one value of the curve, to stretch a short recording over a long run."""

    def factor(self, step: int) -> float:
        index = min((step - 1) // self.steps_per_value, len(self.ratios) - 1)
        return max(0.05, 1.0 + self.amplitude * (self.ratios[index] - 1.0))


@dataclass(frozen=True, slots=True)
class Product:
    """Two variations at once, such as drift and noise."""

    first: Variation
    second: Variation

    def factor(self, step: int) -> float:
        return self.first.factor(step) * self.second.factor(step)


STEADY = Steady()


def uniform(seed: int, index: int) -> float:
    """A number in (0, 1) that depends on its two arguments only (SplitMix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) + 0.5) / 2.0**64


def drift_curve(model: str) -> tuple[float, ...]:
    """The measured ratios of `7B` or `14B`: step time over the first step's, 88 steps."""
    return tuple(float(row["ratio"]) for row in data_tables.rows("step_time_drift") if row["model"] == model)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueSeconds:
    """True seconds of one pipeline's stages, on its requested nodes."""

    by_stage: Mapping[Stage, float]
    variation: Variation = STEADY
    finish_fractions: tuple[float, ...] = ()
    """Moment at which each trajectory of a rollout ends, as a fraction of the rollout's seconds; trajectories are dealt
    to the devices in turn. Empty: every rollout shard takes the rollout's seconds, and its inside is unknown."""
    move_s: float = 0.0
    """Solo seconds that migrated trajectories lose on their target: their contexts are computed again."""

    tail: RolloutTail | None = None
    """True finish times of a rollout, if a device stands for a node of several GPUs; None: by `finish_fractions`."""

    @property
    def gpu(self) -> str | None:
        """The GPU whose interference is known; None: an order on a shared device is as fast as its device fraction."""
        return None

    def shard(self, step: int, index: int, num_devices: int) -> Work:
        """The rollout shard of the `index`-th of so many devices, with nothing of it done."""
        seconds = self.seconds(Stage.GENERATE, step)
        if self.tail is not None:
            return TailedSeconds(seconds, self.tail)
        if not self.finish_fractions:
            return SoloSeconds(seconds, SubStage.DENSE_DECODE)
        mine = self.finish_fractions[index::num_devices]
        return TrajectorySeconds([seconds * fraction for fraction in mine])

    def stage_s(self, stage: Stage, step: int, num_devices: int) -> float:
        """Solo seconds of any other stage on so many devices."""
        return self.seconds(stage, step)

    def migration_s(self, moved: Sequence[Any], *, copies_kv: bool) -> tuple[float, float]:
        """(seconds between the devices, solo seconds on the target before the trajectories continue)."""
        return 0.0, self.move_s

    def seconds(self, stage: Stage, step: int) -> float:
        """Solo seconds of a stage of that step."""
        base = self.by_stage.get(stage, 0.0)
        if self.variation is STEADY:
            return base
        if PHASE_BY_STAGE[stage] is Phase.SYNC:
            return base
        return base * self.variation.factor(step)

    def solo_s(self, step: int) -> float:
        """Seconds of the step's stages one after another, with the devices to itself."""
        if self.variation is STEADY:
            return sum(self.by_stage.values()) - self.by_stage.get(Stage.SFT_WARMUP, 0.0)
        factor = self.variation.factor(step)
        return sum(
            base if PHASE_BY_STAGE[stage] is Phase.SYNC else base * factor
            for stage, base in self.by_stage.items()
            if stage is not Stage.SFT_WARMUP
        )

    @classmethod
    def of_phases(
        cls,
        phases: PhaseSeconds,
        *,
        sync_s: float = 0.0,
        variation: Variation = STEADY,
        tail: RolloutTail | None = None,
    ) -> TrueSeconds:
        """Two stages and a sync: all that is known of a pipeline when only its phases were measured, and perhaps how
        its rollouts end."""
        by_stage = {Stage.GENERATE: phases.rollout_s, Stage.UPDATE: phases.train_s, Stage.PUBLISH: sync_s}
        return cls(by_stage=by_stage, variation=variation, tail=tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSeconds:
    """Seconds to load a pipeline's state onto its devices before a phase: cold, or warm from the host's memory."""

    cold_rollout_s: float = 0.0
    cold_train_s: float = 0.0
    warm_rollout_s: float = 0.0
    warm_train_s: float = 0.0

    def seconds(self, phase: Phase, *, is_warm: bool) -> float:
        if phase is Phase.ROLLOUT:
            return self.warm_rollout_s if is_warm else self.cold_rollout_s
        return self.warm_train_s if is_warm else self.cold_train_s

    @property
    def estimate(self) -> SwitchEstimate:
        """Estimate of a scheduler that has the true seconds."""
        return SwitchEstimate(
            rollout_s=self.warm_rollout_s,
            train_s=self.warm_train_s,
            cold_rollout_s=self.cold_rollout_s,
            cold_train_s=self.cold_train_s,
        )


NO_SWITCH = SwitchSeconds()
