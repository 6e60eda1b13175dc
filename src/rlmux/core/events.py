"""Facts, in the past tense: everything that can reach the scheduler. Time is a field, never a clock.

    driver ── event ──▶ Scheduler.handle ──▶ [actions] ──▶ driver

An event that ends an order names it. Seconds inside events are the driver's measurements (or the simulator's truth).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmux.core.model import DeviceId, NodeId, OrderId, Pipeline, PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSubmitted:
    time_s: float
    pipeline: Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCancelled:
    """Its owner wants it gone; running orders end first (they are paused)."""

    time_s: float
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFailed:
    """The pipeline's own fault. Its running orders have ended with it: no other event will name them."""

    time_s: float
    pipeline: PipelineId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished:
    """The order's work is complete."""

    time_s: float
    order: OrderId
    seconds: float
    """Of computing, switches left out."""
    switch_s: float = 0.0
    """Spent offloading the previous resident and loading this one."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePaused:
    """The order stopped at a safe point with work left; the work is ready again."""

    time_s: float
    order: OrderId
    seconds: float
    switch_s: float = 0.0
    tokens: int = 0
    is_waiting: bool = False
    """A rollout share that can compute nothing until one of its environments replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyArrived:
    """An environment has replied to a paused share that had nothing to compute: it has now."""

    time_s: float
    pipeline: PipelineId
    device: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFinished:
    """Progress of a running order; the order goes on."""

    time_s: float
    order: OrderId
    num_active: int
    num_waiting: int
    num_waiting_for_env: int = 0
    """Waiting for their environment: the device does nothing for them."""
    tokens: int = 0
    """Since the order began."""
    seconds: float = 0.0
    """Since the order began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesMigrated:
    """A MigrateShard order is complete: its sources hold nothing of that step any more."""

    time_s: float
    order: OrderId
    num_trajectories: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A rollout worker died and was replaced: the order it ran has ended, and what it had not handed over is to
    be done again."""

    time_s: float
    pipeline: PipelineId
    device: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRestarted:
    """A pipeline's host or trainer died and came back from a checkpoint. Its running orders have ended, and all
    that came after the restored step is to be done again (with the same result)."""

    time_s: float
    pipeline: PipelineId
    restored_step: int
    """-1: not even the warm start is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    time_s: float
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    time_s: float
    node: NodeId


Event = (
    PipelineSubmitted
    | PipelineCancelled
    | PipelineFailed
    | StageFinished
    | StagePaused
    | ReplyArrived
    | ChunkFinished
    | TrajectoriesMigrated
    | WorkerLost
    | PipelineRestarted
    | NodeLost
    | NodeJoined
)
