"""Which shards of a rollout could migrate now; the look-ahead decides which of them do.

    tail          the tail of a shard migrates to the sibling that will end last
    whole shard   a shard that has not begun migrates to a sibling; planned for rollouts to come as well
    idle device   a shard whose device is held, or wanted, migrates to a free one where its pipeline's shard has ended

A running shard is paused first, with the device that it is to migrate to; the policy chooses again once it has paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rlmux.core.decision.plan import GroupPlan, MigrateWork, PauseOrder
from rlmux.core.decision.views import GroupView, MemberView, OrderView
from rlmux.core.estimation.colocation import NO_SHARING, SharingTable
from rlmux.core.model import DeviceId, Phase, PipelineId, Stage
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.forecast import Forecast, is_idle, name_of_order, name_of_work
from rlmux.policies.lookahead.problem import IdleMigration, Problem, Schedule, SiblingMigration

MigrationSeconds = Callable[[MemberView, DeviceId], float]
"""Seconds to migrate the unfinished trajectories of a pipeline's shard off a device."""
ShardAndDevice = tuple[ReadyWork | OrderView, DeviceId]
"""A shard, ready or running, and an idle device for it."""


MIGRATION_PART = 0.02
"""Seconds of a shard's migration as a part of the shard's own, before one was seen or measured by a profile."""


def trajectory_s(member: MemberView) -> float:
    """Seconds to migrate one begun trajectory of the member: as seen, as profiled, else as a part of its shard's."""
    estimates, expected = member.estimates, member.pipeline.migration
    if estimates.migrate_s is not None:
        return estimates.migrate_s
    if expected is not None:
        return min(expected.copy_s, expected.recompute_s)
    return MIGRATION_PART * estimates.shard_s / (estimates.peak or 1)


def continue_migrations(plan: GroupPlan, sharing: SharingTable = NO_SHARING) -> bool:
    """Migrate the shards that were paused for it and whose target can take them; returns whether there was one."""
    has_migrated = False
    for work in plan.ready:
        if work.migrate_to is not None and _can_take(plan, work, work.migrate_to, sharing):
            has_migrated = True
            plan.choose(MigrateWork(pipeline=work.pipeline, source=work.devices[0], target=work.migrate_to))
    return has_migrated


def _can_take(view: GroupView, work: ReadyWork, target: DeviceId, sharing: SharingTable) -> bool:
    """Whether the shard may leave, and the target's shard stays there and has not ended, or the shard could run beside
    what computes there."""
    members = {member.id: member for member in view.members}
    member = members[work.pipeline]
    if not view.can_migrate(work.pipeline, work.devices[0], target):
        return False
    if target in member.unfinished_rollout_devices:
        return True
    there = [name_of_order(members[order.pipeline], order) for order in view.running if target in order.devices]
    return not there or sharing.rates_beside(name_of_work(member, work), there) is not None


# --- to a sibling -------------------------------------------------------------------------------------------


def possible_sibling_migrations(
    view: GroupView, forecast: Forecast, migration_s: MigrationSeconds, stretch: float
) -> tuple[SiblingMigration, ...]:
    """Migrations inside each pipeline: whole shards that have not begun to a neighbour, and every other shard's tail to
    the shard that will end last. None if no work is ready: no device is wanted then."""
    if len(view.members) < 2 or not view.ready:
        return ()
    possible: list[SiblingMigration] = []
    migrating = {pipeline for pipeline, _ in view.migrating}
    wanted_s = _wanted_from(forecast)
    for number, member in enumerate(view.members):
        shards = forecast.shards.get(member.id, ())
        if member.id in migrating or len(shards) < 2:
            continue
        leaving = [index for index in shards if _is_wanted(forecast, wanted_s, number, index)]
        possible += _whole_shards(forecast, member, shards, leaving, is_odd=number % 2 == 1)
        possible += _late_shards(view, forecast, member, shards)
        if not _is_tail_near(forecast, shards):
            continue
        target = max(shards, key=lambda index: forecast.work_items[index].seconds)
        for source in leaving:
            if source != target and not forecast.is_fresh(source):
                cost_s = migration_s(member, forecast.device_of[source])
                possible.append(SiblingMigration(source=source, target=target, cost_s=cost_s, stretch=stretch))
    return tuple(possible)


