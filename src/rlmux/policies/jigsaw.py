"""`jigsaw`: pipelines share all devices at the grain of sub-stages; a look-ahead decides (after JigsawRL).

    view ──forecast──▶ work items of this step and the next ones ──look-ahead──▶ schedule ──its first moment──▶ choices

Every pipeline of the group rolls out on all of its devices and trains on as many as it requests. At each event the
work items that are known or forecast, the Sub-Stage Graph of every member's next steps, are scheduled anew as a whole,
and what that schedule does now is done:

    start      ready work on free devices; beside another order only at a device fraction that was measured to help
    migrate    the tail of a shard to a sibling: pause, migrate, then the device is free
               a shard that has not begun to a sibling: fewer, fuller batches, and the device is another pipeline's
               a shard whose device is held, or wanted, to a free device on which its pipeline's shard has ended
    yield      a shard whose trajectories all wait for their environments leaves its device to work that could start
    wait       hold a device for something that is about to become ready, if that ends everything sooner

A device never waits while nothing runs. A shard migrates only if the schedule ends sooner by it, migrating included: so
not while no other work waits, and not when contexts are so long that migrating eats the gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from rlmux.core.decision.plan import GroupPlan, MarkPlanned, RunWork
from rlmux.core.decision.policy import Idling, Policy
from rlmux.core.decision.views import GroupView, MemberView
from rlmux.core.estimation.colocation import NO_SHARING, SharingTable
from rlmux.core.model import DeviceId, Phase, Pipeline, PipelineId
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.view import PlacementView
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.cycle_priorities import in_cycle_order
from rlmux.policies.lookahead.dispatching import (
    start_in_cycle_order,
    start_in_cycle_order_or_overtake,
    start_oldest_first,
    start_where_free,
)
from rlmux.policies.lookahead.forecast import Forecast, forecast_group, is_idle, solo_step_s
from rlmux.policies.lookahead.measured_tails import begin_tail_migrations
from rlmux.policies.lookahead.migration import (
    MIGRATION_PART,
    begin_migrations,
    continue_migrations,
    idle_migrations_of,
    later_sibling_migrations,
    possible_sibling_migrations,
    shards_for_idle_devices,
    trajectory_s,
)
from rlmux.policies.lookahead.node_tails import share_nodes_with_tails
from rlmux.policies.lookahead.problem import Problem, Schedule, SiblingMigration
from rlmux.policies.lookahead.search import BUDGET, look_ahead, play_out
from rlmux.policies.lookahead.side_by_side import (
    TableCache,
    base_batches,
    num_fitting_together,
    start_side_by_side,
)
from rlmux.policies.lookahead.tool_waits import yield_devices
from rlmux.policies.search.greedy import greedy
from rlmux.policies.search.shared_placement import MAX_MEMBERS, place_on_shared_nodes

PATIENCE_STEPS = 2
"""Steps of the longest member that work waits, ready, before devices are kept for it."""
UNSEEN_SPREAD = 0.05
"""Spread of forecasts until it was seen: another schedule must save as much of the strict cycle's seconds."""
LEAST_SPREAD = 0.005
"""The least of it that counts: where nothing varies, ties are no gain."""
_STARTS_PER_STEP_S = 250.0
"""Starts that a decision plays out for each second of a step, where steps take less than a second: the next decision is
near then, and a device stands still meanwhile (a start takes 3 to 7 µs)."""
_LEAST_STARTS = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Jigsaw(Policy):
    name: str = "jigsaw"
    reacts_to_progress: bool = True
    sharing: SharingTable = NO_SHARING
    """Pairs that were measured to help on these devices; without, only pipelines of one base share a device."""
    tails: bool = True
    """False: every shard stays on its device."""
    fractions: bool = True
    """False: every order has its devices alone, whatever the table."""
    fill: bool = True
    """False: a shard that only waits for its environments keeps its device, no other work comes between two stages of
    training, and no phase leaves the order of a cycle for a gap or a threatened SLO."""
    looks_ahead: bool = True
    """False: greedy, for comparison."""
    migration_stretch: float = 1.1
    """Factor by which a tail grows with what it takes over, until a migration was seen."""
    migration_part: float = MIGRATION_PART
    """Seconds of a migration as a part of the shard's, before one was seen or measured by a profile."""
    budget: int = BUDGET
    """Starts on a device that one decision may play out; fewer where steps take less than a second."""
    max_members: int = MAX_MEMBERS
    mean_weight: float = 0.1
    """Weight of the mean completion time beside the makespan, of the steps that are looked ahead to, for each other
    member: what ends first begins its next step beyond them."""
    keeps_cycle: bool = False
    """True where a place was promised by the strict cycle: it is kept unless another schedule is expected to be clearly
    shorter, and a step is due as its pipeline's SLO requires in the mean of its steps."""

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return place_on_shared_nodes(pipeline, view, max_members=self.max_members)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        if not self.has_sub_stages_to_place(plan):
            return self._start_phases(plan)
        sharing = self._sharing(plan)
        has_migrated = continue_migrations(plan, sharing)
        if not plan.has_changed:
            return plan
        plan.choose(MarkPlanned())
        if self.fill:
            yield_devices(plan)
        pairs = shards_for_idle_devices(plan) if self.tails else ()
        if not pairs and not self._is_choice(plan, sharing):
            start_side_by_side(plan, (), sharing)
            return plan
        forecast = forecast_group(plan, is_due_by_mean=self.keeps_cycle, splits_training=self.fill)
        problem = Problem(
            work_items=tuple(forecast.work_items),
            sibling_migrations=self._sibling_migrations(plan, forecast, sharing) if self.tails else (),
            idle_migrations=idle_migrations_of(plan, forecast, pairs, self._migration_s),
            sharing=sharing,
            kept=forecast.kept,
            num_kept=forecast.num_kept,
            mean_weight=self.mean_weight * (plan.num_members - 1),
        )
        cycles = tuple(in_cycle_order(plan, forecast, problem)) if self.keeps_cycle else ()
        if self.looks_ahead:
            schedule = look_ahead(problem, budget=self._budget(plan), openings=cycles)
        else:
            schedule = greedy(problem)
        cycle = min((play_out(problem, order) for order in cycles), key=lambda played: played.score, default=None)
        is_kept = cycle is not None and not _is_worth_leaving(schedule, cycle, _spread(plan))
        if is_kept:
            if self.tails:
                begin_tail_migrations(plan)
            works = [choice.work for choice in self._in_cycle_order(plan)]
        else:
            begin_migrations(plan, forecast, problem, schedule, pairs)
            works = _works_to_start(plan, forecast, schedule)
        has_started = start_side_by_side(plan, overdue_first(plan, works), sharing)
        if not has_started and not plan.running and not plan.migrating and not has_migrated:
            plan.choose(*start_where_free(plan, [work for work in plan.ready if not work.is_waiting]))
        return plan

    def idling(self, view: GroupView) -> Idling:
        """A device waits for what is about to become ready, but not while nothing runs, nor beside overdue work; for
        the first slot of a cycle, while no other phase may begin; for nothing beside a pipeline whose work arrives and
        that no cycle was promised to."""
        if self.has_sub_stages_to_place(view):
            return Idling(patience_s=_patience_s(view))
        if not self.keeps_cycle:
            return Idling()
        return Idling(cycle_lead=math.inf if self.fill else 1.0)

    def has_sub_stages_to_place(self, view: GroupView) -> bool:
        """Whether there is more to decide than which phase begins: sub-stages may share a device, tails may leave one,
        or a device has work of both phases. What a client does next cannot be planned."""
        if view.has_arriving_work:
            return False
        if not self.keeps_cycle:
            return True
        if view.num_members < 2:
            return False
        return (self.tails and view.has_wide_rollouts) or self._sharing(view).allows_any

    def _sharing(self, view: GroupView) -> SharingTable:
        """The table with batches of pipelines of one base, as far as the states of this group fit a device together."""
        batches = base_batches(view) if self.fractions else ()
        if not self.fractions or not (self.sharing.entries or batches):
            return NO_SHARING
        tables = view.cache("tables with batches", TableCache)
        return tables.with_batches(self.sharing, batches, num_fitting_together(view))

    def _start_phases(self, plan: GroupPlan) -> GroupPlan:
        if not self.keeps_cycle:
            return plan.choose(*start_oldest_first(plan))
        if self.fill and plan.num_members > 1:
            yield_devices(plan)
        if self.tails and plan.has_tails:
            share_nodes_with_tails(plan)
        return plan.choose(*self._in_cycle_order(plan))

    def _in_cycle_order(self, view: GroupView) -> list[RunWork]:
        return start_in_cycle_order_or_overtake(view) if self.fill else start_in_cycle_order(view)

    def _sibling_migrations(
        self, view: GroupView, forecast: Forecast, sharing: SharingTable
    ) -> tuple[SiblingMigration, ...]:
        now = possible_sibling_migrations(view, forecast, self._migration_s, self.migration_stretch)
        # Later whole shards stay where devices are shared: side by side is better than together.
        return now if sharing.allows_any else now + later_sibling_migrations(view, forecast)

    def _migration_s(self, member: MemberView, device: DeviceId) -> float:
        """Seconds to migrate the member's shard off the device."""
        if member.estimates.migrate_s is None and member.pipeline.migration is None:
            return self.migration_part * member.estimates.shard_s
        return trajectory_s(member) * (member.live_shard(device)[0] or 1)

    def _budget(self, view: GroupView) -> int:
        shortest_s = min(solo_step_s(member) for member in view.members)
        return min(self.budget, max(_LEAST_STARTS, int(_STARTS_PER_STEP_S * shortest_s)))

    def _is_choice(self, view: GroupView, sharing: SharingTable) -> bool:
        """Whether anything could start or migrate to a sibling now, so that a plan is worth its milliseconds."""
        max_holders = sharing.most_together - 1
        num_holders: dict[DeviceId, int] = {}
        num_rollouts: dict[PipelineId, int] = {}
        for order in view.running:
            for device in order.devices:
                num_holders[device] = num_holders.get(device, 0) + 1
            if order.phase is Phase.ROLLOUT:
                num_rollouts[order.pipeline] = num_rollouts.get(order.pipeline, 0) + 1
        ready = [work for work in view.ready if not work.is_waiting]
        if any(all(num_holders.get(device, 0) <= max_holders for device in work.devices) for work in ready):
            return True
        return (
            self.tails
            and bool(view.ready)
            and any(
                num_rollouts.get(member.id, 0) and len(member.unfinished_rollout_devices) > 1 for member in view.members
            )
        )


