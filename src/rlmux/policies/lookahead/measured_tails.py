"""Tails of rollouts migrate to one device, and the pipeline that waits has the others (RollMux section 4.3).

    device 0   [ A dense ][ B dense, 1/7 of the eighth ][ A dense ]
    ...        [ A dense ][ B dense, 1/7 of the eighth ][ A dense ]
    device 7   [ A dense ][ A's tail              ]     [ A dense ]

At most an eighth of a step's trajectories is left: they migrate to the device whose shard would end last. A shard of
the next pipeline that finds this device held does not wait for it, but is spread over its siblings. Both are made only
where they are expected to pay, by what migrations took and what decode iterations cost by their rows:

    tail          its devices are free earlier, in the mean over all of its rollout, than the rollout ends later; and
                  its step, longer by that, is still shorter than the rollouts of all members one after another
    whole shard   its siblings grow by less than the tail lasts

`rollmux`, and `rlmux` while it keeps the cycle; elsewhere the look-ahead decides (`migration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmux.core.decision.plan import GroupPlan, MigrateWork, PauseOrder
from rlmux.core.decision.views import GroupView, MemberView, OrderView
from rlmux.core.model import DeviceId, Phase, PipelineId, Stage
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.migration import continue_migrations, trajectory_s

Members = Mapping[PipelineId, MemberView]
Rollouts = dict[PipelineId, list[OrderView]]
"""Running rollout orders, by pipeline."""
TAIL_PART = 0.125
"""Part of a step's trajectories at or below which its tail migrates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A running shard near its end."""

    order: OrderView
    num_left: int
    """Trajectories that had not ended at its last report."""
    left_s: float
    """Expected solo seconds until it ends."""

    @property
    def device(self) -> DeviceId:
        return self.order.devices[0]


def migrate_tails(plan: GroupPlan) -> None:
    """Migrate what was paused for it, pause the shards whose tails are to migrate now, and let no shard wait for
    another pipeline's tail."""
    if plan.num_members < 2 or plan.has_arriving_work or not plan.has_wide_rollouts:
        return
    continue_migrations(plan)
    begin_tail_migrations(plan)


def begin_tail_migrations(plan: GroupPlan) -> None:
    """Pause the shards whose tails are to migrate now, and let no shard wait for another pipeline's tail."""
    waiting = [work for work in plan.ready if _begins_a_shard(work) and not plan.is_free(work.devices)]
    if not waiting:
        return
    rollouts: Rollouts = {}
    for order in plan.running:
        if order.phase is Phase.ROLLOUT:
            rollouts.setdefault(order.pipeline, []).append(order)
    members = {member.id: member for member in plan.members}
    for pipeline, orders in rollouts.items():
        if len(members[pipeline].rollout_devices) < 2:
            continue
        wanted = {work.devices[0] for work in waiting if work.pipeline != pipeline and plan.is_next_in_cycle(work)}
        if wanted:
            _pause_for_tail(plan, members[pipeline], orders, wanted)
    _spread_over_siblings(plan, members, rollouts, waiting)


def _begins_a_shard(work: ReadyWork) -> bool:
    return work.stage is Stage.GENERATE and not work.is_continuation and not work.is_waiting


def _spare_s(view: GroupView, member: MemberView) -> float:
    """Seconds that the member's own step may grow by until it takes as long as all rollouts on its devices one after
    another, which others would wait for otherwise. Where rollouts run ahead of training, a step is the longer of both.
    """
    own = member.estimates
    rollout_s, train_s = own.longest_s + own.rollout_switch_s, own.train_s + own.train_switch_s
    devices = set(member.rollout_devices)
    rollouts_s = sum(
        other.estimates.longest_s + other.estimates.rollout_switch_s
        for other in view.members
        if not devices.isdisjoint(other.rollout_devices)
    )
    return rollouts_s - (max(rollout_s, train_s) if member.pipeline.staleness else rollout_s + train_s)


