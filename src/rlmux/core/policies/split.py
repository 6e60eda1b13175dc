"""`split`: the cluster divided statically among the pipelines, each on its own share for both phases.

A finite cluster's nodes are dealt in `num_shares` equal shares, training nodes first; a pipeline rolls out
on all nodes of its share and trains on the first. Without a number a share is what the pipeline asks for.
On an unbounded cluster a share is a pipeline's own request, which is `solo`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import AdmissionKind, Phase, Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import founding, impossible, queue
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    name: str = "split"
    reacts_to_progress: bool = False
    num_shares: int | None = None
    """Pipelines that are expected to run side by side."""

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        num_nodes = view.num_nodes(Phase.ROLLOUT) + view.num_nodes(Phase.TRAIN)
        if self.num_shares is None or num_nodes == math.inf:
            return impossible(pipeline, view) or founding(pipeline, view) or queue(pipeline, view)
        size = max(1, int(num_nodes) // self.num_shares)
        refusal = impossible(pipeline, view, needs={Phase.TRAIN: min(1, size)}, is_colocated=True)
        if refusal is not None:
            return refusal
        from_train = int(min(size, view.num_free_nodes(Phase.TRAIN)))
        from_rollout = size - from_train
        if from_rollout > view.num_free_nodes(Phase.ROLLOUT):
            return queue(pipeline, view)
        return PlacementChoice(
            kind=AdmissionKind.NEW,
            group=None,
            num_new_rollout_nodes=from_rollout,
            num_new_train_nodes=from_train,
            is_colocated=True,
        )

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)
