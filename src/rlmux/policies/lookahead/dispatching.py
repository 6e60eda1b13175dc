"""Dispatch rules that several policies share. Whole devices only; nothing is ever paused.

    start_oldest_first                 every ready work whose devices are free, oldest first        work-conserving
    start_in_cycle_order               the same, but only in its slot of the meta-iteration         RollMux section 5.1
    start_in_cycle_order_or_overtake   the same, but out of order into gaps and for SLOs            `rlmux`

A training phase is several stages in a row; between two of them its devices are free for a moment. All rules here
prefer continuations, so that no other pipeline slips in between and pays two switches for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlmux.core.decision.cycle_slots import CycleSlot
from rlmux.core.decision.plan import RunWork
from rlmux.core.decision.views import GroupView
from rlmux.core.estimation.tail_gain import is_tail
from rlmux.core.model import DeviceId, Phase
from rlmux.core.settle.plain_order import age, devices_kept_for_batches, may_take
from rlmux.core.work import ReadyWork

LEAST_FREE = 0.5
"""Part of a node beside tails with which a rollout begins."""


def start_oldest_first(view: GroupView) -> list[RunWork]:
    """Oldest ready work first, continuations before all; no device idles beside work that could start on it."""
    return start_where_free(view, _by_age(view))


def start_in_cycle_order(view: GroupView) -> list[RunWork]:
    """Strict meta-iteration: each member one rollout and one training phase per cycle, in cyclic order.

    A device waits for the member whose slot is next, even if another is ready, unless that member only waits for its
    own user code. SFT warm-ups come before the first
    cycle and take no slot.
    """
    starts: list[RunWork] = []
    taken: set[DeviceId] = set()
    kept = devices_kept_for_batches(view)
    for work in _by_age(view):
        if work.is_waiting or not taken.isdisjoint(work.devices):
            continue
        fraction = free_fraction(view, work)
        if (
            fraction
            and may_take(work, kept)
            and (work.is_continuation or work.step == 0 or view.is_next_in_cycle(work))
        ):
            taken.update(work.devices)
            starts.append(RunWork(work=work, device_fraction=fraction, slowdown=1.0 / fraction))
    return starts


def start_in_cycle_order_or_overtake(view: GroupView) -> list[RunWork]:
    """Start work in cycle order, but where that would break an SLO or leave a gap, the order is another:

        into a gap    a ready work whose slot has not come starts if it ends before those before it can begin, and
                      computes for longer than the switches take that it brings
        overtaking    it starts if its step breaks the SLO otherwise, and those before it are all in time then

    A step is in time if it ends before the mean of all steps so far breaks the SLO; all by the estimates.
    """
    starts: list[RunWork] = []
    taken: set[DeviceId] = set()
    kept = devices_kept_for_batches(view)
    out_of_order: list[ReadyWork] = []
    for work in _by_age(view):
        if work.is_waiting or not taken.isdisjoint(work.devices):
            continue
        fraction = free_fraction(view, work)
        if not fraction or not may_take(work, kept):
            continue
        if work.is_continuation or work.step == 0 or view.is_next_in_cycle(work):
            taken.update(work.devices)
            starts.append(RunWork(work=work, device_fraction=fraction, slowdown=1.0 / fraction))
        elif fraction == 1.0:
            out_of_order.append(work)
    for work in out_of_order:
        if taken.isdisjoint(work.devices) and _may_overtake(view, work):
            taken.update(work.devices)
            starts.append(RunWork(work=work))
    return starts


def _may_overtake(view: GroupView, work: ReadyWork) -> bool:
    mine = view.cycle_slot(work)
    slots_by_device = [view.cycle_slots_before(work, device) for device in work.devices]
    if all(_fits_gap(mine, slots[0]) for slots in slots_by_device if slots):
        return True
    if all(_free_after(slots) <= mine.laxity_s for slots in slots_by_device):
        return False
    return all(_are_in_time(slots, mine.switch_s + mine.seconds) for slots in slots_by_device)


def _fits_gap(mine: CycleSlot, following: CycleSlot) -> bool:
    """Whether what follows is late by the switch back to it at most, and the work is worth both switches."""
    switches_s = mine.switch_s + following.forced_s
    return (
        mine.switch_s + mine.seconds <= following.gap_s
        and switches_s <= mine.seconds
        and following.forced_s <= following.laxity_s
    )


def _free_after(slots: Sequence[CycleSlot]) -> float:
    """Seconds until the device is free again if it serves these one after another from now on."""
    free_s = 0.0
    for number, slot in enumerate(slots):
        switch_s = slot.switch_s + (slot.forced_s if number else 0.0)
        free_s = max(free_s, slot.gap_s) + switch_s + slot.seconds
    return free_s


def _are_in_time(slots: Sequence[CycleSlot], free_s: float = 0.0) -> bool:
    """Whether the steps of all of these keep their SLOs if the device, free in `free_s`, serves them one after
    another."""
    for slot in slots:
        start_s = max(free_s, slot.gap_s) + slot.switch_s + slot.forced_s
        if start_s - slot.gap_s > slot.laxity_s:
            return False
        free_s = start_s + slot.seconds
    return True


def start_where_free(view: GroupView, works: Iterable[ReadyWork]) -> list[RunWork]:
    """Start, in the given order, every work whose devices are free and not taken by one before it.

    A shard of which every trajectory waits for its environment would compute nothing: it starts with the first reply.
    A batch that needs several devices at once keeps them from younger work.
    """
    starts: list[RunWork] = []
    taken: set[DeviceId] = set()
    kept = devices_kept_for_batches(view)
    for work in works:
        if work.is_waiting or not taken.isdisjoint(work.devices):
            continue
        fraction = free_fraction(view, work)
        if fraction and may_take(work, kept):
            taken.update(work.devices)
            starts.append(RunWork(work=work, device_fraction=fraction, slowdown=1.0 / fraction))
    return starts


def free_fraction(view: GroupView, work: ReadyWork) -> float:
    """Part of its devices that the work can have now: all of them where they are free; what tails that have left their
    node hold not, for a rollout; else 0."""
    if view.is_free(work.devices):
        return 1.0
    if not view.has_tails or work.phase is not Phase.ROLLOUT or len(work.devices) > 1:
        return 0.0
    device = work.devices[0]
    free = view.free_fraction(device)
    if free < LEAST_FREE:
        return 0.0
    beside = [order for order in view.running if device in order.devices]
    return free if all(is_tail(view.pipeline(order.pipeline), order.device_fraction) for order in beside) else 0.0


def _by_age(view: GroupView) -> Sequence[ReadyWork]:
    """The group's ready work: continuations first, then what became ready first."""
    ready = view.ready
    return ready if len(ready) < 2 else sorted(ready, key=age)
