"""What a simulation keeps: of a pipeline, of an order under way, of trajectories between two devices.

    Actor     one per pipeline; `stored` is work that nobody runs just now
    Running   one per order that computes, or switches
    Moving    one per migration

Every unfinished trajectory is in exactly one of these, or in a share that has not begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlmux.core.actions import MigrateShard, RunStage
from rlmux.core.model import DeviceId, Placement, Stage
from rlmux.sim.models.work import Remaining
from rlmux.sim.workloads.arrivals import Arrival
from rlmux.sim.world import TrueSeconds


@dataclass(slots=True, eq=False)
class Actor:
    """A pipeline as the world sees it."""

    arrival: Arrival
    last_stage: Stage
    """Its end is the end of a step."""
    world: TrueSeconds
    placement: Placement | None = None
    train_scale: float = 1.0
    stored: dict[DeviceId | Stage, tuple[Remaining, float]] = field(default_factory=dict)
    """Work that was paused, or got trajectories while nobody ran it, and since when: a rollout's by device."""
    has_started: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Running:
    """An order under way."""

    action: RunStage
    actor: Actor
    work: Remaining
    began_s: float
    switch_s: float
    since_s: float
    """Up to when its work was moved on; until its switch is over, when that will be."""
    device_fraction: float
    pace: float = 1.0
    busy_s: float = 0.0
    """Seconds of computing, times device fraction."""
    waited_s: float = 0.0
    """For environments, with nothing to compute."""
    reported: tuple[int, int, int] | None = None
    sequence: int = 0
    """Of its entry in the heap; others are stale."""

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return self.action.devices

    @property
    def kind(self) -> str:
        return self.work.kind

    @property
    def is_waiting(self) -> bool:
        return self.work.idle_s > 0.0

    @property
    def is_share(self) -> bool:
        return self.action.stage is Stage.GENERATE

    @property
    def place(self) -> DeviceId | Stage:
        return place_of(self.action)


@dataclass(slots=True, eq=False)
class Moving:
    """Trajectories between two devices."""

    action: MigrateShard
    actor: Actor
    trajectories: list[Any]
    cost_s: float
    """On the target, before they go on."""


def place_of(action: RunStage) -> DeviceId | Stage:
    """Under which its work is kept while nobody runs it."""
    return action.devices[0] if action.stage is Stage.GENERATE else action.stage
