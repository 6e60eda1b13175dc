"""`solo`: every pipeline alone on its own rollout and training nodes (the paper's Solo-D).

It queues while the cluster is full. Nothing fills its bubbles: the baseline that everything is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import founding, impossible, queue
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    name: str = "solo"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return impossible(pipeline, view) or founding(pipeline, view) or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)
