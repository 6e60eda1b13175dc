"""The fake backend: durations from a function, a clock that jumps. For tests of what sits above the protocol.

    execute(RunStage) ──▶ ends at now + duration_s(action) ──▶ poll jumps there ──▶ StageFinished
    execute(Pause)    ──▶ ends now                         ──▶                      StagePaused

It carries out every order of the scheduler in virtual time and nothing else; there is no model, no process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from rlmux.core.actions import Action, MigrateShard, Park, Pause, RunStage
from rlmux.core.events import Event, PipelineParked, StageFinished, StagePaused, TrajectoriesMigrated
from rlmux.core.model import OrderId, PipelineId
from rlmux.log.notes import Note
from rlmux.runtime.backend import Submission


class FakeBackend:
    """A backend without workers. `duration_s(action)`: seconds that a RunStage takes."""

    def __init__(self, duration_s: Callable[[RunStage], float]) -> None:
        self._duration_s = duration_s
        self._now_s = 0.0
        self._sequence = 0
        self._ends: list[tuple[float, int, OrderId, bool]] = []
        """A heap of (end in seconds, sequence number, order, whether its work is then complete)."""
        self._running: dict[OrderId, tuple[RunStage | MigrateShard, float]] = {}
        self._parked: list[PipelineId] = []
        """Pipelines whose processes have ended, not reported yet."""
        self.executed: list[Action] = []
        """Every action, oldest first."""

    def now_s(self) -> float:
        return self._now_s

    def add_pipeline(self, submission: Submission) -> None:
        pass

    def execute(self, action: Action) -> None:
        self.executed.append(action)
        match action:
            case RunStage():
                self._begin(action, self._duration_s(action))
            case MigrateShard():
                self._begin(action, 0.0)
            case Park(is_awaited=True):
                self._parked.append(action.pipeline)
            case Pause(order=order) if order in self._running:
                self._begin(self._running[order][0], 0.0, is_whole=False)
            case _:
                pass

    def make_room(self, action: RunStage, then: Callable[[float], None]) -> None:
        self.executed.append(action)
        then(0.0)

    def wake(self) -> None:
        pass

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        if self._parked:
            return [PipelineParked(pipeline=self._parked.pop(0))], ()
        while self._ends:
            end_s, _, order, is_whole = self._ends[0]
            if end_s > self._now_s + timeout_s:
                break
            heapq.heappop(self._ends)
            if order in self._running:
                self._now_s = end_s
                return [self._end(order, end_s, is_whole)], ()
        self._now_s += timeout_s
        return (), ()

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return None

    def close(self) -> None:
        self._running.clear()

    def _begin(self, action: RunStage | MigrateShard, seconds: float, *, is_whole: bool = True) -> None:
        started_s = self._running.get(action.order, (action, self._now_s))[1]
        self._running[action.order] = (action, started_s)
        self._sequence += 1
        heapq.heappush(self._ends, (self._now_s + seconds, self._sequence, action.order, is_whole))

    def _end(self, order: OrderId, end_s: float, is_whole: bool) -> Event:
        action, started_s = self._running.pop(order)
        if isinstance(action, MigrateShard):
            return TrajectoriesMigrated(order=order, num_trajectories=1, seconds=end_s - started_s)
        event = StageFinished if is_whole else StagePaused
        return event(order=order, seconds=end_s - started_s)
