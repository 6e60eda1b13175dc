"""Lower bounds on what any placement must cost at one moment, to say how far from the best a policy is.

    solo speed    no pipeline may be slowed at all: every step takes T_solo          sum of loads at T_solo
    SLO slack     every pipeline may use all of its slack: a step takes SLO * T_solo  the same at the budget

A pipeline whose steps take s seconds keeps num_rollout_nodes busy for T_roll / s of the time and
num_train_nodes for T_train / s. No node is busy more than all the time, so each pool needs at least the sum
of these loads, rounded up to whole nodes, and at least the widest request. Both bounds hold for every
schedule of disaggregated phases, strict or not. They ignore host memory, caps, and that groups share no
nodes.

Where pipelines may also roll out on the training pool's GPUs (`colocated`), every whole number of training
nodes is tried: what their idle part can absorb at the best exchange rate among the pipelines needs no
rollout node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.model import Cluster, Phase, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Node-seconds per second that must be worked, by pool."""

    rollout: float
    train: float


def solo_speed_bound_usd(pipelines: Sequence[Pipeline], cluster: Cluster, *, colocated: bool = False) -> float:
    """Dollars an hour below which some step must take longer than T_solo."""
    return _bound_usd(pipelines, cluster, uses_slack=False, colocated=colocated)


def slo_slack_bound_usd(pipelines: Sequence[Pipeline], cluster: Cluster, *, colocated: bool = False) -> float:
    """Dollars an hour below which some SLO must break. A pipeline without SLO or estimate adds nothing."""
    return _bound_usd(pipelines, cluster, uses_slack=True, colocated=colocated)


def node_load(pipeline: Pipeline, step_s: float) -> NodeLoad:
    """Nodes that the pipeline keeps busy when each step takes this long."""
    estimate = pipeline.estimate
    if estimate is None or step_s in (0.0, math.inf):
        return NodeLoad(rollout=0.0, train=0.0)
    return NodeLoad(
        rollout=pipeline.num_rollout_nodes * estimate.rollout_s / step_s,
        train=pipeline.num_train_nodes * estimate.train_s / step_s,
    )


def _bound_usd(pipelines: Sequence[Pipeline], cluster: Cluster, *, uses_slack: bool, colocated: bool) -> float:
    rollout_pool, train_pool = cluster.pool_for(Phase.ROLLOUT), cluster.pool_for(Phase.TRAIN)
    rollout_usd = rollout_pool.usd_per_node_hour if rollout_pool else 0.0
    train_usd = train_pool.usd_per_node_hour if train_pool else 0.0
    rollout_load = train_load = relief = 0.0
    widest_rollout = widest_train = 0
    for pipeline in pipelines:
        alone_s = pipeline.estimate.solo_s if pipeline.estimate else 0.0
        step_s = alone_s * (pipeline.slo_slowdown if uses_slack else 1.0)
        load = node_load(pipeline, step_s)
        train = load.train
        elsewhere = pipeline.colocated_estimate
        if colocated and elsewhere is not None and elsewhere.solo_s <= step_s < math.inf:
            train = min(train, pipeline.num_train_nodes * elsewhere.train_s / step_s)
            extra = pipeline.num_train_nodes * elsewhere.solo_s / step_s - train
            relief = max(relief, load.rollout / extra if extra > 0 else math.inf)
        elif load.rollout > 0:
            widest_rollout = max(widest_rollout, pipeline.num_rollout_nodes)
        if train > 0:
            widest_train = max(widest_train, pipeline.num_train_nodes)
        rollout_load += load.rollout
        train_load += train
    fewest_train = max(widest_train, _whole(train_load))
    most_train = fewest_train + (_whole(rollout_load / relief) if 0 < relief < math.inf else 0)
    return min(
        train_usd * num_train
        + rollout_usd * max(widest_rollout, _whole(rollout_load - (num_train - train_load) * relief))
        for num_train in range(fewest_train, most_train + 1)
    )


def _whole(nodes: float) -> int:
    return max(0, math.ceil(nodes - 1e-9)) if nodes > -math.inf else 0
