"""A pipeline that comes or goes costs each other one switch at most: a relocation at a step boundary, or nothing."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from rlmux.core.actions import Pause, Release, Relocate, RunStage, Switch
from rlmux.core.events import PipelineCancelled, PipelineSubmitted
from rlmux.core.model import (
    PHASE_BY_STAGE,
    Cluster,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    PipelineStatus,
    Pool,
)
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend

NUM_PIPELINES = 40


class Cancelling(FakeBackend):
    """Pipelines are cancelled at their times, if they run then."""

    def __init__(self, duration_s: Any, scheduler: Scheduler, cancels: list[tuple[float, PipelineId]]) -> None:
        super().__init__(duration_s)
        self._scheduler = scheduler
        self._cancels = sorted(cancels)

    def poll(self, timeout_s: float) -> Any:
        while self._cancels and self._cancels[0][0] <= self.now_s():
            _, pipeline = self._cancels.pop(0)
            query = self._scheduler.query
            if pipeline in query and query.status(pipeline) is PipelineStatus.RUNNING:
                return [PipelineCancelled(time_s=self.now_s(), pipeline=pipeline)], ()
        return super().poll(timeout_s)


class Story:
    """Events and actions, as they came."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        self.told += [*events, *actions]


def story(policy: str, seed: int) -> list[Any]:
    """Pipelines of all sorts come, go and are cancelled on nodes that cost something, so that groups are worth it."""
    given = random.Random(seed)
    pools = {
        phase.value: Pool(name=phase.value, phase=phase, usd_per_gpu_hour=2.0) for phase in (Phase.ROLLOUT, Phase.TRAIN)
    }
    submissions, cancels = [], []
    seconds: dict[tuple[PipelineId, Phase], float] = {}
    for number in range(NUM_PIPELINES):
        name, at_s = PipelineId(f"p{number}"), given.uniform(0.0, 3000.0)
        rollout_s, train_s = given.uniform(10.0, 100.0), given.uniform(10.0, 100.0)
        seconds[name, Phase.ROLLOUT], seconds[name, Phase.TRAIN] = rollout_s, train_s
        pipeline = Pipeline(
            id=name,
            num_steps=given.randint(5, 25),
            estimate=PhaseSeconds(rollout_s=rollout_s, train_s=train_s),
            slo_slowdown=given.uniform(1.2, 3.0),
        )
        submissions.append(Submission(pipeline=pipeline, config=TrainingConfig(name=name), submit_at_s=at_s))
        if given.random() < 0.4:
            cancels.append((at_s + given.uniform(50.0, 1500.0), name))
    scheduler = Scheduler(Cluster(pools=pools), make_policy(policy))
    backend = Cancelling(lambda action: seconds[action.pipeline, PHASE_BY_STAGE[action.stage]], scheduler, cancels)
    heard = Story()
    Controller(scheduler, backend, None, [heard]).run(submissions)
    return heard.told


@pytest.mark.parametrize("seed", [0, 2])  # in which pipelines relocate under `rlmux`
@pytest.mark.parametrize("policy", ["rollmux", "rlmux"])
def test_a_change_relocates_each_other_pipeline_once_at_most_and_pauses_none(policy, seed):
    pipeline_by_order: dict[int, str] = {}
    cancelled: set[str] = set()
    moves = Counter[str]()
    loads: Counter[tuple[str, Phase]] = Counter()
    moves_in_all = Counter[str]()
    num_changes = 0
    for told in story(policy, seed):
        match told:
            case PipelineSubmitted() | PipelineCancelled() | Release():
                moves.clear()
                num_changes += 1
                if isinstance(told, PipelineCancelled):
                    cancelled.add(told.pipeline)
            case Relocate(pipeline=pipeline):
                moves[pipeline] += 1
                moves_in_all[pipeline] += 1
                assert moves[pipeline] == 1, f"{pipeline} was moved twice for one change"
            case RunStage(pipeline=pipeline, order=order, switch=switch, stage=stage):
                pipeline_by_order[order] = pipeline
                loads[pipeline, PHASE_BY_STAGE[stage]] += switch is Switch.COLD
            case Pause(order=order):
                assert pipeline_by_order[order] in cancelled, "paused for another pipeline"
    assert num_changes > 2 * NUM_PIPELINES
    assert max(loads.values()) >= 1
    for (pipeline, _), num in loads.items():
        assert num <= 1 + moves_in_all[pipeline], f"{pipeline} loaded its state anew without having been moved"
    assert policy != "rlmux" or moves_in_all, "no pipeline was ever relocated: the test shows nothing"
