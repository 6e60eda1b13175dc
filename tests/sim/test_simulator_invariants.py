"""Random workloads, policies and failures: after every event all is well, and no step is lost."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.model import Footprint, NodeId, PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.policies import POLICIES, make_policy
from rlmux.sim.node_changes import NodeFailure
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import RandomVariation, SwitchSeconds, TrueSeconds

SWITCH = SwitchSeconds(cold_rollout_s=20.0, cold_train_s=15.0, warm_rollout_s=1.0, warm_train_s=3.0)


@st.composite
def arrivals(draw):
    made = []
    for index in range(draw(st.integers(2, 9))):
        phases = PhaseSeconds(rollout_s=draw(st.floats(5, 300)), train_s=draw(st.floats(5, 300)))
        submit_s = draw(st.floats(0, 3000))
        steps = draw(st.integers(1, 12))
        leaves_early = draw(st.booleans())
        pipeline = Pipeline(
            id=PipelineId(f"p{index}"),
            num_steps=steps,
            stages=draw(
                st.sampled_from(
                    [
                        (Stage.GENERATE, Stage.UPDATE),
                        (Stage.GENERATE, Stage.REFERENCE_LOGPROBS, Stage.UPDATE, Stage.PUBLISH),
                    ]
                )
            ),
            has_sft_warmup=draw(st.booleans()),
            num_rollout_nodes=draw(st.integers(1, 2)),
            estimate=phases,
            slo_slowdown=draw(st.floats(1, 3)),
            staleness=draw(st.integers(0, 1)),
            footprint=Footprint(rollout_host_bytes=draw(st.sampled_from([0.0, 400e9])), train_host_bytes=1e9),
        )
        made.append(
            Arrival(
                submit_s=submit_s,
                depart_s=submit_s + draw(st.floats(1, 3000)) if leaves_early else None,
                pipeline=pipeline,
                world=TrueSeconds.of_phases(phases, sync_s=2.0, variation=RandomVariation(seed=index, cv=0.3)),
                switch=SWITCH,
            )
        )
    return tuple(sorted(made, key=lambda one: one.submit_s))


@st.composite
def failures(draw):
    at_s = sorted(draw(st.lists(st.floats(10, 4000), max_size=4)))
    return [
        NodeFailure(node=NodeId(draw(st.sampled_from(["h20", "h800"])), index), at_s=when, down_s=500.0)
        for index, when in enumerate(at_s)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@given(made=arrivals(), broken=failures(), num_nodes=st.sampled_from([None, 4]))
@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_all_is_well_after_every_event(policy, made, broken, num_nodes):
    cluster = h20_h800_cluster(num_rollout_nodes=num_nodes, num_train_nodes=num_nodes, host_memory_gb=1000)
    workload = Workload(name="random", cluster=cluster, arrivals=made)
    result = simulate(workload, make_policy(policy), failures=broken, checks=True)
    for one, arrival in zip(result.pipelines, made, strict=True):
        if arrival.depart_s is None and not one.refused:
            assert one.steps == arrival.pipeline.num_steps
        if one.step_slowdown is not None and policy == "solo" and not broken:
            assert one.step_slowdown >= 1.0 - 1e-9 or arrival.pipeline.staleness
