"""Starting work beside work: two orders share a device at the fraction that was measured for their sub-stages.

    works to start, in order ──▶ granted where every device has room and the pair helps ──▶ new fractions of all

An order that shares gives up its part before the newcomer starts; an order that is alone again gets the whole device.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from rlmux.core.model import DeviceId, OrderId, Phase, SubStage
from rlmux.core.steps.colocation import SharingTable
from rlmux.core.views import ChangeFraction, Choice, GroupView, MemberView, OrderView, RunWork
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.forecast import decode_sub_stage

Holder = OrderId | ReadyWork
"""An order that computes, or the ready work that was granted its place."""
Holders = dict[DeviceId, list[tuple[Holder, SubStage]]]


def fit_together(view: GroupView) -> bool:
    """Whether any two states of the group fit any of its devices together."""
    needs = [
        size
        for member in view.members
        for size in (
            member.pipeline.footprint.rollout_device_bytes,
            member.pipeline.footprint.train_device_bytes,
        )
    ]
    if None in needs:
        return False
    two_largest = sum(sorted((size for size in needs if size is not None), reverse=True)[:2])
    devices = {device for member in view.members for device in member.rollout_devices + member.train_devices}
    return all(two_largest <= view.memory_bytes(device) for device in devices)


def start_side_by_side(
    view: GroupView, works: Sequence[ReadyWork], sharing: SharingTable
) -> Generator[Choice, None, bool]:
    """Start these works where they fit, in this order, with fractions lowered before and raised after.

    Returns whether any work was started. With no works it only raises orders that are alone again.
    """
    holders: Holders = {}
    pausing: set[DeviceId] = set()
    for order in view.running:
        for device in order.devices:
            holders.setdefault(device, []).append((order.id, sub_stage_of(order)))
            if order.is_pausing:
                pausing.add(device)
    granted = _grant(view, works, sharing, holders, pausing)
    fractions = _fractions(holders, sharing)
    raised: list[ChangeFraction] = []
    for order in view.running:
        device_fraction, slowdown = fractions[order.id]
        if order.is_pausing or (abs(device_fraction - order.device_fraction) < 1e-9 and not granted):
            continue
        if device_fraction > order.device_fraction and not pausing.isdisjoint(order.devices):
            continue  # an order being paused keeps its fraction until it has stopped
        change = ChangeFraction(order=order.id, device_fraction=device_fraction, slowdown=slowdown)
        if device_fraction > order.device_fraction:
            raised.append(change)
        else:
            yield change
    for work in granted:
        device_fraction, slowdown = fractions[work]
        yield RunWork(work=work, device_fraction=device_fraction, slowdown=slowdown)
    yield from raised
    return bool(granted)


def _grant(
    view: GroupView, works: Sequence[ReadyWork], sharing: SharingTable, holders: Holders, pausing: set[DeviceId]
) -> list[ReadyWork]:
    """The works that can start, entered into `holders`: at most two hold a device, and only a pair that helps."""
    members = {member.id: member for member in view.members}
    granted: list[ReadyWork] = []
    for work in works:
        sub_stage = _ready_sub_stage(members[work.pipeline], work)
        present = [holders.get(device, []) for device in work.devices]
        if any(device in pausing for device in work.devices) or any(len(there) > 1 for there in present):
            continue
        if any(sharing.pair_rates(sub_stage, other) is None for there in present for _, other in there):
            continue
        for device in work.devices:
            holders.setdefault(device, []).append((work, sub_stage))
        granted.append(work)
    return granted


def _fractions(
    holders: Mapping[DeviceId, Sequence[tuple[Holder, SubStage]]], sharing: SharingTable
) -> dict[Holder, tuple[float, float]]:
    """Device fraction and slowdown of each holder: the least and the largest over its devices."""
    fractions: dict[Holder, tuple[float, float]] = {}
    for there in holders.values():
        for holder, sub_stage in there:
            device_fraction, slowdown = fractions.get(holder, (1.0, 1.0))
            for other, other_sub_stage in there:
                if other != holder:
                    rates = sharing.pair_rates(sub_stage, other_sub_stage)
                    mine = (rates.device_fraction, rates.slowdown) if rates else (0.5, 2.0)
                    device_fraction, slowdown = min(device_fraction, mine[0]), max(slowdown, mine[1])
            fractions[holder] = (device_fraction, slowdown)
    return fractions


def sub_stage_of(order: OrderView) -> SubStage:
    """The sub-stage that the order is in now."""
    if order.phase is Phase.TRAIN:
        return SubStage.UPDATE
    return decode_sub_stage(order.num_active)


def _ready_sub_stage(member: MemberView, work: ReadyWork) -> SubStage:
    """The sub-stage that ready work begins with; a shard that has not begun begins as the last ones did."""
    if work.phase is Phase.TRAIN:
        return SubStage.UPDATE
    num_active = member.live_shard(work.devices[0])[0] if work.is_continuation else member.estimates.peak
    return decode_sub_stage(num_active)