def _wanted_from(forecast: Forecast) -> dict[int, list[tuple[float, int]]]:
    """For each device the seconds from now in which work items that do not run could begin there at the earliest, each
    with its pipeline, ascending."""
    ends_s: list[float] = []
    wanted: dict[int, list[tuple[float, int]]] = {}
    for item in forecast.work_items:
        begin_s = max([ends_s[need] for need in item.needs], default=0.0)
        ends_s.append(begin_s + item.seconds)
        if not item.is_running:
            for device in item.devices:
                wanted.setdefault(device, []).append((begin_s, item.pipeline))
    for entries in wanted.values():
        entries.sort()
    return wanted


def _is_wanted(
    forecast: Forecast, wanted_s: Mapping[int, Sequence[tuple[float, int]]], pipeline: int, index: int
) -> bool:
    """Whether another pipeline could begin something on the shard's device before the shard would have ended."""
    item = forecast.work_items[index]
    return any(
        begin_s < item.seconds
        for device in item.devices
        for begin_s, other in wanted_s.get(device, ())
        if other != pipeline
    )


def later_sibling_migrations(view: GroupView, forecast: Forecast) -> tuple[SiblingMigration, ...]:
    """Migrations in the next rollouts: of each two neighbours, one whole shard to the side where the pipeline trains.

    A schedule without them takes every pipeline for one that will need all its devices again.
    """
    if len(view.members) < 2:
        return ()
    possible: list[SiblingMigration] = []
    for member in view.members:
        if member.estimates.peak is None:
            continue
        trains_on = {forecast.device_numbers[device] for device in member.train_devices}
        for shards in forecast.later_shards.get(member.id, ()):
            for first, second in zip(shards[::2], shards[1::2], strict=False):
                is_first = forecast.work_items[first].devices[0] in trains_on
                source, target = (second, first) if is_first else (first, second)
                cost_s = member.estimates.whole_migration_s()
                possible.append(
                    SiblingMigration(source=source, target=target, cost_s=cost_s, is_whole=True, is_later=True)
                )
    return tuple(possible)


def _is_tail_near(forecast: Forecast, shards: Sequence[int]) -> bool:
    return any(forecast.work_items[index].seconds <= 1.5 * forecast.work_items[index].tail_s for index in shards)


def _whole_shards(
    forecast: Forecast, member: MemberView, shards: Sequence[int], leaving: Sequence[int], *, is_odd: bool
) -> Iterator[SiblingMigration]:
    """Whole shards that have not begun, and whose device is wanted: of each two neighbours, one takes the other over.

    Pipelines prefer opposite sides, so that a schedule that makes all of them leaves each a device of its own.
    """
    if member.estimates.peak is None:  # no step has been seen
        return
    for first, second in zip(shards[::2], shards[1::2], strict=False):
        if forecast.is_fresh(first) and forecast.is_fresh(second):
            ways = [(first, second), (second, first)] if is_odd else [(second, first), (first, second)]
            for source, target in ways:
                if source in leaving:
                    yield SiblingMigration(
                        source=source, target=target, cost_s=member.estimates.whole_migration_s(), is_whole=True
                    )


def _late_shards(
    view: GroupView, forecast: Forecast, member: MemberView, shards: Sequence[int]
) -> Iterator[SiblingMigration]:
    """Whole shards that have not begun since their device is held: spread over all siblings that compute or could now,
    and as a whole to the one that began last."""
    if member.estimates.peak is None:
        return
    late = [index for index in shards if forecast.is_fresh(index) and not view.is_free((forecast.device_of[index],))]
    begun = [index for index in shards if index in forecast.orders and not forecast.orders[index].is_pausing]
    present = begun + [index for index in shards if forecast.is_fresh(index) and index not in late]
    for source in late:
        if len(present) > 1:
            cost_s = member.estimates.whole_migration_s(len(present))
            yield SiblingMigration(
                source=source, target=present[0], others=tuple(present[1:]), cost_s=cost_s, is_whole=True
            )
        if begun:
            target = max(begun, key=lambda index: forecast.orders[index].started_s)
            cost_s = member.estimates.whole_migration_s()
            yield SiblingMigration(source=source, target=target, cost_s=cost_s, is_whole=True)


# --- to an idle device --------------------------------------------------------------------------------------


