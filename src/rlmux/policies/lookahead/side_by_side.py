"""Starting work beside work: orders share a device at the fractions that were measured for their sub-stages.

    works to start, in order ──▶ granted where every device has room and sharing helps ──▶ new fractions of all

An order that shares gives up its part before the newcomer starts; an order that is alone again gets the whole device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rlmux.core.decision.plan import ChangeFraction, GroupPlan, RunWork
from rlmux.core.decision.views import GroupView, MemberView
from rlmux.core.estimation.colocation import BaseBatches, SharedRates, SharingTable
from rlmux.core.model import DeviceId, OrderId, Phase, Pipeline, PipelineId, SubStage
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.forecast import name_of_order, name_of_work

Holder = OrderId | ReadyWork
"""An order that computes, or the ready work that was granted its place."""
Holders = dict[DeviceId, list[tuple[Holder, str]]]
"""Holders of each device, with their sub-stages as a SharingTable names them."""


_BATCHED = {
    Phase.ROLLOUT: (SubStage.PREFILL, SubStage.DENSE_DECODE, SubStage.TAIL_DECODE),
    Phase.TRAIN: (SubStage.REFERENCE, SubStage.OLD_LOGPROBS, SubStage.UPDATE),
}

_MAX_TABLES = 64


def num_fitting_together(view: GroupView) -> int:
    """How many states of the group fit any of its devices together, whichever they are; 1 where a size is unknown."""
    needs = [
        size
        for member in view.members
        for size in (
            member.pipeline.footprint.rollout_device_bytes,
            member.pipeline.footprint.train_device_bytes,
        )
    ]
    known = sorted((size for size in needs if size is not None), reverse=True)
    if len(known) < len(needs):
        return 1
    devices = {device for member in view.members for device in member.rollout_devices + member.train_devices}
    memory_bytes = min(view.memory_bytes(device) for device in devices)
    sums = accumulate(known)
    return max(1, sum(size <= memory_bytes for size in sums))


def base_batches(view: GroupView) -> tuple[BaseBatches, ...]:
    """What members with adapters of one base may compute in one batch, with the slowdowns seen so far."""
    batches = []
    for phase, sub_stages in _BATCHED.items():
        pipelines: dict[str, list[Pipeline]] = {}
        for member in view.members:
            if base := member.pipeline.base_of(phase):
                pipelines.setdefault(base, []).append(member.pipeline)
        for base, alike in pipelines.items():
            numbers = range(2, len(alike) + 1)
            slowdowns = tuple(round(view.batch_slowdown(alike[0], phase, number), 2) for number in numbers)
            batches.append(BaseBatches(base=base, sub_stages=sub_stages, slowdowns=slowdowns))
    return tuple(batches)


class TableCache:
    """Tables with batches, by what they are made of. Dropping its content changes no decision."""

    def __init__(self) -> None:
        self._of: SharingTable | None = None
        self._tables: dict[tuple[tuple[BaseBatches, ...], int], SharingTable] = {}

    def with_batches(self, table: SharingTable, batches: tuple[BaseBatches, ...], num_fitting: int) -> SharingTable:
        """One policy's table with these batches, for devices that so many states fit together."""
        if table is not self._of:
            self._of, self._tables = table, {}
        key = batches, num_fitting
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[key] = replace(table, batches=batches).up_to(num_fitting)
        return self._tables[key]


def start_side_by_side(plan: GroupPlan, works: Sequence[ReadyWork], sharing: SharingTable) -> bool:
    """Start these works where they fit, in this order, with fractions lowered before and raised after.

    Returns whether any work was started. With no works it only raises orders that are alone again.
    """
    holders: Holders = {}
    pausing: set[DeviceId] = set()
    members = {member.id: member for member in plan.members}
    for order in plan.running:
        for device in order.devices:
            holders.setdefault(device, []).append((order.id, name_of_order(members[order.pipeline], order)))
            if order.is_pausing:
                pausing.add(device)
    granted = _grant(members, works, sharing, holders, pausing)
    fractions = _fractions(holders, sharing)
    raised: list[ChangeFraction] = []
    for order in plan.running:
        device_fraction, slowdown = fractions[order.id]
        if order.is_pausing or (abs(device_fraction - order.device_fraction) < 1e-9 and not granted):
            continue
        if device_fraction > order.device_fraction and not pausing.isdisjoint(order.devices):
            continue  # an order being paused keeps its fraction until it has stopped
        change = ChangeFraction(order=order.id, device_fraction=device_fraction, slowdown=slowdown)
        if device_fraction > order.device_fraction:
            raised.append(change)
        else:
            plan.choose(change)
    for work in granted:
        device_fraction, slowdown = fractions[work]
        plan.choose(RunWork(work=work, device_fraction=device_fraction, slowdown=slowdown))
    plan.choose(*raised)
    return bool(granted)


def _grant(
    members: Mapping[PipelineId, MemberView],
    works: Sequence[ReadyWork],
    sharing: SharingTable,
    holders: Holders,
    pausing: set[DeviceId],
) -> list[ReadyWork]:
    """The works that can start, entered into `holders`: beside others only where all of them together help."""
    granted: list[ReadyWork] = []
    for work in works:
        sub_stage = name_of_work(members[work.pipeline], work)
        present = [holders.get(device, []) for device in work.devices]
        if any(device in pausing for device in work.devices):
            continue
        if any(there and sharing.rates_beside(sub_stage, [other for _, other in there]) is None for there in present):
            continue
        for device in work.devices:
            holders.setdefault(device, []).append((work, sub_stage))
        granted.append(work)
    return granted


def _fractions(
    holders: Mapping[DeviceId, Sequence[tuple[Holder, str]]], sharing: SharingTable
) -> dict[Holder, tuple[float, float]]:
    """Device fraction and slowdown of each holder: the least and the largest over its devices."""
    fractions: dict[Holder, tuple[float, float]] = {}
    for there in holders.values():
        for holder, sub_stage in there:
            device_fraction, slowdown = fractions.get(holder, (1.0, 1.0))
            others = [other_sub_stage for other, other_sub_stage in there if other != holder]
            if others:
                rates = sharing.rates_beside(sub_stage, others)
                if rates is None:
                    rates = SharedRates(device_fraction=1.0 / len(there), slowdown=float(len(there)))
                device_fraction, slowdown = min(device_fraction, rates.device_fraction), max(slowdown, rates.slowdown)
            fractions[holder] = (device_fraction, slowdown)
    return fractions
