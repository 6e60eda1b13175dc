"""What a simulation keeps of a pipeline, of a running order, and of trajectories between two devices.

    SimPipeline    one per pipeline; its PausedWork is work that no order runs
    RunningOrder   one per order that switches, computes or waits for an environment
    Migration      one per MigrateShard whose trajectories have not arrived

Invariant: every unfinished trajectory is in exactly one of these, or in a rollout shard that has not begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlmux.core.actions import MigrateShard, RunStage
from rlmux.core.estimation.batch_slowdowns import expected_slowdown
from rlmux.core.model import PHASE_BY_STAGE, SUB_STAGE_BY_STAGE, DeviceId, Placement, Stage, SubStage
from rlmux.sim.clients import SimClient
from rlmux.sim.models.work import SoloSeconds, Work
from rlmux.sim.workloads.arrivals import Arrival
from rlmux.sim.world import TrueSeconds

WorkKey = DeviceId | Stage
"""Key of a pipeline's work: the device of a rollout shard, or the stage of anything else."""


@dataclass(slots=True, eq=False)
class PausedWork:
    """Work that no order runs."""

    work: Work
    advanced_to_s: float
    """Time up to which the work is advanced."""

    def advance(self, to_s: float) -> None:
        """Let time pass: nothing is computed, and waits for environments go on."""
        self.work.advance(to_s - self.advanced_to_s, 0.0)
        self.advanced_to_s = to_s


@dataclass(slots=True, eq=False)
class SimPipeline:
    """One pipeline in the simulated world."""

    arrival: Arrival
    last_stage: Stage
    """Stage whose end is the end of a step."""
    world: TrueSeconds
    """True durations on the nodes that the pipeline is placed on."""
    placement: Placement | None = None
    rollout_devices: tuple[DeviceId, ...] = ()
    train_scale: float = 1.0
    """Requested training nodes over placed ones; 1 unless the simulation rescales training."""
    paused: dict[WorkKey, PausedWork] = field(default_factory=dict)
    client: SimClient | None = None
    """Its client, where its work arrives."""
    num_train_devices: int = 0
    """Devices of its training nodes."""
    has_started: bool = False
    is_over: bool = False

    def resume(self, action: RunStage, at_s: float) -> Work | None:
        """Take the paused work that the order continues, advanced to that time; None: it continues nothing."""
        paused = self.paused.pop(work_key(action), None) if self.paused else None
        if paused is None:
            return None
        paused.advance(at_s)
        return paused.work

    def fresh_work(self, action: RunStage) -> Work:
        """The whole work of an order that continues nothing."""
        stage = action.stage
        if self.client is not None:
            sub_stage = SubStage.DENSE_DECODE if stage is Stage.GENERATE else SubStage.UPDATE
            return SoloSeconds(self.client.batches[self.batch_of(action)].seconds, sub_stage)
        if stage is Stage.GENERATE:
            return self.fresh_shard(action.step, action.devices[0])
        seconds = self.world.stage_s(stage, action.step, len(action.devices))
        if action.devices:
            seconds *= self.train_scale
        return SoloSeconds(seconds, SUB_STAGE_BY_STAGE.get(stage, SubStage.UPDATE))

    def batch_of(self, action: RunStage) -> int:
        """Number of the client's batch that the order works on."""
        assert self.client is not None
        return self.client.batch_of(action.stage, action.devices, self.num_train_devices)

    def fresh_shard(self, step: int, device: DeviceId) -> Work:
        """The rollout shard of a device, with nothing of it done."""
        devices = self.rollout_devices
        num_devices = len(devices)
        return self.world.shard(step, devices.index(device) if num_devices > 1 else 0, num_devices)


@dataclass(slots=True, eq=False)
class SimOrder:
    """An order that switches, computes or waits for an environment; `RunningOrders` alone changes it."""

    action: RunStage
    pipeline: SimPipeline
    work: Work
    began_s: float
    """Time of the order."""
    switch_s: float
    """Seconds of its switch, before anything is computed."""
    advanced_to_s: float
    """Time up to which its work is advanced; while it switches, the end of the switch."""
    device_fraction: float
    rate: float = 1.0
    """Solo seconds per second."""
    busy_s: float = 0.0
    """Seconds of computing so far, each times the device fraction."""
    waited_s: float = 0.0
    """Seconds so far with nothing to compute."""
    prefill_s: float = 0.0
    """Seconds before its first decode step; 0 until then."""
    reported: tuple[int, int, int] | None = None
    """Counts of the last progress report."""
    entry: int = 0
    """Number of its entry in the kernel; others are stale. -1: it has stopped."""

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return self.action.devices

    @property
    def sub_stage(self) -> SubStage:
        return self.work.sub_stage

    @property
    def base(self) -> str:
        return self.pipeline.arrival.pipeline.base_of(PHASE_BY_STAGE[self.action.stage])

    def slowdown_in_batch(self, num_together: int) -> float:
        """Its seconds in a batch of so many of its base, over its seconds alone: as expected before any was seen."""
        return expected_slowdown(self.pipeline.arrival.pipeline, PHASE_BY_STAGE[self.action.stage], num_together)

    @property
    def is_waiting(self) -> bool:
        return self.work.idle_s > 0.0

    @property
    def is_rollout(self) -> bool:
        return self.action.stage is Stage.GENERATE

    @property
    def key(self) -> WorkKey:
        return work_key(self.action)


@dataclass(slots=True, eq=False)
class Migration:
    """Trajectories between two devices."""

    action: MigrateShard
    pipeline: SimPipeline
    trajectories: list[Any]
    cost_s: float
    """Solo seconds on the target before the trajectories continue."""


def work_key(action: RunStage) -> WorkKey:
    """The key under which the order's work is kept while it is paused."""
    return action.devices[0] if action.stage is Stage.GENERATE else action.stage
