"""Dispatch rules that several policies share. Whole devices only; nothing is ever paused.

    first_come     every ready work whose devices are free, oldest first        work-conserving
    in_turn        the same, but only on its turn in the meta-iteration         RollMux section 5.1

A training phase is several stages in a row; between two of them its devices are free for a moment. All rules here
prefer continuations, so that nobody slips in between and pays two switches for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlmux.core.model import DeviceId
from rlmux.core.state import ReadyWork
from rlmux.core.views import CycleSlot, GroupView, RunWork


def first_come(view: GroupView) -> Iterator[RunWork]:
    """Oldest ready work first, continuations before all; never idle while something grantable waits."""
    return first_fit(view, sorted(view.ready, key=_age))


def in_turn(view: GroupView) -> Iterator[RunWork]:
    """Strict meta-iteration: each member one rollout and one training phase per cycle, in cyclic order.

    A device waits for the member whose turn it is, even if another is ready. Warm starts come before the first
    cycle and take no turn.
    """
    on_turn = (
        work
        for work in sorted(view.ready, key=_age)
        if work.is_continuation or work.step == 0 or view.is_next_in_cycle(work)
    )
    return first_fit(view, on_turn)


def in_turn_unless_late(view: GroupView) -> Iterator[RunWork]:
    """In turn, but where steps per cycle would break an SLO or leave a gap, the order is another:

        into a gap    a ready work whose turn has not come starts if it ends before those before it can begin, and
                      computes for longer than the switches take that it brings
        overtaking    it starts if its step breaks the SLO otherwise, and those before it are all in time then

    A step is in time if it ends before the mean of all steps so far breaks the SLO; all by the estimates.
    """
    taken: set[DeviceId] = set()
    off_turn: list[ReadyWork] = []
    for work in sorted(view.ready, key=_age):
        if not (taken.isdisjoint(work.devices) and view.is_free(work.devices)):
            continue
        if work.is_continuation or work.step == 0 or view.is_next_in_cycle(work):
            taken.update(work.devices)
            yield RunWork(work=work)
        else:
            off_turn.append(work)
    for work in off_turn:
        if taken.isdisjoint(work.devices) and _may_overtake(view, work):
            taken.update(work.devices)
            yield RunWork(work=work)


def _may_overtake(view: GroupView, work: ReadyWork) -> bool:
    mine = view.cycle_slot(work)
    lines = [view.cycle_slots_before(work, device) for device in work.devices]
    if all(_fits_gap(mine, line[0]) for line in lines if line):
        return True
    if all(_free_after(line) <= mine.laxity_s for line in lines):
        return False
    return all(_are_in_time(line, mine.switch_s + mine.seconds) for line in lines)


def _fits_gap(mine: CycleSlot, following: CycleSlot) -> bool:
    """What follows is late by the switch back to it at most, and the work is worth both switches."""
    switches_s = mine.switch_s + following.forced_s
    return (
        mine.switch_s + mine.seconds <= following.gap_s
        and switches_s <= mine.seconds
        and following.forced_s <= following.laxity_s
    )


def _free_after(steps_per_cycle: Sequence[CycleSlot]) -> float:
    """When the device is free again if it serves these one after another."""
    free_s = 0.0
    for number, turn in enumerate(steps_per_cycle):
        switch_s = turn.switch_s + (turn.forced_s if number else 0.0)
        free_s = max(free_s, turn.gap_s) + switch_s + turn.seconds
    return free_s


def _are_in_time(steps_per_cycle: Sequence[CycleSlot], free_s: float = 0.0) -> bool:
    """Whether the steps of all of these keep their SLOs if the device serves them one after another from then on."""
    for turn in steps_per_cycle:
        start_s = max(free_s, turn.gap_s) + turn.switch_s + turn.forced_s
        if start_s - turn.gap_s > turn.laxity_s:
            return False
        free_s = start_s + turn.seconds
    return True


def first_fit(view: GroupView, works: Iterable[ReadyWork]) -> Iterator[RunWork]:
    """Grant, in the given order, every work whose devices are free and not granted to one before it."""
    taken: set[DeviceId] = set()
    for work in works:
        if taken.isdisjoint(work.devices) and view.is_free(work.devices):
            taken.update(work.devices)
            yield RunWork(work=work)


def _age(work: ReadyWork) -> tuple[bool, int]:
    return (not work.is_continuation, work.sequence)
