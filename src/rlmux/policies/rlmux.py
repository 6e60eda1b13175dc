"""`rlmux`: best-fit placement, and regrouping whenever something came or left.

    place       cheapest candidate over all groups; among equals the best fit       constant time per group
    rebalance   the most wasteful groups' pipelines are partitioned anew, exactly,  bounded work per change
                and relocated if the dollars saved outweigh the moves

It promises what `rollmux` promises by the same rule: step slowdown max(T_cycle, T_load) / T_solo within every SLO
under the strict meta-iteration that its groups run. A pipeline that fits no group may stand alone on its training
nodes, both phases there, where its measured colocated step keeps its SLO. On a cluster without prices nodes are sunk
cost: pipelines spread over free nodes before they share.

Inside a group the look-ahead over sub-stages decides, as in `jigsaw` (`policies/jigsaw.py`). Where places were promised
by the strict cycle, the cycle is one of the schedules that it weighs, and is kept unless another is clearly better:

    nodes serve both phases of every member    one pool; a table by which it helps; nodes that cost nothing and
                                               pipelines without an estimate: no cycle was promised
    pools apart                                the cycle was promised, or devices share hardware and would only slow
                                               each other; work of other members in its gaps, on devices of tool waits,
                                               beside others by the table, and where tails have left

Where steps are given and nodes are paid as they are used, it counts dollars for the work instead of dollars per hour:
slowness has a price, budgets follow from the steps and the time that are left, and members train on as many nodes as
they request (`search/economy.py`). The rest of this page is about dollars per hour.

Waste of a group: its dollars less what its members would cost on nodes never idle, each as slow as its SLO
allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Idling, Policy
from rlmux.core.decision.views import GroupView
from rlmux.core.estimation.colocation import NO_SHARING, SharingTable
from rlmux.core.model import AdmissionKind, NodeId, Phase, Pipeline
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.group_load import GroupLoad, budget_of, colocated_step_s, solo_s, sync_s
from rlmux.core.placement.view import PlacementView
from rlmux.policies.jigsaw import Jigsaw
from rlmux.policies.search.candidates import as_of_now, founding, impossible, joining, may_join, newcomer, queue
from rlmux.policies.search.cycle_steps import CycleStepFinder
from rlmux.policies.search.economic_placement import cheapest_place
from rlmux.policies.search.economic_regrouping import Caches, SearchLimits, cheaper_regrouping
from rlmux.policies.search.economy import Economy
from rlmux.policies.search.ranking import GroupRanking
from rlmux.policies.search.readmission import place_again, spread_out
from rlmux.policies.search.regrouping import partition_of, relocations_to, targets_of
from rlmux.policies.search.shared_placement import MAX_MEMBERS, place_on_shared_nodes
from rlmux.policies.search.slo_repair import mend_slos


@dataclass(frozen=True, slots=True, kw_only=True)
class RlMux(Policy):
    name: str = "rlmux"
    reacts_to_progress: bool = True
    splits_evenly: ClassVar[bool] = True
    sharing: SharingTable = NO_SHARING
    """Pairs of sub-stages that were measured to help on these devices."""
    max_neighbourhood: int = 16
    """Pipelines that are partitioned anew at once."""
    max_search_nodes: int = 300
    """Nodes of the search tree that one partition may visit."""
    max_tries: int = 1
    """Neighbourhoods tried after each change."""
    usd_per_hour_per_move: float = 2.0
    """Dollars per hour that a regrouping must save for each pipeline it moves: a switch, and nodes held until a step's
    end."""
    slo_margin: float = 0.0
    """Part of each SLO kept in hand for what the meta-iteration does not show: waiting for a slot after a move."""
    tails: bool = True
    """Whether the tail of a rollout leaves devices that another pipeline waits for."""
    fractions: bool = True
    """Whether sub-stages run side by side on a fraction of a device each, where the table says that it helps."""
    fill: bool = True
    """Whether a phase may leave the cycle's order for a gap or a threatened SLO, if no other is late, and other work
    may come on a device whose shard only waits for its environments, and between two stages of training."""
    varies_steps_per_cycle: bool = True
    """Whether short pipelines may make several steps in a long one's cycle."""
    slowness_price: float = 1.2
    """Dollars that an hour of one dollar's work is worth, where steps are given and nodes are paid as they are used; 0:
    dollars per hour count there, too."""
    hold_up_usd: float = 4.0
    """Dollars that a move costs there for each rollout node, beside cold starts."""
    keeps_pools_apart: bool = False
    """Whether nodes of a pool for one phase never serve the other, whatever the table."""
    move_horizon_h: float = 3.0
    """Hours within which a move must have paid for itself there."""
    limits: SearchLimits = field(default_factory=SearchLimits)
    """How far a search for a cheaper grouping goes there."""
    _on_shared_nodes: Jigsaw = field(init=False, repr=False, compare=False)
    _in_a_cycle: Jigsaw = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sub_stages = Jigsaw(sharing=self.sharing, tails=self.tails, fractions=self.fractions, fill=self.fill)
        object.__setattr__(self, "_on_shared_nodes", sub_stages)
        object.__setattr__(self, "_in_a_cycle", replace(sub_stages, keeps_cycle=True))

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        if self._shares_devices(pipeline, view):
            return place_on_shared_nodes(pipeline, view, max_members=MAX_MEMBERS)
        refusal = impossible(pipeline, view)
        if refusal is not None:
            return refusal
        if view.work_left(pipeline.id) is not None and self._prices_slowness(view) and solo_s(pipeline):
            return cheapest_place(pipeline, view, self._economy(view)) or queue(pipeline, view)
        own, is_sunk = founding(pipeline, view), _are_nodes_sunk_cost(view)
        if is_sunk and own is not None:
            return own
        joiner = newcomer(pipeline, view, has_own_nodes=own is not None)
        best: PlacementChoice | None = None
        best_rank = (math.inf, math.inf)
        rollout_usd = view.usd_per_new_node_hour(Phase.ROLLOUT)
        train_usd = view.usd_per_new_node_hour(Phase.TRAIN)
        num_free = view.num_free_nodes(Phase.ROLLOUT)
        for group in view.groups_with_room(joiner):
            if not may_join(group, joiner):
                continue
            group = as_of_now(group, joiner, view)
            nodes, num_new = _emptiest_nodes(group, joiner, num_free) if is_sunk else _best_nodes(group, joiner)
            rank = (num_new * rollout_usd, _misfit(group, joiner))
            if rank < best_rank and num_new <= num_free and self._takes(group, joiner, nodes, num_new):
                best, best_rank = joining(group, nodes, num_new), rank
        alone = _alone(pipeline, view)
        if alone is not None:
            usd = alone.num_new_rollout_nodes * rollout_usd + alone.num_new_train_nodes * train_usd
            if usd < best_rank[0]:
                best = alone
        return best or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation | FruitlessSearch, ...]:
        if self._prices_slowness(view) and self._has_given_work(view):
            return cheaper_regrouping(view, self._economy(view), view.cache("regrouping", Caches), self.limits)
        mended = mend_slos(view, self.place, varies_steps_per_cycle=self.varies_steps_per_cycle)
        if mended or _are_nodes_sunk_cost(view):
            return mended or (place_again(view, self.place) if view.num_waiting else spread_out(view))
        by_waste = view.cache("groups by waste", GroupRanking).ranked(tuple(view.groups()), _waste)
        fruitless: list[FruitlessSearch] = []
        for seed in by_waste:
            groups = self._neighbourhood(seed, by_waste)
            names = tuple(member.pipeline.id for group in groups for member in group.members)
            search = FruitlessSearch(pipelines=names)
            if view.was_searched_in_vain(names) or search in fruitless:
                continue
            relocations = self._regroup(groups, view)
            if relocations:
                return (*fruitless, *relocations)
            fruitless.append(search)
            if len(fruitless) >= self.max_tries or len(groups) == len(by_waste):
                break
        return tuple(fruitless)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return self._sub_stages_of(plan).dispatch(plan)

    def idling(self, view: GroupView) -> Idling:
        return self._sub_stages_of(view).idling(view)

    def _sub_stages_of(self, view: GroupView) -> Jigsaw:
        """What decides inside this group: its places were promised by the strict cycle, but where nodes serve both
        phases of every member."""
        return self._on_shared_nodes if view.serves_both_phases else self._in_a_cycle

    def _prices_slowness(self, view: PlacementView) -> bool:
        """Whether what a step takes is weighed against dollars: nodes never run out, and each has a price."""
        return self.slowness_price > 0.0 and all(
            view.num_nodes(phase) == math.inf and view.usd_per_node_hour(phase) > 0.0
            for phase in (Phase.ROLLOUT, Phase.TRAIN)
        )

    def _has_given_work(self, view: PlacementView) -> bool:
        """Whether a placed pipeline has a number of steps."""

        def num_given(group: GroupLoad) -> float | None:
            given = [member for member in group.members if view.work_left(member.pipeline.id) is not None]
            return float(len(given)) if given else None

        return bool(view.cache("groups with given steps", GroupRanking).ranked(tuple(view.groups()), num_given))

    def _economy(self, view: PlacementView) -> Economy:
        return Economy(
            view=view,
            slowness_price=self.slowness_price,
            hold_up_usd=self.hold_up_usd,
            move_horizon_h=self.move_horizon_h,
        )

    def _shares_devices(self, pipeline: Pipeline, view: PlacementView) -> bool:
        """Whether nodes are to serve both phases of every pipeline: there is one pool, or sharing is expected to be
        better.

        It is where nothing is paid for it (nodes cost nothing, or the pipeline would hold them all anyway) and a table
        shows that sub-stages help each other. A pipeline without an estimate cannot be promised a place in a cycle: it
        shares nodes that cost nothing, and what it does decides.
        """
        if view.cluster.pool_for(Phase.ROLLOUT) is None:
            return True
        if self.keeps_pools_apart or any(pool.shares_hardware for pool in view.cluster.pools.values()):
            return False
        num_rollout, num_train = view.num_nodes(Phase.ROLLOUT), view.num_nodes(Phase.TRAIN)
        if num_rollout + num_train == math.inf:
            return False
        group = view.youngest_group()
        if group is not None:
            return group.is_shared
        if pipeline.estimate is None:
            return _are_nodes_sunk_cost(view)
        if not self.sharing.entries:
            return False
        holds_all = pipeline.num_rollout_nodes == num_rollout and pipeline.num_train_nodes == num_train
        return holds_all or _are_nodes_sunk_cost(view)

    def _takes(self, group: GroupLoad, pipeline: Pipeline, nodes: tuple[NodeId, ...], num_new: int) -> bool:
        if not group.has_memory_for(pipeline, nodes) or not group.keeps_slos_with(pipeline, nodes, num_new):
            return False
        budget_s = min(group.budget_s, budget_of(pipeline)) * (1.0 - self.slo_margin)
        return budget_s == math.inf or group.period_with(pipeline, nodes, num_new) <= budget_s

    def _neighbourhood(self, seed: GroupLoad, by_waste: Sequence[GroupLoad]) -> list[GroupLoad]:
        """The seed and the most wasteful others, up to the number of pipelines that are searched at once."""
        groups, num_members = [seed], seed.num_members
        for group in by_waste:
            if group.id != seed.id and num_members + group.num_members <= self.max_neighbourhood:
                groups.append(group)
                num_members += group.num_members
                if num_members == self.max_neighbourhood:
                    break
        return sorted(groups, key=lambda group: group.id)

    def _regroup(self, groups: list[GroupLoad], view: PlacementView) -> tuple[Relocation, ...]:
        """Relocations to the cheapest partition of these groups' pipelines; () if it does not pay."""
        names, partition = partition_of(
            groups,
            view,
            usd_per_move=self.usd_per_hour_per_move,
            max_search_nodes=self.max_search_nodes,
            step_finder=view.cache("steps per cycle", CycleStepFinder) if self.varies_steps_per_cycle else None,
            slo_margin=self.slo_margin,
        )
        if partition is None:
            return ()
        with view.trial() as ledger:
            relocations = relocations_to(targets_of(partition.groups, names), ledger)
            after = dict.fromkeys(ledger.placement(name).group for name in names)
            usd_after = sum(ledger.group(group_id).usd_per_hour for group_id in after)
        saved_usd = sum(group.usd_per_hour for group in groups) - usd_after
        if not relocations or saved_usd < self.usd_per_hour_per_move * len(relocations):
            return ()
        return relocations


