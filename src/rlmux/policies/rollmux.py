"""`rollmux`: marginal-cost placement, Algorithm 1 of RollMux (OSDI'26 "Weave").

    for each group, oldest first:  direct candidates (cost 0), then the scaled one
    then a new group                                      the strictly cheapest wins, the first found among
    equals

An insertion may saturate its group as long as every SLO holds under the strict meta-iteration that the
group will run. On a finite cluster without nodes for a new group, saturated groups are tried too before the
pipeline queues. On one pool that serves both phases a group's members share all its nodes, one phase after another.

Inside a group the strict meta-iteration decides what begins, and the tail of a rollout leaves devices that the next
pipeline waits for (`lookahead/measured_tails.py`).

In the paper, durations are given before placement. If they are measured only afterwards, and a group turns out to break
an SLO, a member is placed again, or those with an SLO make several steps in a cycle. A pipeline that no group took is
placed again when its mean or spread has changed, or while others wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Idling, Policy
from rlmux.core.decision.views import GroupView
from rlmux.core.model import Pipeline
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.group_load import GroupLoad
from rlmux.core.placement.view import PlacementView
from rlmux.policies.lookahead.dispatching import start_in_cycle_order
from rlmux.policies.lookahead.measured_tails import migrate_tails
from rlmux.policies.lookahead.node_tails import share_nodes_with_tails
from rlmux.policies.search.candidates import as_of_now, direct, founding, impossible, may_join, newcomer, queue, scaled
from rlmux.policies.search.readmission import place_again
from rlmux.policies.search.shared_placement import place_on_shared_nodes
from rlmux.policies.search.slo_repair import mend_slos


@dataclass(frozen=True, slots=True, kw_only=True)
class RollMux(Policy):
    name: str = "rollmux"
    reacts_to_progress: bool = True
    tails: bool = True
    """Whether the tail of a rollout on several devices leaves those that another pipeline waits for."""
    skips_saturated: bool = False
    """Skip groups that are saturated before the insertion, as Algorithm 1 is printed. The published cost and
    admission mix come out without it; with it 64/8/28 % and 7 % dearer on the production trace."""

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        if view.cluster.is_one_pool:
            return place_on_shared_nodes(pipeline, view)
        refusal = impossible(pipeline, view)
        if refusal is not None:
            return refusal
        own = founding(pipeline, view)
        joiner = newcomer(pipeline, view, has_own_nodes=own is not None)
        best: PlacementChoice | None = None
        for group in view.groups_with_room(joiner):
            if self._is_skipped(group) or not may_join(group, joiner):
                continue
            group = as_of_now(group, joiner, view)
            packed = next(direct(group, joiner), None)
            if packed is not None:
                return packed
            best = best or scaled(group, joiner, view)
        return best or own or self._over_saturate(joiner, view) or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation | FruitlessSearch, ...]:
        mended = mend_slos(view, self.place, varies_steps_per_cycle=True, takes_steps_back=True)
        return mended or place_again(view, self.place)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        if self.tails and (plan.has_wide_rollouts or plan.has_tails):
            migrate_tails(plan)
            share_nodes_with_tails(plan)
        return plan.choose(*start_in_cycle_order(plan))

    def idling(self, view: GroupView) -> Idling:
        """A device waits for the member whose slot is first, at most for a cycle of the others."""
        return Idling(cycle_lead=1.0)

    def _is_skipped(self, group: GroupLoad) -> bool:
        """Saturated before the insertion. A group of nothing but unknown durations never is."""
        return self.skips_saturated and group.is_saturated and group.cycle_s > 0

    def _over_saturate(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | None:
        """The least loaded group that can still take it: only where no node is left for a new one."""
        best, best_period_s = None, math.inf
        for group in view.groups_with_room(pipeline):
            if not may_join(group, pipeline):
                continue
            for choice in direct(as_of_now(group, pipeline, view), pipeline):
                period_s = group.period_with(pipeline, choice.rollout_nodes, 0)
                if period_s < best_period_s:
                    best, best_period_s = choice, period_s
        return best
