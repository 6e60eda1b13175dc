"""The interface of a policy: views go in, one value comes out, and a policy keeps no memory.

    place(pipeline, view)   which group and nodes a pipeline gets           placement tier
    rebalance(view)         which placed pipelines are relocated            placement tier, after each change
    dispatch(plan)          which ready work starts on which free device    group tier

Whatever else a policy may do is a member with a default. The scheduler checks every choice before it becomes an action.
`rlmux.policies` has the implementations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.views import GroupView
from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.model import Pipeline, PipelineId, Placement
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.view import PlacementView


@dataclass(frozen=True, slots=True, kw_only=True)
class Idling:
    """What ready work of a group may wait for, and for how long, while all its devices are free. By default nothing."""

    cycle_lead: float = 0.0
    """Cycles that the member whose work waits may be ahead of the one whose cycle slot comes first; infinite where
    phases may begin out of order; 0: no work waits for a cycle slot. With several steps in its cycle a member may be
    one step further ahead."""
    patience_s: float = 0.0
    """Seconds that work may have been ready at a plan of the group and be left; 0: no plan leaves any."""


class TimeSlice(NamedTuple):
    """The nodes that a pipeline holds next."""

    choice: PlacementChoice
    is_as_before: bool
    """Whether they are of the kind that it holds now."""


class TurnTaking(Protocol):
    """How pipelines hold nodes by turns. The clock is the policy's own; the scheduler keeps it."""

    @property
    def turn_s(self) -> float:
        """Seconds after which a turn ends at the next step boundary."""
        ...

    def new_clock(self) -> Any:
        """The clock of a run that begins."""
        ...

    def begin_turn(self, clock: Any, pipeline: PipelineId, placement: Placement, now_s: float) -> None: ...

    def end_turn(self, clock: Any, pipeline: PipelineId, now_s: float) -> None: ...

    def give_turns(
        self,
        clock: Any,
        claimants: tuple[tuple[Pipeline, Placement | None], ...],
        pipelines: tuple[Pipeline, ...],
        now_s: float,
        view: PlacementView,
    ) -> Mapping[PipelineId, TimeSlice | Refusal]:
        """Who of the claimants, with the nodes that each holds now, gets which of the free nodes; why the others wait.

        `pipelines`: all that are not over or held, running ones included.
        """
        ...


class Policy(ABC):
    """A scheduling policy; see the module. Subclasses are frozen dataclasses: nothing is kept between decisions."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def reacts_to_progress(self) -> bool:
        """Whether dispatch is called again at every ChunkFinished."""
        return False

    @property
    def sharing(self) -> SharingTable | None:
        """Pairs of sub-stages that may run side by side on one device; None for a policy that gives devices whole."""
        return None

    @property
    def tails(self) -> bool:
        """Whether tails of rollouts may leave nodes of several GPUs; without, pipelines are scheduled as if none
        could."""
        return False

    @property
    def splits_evenly(self) -> bool:
        """Whether a simulated device's table has its most even split, too: two alike then leave nothing of it
        unused."""
        return False

    @property
    def turn_taking(self) -> TurnTaking | None:
        """How pipelines take turns on nodes; None where each keeps its nodes to its end."""
        return None

    @abstractmethod
    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        """Where the pipeline goes, or why it does not."""

    def rebalance(self, view: PlacementView) -> tuple[Relocation | FruitlessSearch, ...]:
        """Relocations that make the placement cheaper, each valid once those before it are done. Mostly none.

        A search that found nothing is reported too; `PlacementView.was_searched_in_vain` then returns True.
        """
        return ()

    @abstractmethod
    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        """Fill the plan with what starts, pauses or migrates in this group now, and return it."""

    def idling(self, view: GroupView) -> Idling:
        """What ready work of this group may wait for beside free devices; the invariants of a test hold it to that."""
        return Idling()


@runtime_checkable
class RepeatedPolicy(Protocol):
    """A policy that is called twice with the same view: a user's own, which might remember something."""

    def compare(self, method: str, first: Any, second: Any) -> None:
        """Raises PolicyError where a method returned two different things."""
        ...