def shards_for_idle_devices(view: GroupView) -> tuple[ShardAndDevice, ...]:
    """Ready shards whose device is held and running ones whose device is wanted, each with a free device on which its
    pipeline has nothing left to do in this step."""
    ready = [work for work in view.ready if not work.is_waiting]
    if not ready or not view.running:
        return ()
    wanted = {device for work in ready for device in work.devices}
    migrating = {pipeline for pipeline, _ in view.migrating}
    pairs: list[ShardAndDevice] = []
    taken: set[DeviceId] = set()
    for member in view.members:
        idle_devices = _idle_devices(view, member)
        if not idle_devices or member.id in migrating:
            continue
        for shard, device in zip(_shards_in_the_way(view, member, ready, wanted), idle_devices, strict=False):
            if isinstance(shard, OrderView):
                if device in taken:  # by another one that would run there at once
                    continue
                taken.add(device)
            pairs.append((shard, device))
    return tuple(pairs)


def _idle_devices(view: GroupView, member: MemberView) -> list[DeviceId]:
    """Free devices on which the pipeline's shard has ended."""
    unfinished = member.unfinished_rollout_devices
    if len(unfinished) == len(member.rollout_devices):
        return []
    return [device for device in member.rollout_devices if device not in unfinished and view.is_free((device,))]


def _shards_in_the_way(
    view: GroupView, member: MemberView, ready: Sequence[ReadyWork], wanted: set[DeviceId]
) -> list[ReadyWork | OrderView]:
    """The member's ready shards whose device is held, then its running ones whose device is wanted."""
    held: list[ReadyWork | OrderView] = [
        work
        for work in ready
        if work.pipeline == member.id
        and work.stage is Stage.GENERATE
        and not view.is_free(work.devices)
        and not member.has_moved(work.devices[0])
    ]
    held += [
        order
        for order in view.running
        if order.pipeline == member.id
        and order.phase is Phase.ROLLOUT
        and order.devices[0] in wanted
        and not order.is_pausing
        and not is_idle(order)
    ]
    return held


def idle_migrations_of(
    view: GroupView, forecast: Forecast, pairs: Sequence[ShardAndDevice], migration_s: MigrationSeconds
) -> tuple[IdleMigration, ...]:
    """The look-ahead's records of these shards and devices, in the same order."""
    if not pairs:
        return ()
    members = {member.id: member for member in view.members}
    index_of: dict[tuple[PipelineId, tuple[DeviceId, ...]], int] = {
        (shard.pipeline, shard.devices): index
        for shards in (forecast.works, forecast.orders)
        for index, shard in shards.items()
        if shard.phase is Phase.ROLLOUT
    }
    return tuple(
        IdleMigration(
            item=index_of[shard.pipeline, shard.devices],
            device=forecast.device_numbers[device],
            cost_s=0.0 if _has_not_begun(shard) else migration_s(members[shard.pipeline], shard.devices[0]),
        )
        for shard, device in pairs
    )


def _has_not_begun(shard: ReadyWork | OrderView) -> bool:
    return isinstance(shard, ReadyWork) and not shard.is_continuation


# --- what a schedule makes now ------------------------------------------------------------------------------


def begin_migrations(
    plan: GroupPlan, forecast: Forecast, problem: Problem, schedule: Schedule, pairs: Sequence[ShardAndDevice]
) -> None:
    """Make the schedule's migrations of this moment: running shards pause first. Works that migrate leave the
    forecast. A shard to which trajectories are on their way stays until the next plan."""
    for number in schedule.sibling_migrations_now:
        migration = problem.sibling_migrations[number]
        targets = [forecast.device_of[target] for target in migration.targets]
        order = forecast.orders.get(migration.source)
        if order is not None:
            _pause_to_migrate(plan, order, targets[0])
        elif migration.source in forecast.works:
            source, pipeline = forecast.device_of[migration.source], forecast.works[migration.source].pipeline
            if all(plan.can_migrate(pipeline, source, target) for target in targets):
                del forecast.works[migration.source]
                others = tuple(targets[1:])
                plan.choose(MigrateWork(pipeline=pipeline, source=source, target=targets[0], others=others))
    for number in schedule.idle_migrations_now:
        shard, device = pairs[number]
        if isinstance(shard, OrderView):
            _pause_to_migrate(plan, shard, device)
        elif not plan.can_migrate(shard.pipeline, shard.devices[0], device):
            continue
        elif forecast.works.pop(problem.idle_migrations[number].item, None) is not None:
            plan.choose(MigrateWork(pipeline=shard.pipeline, source=shard.devices[0], target=device))


def _pause_to_migrate(plan: GroupPlan, order: OrderView, target: DeviceId) -> None:
    if not order.is_pausing:
        plan.choose(PauseOrder(order=order.id, migrate_to=target))
