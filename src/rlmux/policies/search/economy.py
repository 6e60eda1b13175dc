"""What slowness costs, and how slow a pipeline may be from now on: for pipelines whose steps are given.

    budget            (due - now - reserve) / steps left       longest mean step from now on that keeps its SLO
    cost of a group   $/h + lambda * sum of c_i (1 - s_i)      c_i: dollars of its work in an hour at solo speed
                                                               s_i: its speed, T_solo / seconds of a step
    price of a move   (hold-up and cold starts) / hours        dollars per hour while the pipeline is still there

With the same work to do, a pipeline that is slowed 1.4 times holds nodes 1.4 times as long: cheapest per hour is not
cheapest. Least dollars for work is least (cost - lambda * work) at the lambda that is the best ratio of the two
(Dinkelbach, "On Nonlinear Fractional Programming", Management Science 13(7), 1967). For a pipeline that leaves by the
clock slowness is free: its lambda is 0, and its budget SLO times T_solo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlmux.core.model import GroupId, Phase, Pipeline, PipelineId, WorkLeft
from rlmux.core.placement.group_load import (
    GroupLoad,
    cold_start_s,
    phases_of,
    slo_budget_s,
    slo_step_s,
    solo_s,
)
from rlmux.core.placement.view import PlacementView

MOST_SLOWDOWN = 3.0
"""Step slowdown that no pipeline has to accept, whatever time it has in hand."""
_RESERVE = 0.005
"""Part of the time that is left which is kept in hand."""
_ROUNDING = 1e-9
_TIME_MARGIN_S = 1.0
"""Seconds by which a budget is recomputed too early, so that rounding decides nothing."""


@dataclass(slots=True, kw_only=True)
class Economy:
    """Prices and budgets of one decision; results are kept until its end."""

    view: PlacementView
    slowness_price: float
    """Lambda: dollars that an hour of one dollar's work is worth."""
    hold_up_usd: float
    """Dollars that a move costs for each rollout node, beside cold starts: nodes held until a step's end."""
    move_horizon_h: float
    """Hours within which a move must have paid for itself."""
    rollout_usd: float = field(init=False)
    train_usd: float = field(init=False)
    _budgets_s: dict[PipelineId, float] = field(init=False, default_factory=dict)
    _staying_budgets_s: dict[PipelineId, float] = field(init=False, default_factory=dict)
    _slowness_usd: dict[PipelineId, float] = field(init=False, default_factory=dict)
    _group_budgets: dict[GroupId, tuple[GroupLoad, float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.rollout_usd = self.view.usd_per_node_hour(Phase.ROLLOUT)
        self.train_usd = self.view.usd_per_node_hour(Phase.TRAIN)

    def budget_s(self, pipeline: Pipeline) -> float:
        """Longest mean step from now on that keeps its SLO; T_solo where that is too late."""
        known = self._budgets_s.get(pipeline.id)
        if known is None:
            known = budget_from(pipeline, self.view.work_left(pipeline.id))
            self._budgets_s[pipeline.id] = known
        return known

    def slowness_usd(self, pipeline: Pipeline) -> float:
        """Dollars per hour that the pipeline costs more for each part of its solo speed that it lacks."""
        known = self._slowness_usd.get(pipeline.id)
        if known is None:
            has_given_work = self.view.work_left(pipeline.id) is not None
            known = self.slowness_price * self.work_usd(pipeline) if has_given_work else 0.0
            self._slowness_usd[pipeline.id] = known
        return known

    def work_usd(self, pipeline: Pipeline) -> float:
        """Dollars per hour of its busy nodes at solo speed."""
        rollout_s, train_s = phases_of(pipeline)
        alone_s = solo_s(pipeline)
        if not alone_s:
            return 0.0
        return (
            rollout_s * pipeline.num_rollout_nodes * self.rollout_usd
            + train_s * pipeline.num_train_nodes * self.train_usd
        ) / alone_s

    def staying_budget_s(self, pipeline: Pipeline) -> float:
        """The same for a pipeline that stays where it is: nothing is kept for a move."""
        known = self._staying_budgets_s.get(pipeline.id)
        if known is None:
            known = budget_from(pipeline, self.view.work_left(pipeline.id), reserve_s=0.0)
            self._staying_budgets_s[pipeline.id] = known
        return known

    def budget_of_group(self, group: GroupLoad) -> float:
        """Longest period that keeps every member within its budget where it is."""
        known = self._group_budgets.get(group.id)
        if known is None or known[0] is not group:
            budget_s = min(self.staying_budget_s(member.pipeline) * member.steps_per_cycle for member in group.members)
            known = (group, budget_s)
            self._group_budgets[group.id] = known
        return known[1]

    def keeps_budgets(self, group: GroupLoad) -> bool:
        """Whether no member is slower than its budget. One that is alone cannot be made faster apart."""
        return group.period_s <= self.budget_of_group(group) * (1.0 + _ROUNDING)

    def cost_usd(self, group: GroupLoad) -> float:
        """Dollars per hour of the group's nodes, and the price of its members' slowness."""
        return group.usd_per_hour + sum(
            self.slowness_usd(member.pipeline) * (1.0 - 1.0 / group.slowdown_of(member.pipeline.id))
            for member in group.members
        )

    def idle_usd(self, group: GroupLoad) -> float:
        """Dollars per hour of the group's nodes that no member's work stands against."""
        return group.usd_per_hour - sum(
            self.work_usd(member.pipeline) / group.slowdown_of(member.pipeline.id) for member in group.members
        )

    def move_once_usd(self, pipeline: Pipeline) -> float:
        """Dollars that moving the pipeline costs: nodes held until its step's end, and cold starts."""
        left = self.view.work_left(pipeline.id)
        if left is not None and not left.has_begun:
            return 0.0
        switch = pipeline.switch
        usd = self.hold_up_usd * pipeline.num_rollout_nodes
        if switch is not None:
            usd += switch.cold_rollout_s * pipeline.num_rollout_nodes * self.rollout_usd / 3600.0
            usd += switch.cold_train_s * pipeline.num_train_nodes * self.train_usd / 3600.0
        return usd

    def move_usd(self, pipeline: Pipeline) -> float:
        """Dollars per hour that moving the pipeline must save, so that it pays before the pipeline ends."""
        usd = self.move_once_usd(pipeline)
        left, alone_s = self.view.work_left(pipeline.id), solo_s(pipeline)
        hours = self.move_horizon_h
        if left is not None and alone_s:
            hours = min(hours, max(1, left.num_left) * alone_s / 3600.0)
        return usd / hours


def move_reserve_s(pipeline: Pipeline) -> float:
    """Seconds that a move may cost the pipeline: its cold starts, and one solo step until its first slot."""
    return cold_start_s(pipeline) + solo_s(pipeline)


def budget_from(pipeline: Pipeline, left: WorkLeft | None, *, reserve_s: float | None = None) -> float:
    """Seconds of the longest mean step from now on that keeps the SLO, between T_solo and `MOST_SLOWDOWN` of it.

    `reserve_s`: seconds kept in reserve; by default what a move may cost. SLO times T_solo where the work left is not
    known.
    """
    alone_s = solo_s(pipeline)
    if left is None or not alone_s or pipeline.slo_slowdown == math.inf:
        return slo_step_s(pipeline)
    due_s = _due_s(pipeline, left)
    if reserve_s is None or not left.has_begun:
        reserve_s = move_reserve_s(pipeline)
    room_s = (due_s - left.now_s - reserve_s) * (1.0 - _RESERVE)
    return min(MOST_SLOWDOWN * alone_s, max(alone_s, room_s / max(1, left.num_left) / pipeline.spread))


def budget_left_s(pipeline: Pipeline, left: WorkLeft | None, *, reserve_s: float | None = None) -> float:
    """As `budget_from`, and never more than its SLO allows for the mean of all its steps. The SLO alone counts where no
    probability is stated, and where it is lost: steps as fast as alone would come too late.
    """
    longest_s = slo_budget_s(pipeline)
    if left is None or pipeline.slo_probability is None or longest_s == math.inf:
        return longest_s
    budget_s = budget_from(pipeline, left, reserve_s=reserve_s)
    is_lost = _due_s(pipeline, left) - left.now_s < left.num_left * solo_s(pipeline)
    return longest_s if is_lost else min(longest_s, budget_s)


def keeps_budget_until(pipeline: Pipeline, left: WorkLeft | None, step_s: float) -> float:
    """Time before which steps so long cannot be beyond the budget of a pipeline that they are within now.

    The budget falls as time passes, and rises with each step that is done: here none is.
    """
    alone_s = solo_s(pipeline)
    if left is None or step_s <= alone_s or pipeline.slo_slowdown == math.inf:
        return math.inf
    due_s = _due_s(pipeline, left)
    room_s = step_s * pipeline.spread * max(1, left.num_left) / (1.0 - _RESERVE)
    return due_s - room_s - _TIME_MARGIN_S


def _due_s(pipeline: Pipeline, left: WorkLeft) -> float:
    """Time at which all its steps must be done, if those that are left take as long as is expected of the next."""
    return left.submitted_s + left.num_left * slo_step_s(pipeline) + pipeline.slo_slowdown * left.done_solo_s
