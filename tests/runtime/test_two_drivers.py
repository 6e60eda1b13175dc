"""One brain, two clocks: the simulator and the runtime's controller get the same decisions for the same pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds

PHASES = {
    "a": PhaseSeconds(rollout_s=3.0, train_s=2.0),
    "b": PhaseSeconds(rollout_s=2.0, train_s=2.5),
    "c": PhaseSeconds(rollout_s=1.0, train_s=1.5),
}
NUM_STEPS = 4


class Recording:
    """A policy that writes down what the policy inside it decides, and when."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.name = policy.name
        self.reacts_to_progress = policy.reacts_to_progress
        self.sharing = policy.sharing
        self.decisions: list[object] = []

    def place(self, pipeline, view):
        choice = self._policy.place(pipeline, view)
        self.decisions.append((pipeline.id, choice))
        return choice

    def rebalance(self, view):
        return self._policy.rebalance(view)

    def dispatch(self, view) -> Iterator[Any]:
        for choice in self._policy.dispatch(view):
            work = choice.work
            self.decisions.append(
                (view.now_s, work.pipeline, work.stage, work.step, work.devices, choice.device_fraction)
            )
            yield choice


@pytest.fixture
def cluster():
    pools = (Pool(name=phase.value, phase=phase, num_nodes=2) for phase in (Phase.ROLLOUT, Phase.TRAIN))
    return Cluster(pools={pool.name: pool for pool in pools})


@pytest.fixture
def pipelines():
    return [Pipeline(id=PipelineId(name), num_steps=NUM_STEPS, estimate=phases) for name, phases in PHASES.items()]


@pytest.mark.parametrize("policy", ["solo", "colocated", "split", "fifo", "rollmux"])
def test_simulator_and_controller_make_identical_decisions(cluster, pipelines, policy):
    simulated = Recording(make_policy(policy))
    arrivals = tuple(
        Arrival(
            submit_s=0.0,
            pipeline=pipeline,
            world=TrueSeconds.of_phases(pipeline.estimate),
            colocated_world=TrueSeconds.of_phases(pipeline.estimate),
        )
        for pipeline in pipelines
    )
    simulate(Workload(name="three", cluster=cluster, arrivals=arrivals), simulated)

    controlled = Recording(make_policy(policy))
    backend = FakeBackend(
        lambda action: getattr(PHASES[action.pipeline], "rollout_s" if action.stage is Stage.GENERATE else "train_s")
    )
    submissions = [Submission(pipeline=one, config=TrainingConfig(name=one.id)) for one in pipelines]
    assert Controller(Scheduler(cluster, controlled), backend, None).run(submissions)

    assert len(controlled.decisions) >= len(PHASES) * (1 + 2 * NUM_STEPS)
    assert simulated.decisions == controlled.decisions
