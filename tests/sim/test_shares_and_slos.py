"""Shares decide who is next and who makes room; what was promised to those that run stays kept."""

from __future__ import annotations

import math
import random

import pytest

from rlmux.core.model import QUEUED, Account, PhaseSeconds, Pipeline, PipelineId
from rlmux.core.queue_order import AccountShare, Quota, Share, ShareSettings
from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import TrueSeconds

SECONDS = [10.0, 20.0, 40.0, 80.0, 150.0]
ANN = Account("", "ann")


def workload(chance: random.Random) -> Workload:
    """More than two or three nodes of each pool hold, of three users; every estimate is what a step takes."""
    made = []
    for number in range(chance.randint(4, 14)):
        phases = PhaseSeconds(rollout_s=chance.choice(SECONDS), train_s=chance.choice(SECONDS))
        pipeline = Pipeline(
            id=PipelineId(f"p{number}"),
            num_steps=chance.randint(3, 60),
            num_rollout_nodes=chance.choice([1, 1, 1, 2]),
            estimate=phases,
            slo_slowdown=chance.choice([1.05, 1.2, 1.5, 2.0, 3.0, math.inf]),
            staleness=chance.choice([0, 0, 0, 1]),
            user=chance.choice(["ann", "bob", "eve"]),
            project=chance.choice(["", "", "lab"]),
            urgency=chance.choice(QUEUED),
        )
        made.append(
            Arrival(submit_s=chance.uniform(0.0, 1500.0), pipeline=pipeline, world=TrueSeconds.of_phases(phases))
        )
    share = Share(weight=chance.choice([0.2, 1.0, 5.0]), guarantee=chance.choice([0.0, 0.5]))
    ann = AccountShare(account=ANN, share=share, quota=chance.choice([Quota(), Quota(max_running=2)]))
    num_nodes = chance.choice([2, 3])
    return Workload(
        name="shares",
        cluster=h20_h800_cluster(num_rollout_nodes=num_nodes, num_train_nodes=num_nodes, host_memory_gb=1000),
        arrivals=tuple(sorted(made, key=lambda one: one.submit_s)),
        shares=ShareSettings(
            min_steps=chance.randint(1, 4), half_life_s=chance.choice([200.0, 1e6]), accounts=(ann,), parks=True
        ),
    )


def latest_steps(policy: str, seed: int) -> list[float]:
    """How late each pipeline was over its SLO at its end, in the steps that its SLO allows; 0 for one that kept it."""
    drawn = workload(random.Random(seed))
    result = simulate(drawn, make_policy(policy))
    late = []
    for one, arrival in zip(result.pipelines, drawn.arrivals, strict=True):
        slo, estimate = arrival.pipeline.slo_slowdown, arrival.pipeline.estimate
        assert estimate is not None
        if slo < math.inf and one.step_slowdown is not None:
            late.append(max(0.0, (one.step_slowdown - slo) * one.solo_s / (slo * estimate.solo_s)))
    return late


@pytest.mark.parametrize(
    ("policy", "seeds"),
    [
        ("rollmux", range(5)),
        ("rlmux", range(5)),
        pytest.param("rollmux", range(5, 500), marks=pytest.mark.slow),
        pytest.param("rlmux", range(5, 500), marks=pytest.mark.slow),
    ],
)
def test_shares_never_break_an_slo_of_a_running_pipeline(policy, seeds):
    """Whoever comes, is parked and goes on beside it: it is never later than by the one step in which others came."""
    late = [each for seed in seeds for each in latest_steps(policy, seed)]
    assert len(late) > 4 * len(seeds)
    assert max(late) < 1.0
