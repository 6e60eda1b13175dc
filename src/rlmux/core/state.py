"""What the scheduler remembers. Mutable, and owned by `Scheduler` alone: nobody else holds one of these.

SchedulerState
├── runs:    pipeline ─▶ PipelineRun      where each pipeline is in its steps
├── groups:  group    ─▶ GroupState       its members in cyclic order, its ready work
├── devices: device   ─▶ DeviceState      who computes there, whose state is resident
└── orders:  order    ─▶ Order            what was ordered and has not ended

a rollout share (one step's trajectories on one device):  CLOSED ─▶ READY ─▶ RUNNING ─▶ DONE
                                                                      ▲         │
                                                                      └─ paused ┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from rlmux.core.actions import Switch
from rlmux.core.estimates import StepHistory
from rlmux.core.model import (
    DeviceId,
    GroupId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    PipelineStatus,
    Placement,
    Stage,
)


@dataclass(frozen=True, slots=True)
class ReadyWork:
    """Work that could start now, were its devices free. Frozen: policies see these."""

    pipeline: PipelineId
    step: int
    stage: Stage
    phase: Phase
    devices: tuple[DeviceId, ...]
    """One for a share of a rollout, every training device for a training stage."""
    since_s: float
    sequence: int
    """Total order of becoming ready: ties in time are broken on purpose."""
    is_continuation: bool
    """Its phase has begun: an earlier training stage of the step ran, or this share was paused."""
    is_waiting: bool = False
    """A paused shard of which every trajectory waits for its environment: started, it would compute nothing yet."""
    migrate_to: DeviceId | None = None
    """The device to which this shard was paused to migrate. Set while the policy is asked once: it makes the migration,
    or the shard is ready like any other."""


class OrderStatus(StrEnum):
    RUNNING = "running"
    PAUSING = "pausing"


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
    started_s: float
    status: OrderStatus = OrderStatus.RUNNING
    migrates_from: DeviceId | None = None
    """Set for a MigrateShard: `devices` is then its target, and it leases nothing."""
    is_fresh: bool = False
    """Of a MigrateShard: the share had not begun."""
    switch: Switch = Switch.NONE
    slowdown: float = 1.0
    """Expected at its device fraction beside whoever shares its devices."""
    paced_s: float = 0.0
    """Since when it has that slowdown."""
    solo_s: float = 0.0
    """Seconds up to then, each divided by the slowdown of its time."""
    migrate_to: DeviceId | None = None
    """The device to which the shard migrates once this order has paused; set only while it is PAUSING."""
    num_active: int | None = None
    num_waiting: int = 0
    num_waiting_for_env: int = 0
    tokens: int = 0
    """The last progress report; None before the first."""


@dataclass(frozen=True, slots=True)
class GroupLook:
    """What a plan of a group depends on, in whole steps: most progress reports leave it as it is."""

    ready: tuple[tuple[int, bool], ...]
    """Sequence of each ready work, and whether it waits for an environment."""
    running: tuple[tuple[OrderId, bool, int], ...]
    """Each order that computes: its id, whether it is pausing, and the bit length of its active count."""
    num_idle: int
    """Orders whose every slot waits for an environment."""
    num_migrating: int


@dataclass(slots=True)
class DeviceState:
    id: DeviceId
    orders: dict[OrderId, float] = field(default_factory=dict)
    """Level of each order computing here; they sum to at most 1."""
    residents: dict[tuple[PipelineId, Phase], float | None] = field(default_factory=dict)
    """Device bytes of each state kept here, least recently used first; None fills the device."""
    memory_bytes: float = math.inf


@dataclass(slots=True)
class PipelineRun:
    pipeline: Pipeline
    submitted_s: float
    sequence: int
    """Of submission: the order in which waiting pipelines are tried."""
    status: PipelineStatus = PipelineStatus.WAITING
    reason: str = ""
    placement: Placement | None = None
    next_placement: Placement | None = None
    """Where it goes at its next step boundary; the ledger counts it there already."""
    rollout_devices: tuple[DeviceId, ...] = ()
    train_devices: tuple[DeviceId, ...] = ()
    rollout_step: int = 0
    """The step whose rollout is open, or the last one generated."""
    open_shares: dict[DeviceId, ReadyWork | OrderId | None] = field(default_factory=dict)
    """Of `rollout_step`: ready work, the order that runs it, or None when done. Empty: no rollout is open."""
    generated_step: int = 0
    """Last step whose trajectories are all complete."""
    train_step: int = 0
    """The step in training, or the last one trained. 0 is the warm start."""
    train_stage: int | None = None
    """Index into its training stages of the one that is ready or runs; None between steps."""
    train_work: ReadyWork | OrderId | None = None
    trained_step: int = -1
    published_version: int = -1
    steps_per_cycle: int = 1
    """Steps in each meta-iteration of its group."""
    cycle_index: int = 0
    """In the cyclic order of its group."""
    phases_started: dict[tuple[Phase, DeviceId], int] = field(default_factory=dict)
    """Phases begun on each device: whose turn it is in the meta-iteration."""
    host_resident: set[tuple[Phase, DeviceId]] = field(default_factory=set)
    """Where a load is warm: state was there before (membership tests only)."""
    admitted_s: float = 0.0
    history: StepHistory = field(init=False)
    """What its steps took: estimates for the policies that plan ahead."""
    restart_step: int = 0
    """What it begins from when it is placed: the last step whose result is kept; -1 before the warm start."""

    train_stages: tuple[Stage, ...] = field(init=False)
    """The pipeline's, kept because every training order asks for them."""

    def __post_init__(self) -> None:
        self.history = StepHistory(self.pipeline)
        self.train_stages = self.pipeline.train_stages


@dataclass(slots=True)
class GroupState:
    id: GroupId
    members: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """In cyclic order: the order of joining."""
    ready: dict[int, ReadyWork] = field(default_factory=dict)
    """By sequence."""
    running: dict[OrderId, Order] = field(default_factory=dict)
    """Orders of its members that compute, in the order they were given."""
    members_by_device: dict[tuple[Phase, DeviceId], dict[PipelineId, PipelineRun]] = field(default_factory=dict)
    planned: GroupLook | None = None
    """What the group looked like when its policy last planned it; None before the first time."""
    announced: dict[int, None] = field(default_factory=dict)
    """Ready work, by sequence, whose state the driver was told to read ahead."""


@dataclass(slots=True)
class SchedulerState:
    runs: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    groups: dict[GroupId, GroupState] = field(default_factory=dict)
    devices: dict[DeviceId, DeviceState] = field(default_factory=dict)
    orders: dict[OrderId, Order] = field(default_factory=dict)
    now_s: float = 0.0
    next_order: int = 1
    next_sequence: int = 1
