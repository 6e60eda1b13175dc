"""What a policy has chosen so far in the decision under way. Its view answers as if that had been done already.

    Policy.dispatch ── choice ─▶ plan_check ─▶ Planned ── read by ─▶ GroupView, OrderView

Nothing of it is part of the state: a decision that fails is dropped with it. What only follows once an order is given,
such as its id, or the states that it evicts, is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId


@dataclass(slots=True)
class Planned:
    """See the module."""

    gone: set[int] = field(default_factory=set)
    """Sequence numbers of ready work that starts or migrates."""
    held: dict[DeviceId, float] = field(default_factory=dict)
    """Device fraction that work which starts takes on each device."""
    states: dict[DeviceId, dict[tuple[PipelineId, Phase], float | None]] = field(default_factory=dict)
    """Device bytes of each state that work which starts needs on each device; None is unknown."""
    begun: set[tuple[PipelineId, Phase, DeviceId]] = field(default_factory=set)
    """Phases that begin, each a slot of its pipeline's cycle."""
    targets: dict[tuple[PipelineId, DeviceId], DeviceId] = field(default_factory=dict)
    """Target of each migration, by pipeline and source device."""
    pauses: dict[OrderId, DeviceId | None] = field(default_factory=dict)
    """Orders that are to pause, with the device to which the shard is to migrate then."""
    fractions: dict[OrderId, float] = field(default_factory=dict)
    """Device fraction of each running order that gets another one."""

    def allows_migration(self, pipeline: PipelineId, source: DeviceId, target: DeviceId) -> bool:
        """Whether no planned migration of the pipeline brings trajectories to the source or takes the target's away."""
        targets = self.targets
        if not targets:
            return True
        is_awaited = any(name == pipeline and to == source for (name, _), to in targets.items())
        return not is_awaited and (pipeline, target) not in targets


NOTHING_PLANNED = Planned()
"""No decision is under way."""
