"""The names that every second of a device gets.

kind     cause                               pipeline
busy     compute, tail                       who computes
switch   switch, starting                    who is loaded
bubble   waiting for rollout | rewards |     who is waited for
         training | turn, sync, ...
         tool wait, lost work, control       who holds the device
         held back                           -
idle     nothing admitted, down              -
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmux.core.model import OrderId, PipelineId, Stage


class Kind(StrEnum):
    BUSY = "busy"
    SWITCH = "switch"
    BUBBLE = "bubble"
    IDLE = "idle"


class Cause(StrEnum):
    """Why a device does what it does. Those that wait for a pipeline say which in `Interval.pipeline`."""

    COMPUTE = "compute"
    TAIL = "tail"
    SWITCH = "switch"
    STARTING = "starting"
    TOOL_WAIT = "tool wait"
    ROLLOUT = "waiting for rollout"
    REWARD = "waiting for rewards"
    TRAINING = "waiting for training"
    SYNC = "sync"
    TURN = "waiting for turn"
    DEVICES = "waiting for the other devices"
    MIGRATION = "migration"
    HELD_BACK = "held back"
    LOST = "lost work"
    CONTROL = "control"
    NOTHING_ADMITTED = "nothing admitted"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of one device's time with one name."""

    start_s: float
    end_s: float
    kind: Kind
    cause: Cause
    pipeline: PipelineId | None = None
    """Who computes or switches; in a gap, who is waited for."""
    step: int = 0
    stage: Stage | None = None
    order: OrderId | None = None
    device_fraction: float = 1.0
    lane: int = 0
    """Orders that share a device lie side by side; 0 where it is not shared."""
    is_open: bool = False
    """Nothing in the log ends it: drawn to the last known time."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """`waiting for rollout of sort`, `tail`, `control`."""
        return label_of(self.cause, self.pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of a device under one name."""

    kind: Kind
    cause: Cause
    pipeline: PipelineId | None
    """As in Interval; None for control, which is nobody's."""
    seconds: float

    @property
    def label(self) -> str:
        return label_of(self.cause, self.pipeline)


def label_of(cause: Cause, pipeline: PipelineId | None) -> str:
    return f"{cause} of {pipeline}" if pipeline is not None and cause in _NAMES_PIPELINE else str(cause)


_NAMES_PIPELINE = (
    Cause.ROLLOUT, Cause.REWARD, Cause.TRAINING, Cause.SYNC, Cause.TURN, Cause.DEVICES, Cause.MIGRATION,
)  # fmt: skip
