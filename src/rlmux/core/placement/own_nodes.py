"""Nodes of its own for a pipeline: what stands in for a policy whose placement has failed."""

from __future__ import annotations

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import AdmissionKind, Cluster, Phase, Pipeline
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.placement_ledger import PlacementLedger


def on_nodes_of_its_own(pipeline: Pipeline, ledger: PlacementLedger, why: str) -> PlacementChoice | Refusal:
    """A group of its own where enough nodes are free; otherwise it waits. `why`: what failed, in words."""
    choice = _founding(pipeline, ledger.cluster)
    try:
        ledger.check_admission(pipeline, choice)
    except IllegalTransitionError:
        needs = ((Phase.ROLLOUT, choice.num_new_rollout_nodes), (Phase.TRAIN, choice.num_new_train_nodes))
        counts = [f"{num} {phase} nodes ({ledger.num_free_nodes(phase)} are free)" for phase, num in needs if num]
        reason = f"{why}; pipeline {pipeline.id} waits for nodes of its own: {' and '.join(counts)}"
        return Refusal(reason=reason, is_final=False)
    return choice


def _founding(pipeline: Pipeline, cluster: Cluster) -> PlacementChoice:
    num_rollout, num_train = pipeline.num_rollout_nodes, pipeline.num_train_nodes
    is_one_pool = cluster.is_one_pool or cluster.pool_for(Phase.ROLLOUT) is None
    return PlacementChoice(
        kind=AdmissionKind.NEW,
        group=None,
        num_new_rollout_nodes=0 if is_one_pool else num_rollout,
        num_new_train_nodes=max(num_rollout, num_train) if is_one_pool else num_train,
        is_colocated=is_one_pool,
    )