def _waste(group: GroupLoad) -> float | None:
    """Dollars per hour below what it costs at least, a negative number; None where no SLO binds it."""
    return group.least_usd_per_hour - group.usd_per_hour if group.budget_s < math.inf else None


def _are_nodes_sunk_cost(view: PlacementView) -> bool:
    return view.usd_per_new_node_hour(Phase.ROLLOUT) == 0 and view.usd_per_new_node_hour(Phase.TRAIN) == 0


def _best_nodes(group: GroupLoad, pipeline: Pipeline) -> tuple[tuple[NodeId, ...], int]:
    """The fullest rollout nodes that still take the pipeline; new ones for what is missing."""
    budget_s = min(group.budget_s, budget_of(pipeline))
    room_s = budget_s - max(group.longest_sync_s, sync_s(pipeline))
    fitting = [
        (-load_s, node)
        for node, load_s, free_bytes in zip(
            group.rollout_nodes, group.rollout_loads_s, group.free_rollout_bytes, strict=True
        )
        if group.rollout_s_with(pipeline, node) <= room_s and pipeline.footprint.rollout_host_bytes <= free_bytes
    ]
    nodes = tuple(node for _, node in sorted(fitting)[: pipeline.num_rollout_nodes])
    return nodes, pipeline.num_rollout_nodes - len(nodes)


