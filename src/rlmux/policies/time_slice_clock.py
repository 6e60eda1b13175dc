"""The clock of a policy with time slices (`gavel`). The scheduler stores it; see `core/queue/time_slicing.py`.

    Claim ── policy.turns ─▶ SliceGrant        targets X ── seconds held ─▶ deficits, whenever targets are made anew

A module of its own: it is the state that the scheduler stores for the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlmux.core.model import Pipeline, PipelineId, Placement
from rlmux.core.placement.choice import PlacementChoice


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
class SliceGrant:
    """Nodes that a pipeline holds from now on, alone, until a step boundary after the length of a turn."""

    configuration: Configuration
    choice: PlacementChoice


@dataclass(slots=True)
class SliceClock:
    """Targets, and what was received since they were made."""

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
    held: dict[PipelineId, tuple[Configuration, float]] = field(default_factory=dict)
    """What each pipeline with nodes holds, and the time up to which that is counted."""

    def begin(self, pipeline: PipelineId, placement: Placement, now_s: float) -> None:
        """The pipeline holds these nodes from now on."""
        self.held[pipeline] = configuration_of(placement), now_s

    def end(self, pipeline: PipelineId, now_s: float) -> None:
        """The pipeline leaves its nodes."""
        self.count(now_s)
        self.held.pop(pipeline, None)

    def count(self, now_s: float) -> None:
        """Count what all pipelines with nodes have received up to now."""
        for name, (configuration, since_s) in self.held.items():
            if now_s > since_s:
                received = self.received_s.setdefault(name, {})
                received[configuration] = received.get(configuration, 0.0) + now_s - since_s
                self.held[name] = configuration, now_s

    def claim(self, pipeline: Pipeline, placement: Placement | None) -> Claim:
        """A pipeline's targets, and the seconds that it received and is owed."""
        return Claim(
            pipeline=pipeline,
            holds=None if placement is None else configuration_of(placement),
            targets=self.targets.get(pipeline.id, {}),
            received_s=self.received_s.get(pipeline.id, {}),
            deficits_s=self.deficits_s.get(pipeline.id, {}),
        )

    def are_targets_old(self, known: tuple[Pipeline, ...], num_nodes: tuple[float, ...]) -> bool:
        """Whether the targets were made for other pipelines, other seconds or other nodes."""
        return (known, num_nodes) != (self.known, self.num_nodes)

    def set_targets(
        self,
        known: tuple[Pipeline, ...],
        num_nodes: tuple[float, ...],
        targets: Mapping[PipelineId, Seconds],
        now_s: float,
    ) -> None:
        """Begin with new targets; what was received less than the old ones becomes a deficit."""
        names = {pipeline.id for pipeline in known}
        self.deficits_s = {name: self._deficits(name, now_s) for name in self.targets if name in names}
        self.received_s = {}
        self.known, self.num_nodes, self.since_s, self.targets = known, num_nodes, now_s, dict(targets)

    def _deficits(self, name: PipelineId, now_s: float) -> dict[Configuration, float]:
        received, before = self.received_s.get(name, {}), self.deficits_s.get(name, {})
        return {
            configuration: before.get(configuration, 0.0)
            + target * (now_s - self.since_s)
            - received.get(configuration, 0.0)
            for configuration, target in self.targets[name].items()
        }
