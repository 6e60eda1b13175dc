"""When a device may be idle beside work that could start on it: what a policy promises, and the check of that promise.

    by default         no device is free beside ready work
    cycle_lead         one is while another member's cycle slot comes first       for so many cycles of the others
    patience_s         one is while the group computes or migrates                for so long, then until the next plan

A batch that needs several devices at once keeps those that are free from younger work, under every policy.

A shard whose every trajectory waits for its environment is not ready to compute: it is left out.
"""

from __future__ import annotations

from rlmux.core.decision.cycle_slots import has_phase_to_begin
from rlmux.core.decision.policy import Idling
from rlmux.core.decision.views import GroupView
from rlmux.core.model import DeviceId
from rlmux.core.state import GroupState, SchedulerState
from rlmux.core.work import ReadyWork


def check_idling(state: SchedulerState, view: GroupView, idling: Idling) -> None:
    """Raises AssertionError where ready work waits beside free devices for longer, or for something else, than is
    promised."""
    if idling.patience_s and not idling.cycle_lead:
        _check_patience(state.groups[view.id], view, idling.patience_s)
    for work in view.ready:
        if work.is_waiting or not view.is_free(work.devices) or _is_kept_for_batch(view, work):
            continue
        if any(state.wanted_by.get(device) == view.id for device in work.devices):
            continue  # a filler is leaving for it
        if idling.cycle_lead:
            _check_cycle(state.groups[view.id], view, work, idling.cycle_lead)
        elif idling.patience_s:
            assert view.running or view.migrating, (
                f"nothing of group {view.id} runs, and {work} waits beside free devices"
            )
        else:
            raise AssertionError(f"{work} waits beside free devices")


def _is_kept_for_batch(view: GroupView, work: ReadyWork) -> bool:
    """An older batch needs several devices at once, of which not all are free yet, and one of them is this work's."""
    return any(
        not work.is_continuation
        and older.is_batch
        and older.sequence < work.sequence
        and not view.is_free(older.devices)
        and not set(older.devices).isdisjoint(work.devices)
        for older in view.ready
    )


def _check_cycle(group: GroupState, view: GroupView, work: ReadyWork, cycle_lead: float) -> None:
    """Its devices wait for another's cycle slot, which will come, and which no member is far ahead of."""
    assert work.takes_slot, f"{work}, which takes no cycle slot, waits beside free devices"
    assert not view.is_next_in_cycle(work), f"{work} has the first cycle slot and waits beside free devices"
    assert _is_going_on(group), f"{work} waits for a cycle slot, and nothing of its group is under way"
    for device in work.devices:
        key = (work.phase, device)
        pinned = group.members_by_device[key]
        mine = pinned[work.pipeline]
        rank = mine.cycle.phases_started[key] / mine.cycle.steps_per_cycle
        last = min(
            (
                run.cycle.phases_started[key] / run.cycle.steps_per_cycle
                for run in pinned.values()
                # A client that comes back has fewer, and takes the last slot of the cycle with its next batch.
                if has_phase_to_begin(run, key) and not run.pipeline.work_arrives
            ),
            default=rank,
        )
        # A cycle that begins anew, as the steps in it change, keeps a rollout that is ahead of its training.
        kept = 1 / mine.cycle.steps_per_cycle if mine.cycle.steps_per_cycle > 1 else 0.0
        assert rank - last <= cycle_lead + kept, f"{work} waits on {device} for a member {rank - last:g} cycles behind"


def _is_going_on(group: GroupState) -> bool:
    """An order of the group is under way, or a member's environments are waited for."""
    has_order = any(run.step.orders for run in group.members.values())
    return has_order or any(work.is_waiting for work in group.ready.values())


def _check_patience(group: GroupState, view: GroupView, patience_s: float) -> None:
    """Work that had waited for too long at the last plan has not been left beside devices that are free, and that no
    work overdue before it needs."""
    planned_s = group.planned_s
    kept: set[DeviceId] = set()
    for work in view.ready:
        if work.is_waiting or planned_s - work.since_s <= patience_s:
            continue
        is_left = view.is_free(work.devices) and kept.isdisjoint(work.devices)
        assert not is_left, (
            f"{work} had waited beside free devices for more than {patience_s:.3g} s at {planned_s:.3f} s"
        )
        kept.update(work.devices)
