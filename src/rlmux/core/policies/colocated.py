"""`colocated`: both phases of a pipeline on one set of nodes of its own (verl-like).

The set is the `num_train_nodes` training nodes it asks for where it is known how fast its rollouts are
there (`colocated_estimate`) or where the cluster has no rollout pool. Otherwise the set is all that `solo`
would hold: its training and its rollout nodes, rollouts on all of them, training on the first. On a small
cluster the sets are few, so pipelines run one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import AdmissionKind, Phase, Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import impossible, queue
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated:
    name: str = "colocated"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        takes_rollout_nodes = (
            pipeline.colocated_estimate is None and view.cluster.pool_for(Phase.ROLLOUT) is not None
        )
        needs = {
            Phase.TRAIN: pipeline.num_train_nodes,
            Phase.ROLLOUT: pipeline.num_rollout_nodes if takes_rollout_nodes else 0,
        }
        refusal = impossible(pipeline, view, needs=needs, is_colocated=True)
        if refusal is not None:
            return refusal
        if any(count > view.num_free_nodes(phase) for phase, count in needs.items()):
            return queue(pipeline, view)
        return PlacementChoice(
            kind=AdmissionKind.NEW,
            group=None,
            num_new_rollout_nodes=needs[Phase.ROLLOUT],
            num_new_train_nodes=needs[Phase.TRAIN],
            is_colocated=True,
        )

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)
