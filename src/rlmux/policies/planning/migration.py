"""Which parts of rollouts could go to another device now; a plan says which of them do.

merge      the tail of a share goes to the sibling that will end last
gather     a share that has not begun goes to a sibling as a whole; planned for rollouts to come as well
migrate    a share whose device is held, or wanted, goes to a free one on which its pipeline's share has ended
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from rlmux.core.model import DeviceId, Phase, PipelineId, Stage
from rlmux.core.state import ReadyWork
from rlmux.core.views import GroupView, MemberView, MigrateWork, OrderView
from rlmux.policies.planning.forecast import Upcoming, is_idle
from rlmux.policies.planning.lookahead import Merge, Migration

MoveSeconds = Callable[[MemberView, DeviceId], float]
"""Of moving the unfinished trajectories of a pipeline's share off a device."""
Mover = tuple[ReadyWork | OrderView, DeviceId]
"""A share and a device for it."""


def possible_merges(view: GroupView, ahead: Upcoming, move_s: MoveSeconds, stretch: float) -> tuple[Merge, ...]:
    """For each pipeline: every other share's tail to the share that will end last. None if nobody waits."""
    if len(view.members) < 2 or not view.ready:
        return ()
    merges: list[Merge] = []
    moving = {pipeline for pipeline, _ in view.moving}
    for number, member in enumerate(view.members):
        shares = ahead.shares.get(member.id, ())
        if member.id in moving or len(shares) < 2:
            continue
        merges += _gathers(ahead, member, shares, is_odd=number % 2 == 1)
        if not _is_tail_near(ahead, shares):
            continue
        target = max(shares, key=lambda index: ahead.work_items[index].seconds)
        for source in shares:
            if source != target and not ahead.is_fresh(source):
                cost_s = move_s(member, ahead.device_of[source])
                merges.append(Merge(source=source, target=target, cost_s=cost_s, stretch=stretch))
    return tuple(merges)


def later_gathers(view: GroupView, ahead: Upcoming) -> tuple[Merge, ...]:
    """Of the next rollouts: each two neighbours on the side where their pipeline trains.

    A plan without them takes every pipeline for one that will need all its devices again.
    """
    if len(view.members) < 2:
        return ()
    merges: list[Merge] = []
    for member in view.members:
        if member.estimates.peak is None:
            continue
        trains_on = {ahead.numbers[device] for device in member.train_devices}
        for shares in ahead.later_shares.get(member.id, ()):
            for first, second in zip(shares[::2], shares[1::2], strict=False):
                is_first = ahead.work_items[first].devices[0] in trains_on
                source, target = (second, first) if is_first else (first, second)
                cost_s = member.estimates.gathered_s
                merges.append(Merge(source=source, target=target, cost_s=cost_s, is_whole=True, is_later=True))
    return tuple(merges)


def _is_tail_near(ahead: Upcoming, shares: Sequence[int]) -> bool:
    return any(ahead.work_items[index].seconds <= 1.5 * ahead.work_items[index].tail_s for index in shares)


def _gathers(ahead: Upcoming, member: MemberView, shares: Sequence[int], *, is_odd: bool) -> Iterator[Merge]:
    """Of each two neighbours that have not begun: one takes the other over.

    Pipelines prefer opposite sides, so that a schedule that gathers everybody leaves each a device of its own.
    """
    if member.estimates.peak is None:  # no step has been seen
        return
    for first, second in zip(shares[::2], shares[1::2], strict=False):
        if ahead.is_fresh(first) and ahead.is_fresh(second):
            ways = [(first, second), (second, first)] if is_odd else [(second, first), (first, second)]
            for source, target in ways:
                yield Merge(source=source, target=target, cost_s=member.estimates.gathered_s, is_whole=True)


def continue_migrations(view: GroupView) -> Generator[MigrateWork, None, bool]:
    """Migrate the shards that were paused for it and whose target can take them; returns whether there was one."""
    has_migrated = False
    for work in view.ready:
        if work.migrate_to is not None and _can_take(view, work.pipeline, work.migrate_to):
            has_migrated = True
            yield MigrateWork(pipeline=work.pipeline, source=work.devices[0], target=work.migrate_to)
    return has_migrated


def _can_take(view: GroupView, pipeline: PipelineId, target: DeviceId) -> bool:
    """The target's shard stays there and has not ended, or no order computes there."""
    member = next(member for member in view.members if member.id == pipeline)
    if (pipeline, target) in view.moving:
        return False
    return target in member.unfinished_rollout_devices or view.is_free((target,))


def possible_movers(view: GroupView) -> tuple[Mover, ...]:
    """Ready shares whose device is held and running ones whose device is wanted, each with a free device on which its
    pipeline has nothing left to do in this step.
    """
    ready = [work for work in view.ready if not work.is_waiting]
    if not ready or not view.running:
        return ()
    wanted = {device for work in ready for device in work.devices}
    moving = {pipeline for pipeline, _ in view.moving}
    movers: list[Mover] = []
    taken: set[DeviceId] = set()
    for member in view.members:
        free = _devices_left(view, member)
        if not free or member.id in moving:
            continue
        held: list[ReadyWork | OrderView] = [
            work
            for work in ready
            if work.pipeline == member.id and work.stage is Stage.GENERATE and not view.is_free(work.devices)
        ]
        in_the_way = [
            order
            for order in view.running
            if order.pipeline == member.id and order.phase is Phase.ROLLOUT and order.devices[0] in wanted
        ]
        held += [order for order in in_the_way if not order.is_pausing and not is_idle(order)]
        for share, device in zip(held, free, strict=False):
            if isinstance(share, OrderView):
                if device in taken:  # by another one that would run there at once
                    continue
                taken.add(device)
            movers.append((share, device))
    return tuple(movers)


def _devices_left(view: GroupView, member: MemberView) -> list[DeviceId]:
    """Free ones on which the pipeline's share has ended."""
    unfinished = member.unfinished_rollout_devices
    if len(unfinished) == len(member.rollout_devices):
        return []
    return [device for device in member.rollout_devices if device not in unfinished and view.is_free((device,))]


def migrations_of(
    view: GroupView, ahead: Upcoming, movers: Sequence[Mover], move_s: MoveSeconds
) -> tuple[Migration, ...]:
    """As the plan knows them."""
    if not movers:
        return ()
    members = {member.id: member for member in view.members}
    index_of: dict[tuple[PipelineId, tuple[DeviceId, ...]], int] = {
        (share.pipeline, share.devices): index
        for shares in (ahead.works, ahead.orders)
        for index, share in shares.items()
        if share.phase is Phase.ROLLOUT
    }
    return tuple(
        Migration(
            task=index_of[share.pipeline, share.devices],
            device=ahead.numbers[device],
            cost_s=0.0 if _has_not_begun(share) else move_s(members[share.pipeline], share.devices[0]),
        )
        for share, device in movers
    )


def _has_not_begun(share: ReadyWork | OrderView) -> bool:
    return isinstance(share, ReadyWork) and not share.is_continuation