def _emptiest_nodes(group: GroupLoad, pipeline: Pipeline, num_free: float) -> tuple[tuple[NodeId, ...], int]:
    """Free nodes as far as there are any, and the least busy of the group's for what is missing."""
    num_new = int(min(num_free, pipeline.num_rollout_nodes))
    fitting = sorted(
        (load_s, node)
        for node, load_s, free_bytes in zip(
            group.rollout_nodes, group.rollout_loads_s, group.free_rollout_bytes, strict=True
        )
        if pipeline.footprint.rollout_host_bytes <= free_bytes
    )
    nodes = tuple(node for _, node in fitting[: pipeline.num_rollout_nodes - num_new])
    return nodes, pipeline.num_rollout_nodes - len(nodes)


def _misfit(group: GroupLoad, pipeline: Pipeline) -> float:
    """How much of the training nodes stays unused, and how unlike the budgets are; the lower the better."""
    budget_s = min(group.budget_s, budget_of(pipeline))
    if budget_s == math.inf:
        return float(group.num_members)
    train_s = pipeline.estimate.train_s if pipeline.estimate else 0.0
    widest_s = max(budget_of(pipeline), group.budget_s)
    unlike = 1.0 - budget_s / widest_s
    return 1.0 - (group.train_load_s + train_s) / budget_s + unlike


def _alone(pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
    """A group of its own: on its training nodes alone where that is cheaper and keeps its SLO, if nodes never run out.

    No pipeline can join a colocated one, so where training nodes are counted it would keep others waiting.
    """
    apart = founding(pipeline, view)
    if apart is not None and view.num_nodes(Phase.TRAIN) < math.inf:
        return apart
    footprint = pipeline.footprint
    pool = view.cluster.pool_for(Phase.TRAIN)
    if (
        pipeline.colocated_estimate is not None
        and pool is not None
        and colocated_step_s(pipeline, pool) <= budget_of(pipeline)
        and footprint.rollout_host_bytes + footprint.train_host_bytes <= pool.host_memory_bytes
        and pipeline.num_train_nodes <= view.num_free_nodes(Phase.TRAIN)
    ):
        return PlacementChoice(
            kind=AdmissionKind.NEW,
            group=None,
            num_new_train_nodes=pipeline.num_train_nodes,
            is_colocated=True,
        )
    return apart
