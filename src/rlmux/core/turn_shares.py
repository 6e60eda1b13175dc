"""What is remembered of turns: who is to hold which kind of nodes for which part of the time, and who held them.

Claim ── policy.turns ─▶ Turn            targets X ── seconds held ─▶ deficits, whenever targets are made anew
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlmux.core.model import Pipeline, PipelineId, Placement
from rlmux.core.placement_choice import PlacementChoice


class Configuration(NamedTuple):
    """Pools whose nodes a pipeline holds at once; the same twice where both phases share nodes."""

    rollout: str
    train: str


Seconds = Mapping[Configuration, float]


def configuration_of(placement: Placement) -> Configuration:
    """The pools of a placement's nodes."""
    return Configuration(placement.rollout_nodes[0].pool, placement.train_nodes[0].pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A pipeline that waits for a turn, or whose turn is over."""

    pipeline: Pipeline
    holds: Configuration | None = None
    """Nodes that it holds now, free for others once its turn is over; None where it waits."""
    targets: Seconds = field(default_factory=dict)
    """Part of the time, 0 to 1, for which it is to hold nodes of each configuration; empty where not decided yet."""
    received_s: Seconds = field(default_factory=dict)
    """Seconds for which it held nodes of each configuration since the targets were made."""
    deficits_s: Seconds = field(default_factory=dict)
    """Seconds by which it received less than earlier targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Nodes that a pipeline holds from now on, alone, until a step boundary after the length of a turn."""

    configuration: Configuration
    choice: PlacementChoice


@dataclass(slots=True)
class TurnShares:
    """Targets and what was received since they were made."""

    known: tuple[Pipeline, ...] = ()
    """Pipelines that the targets are for, as they were believed then."""
    num_nodes: tuple[float, ...] = ()
    """Nodes of each phase's pool that there were then, lost ones left out."""
    since_s: float = -math.inf
    """Time at which the targets were made."""
    targets: dict[PipelineId, Seconds] = field(default_factory=dict)
    """Target part of the time by pipeline."""
    received_s: dict[PipelineId, dict[Configuration, float]] = field(default_factory=dict)
    """Seconds received by pipeline since the targets were made."""
    deficits_s: dict[PipelineId, dict[Configuration, float]] = field(default_factory=dict)
    """Seconds by which pipelines received less than earlier targets."""
    counted_s: dict[PipelineId, float] = field(default_factory=dict)
    """Time up to which what a pipeline receives is counted, of all that hold nodes."""
