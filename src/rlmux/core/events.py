"""Facts, in the past tense: everything that can reach the scheduler. Time is a field, never a clock.

    driver ── event ──▶ Scheduler.handle ──▶ [actions] ──▶ driver

A driver dates its events in one place, as they enter a tick (`Controller`, `Simulation`): `time_s` never decreases,
whatever thread or process an event comes from. Until then an event is `UNDATED`, and `handle` refuses it.

An event that ends an order names it. Seconds inside events are the driver's measurements (or the simulator's truth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rlmux.core.model import (
    ARRIVING_KINDS,
    AlikeSeconds,
    DeviceId,
    FailureCause,
    NodeId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
)
from rlmux.core.queue_order import AccountSpent, AccountUsage, PipelineWait, ShareSettings

UNDATED = math.nan
"""`time_s` of an event that has not entered a tick: seconds since the run began are not known for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSubmitted:
    """It comes to the run, or comes again: after it failed, or in a later part of the run."""

    time_s: float = UNDATED
    pipeline: Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCancelled:
    """The user wants it gone; running orders end first (they are paused)."""

    time_s: float = UNDATED
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHeld:
    """The user wants it not to start until `HoldReleased`."""

    time_s: float = UNDATED
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldReleased:
    """The user lets it start again, or go on where it was parked."""

    time_s: float = UNDATED
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkRequested:
    """The user wants it to give its nodes back at its next step boundary, and to wait until `HoldReleased`."""

    time_s: float = UNDATED
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParked:
    """What `Park` ordered is done: its checkpoint is written, its processes have ended, its devices are free."""

    time_s: float = UNDATED
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesSet:
    """What users and projects are entitled to beside others, from now on."""

    time_s: float = UNDATED
    shares: ShareSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRestored:
    """What users and projects had used in earlier parts of the run."""

    time_s: float = UNDATED
    usage: tuple[AccountUsage, ...]
    spent: tuple[AccountSpent, ...] = ()
    """Dollars of accounts with a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsRestored:
    """Pipelines that waited when an earlier part of the run ended; each goes on waiting once it is submitted again."""

    time_s: float = UNDATED
    waits: tuple[PipelineWait, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeRestored:
    """What steps of pipelines took in earlier parts of the run, for those alike: the oldest first."""

    time_s: float = UNDATED
    seconds: tuple[AlikeSeconds, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeReached:
    """The time of a `Remind` has come."""

    time_s: float = UNDATED


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRanked:
    """The user gives it another place among the user's own waiting pipelines."""

    time_s: float = UNDATED
    pipeline: PipelineId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFailed:
    """The pipeline's own fault. Its running orders have ended with it: no other event will name them."""

    time_s: float = UNDATED
    pipeline: PipelineId
    reason: str
    cause: FailureCause = FailureCause.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkArrived:
    """Work of one kind was announced for an on-demand pipeline; see `core/steps/on_demand_work.py`."""

    time_s: float = UNDATED
    pipeline: PipelineId
    phases: tuple[Phase, ...]
    """Kind of the work, one of `ARRIVING_KINDS`: the phases of whose devices it needs all."""
    units: int = 0
    """Size of the work, in a unit of the client's own that its seconds grow with; 0 where it is unknown."""
    step: int | None = None
    """Step of the client's own count to which it belongs: its seconds are those of all its work. None: each of its
    own."""

    def __post_init__(self) -> None:
        _check_kind(self.phases)
        if self.units < 0:
            raise ValueError(f"units is {self.units}; it must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkWithdrawn:
    """The client takes back its work of one kind that does not run."""

    time_s: float = UNDATED
    pipeline: PipelineId
    phases: tuple[Phase, ...]
    """Kind of the work, as in `WorkArrived`."""

    def __post_init__(self) -> None:
        _check_kind(self.phases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFinished:
    """The client of an on-demand pipeline is done: the pipeline is finished. Running orders end first (they are
    paused)."""

    time_s: float = UNDATED
    pipeline: PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """The part of an order that was computed in batches of several pipelines of one base."""

    num_together: int
    """Pipelines in each of these batches, 2 or more."""
    tokens: int
    """Tokens of the order's own pipeline."""
    seconds: float
    """Seconds of the batches."""
    held_s: float
    """`seconds` times the order's device fraction: what the order is charged while it runs."""
    charged_s: float
    """The pipeline's charge: its share of `seconds`, by computed tokens."""


class DecodeSpan(NamedTuple):
    """Decode iterations of an order that were about as wide."""

    num_iterations: int
    num_rows: int
    """Rows computed by all of them together."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished:
    """The order's work is complete."""

    time_s: float = UNDATED
    order: OrderId
    seconds: float
    """Seconds of computing, switches left out."""
    switch_s: float = 0.0
    """Seconds spent offloading the previous resident and loading this one."""
    tokens: int = 0
    """Tokens generated since the order began."""
    prefill_s: float = 0.0
    """Part of `seconds` in which a rollout computed the prompts before its first decode step."""
    batches: tuple[BatchShare, ...] = ()
    """Parts of it in batches with other pipelines, by the number of pipelines."""
    decoded: tuple[DecodeSpan, ...] = ()
    """Decode iterations of a rollout, by width; empty where the engine does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePaused:
    """The order stopped at a safe point with work left; the work is ready again."""

    time_s: float = UNDATED
    order: OrderId
    seconds: float
    """Seconds of computing, switches left out."""
    switch_s: float = 0.0
    """Seconds spent offloading the previous resident and loading this one."""
    tokens: int = 0
    """Tokens generated since the order began."""
    prefill_s: float = 0.0
    """Part of `seconds` in which a rollout computed the prompts before its first decode step."""
    batches: tuple[BatchShare, ...] = ()
    """Parts of it in batches with other pipelines, by the number of pipelines."""
    decoded: tuple[DecodeSpan, ...] = ()
    """Decode iterations of a rollout, by width; empty where the engine does not tell."""
    is_waiting: bool = False
    """Whether it is a rollout shard that can compute nothing until one of its environments replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyArrived:
    """An environment has replied to a paused shard that had nothing to compute: it has now."""

    time_s: float = UNDATED
    pipeline: PipelineId
    device: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOverdue:
    """Rewards have taken longer than a co-execution group waits for them; the order goes on."""

    time_s: float = UNDATED
    order: OrderId


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFinished:
    """Progress of a running order; the order goes on."""

    time_s: float = UNDATED
    order: OrderId
    num_active: int
    """Sequences that are decoding."""
    num_waiting: int
    """Sequences that wait for a slot."""
    num_waiting_for_env: int = 0
    """Sequences that wait for their environment: the device does nothing for them."""
    tokens: int = 0
    """Tokens generated since the order began."""
    seconds: float = 0.0
    """Seconds of computing since the order began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesMigrated:
    """A MigrateShard order is complete: its source holds nothing of that step any more."""

    time_s: float = UNDATED
    order: OrderId
    num_trajectories: int
    seconds: float
    num_begun: int = 0
    """Those of them that had tokens, and took their contexts along: a tail. 0: a shard that had not begun."""
    tokens: int = 0
    """Tokens of these contexts, prompts included."""
    kv_bytes: int = 0
    """Bytes of KV cache that were copied; 0 where the targets compute it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A rollout worker died and was replaced: the order that it ran has ended, and what it had not handed over is to be
    done again."""

    time_s: float = UNDATED
    pipeline: PipelineId
    device: DeviceId


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRestarted:
    """A pipeline's env worker or trainer died and came back from a checkpoint. Its running orders have ended, and all
    that came after the restored step is to be done again (with the same result)."""

    time_s: float = UNDATED
    pipeline: PipelineId
    restored_step: int
    """Last step whose result is kept; 0: the SFT warm-up is; -1: nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    time_s: float = UNDATED
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeGiven:
    """A node is about to go, as a cloud takes it back or a machine is to be mended."""

    time_s: float = UNDATED
    node: NodeId
    gone_at_s: float
    """Time at which it is gone, whatever is there then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    time_s: float = UNDATED
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPriced:
    """Nodes of a pool have another price from now on. Quotas and budgets stay at the price in the user's file."""

    time_s: float = UNDATED
    pool: str
    usd_per_gpu_hour: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.usd_per_gpu_hour < math.inf:
            raise ValueError(f"usd_per_gpu_hour is {self.usd_per_gpu_hour}; it must be 0 or more, and finite")


Event = (
    PipelineSubmitted
    | PipelineCancelled
    | PipelineHeld
    | HoldReleased
    | PipelineRanked
    | ParkRequested
    | PipelineParked
    | SharesSet
    | UsageRestored
    | WaitsRestored
    | AlikeRestored
    | TimeReached
    | PipelineFailed
    | WorkArrived
    | WorkWithdrawn
    | ClientFinished
    | StageFinished
    | StagePaused
    | ReplyArrived
    | RewardOverdue
    | ChunkFinished
    | TrajectoriesMigrated
    | WorkerLost
    | PipelineRestarted
    | NodeLost
    | NoticeGiven
    | NodeJoined
    | PoolPriced
)


def _check_kind(phases: tuple[Phase, ...]) -> None:
    """Raises ValueError for phases that are no kind of arriving work."""
    if phases not in ARRIVING_KINDS:
        accepted = ", ".join("+".join(kind) for kind in ARRIVING_KINDS)
        raise ValueError(f"phases are {'+'.join(phases) or 'none'}; accepted: {accepted}")
