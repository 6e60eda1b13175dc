"""The strict meta-iteration as a schedule of the look-ahead, so that both grains are weighed in one model.

    forecast ──in_cycle_order──▶ Priorities: rank by cycle slot, each phase after the one before it, nothing shared

A member with m steps per cycle has its n-th slot on a device at n / m of the meta-iteration, ties in cyclic order: as
`GroupView.is_next_in_cycle` has it, for the phases to come as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmux.core.decision.views import GroupView
from rlmux.core.model import Phase
from rlmux.policies.lookahead.forecast import Forecast, state_number
from rlmux.policies.lookahead.priorities import Priorities, compatible_migrations
from rlmux.policies.lookahead.problem import Problem

Slot = tuple[float, int]
"""Place in the meta-iteration, and the member's place in the cyclic order."""
_UNDER_WAY: Slot = (-1.0, -1)


def in_cycle_order(view: GroupView, forecast: Forecast, problem: Problem) -> Iterator[Priorities]:
    """Priorities of the strict cycle: without migrations, and with every tail that may migrate to a sibling."""
    slots = _slots(view, forecast)
    order = sorted(range(len(forecast.work_items)), key=lambda index: (slots.get(index, _UNDER_WAY), index))
    rank = [0] * len(order)
    for position, index in enumerate(order):
        rank[index] = position
    strict = Priorities(
        rank,
        after=_after(forecast, [index for index in order if index in slots]),
        unshared=frozenset(range(len(order))),
    )
    yield strict
    tails = [number for number, move in enumerate(problem.sibling_migrations) if not (move.is_whole or move.is_later)]
    if tails:
        yield strict.changed(sibling_migrations=compatible_migrations(problem, tuple(tails)))


def _slots(view: GroupView, forecast: Forecast) -> dict[int, Slot]:
    """The slot of each work item that begins a phase; the latest one where it needs several devices."""
    devices = {number: device for device, number in forecast.device_numbers.items()}
    members = view.members
    num_before: dict[tuple[int, int], int] = {}
    slots: dict[int, Slot] = {}
    for index, item in enumerate(forecast.work_items):
        if item.is_running or not item.devices or index in forecast.continued:
            continue
        if index in forecast.works and not forecast.is_fresh(index):
            continue
        member = members[item.pipeline]
        phase = Phase.TRAIN if item.state == state_number(item.pipeline, Phase.TRAIN) else Phase.ROLLOUT
        slots[index] = max(
            member.cycle_place(phase, devices[number], num_before.get((item.state, number), 0))
            for number in item.devices
        )
        for number in item.devices:
            num_before[item.state, number] = num_before.get((item.state, number), 0) + 1
    return slots


def _after(forecast: Forecast, in_order: list[int]) -> dict[int, int]:
    """Each work item with the one that has the slot before it on its devices, of another pipeline."""
    last: dict[tuple[int, bool], int] = {}
    after: dict[int, int] = {}
    position = {index: place for place, index in enumerate(in_order)}
    for index in in_order:
        item = forecast.work_items[index]
        is_train = item.state % 2 == 1
        before = [last[device, is_train] for device in item.devices if (device, is_train) in last]
        if before:
            latest = max(before, key=position.__getitem__)
            if forecast.work_items[latest].pipeline != item.pipeline:
                after[index] = latest
        for device in item.devices:
            last[device, is_train] = index
    return after