def _late_s(member: MemberView, leaving: Sequence[_Shard]) -> float:
    """Seconds by which its rollout is expected to end later if the tails of these shards migrate: as seen, else what
    each trajectory takes on its way and in the last shard's iterations."""
    estimates = member.estimates
    if estimates.tail_growth is not None:
        return estimates.tail_growth * estimates.longest_s
    num_left = sum(shard.num_left for shard in leaving)
    return num_left * trajectory_s(member) + estimates.tail_migration_s([shard.left_s for shard in leaving])


def _pause_for_tail(plan: GroupPlan, member: MemberView, orders: Sequence[OrderView], wanted: set[DeviceId]) -> None:
    """Pause all shards of the rollout but the one that would end last, if only its tail is left and that pays."""
    shards = _shards_at_their_end(member, orders, plan.now_s)
    if len(shards) < 2:
        return
    last = max(shards, key=lambda shard: shard.left_s)
    leaving = [shard for shard in shards if shard is not last and shard.device in wanted]
    late_s = _late_s(member, leaving)
    if sum(shard.left_s for shard in leaving) <= late_s * len(member.rollout_devices):
        return
    if late_s > _spare_s(plan, member):
        return
    for shard in leaving:
        plan.choose(PauseOrder(order=shard.order.id, migrate_to=last.device))


def _shards_at_their_end(member: MemberView, orders: Sequence[OrderView], now_s: float) -> list[_Shard]:
    """The unfinished shards of a rollout of which no more than its tail is left; else none, nor before a whole rollout
    was seen."""
    peak, estimates = member.estimates.peak, member.estimates
    if peak is None or len(estimates.curves) < len(member.rollout_devices):
        return []
    if len(orders) != len(member.unfinished_rollout_devices) or any(order.is_pausing for order in orders):
        return []
    found = []
    for order in orders:
        num_left, before_s = member.live_shard(order.devices[0])
        if num_left is None:
            return []
        left = estimates.remaining_time(num_left, before_s + order.solo_s(now_s))
        found.append(_Shard(order=order, num_left=num_left, left_s=left.median_s))
    num_left = sum(shard.num_left for shard in found)
    return found if num_left <= TAIL_PART * peak * len(member.rollout_devices) else []


def _spread_over_siblings(
    plan: GroupPlan,
    members: Members,
    rollouts: Rollouts,
    waiting: Sequence[ReadyWork],
) -> None:
    """Spread whole shards whose device holds another pipeline's tail over the siblings that have begun."""
    migrating = {pipeline for pipeline, _ in plan.migrating}
    for work in waiting:
        member, siblings = members[work.pipeline], rollouts.get(work.pipeline, [])
        if not siblings or work.pipeline in migrating or not plan.is_next_in_cycle(work):
            continue
        wait_s = _tail_s(plan, members, rollouts, work.devices[0])
        targets = [
            order.devices[0]
            for order in sorted(siblings, key=lambda order: -order.started_s)
            if not order.is_pausing and plan.can_migrate(work.pipeline, work.devices[0], order.devices[0])
        ]
        if targets and member.estimates.whole_migration_s(len(targets)) < wait_s:
            migrating.add(work.pipeline)
            plan.choose(
                MigrateWork(
                    pipeline=work.pipeline, source=work.devices[0], target=targets[0], others=tuple(targets[1:])
                )
            )


def _tail_s(
    view: GroupView,
    members: Members,
    rollouts: Rollouts,
    device: DeviceId,
) -> float:
    """Expected seconds until the device's tail ends; 0 where it holds none."""
    for pipeline, orders in rollouts.items():
        member = members[pipeline]
        if len(member.rollout_devices) == 1:
            continue  # its only shard, which nothing has left for
        if len(orders) == 1 and orders[0].devices == (device,) and member.unfinished_rollout_devices == (device,):
            run_s = member.live_shard(device)[1] + orders[0].solo_s(view.now_s)
            return member.estimates.remaining_time(None, run_s).high_s  # a tail is the longest of its rollout
    return 0.0
