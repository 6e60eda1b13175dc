"""The simulator against arithmetic: what a policy promises is what its pipelines get."""

from __future__ import annotations

import itertools

import pytest

from rlmux.core.model import Footprint, NodeId, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.model import Cluster
from rlmux.core.policies.rollmux import RollMux
from rlmux.sim import workloads
from rlmux.sim.simulator import NodeFailure, simulate
from rlmux.sim.workloads import Arrival, Workload
from rlmux.sim.world import SwitchSeconds, TrueSeconds


def arrival(name, rollout_s, train_s, *, submit_s=0.0, num_steps=20, slo=10.0, **more):
    phases = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    return Arrival(
        submit_s=submit_s,
        pipeline=Pipeline(id=PipelineId(name), num_steps=num_steps, estimate=phases, slo_slowdown=slo),
        world=TrueSeconds.of_phases(phases),
        **more,
    )


def workload(*arrivals, rollout_nodes=None, train_nodes=None, **more):
    cluster = workloads.h20_h800_cluster(
        num_rollout_nodes=rollout_nodes, num_train_nodes=train_nodes, **more
    )
    return Workload(name="test", cluster=cluster, arrivals=arrivals)


def slowdowns(result):
    return {p.pipeline: p.step_slowdown for p in result.pipelines}


def test_a_pipeline_alone_takes_its_solo_time_and_costs_its_nodes():
    result = simulate(workload(arrival("a", 60.0, 40.0, num_steps=36)), RollMux())
    assert result.hours == pytest.approx(1.0)
    assert result.cost_usd == pytest.approx(8 * (1.76 + 5.28))
    assert slowdowns(result) == {"a": pytest.approx(1.0)}
    assert result.utilization == {"rollout": pytest.approx(0.6), "train": pytest.approx(0.4)}
