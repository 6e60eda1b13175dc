"""The plain order of work: what is ready starts on free devices, continuations first, then what became ready first.

It stands in for a policy whose decision has failed. Policies build on the same order (`policies/lookahead`).
"""

from __future__ import annotations

from collections.abc import Mapping

from rlmux.core.decision.plan import RunWork
from rlmux.core.decision.views import GroupView
from rlmux.core.model import DeviceId
from rlmux.core.work import ReadyWork


def in_plain_order(view: GroupView) -> list[RunWork]:
    """Every ready work that starts now: alone on devices that are wholly free. Nothing is paused or migrates."""
    taken: set[DeviceId] = set()
    kept = devices_kept_for_batches(view)
    starts: list[RunWork] = []
    for work in sorted(view.ready, key=age):
        is_free = not work.is_waiting and taken.isdisjoint(work.devices) and view.is_free(work.devices)
        if is_free and may_take(work, kept):
            taken.update(work.devices)
            starts.append(RunWork(work=work))
    return starts


def devices_kept_for_batches(view: GroupView) -> dict[DeviceId, int]:
    """Devices kept for request batches that wait for further devices, each with the ready number of the oldest such
    batch. Otherwise those would wait for ever while shorter work alternates on each device."""
    kept: dict[DeviceId, int] = {}
    for work in view.ready if view.has_arriving_work else ():
        if work.is_batch and len(work.devices) > 1 and not view.is_free(work.devices):
            for device in work.devices:
                kept[device] = min(kept.get(device, work.sequence), work.sequence)
    return kept


def may_take(work: ReadyWork, kept: Mapping[DeviceId, int]) -> bool:
    """Whether no older batch keeps the work's devices. A phase that has begun goes on."""
    if not kept or work.is_continuation:
        return True
    return all(kept.get(device, work.sequence) >= work.sequence for device in work.devices)


def age(work: ReadyWork) -> tuple[bool, int]:
    """Sort key: continuations first, then what became ready first."""
    return (not work.is_continuation, work.sequence)
