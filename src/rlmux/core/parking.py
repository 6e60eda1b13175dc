"""Parking: a running pipeline gives its nodes back at a step boundary, waits, and goes on later with the same result.

    ParkRequested, a quota that is spent, a turn that is over, a waiting pipeline that is entitled to the room
        ─▶ is_parking ── no rollout opens, what is open ends ─▶ Park ── PipelineParked ─▶ it waits; its nodes are free

Room is made only for the first in the queue, where the policy then places it, by as few pipelines as that takes. Whose
pipelines may go is `QueueOrder.to_park`. A pipeline that was parked for another never has others parked for itself, so
no two park each other in turn: each pipeline has others parked at most until it first starts.
"""

from __future__ import annotations

import math

from rlmux.core.actions import Action, Park
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.core.parts import Parts
from rlmux.core.placement_choice import Refusal
from rlmux.core.state import PipelineRun, SchedulerState
from rlmux.core.step_machine import PipelineInput

PARKED = Refusal(reason="its user parked it", is_final=False)


def request(parts: Parts, run: PipelineRun, *, for_pipeline: PipelineId | None = None) -> None:
    """Have a running pipeline park at its next step boundary."""
    run.is_parking, run.parks_for = True, for_pipeline
    if not run.shards:  # else what is open comes to its step boundary by itself
        parts.state.dirty.boundaries[run.pipeline.id] = run


def is_due(parts: Parts, run: PipelineRun) -> bool:
    """Whether the pipeline gives its nodes back at its step boundary: no rollout of it opens."""
    if run.is_leaving:
        return True
    if run.is_parking and run.parks_for is not None:
        waiting = parts.state.runs[run.parks_for]
        if waiting.status is not PipelineStatus.WAITING or waiting.num_parks:  # it started, or had its turn
            forget(run)
    if not run.is_parking and parts.turns.is_over(run):
        run.is_parking, run.parks_for = True, None
    has_quota = not (run.pipeline.work_arrives or run.pipeline.is_filler)
    if not run.is_parking and has_quota and parts.shares.quotas.counts_charges():
        parts.shares.charge(run.rollout_devices + run.train_devices)
        run.is_parking, run.parks_for = parts.shares.quotas.is_spent(run), None
    return run.is_parking


def leave(parts: Parts, run: PipelineRun) -> list[Action]:
    """Order a pipeline that is due to park once nothing of it is open."""
    is_open = run.shards or run.training.is_open or parts.orders.of(run) or run.generated_step > run.trained_step
    if is_open or run.is_leaving:
        return []
    run.is_leaving = True
    return [Park(pipeline=run.pipeline.id, is_awaited=True)]


def end(parts: Parts, run: PipelineRun) -> list[Action]:
    """The pipeline, which is pinned to nothing any more, waits."""
    state = parts.state
    run.next_placement = None
    run.restart_step = run.published_version
    run.waiting_since_s = state.now_s
    run.promised_s = math.inf
    run.num_parks += run.parks_for is not None
    forget(run)
    for other in _parking_for(state, run.pipeline.id):
        if not other.is_leaving:  # asked while this one waited before: it started without that
            forget(other)
    parts.steps.move_pipeline(run, PipelineInput.PARKED)
    waiting = state.waiting_fillers if run.pipeline.is_filler else state.waiting
    waiting[run.pipeline.id] = run
    return parts.queue.tell(run, PARKED) if run.is_held else []


def forget(run: PipelineRun) -> None:
    """The pipeline parks no longer: it does already, or it goes on."""
    run.is_parking = run.is_leaving = False
    run.parks_for = None


def make_room(parts: Parts) -> None:
    """Have the fewest running pipelines park for the first in the queue, where it is entitled to their room."""
    head = _head(parts.state)
    if head is not None:
        for run in _fewest(parts, head, parts.shares.to_park(head)):
            request(parts, run, for_pipeline=head.pipeline.id)


def _head(state: SchedulerState) -> PipelineRun | None:
    """The first in the queue, where others may be parked for it and none is yet."""
    reservation, settings = state.reservation, state.settings
    if reservation is None or settings is None or not settings.parks:
        return None
    head = state.runs[reservation.pipeline]
    return None if head.num_parks or _parking_for(state, head.pipeline.id) else head


def _parking_for(state: SchedulerState, name: PipelineId) -> list[PipelineRun]:
    """Running pipelines that are to make room for this one."""
    running = (run for group in state.groups.values() for run in group.members.values())
    return [run for run in running if run.parks_for == name]


def _fewest(parts: Parts, head: PipelineRun, candidates: list[PipelineRun]) -> list[PipelineRun]:
    """The first of these with which gone the policy places the pipeline, without those that it does not need."""
    chosen: list[PipelineRun] = []
    with parts.ledger.trial():
        parts.ledger.finish_relocations()
        for run in candidates:
            parts.ledger.depart(run.pipeline.id)
            chosen.append(run)
            if parts.queue.fits(head.pipeline):
                break
        else:
            return []
    for run in chosen[-2::-1]:
        if _fits_without(parts, head, [one for one in chosen if one is not run]):
            chosen.remove(run)
    return chosen


def _fits_without(parts: Parts, head: PipelineRun, leaving: list[PipelineRun]) -> bool:
    with parts.ledger.trial():
        parts.ledger.finish_relocations()
        for run in leaving:
            parts.ledger.depart(run.pipeline.id)
        return parts.queue.fits(head.pipeline)
