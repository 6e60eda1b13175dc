"""What users say of their pipelines, and what was set for them: held, released, ranked, parked; shares and usage.

PipelineHeld, HoldReleased, PipelineRanked, ParkRequested ─┐
PipelineParked, SharesSet, UsageRestored, WaitsRestored ───┼─▶ a pipeline's run, or Shares ─▶ the queue
TimeReached ───────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlmux.core.admission_queue import HELD, AdmissionQueue
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
from rlmux.core.fillers import Fillers
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.core.parking import Parking
from rlmux.core.placing import Placing
from rlmux.core.shares import Shares
from rlmux.core.state import PipelineRun
from rlmux.core.step_machine import StepMachine


class Standings:
    """Handles these events; see the module."""

    def __init__(
        self,
        *,
        run_of: Callable[[PipelineId], PipelineRun],
        queue: AdmissionQueue,
        placing: Placing,
        parking: Parking,
        fillers: Fillers,
        shares: Shares,
        steps: StepMachine,
    ) -> None:
        """`run_of`: raises for a pipeline that was not submitted."""
        self._run = run_of
        self._queue = queue
        self._placing = placing
        self._parking = parking
        self._fillers = fillers
        self._shares = shares
        self._steps = steps

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {
            PipelineHeld: self._on_held,
            HoldReleased: self._on_hold_released,
            PipelineRanked: self._on_ranked,
            ParkRequested: self._on_park_requested,
            PipelineParked: self._on_parked,
            SharesSet: self._on_shares_set,
            UsageRestored: self._on_usage_restored,
            WaitsRestored: self._on_waits_restored,
            TimeReached: self._on_time_reached,
        }

    def _on_held(self, event: PipelineHeld) -> None:
        run = self._run(event.pipeline)
        if run.status is PipelineStatus.WAITING:
            self._hold(run)

    def _hold(self, run: PipelineRun) -> None:
        if not run.is_held:
            run.is_held = True
            self._queue.tell(run, HELD)
            self._placing.place_waiting()

    def _on_hold_released(self, event: HoldReleased) -> None:
        run = self._run(event.pipeline)
        run.is_held = False
        if not run.is_leaving:
            self._parking.forget(run)
        self._placing.place_waiting()

    def _on_ranked(self, event: PipelineRanked) -> None:
        self._run(event.pipeline).rank = event.rank
        self._shares.begin()
        self._placing.place_waiting()

    def _on_park_requested(self, event: ParkRequested) -> None:
        run = self._run(event.pipeline)
        if run.status is PipelineStatus.WAITING:
            self._hold(run)
        elif run.status is PipelineStatus.RUNNING and not run.pipeline.work_arrives:
            run.is_held = True
            self._parking.request(run)
            if not run.shards:
                self._steps.open_rollout(run)

    def _on_parked(self, event: PipelineParked) -> None:
        run = self._run(event.pipeline)
        if run.status is PipelineStatus.RUNNING and run.is_leaving:  # else it is over, or has lost a node meanwhile
            if run.pipeline.is_filler:
                self._fillers.park(run)
            else:
                self._placing.park(run)

    def _on_shares_set(self, event: SharesSet) -> None:
        self._shares.set(event.shares)
        self._placing.place_waiting()

    def _on_usage_restored(self, event: UsageRestored) -> None:
        self._shares.restore(event.usage, event.spent)

    def _on_waits_restored(self, event: WaitsRestored) -> None:
        self._queue.restore(event.waits)

    def _on_time_reached(self, event: TimeReached) -> None:
        self._placing.place_waiting()
