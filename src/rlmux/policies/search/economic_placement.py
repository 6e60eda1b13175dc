"""Where a newcomer whose steps are given adds least to what all groups cost, slowness included.

groups x (the least busy of their rollout nodes, 0 ... n new ones)    every member within its budget
a group of its own, both pools or the training nodes alone            always possible where nodes never run out
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rlmux.core.model import AdmissionKind, Cluster, NodeId, Phase, Pipeline
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.group_load import GroupLoad, colocated_step_s, phases_of, solo_s
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.candidates import founding, joining, least_loaded
from rlmux.policies.search.economic_regrouping import MOST_PLAYED_OUT, usd_to_the_end
from rlmux.policies.search.economy import Economy


def cheapest_place(pipeline: Pipeline, view: PlacementView, economy: Economy) -> PlacementChoice | None:
    """The place that adds fewest dollars; None where no node is free.

    Dollars per hour, or in all where so few pipelines are placed that they can be played out to the end of their work,
    and each has one.
    """
    if view.num_pipelines >= MOST_PLAYED_OUT or not _have_an_end(pipeline, view):
        return _cheapest_per_hour(pipeline, view, economy)
    alone, _ = _alone(pipeline, view, economy)
    places = [*([] if alone is None else [alone]), *_places(pipeline, view, economy)]
    return min(places, key=lambda choice: _usd_in_all(choice, pipeline, view), default=None)


def _have_an_end(pipeline: Pipeline, view: PlacementView) -> bool:
    """Whether the number of steps is known of the newcomer and of all that are placed."""
    placed = (member.pipeline.id for group in view.groups() for member in group.members)
    return pipeline.num_steps is not None and all(view.work_left(name) is not None for name in placed)


def _places(pipeline: Pipeline, view: PlacementView, economy: Economy) -> Iterator[PlacementChoice]:
    """Every place beside others that keeps all members and the newcomer within their budgets."""
    own_budget_s = economy.budget_s(pipeline)
    for group in view.groups():
        budget_s = min(economy.budget_of_group(group), own_budget_s)
        if not _has_room(group, pipeline, budget_s):
            continue
        train_nodes = _train_nodes(group, pipeline, view.cluster)
        for nodes, num_new in _nodes(group, pipeline):
            period_s = group.period_with(pipeline, nodes, num_new, train_nodes)
            if period_s <= budget_s and group.has_memory_for(pipeline, nodes):
                yield replace(joining(group, nodes, num_new), train_nodes=train_nodes)


def _usd_in_all(choice: PlacementChoice, pipeline: Pipeline, view: PlacementView) -> float:
    """Dollars that the choice adds until the work of its group's members is done, if no other pipeline comes."""
    before_usd = 0.0 if choice.group is None else usd_to_the_end(view.group(choice.group), view)
    with view.trial() as ledger:
        placement = ledger.admit(pipeline, choice)
        return usd_to_the_end(ledger.group(placement.group), view) - before_usd


def _cheapest_per_hour(pipeline: Pipeline, view: PlacementView, economy: Economy) -> PlacementChoice | None:
    best, best_usd = _alone(pipeline, view, economy)
    own_budget_s = economy.budget_s(pipeline)
    for group in view.groups():
        if not _has_room(group, pipeline, own_budget_s) or not _has_room(
            group, pipeline, economy.budget_of_group(group)
        ):
            continue
        budget_s = min(economy.budget_of_group(group), own_budget_s)
        before_usd = economy.cost_usd(group)
        train_nodes = _train_nodes(group, pipeline, view.cluster)
        for nodes, num_new in _nodes(group, pipeline):
            new_usd = num_new * economy.rollout_usd
            if new_usd >= best_usd or not group.has_memory_for(pipeline, nodes):
                continue
            period_s = group.period_with(pipeline, nodes, num_new, train_nodes)
            if period_s > budget_s:
                continue
            usd = new_usd + _usd_at(group, pipeline, period_s, economy) - before_usd
            if usd < best_usd - 1e-9:
                best, best_usd = replace(joining(group, nodes, num_new), train_nodes=train_nodes), usd
    return best


def _has_room(group: GroupLoad, pipeline: Pipeline, budget_s: float) -> bool:
    """A quick test that every place in the group needs: of the newcomer's budget first, which most groups fail."""
    if group.is_colocated or len(group.train_nodes) < pipeline.num_train_nodes:
        return False
    if max(group.period_s, solo_s(pipeline)) > budget_s or not group.has_memory_for(pipeline, ()):
        return False
    least_busy_s = sorted(group.train_loads_s)[pipeline.num_train_nodes - 1]
    return least_busy_s + phases_of(pipeline)[1] <= budget_s


def _train_nodes(group: GroupLoad, pipeline: Pipeline, cluster: Cluster) -> tuple[NodeId, ...]:
    """The least busy training nodes of the group, as many as the pipeline requests, in the group's order."""
    by_load = sorted(zip(group.train_loads_s, group.train_nodes, strict=True))
    taken = set(least_loaded(by_load, pipeline.num_train_nodes, cluster))
    return tuple(node for node in group.train_nodes if node in taken)


def _nodes(group: GroupLoad, pipeline: Pipeline) -> Iterator[tuple[tuple[NodeId, ...], int]]:
    """The least busy rollout nodes of the group, and new ones for the others, in every proportion."""
    by_load = [node for _, node in sorted(zip(group.rollout_loads_s, group.rollout_nodes, strict=True))]
    for num_new in range(pipeline.num_rollout_nodes + 1):
        num_old = pipeline.num_rollout_nodes - num_new
        if num_old <= len(by_load):
            yield tuple(by_load[:num_old]), num_new


def _usd_at(group: GroupLoad, pipeline: Pipeline, period_s: float, economy: Economy) -> float:
    """Dollars per hour of the group's nodes, and the price of slowness if its meta-iteration takes so long."""
    usd = group.usd_per_hour + economy.slowness_usd(pipeline) * (1.0 - solo_s(pipeline) / period_s)
    for member in group.members:
        speed = member.steps_per_cycle * solo_s(member.pipeline) / period_s
        usd += economy.slowness_usd(member.pipeline) * (1.0 - speed)
    return usd


def _alone(pipeline: Pipeline, view: PlacementView, economy: Economy) -> tuple[PlacementChoice | None, float]:
    """A group of its own, and what it costs: on its training nodes alone where that is cheaper within its budget."""
    apart = founding(pipeline, view)
    usd = pipeline.num_rollout_nodes * economy.rollout_usd + pipeline.num_train_nodes * economy.train_usd
    best, best_usd = (apart, usd) if apart is not None else (None, math.inf)
    pool = view.cluster.pool_for(Phase.TRAIN)
    footprint = pipeline.footprint
    if pool is None or footprint.rollout_host_bytes + footprint.train_host_bytes > pool.host_memory_bytes:
        return best, best_usd
    step_s = colocated_step_s(pipeline, pool)
    if step_s == math.inf:
        return best, best_usd
    usd = pipeline.num_train_nodes * economy.train_usd
    usd += economy.slowness_usd(pipeline) * (1.0 - solo_s(pipeline) / step_s)
    if (
        step_s <= economy.budget_s(pipeline)
        and usd < best_usd
        and pipeline.num_train_nodes <= view.num_free_nodes(Phase.TRAIN)
    ):
        best = PlacementChoice(
            kind=AdmissionKind.NEW, group=None, num_new_train_nodes=pipeline.num_train_nodes, is_colocated=True
        )
        best_usd = usd
    return best, best_usd
