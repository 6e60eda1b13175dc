"""`fifo`: one lock per shared set of nodes, first come first served (what llm-d's time slicing does).

On a finite cluster everybody shares all of it, memory or cap permitting. On an unbounded one a set is what
the first comer asks for, and the next ones join the youngest set until it is full. SLOs play no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import impossible, queue, sharing_everything
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo:
    name: str = "fifo"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return impossible(pipeline, view) or sharing_everything(pipeline, view) or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)
