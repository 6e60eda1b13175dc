"""Parking: a running pipeline gives its nodes back at a step boundary, waits, and goes on later with the same result.

    ParkRequested, a quota that is spent, a turn that is over, a waiting pipeline that is entitled to the room
        ─▶ is_parking ── no rollout opens, what is open ends ─▶ Park ── PipelineParked ─▶ it waits; its nodes are free

Room is made only for the first in the queue, where the policy then places it, by as few pipelines as that takes. Whose
pipelines may go is `QueueOrder.to_park`. A pipeline that was parked for another never has others parked for itself, so
no two park each other in turn: each pipeline has others parked at most until it first starts.
"""

from __future__ import annotations

import math

from rlmux.core.actions import Park
from rlmux.core.admission_queue import AdmissionQueue
from rlmux.core.journal import Journal
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.core.orders import Orders
from rlmux.core.placement import PlacementLedger
from rlmux.core.placement_choice import Refusal
from rlmux.core.shares import Shares
from rlmux.core.state import PipelineRun, SchedulerState
from rlmux.core.step_machine import PipelineInput, StepMachine
from rlmux.core.turns import Turns

PARKED = Refusal(reason="its user parked it", is_final=False)


class Parking:
    """See the module."""

    def __init__(
        self,
        state: SchedulerState,
        ledger: PlacementLedger,
        queue: AdmissionQueue,
        orders: Orders,
        shares: Shares,
        turns: Turns,
        journal: Journal,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._queue = queue
        self._orders = orders
        self._shares = shares
        self._turns = turns
        self._journal = journal

    def request(self, run: PipelineRun, *, for_pipeline: PipelineId | None = None) -> None:
        """Have a running pipeline park at its next step boundary."""
        run.is_parking, run.parks_for = True, for_pipeline

    def takes_effect(self, run: PipelineRun) -> bool:
        """Whether no rollout opens, since the pipeline gives its nodes back; at its step boundary that is ordered."""
        if not self._is_due(run):
            return False
        is_open = run.shards or run.training.is_open or self._orders.of(run) or run.generated_step > run.trained_step
        if not is_open and not run.is_leaving:
            run.is_leaving = True
            self._journal.act(Park(pipeline=run.pipeline.id, is_awaited=True))
        return True

    def _is_due(self, run: PipelineRun) -> bool:
        if run.is_leaving:
            return True
        if run.is_parking and run.parks_for is not None:
            waiting = self._state.runs[run.parks_for]
            if waiting.status is not PipelineStatus.WAITING or waiting.num_parks:  # it started, or had its turn
                self.forget(run)
        if not run.is_parking and self._turns.is_over(run):
            run.is_parking, run.parks_for = True, None
        has_quota = not (run.pipeline.work_arrives or run.pipeline.is_filler)
        if not run.is_parking and has_quota and self._shares.quotas.counts_charges():
            self._shares.charge(run.rollout_devices + run.train_devices)
            run.is_parking, run.parks_for = self._shares.quotas.is_spent(run), None
        return run.is_parking

    def end(self, run: PipelineRun, steps: StepMachine) -> None:
        """The pipeline, which is pinned to nothing any more, waits."""
        run.next_placement = None
        run.restart_step = run.published_version
        run.waiting_since_s = self._state.now_s
        run.promised_s = math.inf
        run.num_parks += run.parks_for is not None
        self.forget(run)
        for other in self._parking_for(run.pipeline.id):
            if not other.is_leaving:  # asked while this one waited before: it started without that
                self.forget(other)
        steps.move_pipeline(run, PipelineInput.PARKED)
        waiting = self._state.waiting_fillers if run.pipeline.is_filler else self._state.waiting
        waiting[run.pipeline.id] = run
        if run.is_held:
            self._queue.tell(run, PARKED)

    def forget(self, run: PipelineRun) -> None:
        """The pipeline parks no longer: it does already, or it goes on."""
        run.is_parking = run.is_leaving = False
        run.parks_for = None

    def make_room(self) -> list[PipelineRun]:
        """Choose what parks for the first in the queue; returns the pipelines that do from now on."""
        head = self._head()
        if head is None:
            return []
        chosen = self._fewest(head, self._shares.to_park(head))
        for run in chosen:
            self.request(run, for_pipeline=head.pipeline.id)
        return chosen

    def _head(self) -> PipelineRun | None:
        """The first in the queue, where others may be parked for it and none is yet."""
        reservation, settings = self._state.reservation, self._state.settings
        if reservation is None or settings is None or not settings.parks:
            return None
        head = self._state.runs[reservation.pipeline]
        return None if head.num_parks or self._parking_for(head.pipeline.id) else head

    def _parking_for(self, name: PipelineId) -> list[PipelineRun]:
        """Running pipelines that are to make room for this one."""
        running = (run for group in self._state.groups.values() for run in group.members.values())
        return [run for run in running if run.parks_for == name]

    def _fewest(self, head: PipelineRun, candidates: list[PipelineRun]) -> list[PipelineRun]:
        """The first of these with which gone the policy places the pipeline, without those that it does not need."""
        chosen: list[PipelineRun] = []
        with self._ledger.trial():
            self._ledger.finish_relocations()
            for run in candidates:
                self._ledger.depart(run.pipeline.id)
                chosen.append(run)
                if self._queue.fits(head.pipeline):
                    break
            else:
                return []
        for run in chosen[-2::-1]:
            if self._fits_without(head, [one for one in chosen if one is not run]):
                chosen.remove(run)
        return chosen

    def _fits_without(self, head: PipelineRun, leaving: list[PipelineRun]) -> bool:
        with self._ledger.trial():
            self._ledger.finish_relocations()
            for run in leaving:
                self._ledger.depart(run.pipeline.id)
            return self._queue.fits(head.pipeline)
