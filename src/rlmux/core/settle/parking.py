"""Parking: a running pipeline gives its nodes back at a step boundary, waits, and goes on later with the same result.

    ParkRequested, a quota that is spent, a turn that is over, a waiting pipeline that is entitled to the room
        ─▶ is_parking ── no rollout opens, what is open ends ─▶ Park ── PipelineParked ─▶ it waits; its nodes are free

Room is made only for the first in the queue, where the policy then places it, by as few pipelines as that takes. Whose
pipelines may go is `QueueOrder.to_park`. A pipeline that was parked for another never has others parked for itself, so
no two park each other in turn: each pipeline has others parked at most until it first starts.
"""

from __future__ import annotations

from rlmux.core.actions import Action, Park
from rlmux.core.model import PipelineId, PipelineKind, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.choice import Refusal
from rlmux.core.settle.parts import Parts
from rlmux.core.state import SchedulerState
from rlmux.core.steps.step_machine import PipelineInput

PARKED = Refusal(reason="its user parked it", is_final=False)


def request(parts: Parts, run: PipelineRun, *, for_pipeline: PipelineId | None = None) -> None:
    """Have a running pipeline park at its next step boundary."""
    run.parking.is_parking, run.parking.parks_for = True, for_pipeline
    if not run.step.shards:  # else what is open comes to its step boundary by itself
        parts.state.dirty.boundaries[run.pipeline.id] = run


def is_due(parts: Parts, run: PipelineRun) -> bool:
    """Whether the pipeline gives its nodes back at its step boundary: no rollout of it opens."""
    if run.parking.is_leaving:
        return True
    if run.parking.is_parking and run.parking.parks_for is not None:
        waiting = parts.state.runs[run.parking.parks_for]
        if waiting.status is not PipelineStatus.WAITING or waiting.parking.num_parks:  # it started, or had its turn
            forget(run)
    if not run.parking.is_parking and parts.turns.is_over(run):
        run.parking.is_parking, run.parking.parks_for = True, None
    has_quota = run.pipeline.kind is PipelineKind.PLANNED
    if not run.parking.is_parking and has_quota and parts.shares.quotas.counts_charges():
        parts.shares.charge(run.nodes.rollout_devices + run.nodes.train_devices)
        run.parking.is_parking, run.parking.parks_for = parts.shares.quotas.is_spent(run), None
    return run.parking.is_parking


def leave(parts: Parts, run: PipelineRun) -> list[Action]:
    """Order a pipeline that is due to park once nothing of it is open."""
    is_open = (
        run.step.shards
        or run.step.training.is_open
        or parts.orders.of(run)
        or run.step.generated_step > run.step.trained_step
    )
    if is_open or run.parking.is_leaving:
        return []
    run.parking.is_leaving = True
    return [Park(pipeline=run.pipeline.id, is_awaited=True)]


def end(parts: Parts, run: PipelineRun) -> list[Action]:
    """The pipeline, which is pinned to nothing any more, waits."""
    state = parts.state
    parts.groups.plan_move(run, None)
    parts.queue.drop_reserved_start(run)
    run.parking.num_parks += run.parking.parks_for is not None
    forget(run)
    for other in _parking_for(state, run.pipeline.id):
        if not other.parking.is_leaving:  # requested while this one waited before: it started without that
            forget(other)
    parts.steps.move_pipeline(run, PipelineInput.PARKED)
    parts.queue.wait_again(run)
    return parts.queue.refuse(run, PARKED) if run.admission.is_held else []


def forget(run: PipelineRun) -> None:
    """The pipeline parks no longer: it does already, or it goes on."""
    run.parking.is_parking = run.parking.is_leaving = False
    run.parking.parks_for = None


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
    return None if head.parking.num_parks or _parking_for(state, head.pipeline.id) else head


def _parking_for(state: SchedulerState, name: PipelineId) -> list[PipelineRun]:
    """Running pipelines that are to make room for this one."""
    running = (run for group in state.groups.values() for run in group.members.values())
    return [run for run in running if run.parking.parks_for == name]


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
        if _fits_without(parts, head, [other for other in chosen if other is not run]):
            chosen.remove(run)
    return chosen


def _fits_without(parts: Parts, head: PipelineRun, leaving: list[PipelineRun]) -> bool:
    with parts.ledger.trial():
        parts.ledger.finish_relocations()
        for run in leaving:
            parts.ledger.depart(run.pipeline.id)
        return parts.queue.fits(head.pipeline)
