"""Work that devices do for pipelines: what is ready, who runs it, and the orders that have not ended.

    RolloutShard  ─┐
    TrainingStage ─┼─▶ ReadyWork, which policies see ── RunStage ─▶ Order
    RequestBatch  ─┘

`step_machine` holds the legal moves of shards, training stages and batches, and makes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmux.core.actions import Switch
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, Stage


class WorkState(StrEnum):
    """Where a rollout shard or a training stage is in its life."""

    __hash__ = str.__hash__  # an Enum's own is Python code, and these are the keys of every move

    READY = "ready"
    """It could start now, were its devices free."""
    WAITING_FOR_ENV = "waiting_for_env"
    """A paused shard of which every trajectory waits for its environment: started, it would compute nothing yet."""
    RUNNING = "running"
    PAUSING = "pausing"
    """Its order is to pause and has not ended."""
    MIGRATING = "migrating"
    """A shard whose trajectories are on their way to another device."""
    DONE = "done"
    """Nothing of it is left to do in this step."""


@dataclass(frozen=True, slots=True)
class ReadyWork:
    """Work that could start now, were its devices free. Frozen: policies see these."""

    pipeline: PipelineId
    step: int
    stage: Stage
    phase: Phase
    devices: tuple[DeviceId, ...]
    """One device for a rollout shard, every training device for a training stage."""
    since_s: float
    """Time at which it became ready."""
    sequence: int
    """Total order of becoming ready: ties in time are broken on purpose."""
    is_continuation: bool
    """Its phase has begun: an earlier training stage of the step ran, or this shard was paused."""
    is_waiting: bool = False
    """A shard in state WAITING_FOR_ENV."""
    migrate_to: DeviceId | None = None
    """Device to which this shard was paused to migrate, until the policy has chosen once; then it is like any other."""
    kind: tuple[Phase, ...] = ()
    """Kind of a batch; empty for work of a planned step."""
    rollout_devices: tuple[DeviceId, ...] = ()
    """Devices of a batch of both phases that it uses as a rollout, where `phase` is training; else empty."""

    @property
    def is_batch(self) -> bool:
        """Whether it arrived: it then starts on all its devices at once."""
        return bool(self.kind)

    @property
    def takes_slot(self) -> bool:
        """Whether it begins a phase in its pipeline's cycle slot. A batch of both phases belongs to no one cycle."""
        return not self.is_continuation and self.step > 0 and len(self.kind) < 2

    def phase_on(self, device: DeviceId) -> Phase:
        """The phase whose state it needs on the device."""
        return Phase.ROLLOUT if device in self.rollout_devices else self.phase


@dataclass(slots=True)
class RolloutShard:
    """The part of a step's rollout that one device has."""

    work: ReadyWork
    """The value that policies see while it is READY or WAITING_FOR_ENV; the last such value afterwards."""
    state: WorkState = WorkState.READY
    order: OrderId | None = None
    """The order that runs or migrates it; None where there is none."""
    migrate_to: DeviceId | None = None
    """The device to which it is to migrate once it is paused; set only while it is PAUSING."""

    @property
    def device(self) -> DeviceId:
        return self.work.devices[0]

    @property
    def is_ready(self) -> bool:
        """It is in its group's ready work, with or without something to compute."""
        return self.state is WorkState.READY or self.state is WorkState.WAITING_FOR_ENV


@dataclass(slots=True)
class TrainingStage:
    """The training of a pipeline: one stage of one step at a time. DONE between two steps."""

    work: ReadyWork | None = None
    """The value that policies see while it is READY; the last such value afterwards; None before the first."""
    state: WorkState = WorkState.DONE
    order: OrderId | None = None
    """The order that runs it; None where there is none."""
    index: int | None = None
    """Number of the stage among the pipeline's training stages; None between steps and for the SFT warm-up."""

    @property
    def is_open(self) -> bool:
        """A stage of it is ready or runs."""
        return self.state is not WorkState.DONE


@dataclass(slots=True)
class RequestBatch:
    """Announced work of one kind of an on-demand pipeline, as `on_demand_work.py` draws it. DONE if there is none."""

    kind: tuple[Phase, ...]
    """Phases of whose devices it needs all."""
    work: ReadyWork | None = None
    """The value that policies see while it is READY; the last such value afterwards; None before the first."""
    state: WorkState = WorkState.DONE
    order: OrderId | None = None
    """The order that runs it; None where there is none."""
    number: int = 0
    """Number of the open batch, or of the last one, from 1: the step of its orders."""
    units: int = 0
    """Size of the open batch; 0 where it is unknown."""
    step: int | None = None
    """Step of the client to which its last work belongs; None where the client names none."""
    solo_s: float = 0.0
    """Solo seconds of the open batch's orders so far."""
    held_s: float = 0.0
    """Seconds for which they held their devices, switches left out."""
    next_units: int | None = None
    """Size of the work that arrived while it ran, and that the next batch is; None where none did."""
    is_due: bool = False
    """Whether it opens, under its number, as soon as the pipeline is placed."""

    @property
    def is_open(self) -> bool:
        """It is ready or runs."""
        return self.state is not WorkState.DONE

    @property
    def is_begun(self) -> bool:
        """An order of it has run."""
        return self.work is not None and self.work.is_continuation


Work = RolloutShard | TrainingStage | RequestBatch
"""What an order runs on devices."""


@dataclass(slots=True)
class Order:
    """A RunStage or MigrateShard that has not ended."""

    id: OrderId
    pipeline: PipelineId
    step: int
    stage: Stage
    phase: Phase
    devices: tuple[DeviceId, ...]
    device_fraction: float
    """Part of each device that it may use; 0 for one that leases no device."""
    started_s: float
    work: Work | None = None
    """The shard, training stage or batch that it runs or migrates; None for rewards and publications."""
    rollout_devices: tuple[DeviceId, ...] = ()
    """As in ReadyWork."""
    migrates_from: DeviceId | None = None
    """Source of a MigrateShard: `devices` are then its targets, and it leases nothing. None for a RunStage."""
    is_fresh: bool = False
    """A MigrateShard of a shard that had not begun."""
    switch: Switch = Switch.NONE
    slowdown: float = 1.0
    """Expected at its device fraction beside the orders that share its devices."""
    rate_since_s: float = 0.0
    """Time from which it has had that slowdown."""
    solo_s: float = 0.0
    """Seconds up to `rate_since_s`, each divided by the slowdown of its time."""
    num_active: int | None = None
    """Sequences decoding at the last progress report; None before the first."""
    num_waiting: int = 0
    """Sequences waiting for a slot at the last progress report."""
    num_waiting_for_env: int = 0
    """Sequences waiting for their environment at the last progress report."""
    has_waited_for_env: bool = False
    """Whether a progress report counted sequences that wait for their environment."""
    tokens: int = 0
    """Tokens since it began, at the last progress report."""

    @property
    def is_pausing(self) -> bool:
        return self.work is not None and self.work.state is WorkState.PAUSING

    def phase_on(self, device: DeviceId) -> Phase:
        """The phase whose state it uses on the device."""
        return Phase.ROLLOUT if device in self.rollout_devices else self.phase
