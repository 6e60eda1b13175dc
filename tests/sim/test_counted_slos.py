"""Counted nodes and pipelines whose token limit is above their SLO: the default keeps every SLO that two pairs keep."""

from __future__ import annotations

import pytest

from rlmux.core.model import DEFAULT_SLO_PROBABILITY, Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool
from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.noise import with_noise
from rlmux.sim.world import NO_SWITCH, SwitchSeconds, TrueSeconds

STEP = PhaseSeconds(rollout_s=100.0, train_s=100.0)
LIMIT = PhaseSeconds(rollout_s=200.0, train_s=200.0)
SLOW = SwitchSeconds(cold_rollout_s=20.0, cold_train_s=15.0, warm_rollout_s=20.0, warm_train_s=15.0)


def four_on_two_pairs(slo_slowdown: float, switch: SwitchSeconds = NO_SWITCH) -> Workload:
    pools = {
        name: Pool(name=name, phase=phase, num_nodes=2, gpus_per_node=8, usd_per_gpu_hour=3.5)
        for name, phase in (("rollout", Phase.ROLLOUT), ("train", Phase.TRAIN))
    }
    arrivals = [
        Arrival(
            submit_s=0.0,
            pipeline=Pipeline(
                id=PipelineId(name),
                num_steps=50,
                estimate=STEP,
                limit=LIMIT,
                slo_slowdown=slo_slowdown,
                slo_probability=DEFAULT_SLO_PROBABILITY,
                switch=None if switch == NO_SWITCH else switch.estimate,
            ),
            world=TrueSeconds.of_phases(STEP),
            switch=switch,
        )
        for name in "abcd"
    ]
    return Workload(name="four", cluster=Cluster(pools=pools), arrivals=tuple(arrivals))


@pytest.mark.parametrize(
    ("slo_slowdown", "switch", "most_usd"), [(1.8, NO_SWITCH, 430.0), (1.3, NO_SWITCH, 315.0), (1.8, SLOW, 380.0)]
)
def test_the_default_keeps_every_slo_of_four_pipelines_on_two_pairs(slo_slowdown, switch, most_usd):
    result = simulate(four_on_two_pairs(slo_slowdown, switch), make_policy("rlmux"), checks=True)
    assert (result.slo_attainment, result.admissions["direct"]) == (1.0, 2)
    assert result.paid_usd <= most_usd


@pytest.mark.parametrize("policy", ["rollmux", "rlmux"])
@pytest.mark.parametrize("seed", range(3))
def test_so_it_does_while_steps_vary_by_a_tenth(policy, seed):
    made = with_noise(four_on_two_pairs(1.5), 0.1, seed=seed)
    assert simulate(made, make_policy(policy), checks=True).slo_attainment == 1.0
