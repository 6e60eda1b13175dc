"""Estimates the seconds of a pipeline's switches and migrations on this device from measured ones.

    SwitchTimes, MigrationTimes of a profile ──▶ DeviceCosts ──add_to──▶ Pipeline.switch, Pipeline.migration

A state of another size takes time in proportion to its bytes, after the measured one whose size is nearest. In a pool
that spills, a switch counts as one from disk, until the run has seen what its own take. Migrations count only
for the model and the slots that were measured.

Invariant: recomputation is never estimated where it could change the bits of a KV cache.

A module of its own: it is tested without a profile file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlmux.core.model import Cluster, MigrationEstimate, Phase, Pipeline, SwitchEstimate
from rlmux.profiling.migration_times import MigrationTimes, expected_context
from rlmux.profiling.step_estimates import model_of
from rlmux.profiling.switch_times import SwitchTimes
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.footprint import footprint_of


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """A profile's figures of switches and migrations on this device."""

    switches: tuple[SwitchTimes, ...] = ()
    migrations: tuple[MigrationTimes, ...] = ()

    def add_to(self, pipeline: Pipeline, config: TrainingConfig, cluster: Cluster) -> Pipeline:
        """The pipeline with the estimates that the profile has figures for."""
        return replace(
            pipeline,
            switch=self.switch_of(config, cluster) or pipeline.switch,
            migration=self.migration_of(config) or pipeline.migration,
        )

    def switch_s(self, phase: Phase, footprint_bytes: float, *, is_spilled: bool) -> float | None:
        """Seconds of a switch to a state of this size; None where no state of the phase was measured."""
        alike = [times for times in self.switches if times.phase is phase]
        if not alike:
            return None
        nearest = min(
            alike, key=lambda times: abs(math.log(max(footprint_bytes, 1.0) / max(times.footprint_bytes, 1.0)))
        )
        seconds = nearest.spilled_s if is_spilled else nearest.warm_s
        return seconds * footprint_bytes / max(nearest.footprint_bytes, 1.0)

    def switch_of(self, config: TrainingConfig, cluster: Cluster) -> SwitchEstimate | None:
        """Estimate both of a pipeline's switches; None where one of its phases was not measured."""
        footprint = footprint_of(config)
        rollout_s = self.switch_s(
            Phase.ROLLOUT, footprint.rollout_device_bytes or 0.0, is_spilled=_spills(cluster, Phase.ROLLOUT)
        )
        train_s = self.switch_s(
            Phase.TRAIN, footprint.train_device_bytes or 0.0, is_spilled=_spills(cluster, Phase.TRAIN)
        )
        if rollout_s is None or train_s is None:
            return None
        return SwitchEstimate(rollout_s=rollout_s, train_s=train_s)

    def migration_of(self, config: TrainingConfig) -> MigrationEstimate | None:
        """Estimate a migration at the expected context; None where this model with these slots was not measured.

        Recomputation has no estimate where it had other bits, or where new weights may come between decoding and
        recomputation.
        """
        measured = (config.rollout.num_slots, model_of(config))
        times = next(
            (migration for migration in self.migrations if (migration.num_slots, migration.model) == measured), None
        )
        if times is None or config.rollout.engine.name != "rlmux":
            return None
        context = expected_context(config.rollout)
        keeps_weights = config.algorithm.staleness == 0 and config.rollout.interruptible is None
        may_recompute = times.is_recompute_exact and keeps_weights
        return MigrationEstimate(
            copy_s=times.copy_s_per_token * context,
            recompute_s=times.recompute_s_per_token * context if may_recompute else math.inf,
        )


def _spills(cluster: Cluster, phase: Phase) -> bool:
    pool = cluster.pool_serving(phase)
    return pool is not None and pool.spills_to_disk
