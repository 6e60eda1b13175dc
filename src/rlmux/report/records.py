"""What the log tells of orders, pins and pipelines: the values that `history.py` folds it into.

    OrderRecord      RunStage … ChunkFinished* … StageFinished | StagePaused
    Pin              Admit … Release, on one set of nodes
    PipelineRecord   status, steps, metrics
    Instant          a failure, a loss, a migration

An order that no event ended is *open*: it lasts to the last known time. One whose worker, pipeline or node went away is
*lost*: its reports stand, the rest is to be done again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlmux.core.actions import Switch
from rlmux.core.events import ChunkFinished
from rlmux.core.model import DeviceId, OrderId, Phase, Pipeline, PipelineId, PipelineStatus, Placement, Stage

STOPPED = "stopped"
"""Status of a pipeline whose run ended on purpose before it was over: it can be resumed."""


class Ending(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    PAUSED = "paused"
    LOST = "lost"


@dataclass(slots=True)
class OrderRecord:
    """A RunStage or MigrateShard and what became of it."""

    id: OrderId
    pipeline: PipelineId
    step: int
    stage: Stage
    phase: Phase
    devices: tuple[DeviceId, ...]
    start_s: float
    switch: Switch = Switch.NONE
    device_fraction: float = 1.0
    weight_version: int = 0
    is_migration: bool = False
    end_s: float = math.inf
    ending: Ending = Ending.OPEN
    seconds: float = 0.0
    """Of computing; the last report's while it is open or when it was lost."""
    switch_s: float = 0.0
    tokens: int = 0
    chunks: list[ChunkFinished] = field(default_factory=list)
    is_redone: bool = False
    """Its pipeline went back to a step before this one: the time was spent, the result does not count."""

    @property
    def counts(self) -> bool:
        """Its result is part of the run's."""
        return not self.is_redone and self.ending is not Ending.LOST


@dataclass(slots=True)
class Pin:
    """A pipeline holds nodes, from its admission to its release."""

    pipeline: PipelineId
    placement: Placement
    start_s: float
    end_s: float = math.inf


@dataclass(slots=True)
class PipelineRecord:
    pipeline: Pipeline
    submitted_s: float
    status: str = PipelineStatus.WAITING
    reason: str = ""
    admitted_s: float | None = None
    ended_s: float | None = None
    published: dict[int, float] = field(default_factory=dict)
    """When each version from step 1 on was last published."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of each step's note."""
    rollouts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Each step's `rollout` note, as it was written (runtime/rollout_record.py)."""
    weights_sha256: str | None = None

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened at one moment and that a reader of the timeline wants to see."""

    time_s: float
    what: str
    """`failure`, `loss`, `restart`, `migration`, `refused`, `cancelled`, `node lost`, `node joined`,
    `resumed`."""
    pipeline: PipelineId | None = None
    device: DeviceId | None = None
    text: str = ""
