"""`gavel`: job-level fractional shares of heterogeneous nodes, without phase interleaving.

Pipelines that share nodes take turns by whole steps: nobody rolls out while another trains. A round of a
shared set is then the sum of its members' solo steps, and a pipeline joins where that sum keeps every SLO.
Otherwise it founds the cheapest set that keeps its own: its training nodes alone for both phases (if it is
known how fast that is), or rollout and training nodes. Queue order is by arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import AdmissionKind, Phase, Pipeline
from rlmux.core.placement import (
    GroupLoad,
    PlacementChoice,
    PlacementView,
    Refusal,
    Relocation,
    budget_of,
    solo_s,
)
from rlmux.core.policies.candidates import any_room, founding, impossible, queue
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Gavel:
    name: str = "gavel"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        for group in view.groups():
            if self._round_s(group, pipeline) <= min(group.budget_s, budget_of(pipeline)):
                choice = next(any_room(group, pipeline), None)
                if choice is not None:
                    return choice
        return (
            self._on_train_nodes(pipeline, view)
            or impossible(pipeline, view)
            or founding(pipeline, view)
            or queue(pipeline, view)
        )

    def _round_s(self, group: GroupLoad, pipeline: Pipeline) -> float:
        """Seconds in which every member makes one step, one after another."""
        return sum(solo_s(member.pipeline) for member in group.members) + solo_s(pipeline)

    def _on_train_nodes(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
        alone = pipeline.colocated_estimate
        if alone is None or alone.solo_s > budget_of(pipeline):
            return None
        if pipeline.num_train_nodes > view.num_free_nodes(Phase.TRAIN):
            return None
        return PlacementChoice(
            kind=AdmissionKind.NEW,
            group=None,
            num_new_train_nodes=pipeline.num_train_nodes,
            is_colocated=True,
        )

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)
