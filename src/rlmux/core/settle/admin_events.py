"""What users set for their pipelines: held, released, ranked, parked; shares and usage.

PipelineHeld, HoldReleased, PipelineRanked, ParkRequested ─┐
PipelineParked, SharesSet, UsageRestored, WaitsRestored ───┼─▶ a pipeline's run, or Shares ─▶ the queue
TimeReached ───────────────────────────────────────────────┘
"""

from __future__ import annotations

from rlmux.core.actions import Action
from rlmux.core.events import (
    HoldReleased,
    ParkRequested,
    PipelineHeld,
    PipelineParked,
    PipelineRanked,
    SharesSet,
    TimeReached,
    UsageRestored,
    WaitsRestored,
)
from rlmux.core.model import PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.queue.admission import HELD
from rlmux.core.settle import parking, placer
from rlmux.core.settle.parts import Parts


def on_held(parts: Parts, event: PipelineHeld) -> list[Action]:
    run = parts.run(event.pipeline)
    return _hold(parts, run) if run.status is PipelineStatus.WAITING else []


def _hold(parts: Parts, run: PipelineRun) -> list[Action]:
    if run.admission.is_held:
        return []
    parts.queue.hold(run)
    parts.state.dirty.queue = True
    return parts.queue.refuse(run, HELD)


def on_hold_released(parts: Parts, event: HoldReleased) -> list[Action]:
    run = parts.run(event.pipeline)
    parts.queue.release_hold(run)
    if not run.parking.is_leaving:
        parking.forget(run)
    parts.state.dirty.queue = True
    return []


def on_ranked(parts: Parts, event: PipelineRanked) -> list[Action]:
    parts.queue.rank(parts.run(event.pipeline), event.rank)
    parts.shares.begin()
    parts.state.dirty.queue = True
    return []


def on_park_requested(parts: Parts, event: ParkRequested) -> list[Action]:
    run = parts.run(event.pipeline)
    if run.status is PipelineStatus.WAITING:
        return _hold(parts, run)
    if run.status is PipelineStatus.RUNNING and not run.pipeline.work_arrives:
        parts.queue.hold(run)
        parking.request(parts, run)
    return []


def on_parked(parts: Parts, event: PipelineParked) -> list[Action]:
    run = parts.run(event.pipeline)
    if run.status is PipelineStatus.RUNNING and run.parking.is_leaving:  # else it is over, or has lost a node meanwhile
        return placer.park(parts, run)
    return []


def on_shares_set(parts: Parts, event: SharesSet) -> list[Action]:
    parts.shares.set(event.shares)
    parts.state.dirty.queue = True
    return []


def on_usage_restored(parts: Parts, event: UsageRestored) -> list[Action]:
    parts.shares.restore(event.usage, event.spent)
    return []


def on_waits_restored(parts: Parts, event: WaitsRestored) -> list[Action]:
    parts.queue.restore(event.waits)
    return []


def on_time_reached(parts: Parts, event: TimeReached) -> list[Action]:
    parts.state.dirty.queue = True
    return []
