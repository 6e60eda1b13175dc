"""Lower bounds on pipelines' cost, to measure a policy's distance from the optimum.

    work_usd           dollars of so many steps on nodes that are never idle: no schedule of that work is below
    planned_work_usd   the same of one step by a pipeline's estimates
    kept_slos_usd      the same for a workload, of the steps that every policy makes which keeps all SLOs
    steady_..._usd     dollars an hour of whole nodes that serve these pipelines and no others, for good, each step as
                       long as that. No bound for a workload: an SLO binds the mean step, so a policy may do with
                       fewer nodes for a while, and make up for it before and after

All of it holds for every schedule, strict or not, of phases on nodes of their own pools or both on the training pool's.
It ignores host memory, caps, switches, and that groups share no nodes. A pipeline whose steps take s seconds keeps
num_rollout_nodes busy for T_roll / s of the time and num_train_nodes for T_train / s; no node is busy more than all
the time, so steady nodes are at least the sum of these loads, and at least the widest request.

Where pipelines may also roll out on the training pool's GPUs (`colocated`), every whole number of training nodes is
tried: what their idle part can absorb at the best exchange rate among the pipelines needs no rollout node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.model import PHASE_BY_STAGE, Cluster, Phase, Pipeline, Placement
from rlmux.report.slos import SLO_TOLERANCE
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds

# --- of work that was done -----------------------------------------------------------------------------------


def work_usd(
    arrival: Arrival,
    cluster: Cluster,
    num_steps: int,
    *,
    keeps_to_own_pools: bool = True,
    may_colocate: bool = True,
) -> float:
    """Dollars of the arrival's first so many steps on nodes that are never idle, each phase where it is cheapest.

    `keeps_to_own_pools` (`are_own_pools` of every placement): rollouts are on rollout nodes and training on training
    nodes, or both on training nodes. If not, any node of the cheapest pool may do anything. Work whose seconds depend
    on the schedule (sequences that are decoded together, orders that help each other on one device) counts as nothing.
    """
    world = arrival.world
    if not isinstance(world, TrueSeconds):
        return 0.0
    anywhere = not keeps_to_own_pools
    usd_per_step = _usd_per_step(arrival, cluster, world, is_colocated=False, anywhere=anywhere)
    if may_colocate:
        there = arrival.colocated_world or world
        usd_per_step = min(usd_per_step, _usd_per_step(arrival, cluster, there, is_colocated=True, anywhere=anywhere))
    first = arrival.pipeline.first_step
    return usd_per_step * sum(world.variation.factor(step) for step in range(first, first + num_steps))


def planned_work_usd(pipeline: Pipeline, cluster: Cluster) -> float:
    """Dollars of a step by its estimates on requested nodes that are never idle, each phase where it is cheapest.

    Both phases may be on training nodes; tails keep their nodes. 0 without an estimate.
    """
    apart = pipeline.estimate
    if apart is None:
        return 0.0
    together = pipeline.colocated_estimate or apart
    rollout_usd = pipeline.num_rollout_nodes * _node_usd(cluster, Phase.ROLLOUT) / 3600
    train_usd = pipeline.num_train_nodes * _node_usd(cluster, Phase.TRAIN) / 3600
    return min(
        apart.rollout_s * rollout_usd + apart.train_s * train_usd,
        (together.rollout_s + together.train_s) * train_usd,
    )


def are_own_pools(pipeline: Pipeline, placement: Placement, cluster: Cluster) -> bool:
    """Whether it trains on its requested number of training nodes, and rolls out on as many nodes of either pool."""
    trains_at_home = all(cluster.pools[node.pool].phase is Phase.TRAIN for node in placement.train_nodes)
    num_train, num_rollout = len(placement.train_nodes), len(placement.rollout_nodes)
    at_least = pipeline.num_rollout_nodes
    if placement.train_nodes == placement.rollout_nodes:
        at_least = pipeline.num_train_nodes
    return trains_at_home and num_train >= pipeline.num_train_nodes and num_rollout >= at_least


def _usd_per_step(
    arrival: Arrival, cluster: Cluster, world: TrueSeconds, *, is_colocated: bool, anywhere: bool
) -> float:
    """Dollars of a step whose variation is 1."""
    pipeline = arrival.pipeline
    usd_by_phase = {phase: _node_usd(cluster, phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    num_by_phase = {Phase.ROLLOUT: pipeline.num_rollout_nodes, Phase.TRAIN: pipeline.num_train_nodes}
    if is_colocated:
        usd_by_phase[Phase.ROLLOUT] = usd_by_phase[Phase.TRAIN]
        num_by_phase[Phase.ROLLOUT] = pipeline.num_train_nodes
    if anywhere:
        cheapest = min(pool.usd_per_node_hour for pool in cluster.pools.values())
        usd_by_phase = dict.fromkeys(usd_by_phase, cheapest)
        num_by_phase = dict.fromkeys(num_by_phase, 1)
    usd = 0.0
    for stage, seconds in world.by_stage.items():
        phase = PHASE_BY_STAGE[stage]
        if stage in pipeline.stages and phase in usd_by_phase:
            if phase is Phase.ROLLOUT:
                seconds *= _held_part(world)
            usd += seconds * num_by_phase[phase] * usd_by_phase[phase] / 3600
    return usd


def _held_part(world: TrueSeconds) -> float:
    """Least part of a rollout's node-seconds that it holds its nodes for; 0 where that depends on the schedule."""
    if world.finish_fractions:
        return 0.0
    if world.tail is None:
        return 1.0
    fraction = world.tail.device_fraction
    return min(1.0, *(p.begins + (1.0 - p.begins + p.growth) * fraction for p in world.tail.points))


