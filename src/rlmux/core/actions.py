"""Orders, in the imperative: everything the scheduler can request of a driver.

RunStage / MigrateShard carry an id; exactly one event names it when it ends
    RunStage ─▶ ChunkFinished* ─▶ StageFinished | StagePaused (after a Pause, or when the driver must stop)
    MigrateShard  ─▶ TrajectoriesMigrated
the others take effect at once
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmux.core.model import (
    AdmissionKind,
    AlikeSeconds,
    BoundedSteps,
    DeviceId,
    MeasuredSeconds,
    NodeId,
    OrderId,
    PipelineId,
    Placement,
    Resident,
    Stage,
)


class Switch(StrEnum):
    """What must happen on the order's devices before its work can start."""

    NONE = "none"
    """The pipeline's state is there."""
    WARM = "warm"
    """Load it from host memory."""
    COLD = "cold"
    """Start it from its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Pin the pipeline to these nodes and start its processes there."""

    pipeline: PipelineId
    placement: Placement
    kind: AdmissionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocate:
    """Pin an admitted pipeline to other nodes, at a step boundary."""

    pipeline: PipelineId
    placement: Placement
    expected_step_s: float | None = None
    """Expected seconds of its steps there, for people and reports; None where nothing is known of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The pipeline can never fit on this cluster; the reason has the numbers."""

    pipeline: PipelineId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The pipeline fits, but not now; it is tried again whenever something leaves."""

    pipeline: PipelineId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectSteps:
    """What is expected of the pipeline's steps from now on, for people and reports: a driver has nothing to do."""

    pipeline: PipelineId
    measured: MeasuredSeconds | None
    """Solo seconds that its own steps took, before the third those of pipelines alike, which it is planned with; None
    where they are near the estimate that its user gave."""
    step_slowdown: float
    """Expected step slowdown in the meta-iteration of its group."""
    reason: str
    """Why its SLO cannot be promised where it is, in one line with the numbers; empty where it can, or there is
    none."""
    probability: float | None = None
    """Probability with which the mean of the steps that are left keeps its SLO in its group as planned; 1 where it is
    alone; None if none was requested, or none can be stated."""
    bounded: BoundedSteps | None = None
    """Upper bounds on the mean of its coming steps, and the steps that they follow from; None for a pipeline without a
    probability, and where nothing is known of it."""
    alike: AlikeSeconds | None = None
    """What the next pipelines alike that come without an estimate are planned with; None: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPolicyFault:
    """A decision of the policy failed, and the plain order of work stands in for it: for people and reports, a driver
    has nothing to do. The same error of the same method is reported once."""

    policy: str
    method: str
    """`place`, `rebalance` or `dispatch`; `give_turns` of a policy whose pipelines hold nodes by turns."""
    error: str
    """What it raised, or chose that is not allowed, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """The pipeline gives its nodes back and waits: end its processes. It goes on from a checkpoint where it is admitted
    next, and `PipelineRestarted` names it."""

    pipeline: PipelineId
    is_awaited: bool = False
    """Whether it stands at a step boundary and keeps its devices until `PipelineParked` confirms that its checkpoint is
    written and its processes have ended; False: it has lost a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remind:
    """Send `TimeReached` at this time: something may start then, though nothing else happens."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectLoss:
    """Tell of the node's loss at this time, unless it is lost before: what is there then ends."""

    node: NodeId
    at_s: float | None
    """Time of the loss; None: the node stays after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The pipeline is over: end its processes; its nodes are free."""

    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStage:
    """Work on a stage until it is complete or paused."""

    order: OrderId
    pipeline: PipelineId
    step: int
    stage: Stage
    devices: tuple[DeviceId, ...]
    """One device for a rollout shard, every training device for a training stage, none for REWARD and PUBLISH. For work
    that arrived all devices of its phases, each once, rollout first; `step` is then the batch's number."""
    weight_version: int
    """Weight version that the stage computes with; 0 for work that arrived."""
    device_fraction: float = 1.0
    """Part of each device that it may use, one of those prepared there."""
    switch: Switch = Switch.NONE
    evicted: tuple[Resident, ...] = ()
    """States that must leave the devices before its own is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Stop the order at its next safe point."""

    order: OrderId


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateShard:
    """Migrate a rollout shard's unfinished trajectories to other workers of the pipeline. Nothing is dropped."""

    order: OrderId
    pipeline: PipelineId
    step: int
    source: DeviceId
    target: DeviceId
    copies_kv: bool
    """Whether the KV cache is copied; False: the target computes it again from the tokens."""
    others: tuple[DeviceId, ...] = ()
    """Targets besides: each trajectory goes to the one that has the fewest then."""

    @property
    def targets(self) -> tuple[DeviceId, ...]:
        return (self.target, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDeviceFraction:
    """Change the fraction of its devices that a running order may use."""

    order: OrderId
    device_fraction: float


Action = (
    Admit
    | Relocate
    | Refuse
    | Queue
    | ExpectSteps
    | ReportPolicyFault
    | Park
    | Remind
    | ExpectLoss
    | Release
    | RunStage
    | Pause
    | MigrateShard
    | SetDeviceFraction
)
