"""The names that every second of a device gets.

kind     cause                               pipeline
busy     compute, tail                       the one that computes
switch   switch, starting                    the one whose state is loaded
bubble   waiting for rollout | rewards |     the one that is waited for
         training | cycle slot, sync, ...
         tool wait, lost work, control,      the one that holds the device
         worker stood still
         held back                           -
idle     client                              the one whose client has requested nothing
         nothing admitted, down              -
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rlmux.core.model import OrderId, PipelineId, Stage


class Kind(StrEnum):
    BUSY = "busy"
    SWITCH = "switch"
    BUBBLE = "bubble"
    IDLE = "idle"


class Cause(StrEnum):
    """Why a device computes, switches or stands still. `Interval.pipeline` names the pipeline that is waited for."""

    COMPUTE = "compute"
    TAIL = "tail"
    SWITCH = "switch"
    STARTING = "starting"
    TOOL_WAIT = "tool wait"
    ROLLOUT = "waiting for rollout"
    REWARD = "waiting for rewards"
    TRAINING = "waiting for training"
    SYNC = "sync"
    CYCLE_SLOT = "waiting for cycle slot"
    DEVICES = "waiting for the other devices"
    MIGRATION = "migration"
    HELD_BACK = "held back"
    LOST = "lost work"
    STANDSTILL = "worker stood still"
    CONTROL = "control"
    CLIENT = "client"
    """The client of an on-demand pipeline has requested nothing."""
    NOTHING_ADMITTED = "nothing admitted"
    DOWN = "down"


class Interval(NamedTuple):
    """A stretch of one device's time with one name, in seconds of the run's clock.

    A long run has hundreds of thousands: a named tuple is made in a third of the time that a frozen dataclass takes.
    """

    start_s: float
    end_s: float
    kind: Kind
    cause: Cause
    pipeline: PipelineId | None = None
    """The pipeline that computes or switches; in a gap, the one that is waited for."""
    step: int = 0
    stage: Stage | None = None
    order: OrderId | None = None
    device_fraction: float = 1.0
    lane: int = 0
    """Row among the orders that run beside each other on the device; 0 where an order has it alone."""
    is_open: bool = False
    """True where nothing in the log ends it: it lasts to the last known time."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """Its name as shown: `waiting for rollout of sort`, `tail`, `control`."""
        return label_of(self.cause, self.pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Seconds of one device that are put down to one cause."""

    kind: Kind
    cause: Cause
    pipeline: PipelineId | None
    """The interval's pipeline; None for control, which belongs to no pipeline."""
    seconds: float

    @property
    def label(self) -> str:
        """Its name as shown."""
        return label_of(self.cause, self.pipeline)


def label_of(cause: Cause, pipeline: PipelineId | None) -> str:
    """The cause's name, with the pipeline where the cause is about one."""
    return f"{cause} of {pipeline}" if pipeline is not None and cause in _NAMES_PIPELINE else str(cause)


_NAMES_PIPELINE = (
    Cause.ROLLOUT, Cause.REWARD, Cause.TRAINING, Cause.SYNC, Cause.CYCLE_SLOT, Cause.DEVICES, Cause.MIGRATION,
    Cause.CLIENT,
)  # fmt: skip
