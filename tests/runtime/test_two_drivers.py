"""One brain, two clocks: the simulator and the runtime's controller get the same decisions for the same pipelines."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rlmux.core.actions import Action, ExpectSteps
from rlmux.core.decision.plan import GroupPlan, MarkPlanned, RunWork
from rlmux.core.decision.policy import Policy
from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.policies import POLICIES, make_policy
from rlmux.report.reports import write_report
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
OPTIONS = {"jigsaw": {"tails": False}}
"""The fake backend does not know what a paused shard has left: it would begin again there, and goes on in the world."""


class Recording(Policy):
    """A policy that writes down what the policy inside it decides, and when."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.decisions: list[object] = []

    name = property(lambda self: self._policy.name)
    reacts_to_progress = property(lambda self: self._policy.reacts_to_progress)
    sharing = property(lambda self: self._policy.sharing)
    tails = property(lambda self: self._policy.tails)

    def place(self, pipeline, view):
        choice = self._policy.place(pipeline, view)
        self.decisions.append((pipeline.id, choice))
        return choice

    def rebalance(self, view):
        return self._policy.rebalance(view)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        for choice in self._policy.dispatch(plan).decision:
            if isinstance(choice, RunWork):
                work = choice.work
                self.decisions.append(
                    (plan.now_s, work.pipeline, work.stage, work.step, work.devices, choice.device_fraction)
                )
            elif not isinstance(choice, MarkPlanned):
                self.decisions.append((plan.now_s, choice))
        return plan


@pytest.fixture
def cluster():
    pools = (Pool(name=phase.value, phase=phase, num_nodes=2) for phase in (Phase.ROLLOUT, Phase.TRAIN))
    return Cluster(pools={pool.name: pool for pool in pools})


@pytest.fixture
def pipelines():
    return [Pipeline(id=PipelineId(name), num_steps=NUM_STEPS, estimate=phases) for name, phases in PHASES.items()]


@pytest.mark.parametrize("policy", POLICIES)
def test_simulator_and_controller_make_identical_decisions(cluster, pipelines, policy):
    simulated = Recording(make_policy(policy, **OPTIONS.get(policy, {})))
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

    controlled = Recording(make_policy(policy, **OPTIONS.get(policy, {})))
    backend = FakeBackend(
        lambda action: getattr(PHASES[action.pipeline], "rollout_s" if action.stage is Stage.GENERATE else "train_s")
    )
    submissions = [Submission(pipeline=one, config=TrainingConfig(name=one.id)) for one in pipelines]
    assert Controller(Scheduler(cluster, controlled), backend, None).run(submissions)

    assert len(controlled.decisions) >= len(PHASES) * (1 + 2 * NUM_STEPS)
    assert simulated.decisions == controlled.decisions


def both_logs(cluster, pipelines, policy: str, folder):
    """Actions of the simulator and of the controller, and what a scheduler says to the controller's log."""
    seconds = {one.id: PHASES[name] for name, one in zip(PHASES, pipelines, strict=True)}
    arrivals = tuple(
        Arrival(submit_s=0.0, pipeline=one, world=TrueSeconds.of_phases(seconds[one.id])) for one in pipelines
    )
    simulated: list[Action] = []
    simulate(
        Workload(name="unknown", cluster=cluster, arrivals=arrivals),
        make_policy(policy),
        observer=lambda _, actions: simulated.extend(actions),
    )
    backend = FakeBackend(
        lambda action: getattr(seconds[action.pipeline], "rollout_s" if action.stage is Stage.GENERATE else "train_s")
    )
    submissions = [Submission(pipeline=one, config=TrainingConfig(name=one.id)) for one in pipelines]
    with RunLog.create(folder, run_header(policy=policy, backend="fake", cluster=cluster)) as log:
        assert Controller(Scheduler(cluster, make_policy(policy)), backend, log).run(submissions)
    with LogReader(folder) as reader:
        rows = list(reader.entries())
    logged = [row.value for row in rows if row.kind == "action"]
    again = Scheduler(cluster, make_policy(policy))
    replayed = [action for row in rows if row.kind == "event" for action in again.handle(row.value)]
    return simulated, logged, replayed


@pytest.mark.parametrize("policy", ["rollmux", "gavel-steps"])
def test_both_learn_the_same_estimates_and_act_on_them_and_the_log_replays(cluster, tmp_path, policy):
    pipelines = [
        Pipeline(id=PipelineId(name), num_steps=30, slo_slowdown=1.3 if number == 1 else math.inf)
        for number, name in enumerate(PHASES)
    ]
    simulated, logged, replayed = both_logs(cluster, pipelines, policy, tmp_path)
    assert simulated == logged == replayed
    learned = [action for action in logged if isinstance(action, ExpectSteps)]
    assert {action.pipeline for action in learned} == set(PHASES)
    for action in learned:
        assert action.measured is not None
        assert action.measured.median == PHASES[action.pipeline]


def test_an_slo_acts_without_an_estimate_in_the_file(cluster, tmp_path):
    """As in the example of three pipelines, where one accepts less than a cycle of all three brings it."""

    def slowdown(slo_slowdown: float) -> tuple[float, bool, float]:
        one_each = Cluster(pools={name: replace(pool, num_nodes=1) for name, pool in cluster.pools.items()})
        pipelines = [
            Pipeline(id=PipelineId(name), num_steps=60, slo_slowdown=slo_slowdown if number == 1 else math.inf)
            for number, name in enumerate(PHASES)
        ]
        folder = tmp_path / str(slo_slowdown)
        both_logs(one_each, pipelines, "rollmux", folder)
        summary = write_report(folder)
        shown = summary["pipelines"][list(PHASES)[1]]
        assert shown["estimate"]["source"] == "learned"
        return shown["step_slowdown"], shown["keeps_slo"], summary["slo_attainment"]

    without, _, _ = slowdown(math.inf)
    assert without > 1.3
    with_slo, keeps_slo, attainment = slowdown(1.2)
    assert with_slo <= 1.2
    assert keeps_slo
    assert attainment == 1.0
