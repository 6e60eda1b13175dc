"""Clients are played again: they react to what they get, under any policy, and their logs can be simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.core.actions import Admit, Release, RunStage
from rlmux.core.events import ClientFinished, PipelineSubmitted, StageFinished, WorkArrived
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    DeviceId,
    GroupId,
    NodeId,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Placement,
    Pool,
    Stage,
)
from rlmux.log.run_log import RunLog, run_header
from rlmux.policies import POLICIES, make_policy
from rlmux.sim.clients import ClientBatch
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.recorded import recorded_workload
from rlmux.sim.world import TrueSeconds

ROLLOUT, TRAIN = (Phase.ROLLOUT,), (Phase.TRAIN,)
CLUSTER = Cluster(
    pools={
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=2),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=2),
    }
)


def client(num_rounds: int = 3) -> Arrival:
    """Rollout of 2 s, 1 s of thinking, training of 1 s, 1 s of thinking; and so on."""
    batches = []
    for number in range(num_rounds):
        after = 2 * number - 1 if number else None
        batches.append(ClientBatch(kind=ROLLOUT, seconds=2.0, after=after, think_s=1.0))
        batches.append(ClientBatch(kind=TRAIN, seconds=1.0, after=2 * number, think_s=1.0))
    pipeline = Pipeline(id=PipelineId("client"), num_steps=None, work_arrives=True)
    world = TrueSeconds.of_phases(PhaseSeconds(rollout_s=2.0, train_s=1.0), sync_s=2.0)
    return Arrival(submit_s=0.0, pipeline=pipeline, world=world, batches=tuple(batches))


def planned(name: str) -> Arrival:
    phases = PhaseSeconds(rollout_s=2.0, train_s=1.0)
    pipeline = Pipeline(id=PipelineId(name), num_steps=5, estimate=phases)
    return Arrival(submit_s=0.0, pipeline=pipeline, world=TrueSeconds.of_phases(phases))


def test_a_client_alone_takes_its_work_and_its_thinking():
    result = simulate(Workload(name="w", cluster=CLUSTER, arrivals=(client(),)), make_policy("solo"), checks=True)
    assert result.figures()["makespan_s"] == 15.0
    assert result.pipelines[0].steps == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_and_planned_pipelines_all_end_under_every_policy(policy):
    workload = Workload(name="w", cluster=CLUSTER, arrivals=(client(), planned("a"), planned("b")))
    result = simulate(workload, make_policy(policy), checks=True)
    assert {one.pipeline: one.steps for one in result.pipelines} == {"client": 3, "a": 5, "b": 5}


def test_a_recorded_client_reacts_instead_of_keeping_the_time_of_day(tmp_path: Path):
    """Its second batch came 3 s after the end of the first: wherever that ends, it thinks for 3 s."""
    log = RunLog.create(tmp_path, run_header(policy="fifo", backend="local", cluster=CLUSTER))
    name = PipelineId("client")
    placement = Placement(group=GroupId(1), rollout_nodes=(NodeId("rollout", 0),), train_nodes=(NodeId("train", 0),))
    rollout, train = DeviceId("rollout", 0, 0), DeviceId("train", 0, 0)

    def run(order: int, stage: Stage, device: DeviceId) -> RunStage:
        return RunStage(order=order, pipeline=name, step=1, stage=stage, devices=(device,), weight_version=0)

    rows = [
        (
            PipelineSubmitted(time_s=0.0, pipeline=client().pipeline),
            [Admit(pipeline=name, placement=placement, kind=AdmissionKind.NEW)],
        ),
        (WorkArrived(time_s=1.0, pipeline=name, phases=ROLLOUT), []),
        (StageFinished(time_s=1.0, order=99, seconds=0.0), [run(1, Stage.GENERATE, rollout)]),
        (StageFinished(time_s=3.0, order=1, seconds=2.0), []),
        (WorkArrived(time_s=6.0, pipeline=name, phases=TRAIN), [run(2, Stage.UPDATE, train)]),
        (StageFinished(time_s=7.0, order=2, seconds=1.0), []),
        (ClientFinished(time_s=7.0, pipeline=name), [Release(pipeline=name)]),
    ]
    for event, actions in rows:
        log.commit()
        log.append_event(event)
        log.append_actions(actions)
    log.close()
    workload = recorded_workload(tmp_path)
    assert [(one.kind, one.seconds, one.after, one.think_s) for one in workload.arrivals[0].batches] == [
        (ROLLOUT, 2.0, None, 1.0),
        (TRAIN, 1.0, 0, 3.0),
    ]
    assert simulate(workload, make_policy("rollmux"), checks=True).figures()["makespan_s"] == 7.0
