"""The baselines: policies of one rule each, that others are compared with.

solo        every pipeline alone on its own rollout and training nodes
fifo        one lock for each shared set of nodes, first come first served
split       the cluster divided statically among the pipelines
colocated   each pipeline on training nodes for both phases
gap-ratio   rollout devices by each pipeline's remaining work
gavel-steps whole steps in turn, as many pipelines as every SLO allows
most-idle   the group with the highest idle share
random      a random group that has room
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Policy
from rlmux.core.decision.views import GroupView
from rlmux.core.model import AdmissionKind, GroupId, Phase, Pipeline
from rlmux.core.placement.choice import PlacementChoice, Refusal, Relocation
from rlmux.core.placement.group_load import GroupLoad, colocated_step_s, slo_step_s, solo_s
from rlmux.core.placement.view import PlacementView
from rlmux.core.settle.plain_order import age, devices_kept_for_batches, may_take
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.dispatching import start_oldest_first, start_where_free
from rlmux.policies.search.candidates import any_room, founding, impossible, queue, sharing_everything
from rlmux.policies.search.shared_placement import nodes_for_both, place_on_shared_nodes
from rlmux.policies.search.slo_repair import mend_slos


class OneRule(Policy):
    """What a baseline leaves as it is: work starts oldest first, alone on its devices, and no pipeline relocates."""

    __slots__ = ()

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return plan.choose(*start_oldest_first(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo(OneRule):
    """`solo`: every pipeline alone on its own rollout and training nodes (the paper's Solo-D).

    It queues while the cluster is full. Nothing fills its bubbles: the baseline that everything is compared with.
    """

    name: str = "solo"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return on_own_nodes(pipeline, view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo(OneRule):
    """`fifo`: one lock per shared set of nodes, first come first served (what llm-d's time slicing does).

    On a finite cluster all pipelines share all of it, memory or cap permitting. On an unbounded one a set is what the
    first pipeline requests, and the next ones join the youngest set until it is full. SLOs play no part.
    """

    name: str = "fifo"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return in_one_set(pipeline, view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(OneRule):
    """`split`: the cluster divided statically among the pipelines, each on its own part for both phases.

    A finite cluster's nodes are divided into `num_parts` equal parts, training nodes first; a pipeline rolls out on all
    nodes of its part and trains on the first. Without a number a part has as many nodes as the pipeline requests. On
    an unbounded cluster a part is a pipeline's own request, which is `solo`.
    """

    name: str = "split"
    num_parts: int | None = None
    """Pipelines that are expected to run side by side; None divides nothing."""

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        num_nodes = view.num_nodes(Phase.ROLLOUT) + view.num_nodes(Phase.TRAIN)
        if self.num_parts is None or num_nodes == math.inf:
            return on_own_nodes(pipeline, view)
        size = max(1, int(num_nodes) // self.num_parts)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated(OneRule):
    """`colocated`: both phases of a pipeline on one set of nodes of its own (verl-like).

    The set is the `num_train_nodes` training nodes it requests if it is known how fast its rollouts are
    there (`colocated_estimate`) or where the cluster has no rollout pool; where one pool serves both phases, as many
    as the wider phase requests. Otherwise the set is all that `solo` would hold: its training and its rollout nodes,
    rollouts on all of them, training on the first. On a small cluster the sets are few, so pipelines run one after
    another.
    """

    name: str = "colocated"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        needs = nodes_for_both(pipeline, view)
        if pipeline.colocated_estimate is not None:
            needs[Phase.ROLLOUT] = 0
        return _colocated_on(needs, pipeline, view)


def on_own_nodes(pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
    """A group of its own: rollout and training nodes, or nodes of the one pool that serves both phases."""
    if view.cluster.is_one_pool:
        return _colocated_on(nodes_for_both(pipeline, view), pipeline, view)
    return impossible(pipeline, view) or founding(pipeline, view) or queue(pipeline, view)


def in_one_set(pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
    """Into the youngest set of nodes that all pipelines share; SLOs play no part."""
    if view.cluster.is_one_pool:
        return place_on_shared_nodes(pipeline, view, keeps_slos=False)
    return impossible(pipeline, view) or sharing_everything(pipeline, view) or queue(pipeline, view)


def _colocated_on(needs: dict[Phase, int], pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRatio(OneRule):
    """`gap-ratio`: elastic rollouts, each pipeline's devices by its remaining work (what RLix does).

    Every rollout may use all rollout nodes of the shared set; which shard has which device at a moment is decided in
    `dispatch`. Sets are those of `fifo`. SLOs play no part.

        remaining  unfinished shards of a pipeline's open rollout
        target     devices x remaining / remaining of all
        next       the ready shard whose pipeline is furthest below its target, as a part of it; the oldest of equals

    A free device is always given to a shard: targets are not rounded. Nothing that runs is stopped for a target:
    a shard keeps its device until it ends.
    """

    name: str = "gap-ratio"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return in_one_set(pipeline, view)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        kept = devices_kept_for_batches(plan)
        shards = [
            work
            for work in sorted(plan.ready, key=age)
            if _is_new_shard(work) and not work.is_waiting and plan.is_free(work.devices) and may_take(work, kept)
        ]
        others = [work for work in sorted(plan.ready, key=age) if not work.is_waiting and not _is_new_shard(work)]
        return plan.choose(*start_where_free(plan, [*others, *_by_gap(plan, shards)]))


def _is_new_shard(work: ReadyWork) -> bool:
    return work.phase is Phase.ROLLOUT and not work.is_continuation and len(work.devices) == 1


def _by_gap(view: GroupView, shards: list[ReadyWork]) -> list[ReadyWork]:
    """One shard for each free device, in the order of choosing."""
    remaining = {member.id: len(member.unfinished_rollout_devices) for member in view.members}
    num_devices = len({device for member in view.members for device in member.rollout_devices})
    per_shard = num_devices / max(1, sum(remaining.values()))
    held = dict.fromkeys(remaining, 0)
    for order in view.running:
        held[order.pipeline] += order.phase is Phase.ROLLOUT
    chosen: list[ReadyWork] = []
    while shards:
        best = min(shards, key=lambda work: held[work.pipeline] / (per_shard * remaining[work.pipeline]))
        chosen.append(best)
        held[best.pipeline] += 1
        shards = [work for work in shards if work.devices != best.devices]
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class GavelSteps(OneRule):
    """`gavel-steps`: whole steps on shared nodes, admitted without counting on phase interleaving.

    Pipelines that share nodes alternate by whole steps: none rolls out while another trains. A cycle of a shared set is
    then the sum of its members' solo steps, and a pipeline joins where that sum keeps every SLO. Otherwise it founds
    the cheapest set that keeps its own: its training nodes alone for both phases (if it is known how fast that is), or
    rollout and training nodes. Queue order is by arrival.
    """

    name: str = "gavel-steps"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        if view.cluster.is_one_pool:
            return place_on_shared_nodes(pipeline, view)
        for group in view.groups():
            if self._cycle_s(group, pipeline) <= min(group.budget_s, slo_step_s(pipeline)):
                choice = next(any_room(group, pipeline), None)
                if choice is not None and self._is_in_time(group, pipeline, choice):
                    return choice
        return (
            self._on_train_nodes(pipeline, view)
            or impossible(pipeline, view)
            or founding(pipeline, view)
            or queue(pipeline, view)
        )

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return mend_slos(view, self.place, varies_steps_per_cycle=False)

    def _is_in_time(self, group: GroupLoad, pipeline: Pipeline, choice: PlacementChoice) -> bool:
        """Whether the cycle keeps every SLO with the switches that sharing these nodes brings."""
        budget_s = min(group.budget_s, slo_step_s(pipeline))
        return group.one_after_another_s(pipeline, choice.rollout_nodes) <= budget_s

    def _cycle_s(self, group: GroupLoad, pipeline: Pipeline) -> float:
        """Seconds in which every member makes one step, one after another, without switches."""
        return sum(solo_s(member.pipeline) for member in group.members) + solo_s(pipeline)

    def _on_train_nodes(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
        pool = view.cluster.pool_for(Phase.TRAIN)
        if pool is None or pipeline.colocated_estimate is None:
            return None
        if colocated_step_s(pipeline, pool) > slo_step_s(pipeline):
            return None
        if pipeline.num_train_nodes > view.num_free_nodes(Phase.TRAIN):
            return None
        return PlacementChoice(
            kind=AdmissionKind.NEW,
            group=None,
            num_new_train_nodes=pipeline.num_train_nodes,
            is_colocated=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MostIdle(OneRule):
    """`most-idle`: the group with the highest idle share, on its most idle rollout nodes (RollMux 8.2, Greedy).

    A new group only when no group has room. SLOs play no part. A group's idle share is 1 - busy seconds /
    (nodes x period) in its meta-iteration, over rollout and training nodes together.
    """

    name: str = "most-idle"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        if view.cluster.is_one_pool:
            return in_one_set(pipeline, view)
        refusal = impossible(pipeline, view)
        if refusal is not None:
            return refusal
        best: PlacementChoice | None = None
        best_rank = (math.inf, math.inf)
        for group in view.groups():
            rank = -idle_share(group)
            if rank > best_rank[0]:
                continue
            for choice in any_room(group, pipeline):
                load_s = sum(group.rollout_loads_s[group.rollout_nodes.index(node)] for node in choice.rollout_nodes)
                if (rank, load_s) < best_rank:
                    best, best_rank = choice, (rank, load_s)
        return best or founding(pipeline, view) or queue(pipeline, view)


def idle_share(group: GroupLoad) -> float:
    """The part of all node-seconds of one meta-iteration that is idle; 1.0 where no duration is known."""
    if group.period_s == 0:
        return 1.0
    num_nodes = len(group.rollout_nodes) + len(group.train_nodes)
    busy_s = sum(group.rollout_loads_s) + group.train_load_s * len(group.train_nodes)
    return 1.0 - busy_s / (num_nodes * group.period_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGroups(OneRule):
    """`random`: a random group that has room, or a new one, and random rollout nodes there (RollMux section 8.2).

    SLOs play no part. The draw depends on the seed, the pipeline's name and how many are placed, so that the same
    submissions get the same places.
    """

    name: str = "random"
    seed: int = 0

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        if view.cluster.is_one_pool:
            return in_one_set(pipeline, view)
        refusal = impossible(pipeline, view)
        if refusal is not None:
            return refusal
        generator = random.Random(f"{self.seed}/{pipeline.id}/{view.num_pipelines}")
        choices = [choice for group in view.groups() for choice in any_room(group, pipeline)]
        by_group: dict[GroupId | None, list[PlacementChoice]] = {}
        for choice in choices:
            by_group.setdefault(choice.group, []).append(choice)
        fresh = founding(pipeline, view)
        if fresh is not None:
            by_group[None] = [fresh]
        if not by_group:
            return queue(pipeline, view)
        return generator.choice(by_group[generator.choice(list(by_group))])
