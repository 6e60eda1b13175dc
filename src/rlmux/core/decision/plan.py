"""A policy's decision for a group, as it is made: what is chosen is checked at once, and reads see it as done.

    plan.choose(RunWork(...)) ─▶ plan_check ─▶ Planned ── read by ─▶ plan, its orders and members
                                    └─ PolicyError                   plan.decision ─▶ dispatch ─▶ orders

Nothing of it is part of the state: a decision that fails is dropped with it. What only follows once an order is given,
such as its id, or the states that it evicts, is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlmux.core.decision.views import GroupView, Planned
from rlmux.core.model import DeviceId, OrderId, PipelineId
from rlmux.core.state import GroupState, SchedulerState
from rlmux.core.work import ReadyWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """A policy's choice: start this ready work now, on this fraction of its devices."""

    work: ReadyWork
    device_fraction: float = 1.0
    slowdown: float = 1.0
    """Expected seconds beside the orders on its devices, over the seconds of having them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOrder:
    """A policy's choice: stop this order at its next safe point."""

    order: OrderId
    migrate_to: DeviceId | None = None
    """The device to which the order's shard is to migrate then; the paused shard names it when it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeFraction:
    """A policy's choice: give a running order another fraction of its devices, from its next safe point on."""

    order: OrderId
    device_fraction: float
    slowdown: float = 1.0
    """Expected slowdown from now on, as of a RunWork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateWork:
    """A policy's choice: migrate the unfinished trajectories of a ready shard to another device of its rollout, or
    spread them over several."""

    pipeline: PipelineId
    source: DeviceId
    target: DeviceId
    others: tuple[DeviceId, ...] = ()
    """Targets besides: each trajectory goes to the one that has the fewest then."""

    @property
    def targets(self) -> tuple[DeviceId, ...]:
        return (self.target, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkPlanned:
    """A policy's choice: record the group as planned. `has_changed` is False until something differs."""


Choice = RunWork | ChangeFraction | PauseOrder | MigrateWork | MarkPlanned


Decision = tuple[Choice, ...]
"""All that a policy chose for a group at one moment, in order."""


class GroupPlan(GroupView):
    """A group as it will be once what was chosen is done, and the choices."""

    __slots__ = ("_check", "_choices")

    def __init__(
        self, state: SchedulerState, group: GroupState, check: Callable[[GroupState, Planned, Choice], None]
    ) -> None:
        """`check`: enters a choice into what is planned, or raises PolicyError."""
        self._state, self._group, self._planned = state, group, Planned()  # a call less for each decision
        self._check = check
        self._choices: list[Choice] = []

    def choose(self, *choices: Choice) -> GroupPlan:
        """Add these, one after another, and return the plan. Raises PolicyError for one that is not allowed."""
        for choice in choices:
            self._check(self._group, self._planned, choice)
            self._choices.append(choice)
        return self

    @property
    def decision(self) -> Decision:
        """What was chosen so far."""
        return tuple(self._choices)