def _spread(view: GroupView) -> float:
    """Part by which forecasts of the members are off, in the mean: a gain below it may be none."""
    spreads = [member.estimates.spread for member in view.members]
    return max(LEAST_SPREAD, fmean(UNSEEN_SPREAD if each is None else each for each in spreads))


def _is_worth_leaving(schedule: Schedule, cycle: Schedule, spread: float) -> bool:
    """Whether the schedule keeps more of the SLOs than the strict cycle, or its pipelines end sooner by more than
    forecasts are off.

    Not by makespans: a cycle's pipelines end one after another, and the first begins its next cycle meanwhile.
    """
    if schedule.missed_s < cycle.missed_s - 1e-6:
        return True
    return schedule.mean_end_s < (1.0 - spread) * cycle.mean_end_s


def _works_to_start(view: GroupView, forecast: Forecast, schedule: Schedule) -> list[ReadyWork]:
    """Works that the schedule starts now. While tools are waited for, whatever else could start follows, in the
    schedule's order: how long a device that is kept for a reply would wait is not known."""
    now = [index for index in schedule.starts_now if index in forecast.works]
    if any(work.is_waiting for work in view.ready) or any(is_idle(order) for order in view.running):
        now += sorted(forecast.works.keys() - now, key=lambda index: (schedule.start_s[index], index))
    return [forecast.works[index] for index in now]


def overdue_first(view: GroupView, works: list[ReadyWork]) -> list[ReadyWork]:
    """The works, after those that have waited too long, without those that would take the devices of these.

    Makespans look only so far ahead: work on several devices would wait for ever while shorter work alternates on each.
    """
    patience_s = _patience_s(view)
    overdue: list[ReadyWork] = []
    kept: set[DeviceId] = set()
    for work in view.ready:
        if not work.is_waiting and view.now_s - work.since_s > patience_s and kept.isdisjoint(work.devices):
            overdue.append(work)
            kept.update(work.devices)
    return overdue + [work for work in works if kept.isdisjoint(work.devices)]


def _patience_s(view: GroupView) -> float:
    """Seconds that work waits, ready, before devices are kept for it."""
    return PATIENCE_STEPS * max(solo_step_s(member) for member in view.members)
