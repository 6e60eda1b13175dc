"""Estimates the seconds of a pipeline's switches on this device from measured states.

    SwitchTimes of a profile ──▶ SwitchCosts ──estimate_of(config, cluster)──▶ SwitchEstimate, the scheduler's belief

A state of another size takes time in proportion to its bytes, after the measured one whose size is nearest. In a pool
that spills, a switch counts as one from disk, until the run has seen what its own take.

A module of its own: it is tested without a profile file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmux.core.model import Cluster, Phase, SwitchEstimate
from rlmux.profiling.switch_times import SwitchTimes
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.footprint import footprint_of


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """A profile's figures of switches on this device."""

    measured: tuple[SwitchTimes, ...] = ()

    def seconds(self, phase: Phase, footprint_bytes: float, *, is_spilled: bool) -> float | None:
        """Seconds of a switch to a state of this size; None where no state of the phase was measured."""
        alike = [one for one in self.measured if one.phase is phase]
        if not alike:
            return None
        nearest = min(alike, key=lambda one: abs(math.log(max(footprint_bytes, 1.0) / max(one.footprint_bytes, 1.0))))
        seconds = nearest.spilled_s if is_spilled else nearest.warm_s
        return seconds * footprint_bytes / max(nearest.footprint_bytes, 1.0)

    def estimate_of(self, config: TrainingConfig, cluster: Cluster) -> SwitchEstimate | None:
        """Estimate both of a pipeline's switches; None where one of its phases was not measured."""
        footprint = footprint_of(config)
        rollout_s = self.seconds(
            Phase.ROLLOUT, footprint.rollout_device_bytes or 0.0, is_spilled=_spills(cluster, Phase.ROLLOUT)
        )
        train_s = self.seconds(
            Phase.TRAIN, footprint.train_device_bytes or 0.0, is_spilled=_spills(cluster, Phase.TRAIN)
        )
        if rollout_s is None or train_s is None:
            return None
        return SwitchEstimate(rollout_s=rollout_s, train_s=train_s)


def _spills(cluster: Cluster, phase: Phase) -> bool:
    pool = cluster.pool_serving(phase)
    return pool is not None and pool.spills_to_disk
