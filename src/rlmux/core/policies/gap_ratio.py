"""`gap-ratio`: elastic rollouts, each pipeline's share by its remaining work (what RLix does).

Everybody's rollouts may use all rollout nodes of the shared set; who holds which device at a moment is
decided in `dispatch`. Sets are those of `fifo`. SLOs play no part.
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
class GapRatio:
    name: str = "gap-ratio"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return impossible(pipeline, view) or sharing_everything(pipeline, view) or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)
