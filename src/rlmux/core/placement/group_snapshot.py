"""What a group looks like: of its members until one joins or leaves, of its work until something whole changes.

members ── join, leave ─▶ MemberFacts    read at every event, and recomputed at these alone
work    ── policy plans ─▶ GroupLook     compared at every event with that of the last plan
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmux.core.model import OrderId


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """Facts about the members of a group."""

    has_arriving_work: bool
    """Whether a member is on demand: its next work cannot be planned."""
    has_wide_rollouts: bool
    """Whether a member rolls out on several devices, so that trajectories could migrate between them."""
    has_tails: bool
    """Whether tails of a member's rollouts may leave their nodes to others."""
    serves_both_phases: bool
    """Whether the first member trains on devices that it rolls out on: then all do."""


NO_MEMBERS = MemberFacts(has_arriving_work=False, has_wide_rollouts=False, has_tails=False, serves_both_phases=False)


@dataclass(frozen=True, slots=True)
class GroupLook:
    """Inputs of a group's plan, in whole steps; most progress reports do not change them."""

    ready: tuple[tuple[int, bool], ...]
    """Sequence of each ready work, and whether it waits for an environment."""
    running: tuple[tuple[OrderId, bool, int], ...]
    """Each order that computes: its id, whether it is pausing, and the bit length of its active count."""
    num_idle: int
    """Orders whose every slot waits for an environment."""
    num_migrating: int
