"""Small builders and a driver in virtual time that checks every invariant after every event."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import pytest

from rlmux.core import invariants
from rlmux.core.actions import Action, MigrateShard, Park, Pause, Remind, RunStage
from rlmux.core.events import (
    Event,
    PipelineParked,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    TimeReached,
    TrajectoriesMigrated,
)
from rlmux.core.model import Cluster, OrderId, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler


def pipeline(name: str, *, num_steps: int = 3, rollout_s: float = 2.0, train_s: float = 1.0, **fields) -> Pipeline:
    estimate = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    return Pipeline(id=PipelineId(name), num_steps=num_steps, estimate=estimate, **fields)


def cluster(*, rollout: int | None = 1, train: int | None = 1, devices_per_node: int = 1) -> Cluster:
    return Cluster(
        pools={
            "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=rollout, devices_per_node=devices_per_node),
            "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=train),
        }
    )


class Driver:
    """Carries out orders in virtual time; the fewest lines that can end every order with an event."""

    def __init__(
        self,
        scheduler: Scheduler,
        seconds: Callable[[RunStage], float] | None = None,
        *,
        raises_policy_faults: bool = True,
    ) -> None:
        self.scheduler = scheduler
        if raises_policy_faults:
            scheduler.raise_policy_faults()
        self.now_s = 0.0
        self.log: list[tuple[float, Action]] = []
        self.events: list[Event] = []
        self._seconds = seconds or self._estimated
        self._heap: list[tuple[float, int, OrderId | Event]] = []
        self._orders: dict[OrderId, Action] = {}
        self._taken_s: dict[OrderId, float] = {}
        self._sequence = 0
        self.park_s = 0.0
        """Seconds from a Park until its devices are free."""
        self.check_every = 1
        """Events from one look at the invariants to the next."""

    def _estimated(self, action: RunStage) -> float:
        estimate = self.scheduler.query.pipeline(action.pipeline).pipeline.estimate
        assert estimate is not None
        return {Stage.GENERATE: estimate.rollout_s, Stage.UPDATE: estimate.train_s}.get(action.stage, 0.0)

    def send(self, event: Event) -> list[Action]:
        self.now_s = event.time_s
        self.events.append(event)
        actions = self.scheduler.handle(event)
        if len(self.events) % self.check_every == 0:
            invariants.check(self.scheduler)
        for action in actions:
            self.log.append((event.time_s, action))
            if isinstance(action, RunStage):
                self._begin(action, self._seconds(action))
            elif isinstance(action, MigrateShard):
                self._begin(action, 0.0)
            elif isinstance(action, Pause):
                self._orders[action.order] = action
                self._push(0.0, action.order)
            elif isinstance(action, Park) and action.is_awaited:
                at_s = event.time_s + self.park_s
                self._push(self.park_s, PipelineParked(time_s=at_s, pipeline=action.pipeline))
            elif isinstance(action, Remind):
                self._push(action.at_s - event.time_s, TimeReached(time_s=action.at_s))
        return actions

    def submit(self, *pipelines: Pipeline) -> None:
        for one in pipelines:
            self.send(PipelineSubmitted(time_s=self.now_s, pipeline=one))

    def _begin(self, action: RunStage | MigrateShard, seconds: float) -> None:
        self._orders[action.order] = action
        self._taken_s[action.order] = seconds
        self._push(seconds, action.order)

    def _push(self, seconds: float, order: OrderId | Event) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + seconds, self._sequence, order))

    def next_end_s(self) -> float:
        """When the next order ends; infinite where none runs."""
        while self._heap and self._is_stale(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def _is_stale(self, order: OrderId | Event) -> bool:
        """Whether nothing ends there: the order was taken back."""
        if isinstance(order, PipelineParked | TimeReached):
            return False
        return order not in self._orders or not self.scheduler.query.has_order(order)

    def step(self) -> bool:
        """Let the next order end. False when none is left."""
        while self._heap:
            time_s, _, order = heapq.heappop(self._heap)
            if isinstance(order, PipelineParked | TimeReached):
                self.send(order)
                return True
            action = self._orders.pop(order, None)
            if action is None or not self.scheduler.query.has_order(order):
                continue
            if isinstance(action, Pause):
                self.send(StagePaused(time_s=time_s, order=order, seconds=0.0))
            elif isinstance(action, MigrateShard):
                self.send(TrajectoriesMigrated(time_s=time_s, order=order, num_trajectories=1, seconds=0.0))
            else:
                self.send(StageFinished(time_s=time_s, order=order, seconds=self._taken_s[order]))
            return True
        return False

    def run(self, max_events: int = 100_000) -> float:
        """Until nothing is left to end; returns the time."""
        for _ in range(max_events):
            if not self.step():
                return self.now_s
        raise AssertionError(f"still running after {max_events} events")

    def starts(self) -> list[tuple[float, str, str, int]]:
        """(time, pipeline, stage, step) of every RunStage."""
        return [
            (time_s, action.pipeline, action.stage.value, action.step)
            for time_s, action in self.log
            if isinstance(action, RunStage)
        ]

    def actions(self, *kinds: type) -> Sequence[Action]:
        return [action for _, action in self.log if not kinds or isinstance(action, kinds)]


@pytest.fixture
def builders():
    """The builders, for test modules: they cannot import this file."""

    class Builders:
        pipeline = staticmethod(pipeline)
        cluster = staticmethod(cluster)
        Driver = Driver

    return Builders