def _node_usd(cluster: Cluster, phase: Phase) -> float:
    """Dollars per hour of a node of the phase's pool, or of the other pool if the first is missing."""
    pool = cluster.pool_for(phase) or next(iter(cluster.pools.values()))
    return pool.usd_per_node_hour


# --- of a workload whose SLOs are kept ------------------------------------------------------------------------


def kept_slos_usd(workload: Workload, *, uses_slack: bool = True, colocated: bool = True) -> float:
    """Dollars below which some pipeline of the workload misses its SLO or does not make its steps.

    `uses_slack`: a mean step may take SLO times T_solo; else T_solo. `colocated`: both phases may be on training nodes.
    Where a pipeline leaves at a given time, the steps that keep the SLO until then are counted, the open one is not.
    """
    return sum(
        work_usd(arrival, workload.cluster, _least_steps(arrival, uses_slack=uses_slack), may_colocate=colocated)
        for arrival in workload.arrivals
    )


def _least_steps(arrival: Arrival, *, uses_slack: bool) -> int:
    """Steps that must have ended when it leaves: after them and one more the SLO is not broken yet."""
    pipeline = arrival.pipeline
    if arrival.depart_s is None:
        return max(0, (pipeline.num_steps or 0) - pipeline.first_step + 1)
    slo = pipeline.slo_slowdown * (1 + SLO_TOLERANCE) if uses_slack else 1.0
    due_s, num_steps = arrival.submit_s, 0
    while slo < math.inf and (pipeline.num_steps is None or num_steps < pipeline.num_steps):
        due_s += slo * arrival.world.solo_s(pipeline.first_step + num_steps)
        if due_s >= arrival.depart_s - 1e-6:
            break
        num_steps += 1
    return num_steps


# --- of pipelines that run together --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Node-seconds per second that must be worked, by pool."""

    rollout: float
    train: float


def steady_solo_speed_usd(pipelines: Sequence[Pipeline], cluster: Cluster, *, colocated: bool = False) -> float:
    """Dollars an hour of steady whole nodes below which the mean step of some pipeline is longer than T_solo."""
    return _steady_usd(pipelines, cluster, uses_slack=False, colocated=colocated)


def steady_slo_slack_usd(pipelines: Sequence[Pipeline], cluster: Cluster, *, colocated: bool = False) -> float:
    """Dollars an hour of steady whole nodes below which some SLO breaks.

    A pipeline without SLO or estimate adds nothing.
    """
    return _steady_usd(pipelines, cluster, uses_slack=True, colocated=colocated)


def node_load(pipeline: Pipeline, step_s: float) -> NodeLoad:
    """Nodes that the pipeline keeps busy when each step takes this long."""
    estimate = pipeline.estimate
    if estimate is None or step_s in (0.0, math.inf):
        return NodeLoad(rollout=0.0, train=0.0)
    return NodeLoad(
        rollout=pipeline.num_rollout_nodes * estimate.rollout_s / step_s,
        train=pipeline.num_train_nodes * estimate.train_s / step_s,
    )


def _step_s(pipeline: Pipeline, *, uses_slack: bool) -> float:
    alone_s = pipeline.estimate.solo_s if pipeline.estimate else 0.0
    return alone_s * (pipeline.slo_slowdown if uses_slack else 1.0)


def _steady_usd(pipelines: Sequence[Pipeline], cluster: Cluster, *, uses_slack: bool, colocated: bool) -> float:
    rollout_usd, train_usd = _node_usd(cluster, Phase.ROLLOUT), _node_usd(cluster, Phase.TRAIN)
    rollout_load = train_load = relief = 0.0
    widest_rollout = widest_train = 0
    for pipeline in pipelines:
        step_s = _step_s(pipeline, uses_slack=uses_slack)
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
