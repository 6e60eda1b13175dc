"""The interface of a policy. Frozen views go in, a choice comes out; a policy keeps no memory.

    place(pipeline, view)   which group and nodes a pipeline gets           placement tier
    rebalance(view)         which placed pipelines are relocated            placement tier, after each change
    dispatch(view)          which ready work starts on which free device    group tier

The scheduler checks every choice before it becomes an action. `rlmux.policies` has the implementations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from rlmux.core.decision.views import Choice, GroupView
from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.model import Pipeline
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.view import PlacementView


class Policy(Protocol):
    """A scheduling policy; see the module."""

    @property
    def name(self) -> str: ...

    @property
    def reacts_to_progress(self) -> bool:
        """Whether dispatch is called again at every ChunkFinished."""
        ...

    @property
    def sharing(self) -> SharingTable | None:
        """Pairs of sub-stages that may run side by side on one device; None for a policy that gives devices whole."""
        ...

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        """Where the pipeline goes, or why it does not."""
        ...

    def rebalance(self, view: PlacementView) -> tuple[Relocation | FruitlessSearch, ...]:
        """Relocations that make the placement cheaper, each valid once those before it are done. Mostly none.

        A search that found nothing is reported too; `PlacementView.was_searched_in_vain` then returns True.
        """
        ...

    def dispatch(self, view: GroupView) -> Iterable[Choice]:
        """What starts, pauses or migrates in this group now."""
        ...


@runtime_checkable
class RepeatedPolicy(Protocol):
    """A policy that is called twice with the same view: a user's own, which might remember something."""

    def compare(self, method: str, first: Any, second: Any) -> None:
        """Raises PolicyError where a method returned two different things."""
        ...
