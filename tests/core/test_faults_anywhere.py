"""Any faults, in any order, at any state of a step: what is not broken goes on, and what is broken ends."""

from __future__ import annotations

import random

import pytest
from tests.examples import examples
from tests.faults import BreakingBackend, Restless

from rlmux.core.model import Cluster, Phase, Pool
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

POLICIES = ("rollmux", "rlmux", "jigsaw", "colocated", "solo", "fifo", "gap-ratio", "gavel-steps", "gavel", "restless")
NUM_SEQUENCES = 60
"""Sequences of each policy in the quick test; `make prove` plays more than 10,000 in all."""


def play(policy: str, seed: int, *, knows_seconds: bool = True) -> None:
    """Two or three pipelines, up to three faults close together at a random state, then what is left to its end."""
    draw = random.Random(f"{policy}/{seed}")
    num_nodes = draw.choice([1, 2, 3]) + 2 * (policy == "restless")
    pools = [
        Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=num_nodes + 1, usd_per_gpu_hour=1.0),
        Pool(name="train", phase=Phase.TRAIN, num_nodes=num_nodes, usd_per_gpu_hour=3.0),
    ]
    short = {"turn_s": 5.0, "reset_s": 12.0} if policy == "gavel" else {}  # turns end within a sequence
    chosen = Restless() if policy == "restless" else make_policy(policy, seed=seed, **short)
    cluster = Cluster(pools={pool.name: pool for pool in pools})
    backend = BreakingBackend(Scheduler(cluster, chosen), draw, knows_seconds=knows_seconds)
    for _ in range(draw.choice([2, 3])):
        backend.submit_another()
    for _ in range(draw.randrange(25 if knows_seconds else 100)):
        backend.go_on()
    for _ in range(draw.choice([1, 2, 3])):
        draw.choice(list(backend.faults().values()))()
        for _ in range(draw.choice([0, 0, 1, 3])):
            backend.go_on()
    backend.settle()


def play_all(policy: str, seeds: range, *, knows_seconds: bool = True) -> None:
    for seed in seeds:
        try:
            play(policy, seed, knows_seconds=knows_seconds)
        except Exception as error:
            raise AssertionError(f"sequence {seed} of {policy}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("policy", POLICIES)
def test_faults_of_one_pipeline_are_its_own_at_every_state(policy):
    play_all(policy, range(NUM_SEQUENCES // 3))


@pytest.mark.parametrize("policy", ["rollmux", "rlmux", "gavel-steps", "gavel", "restless"])
def test_faults_while_seconds_are_learned_and_pipelines_move_for_their_slo(policy):
    play_all(policy, range(examples(NUM_SEQUENCES // 2)), knows_seconds=False)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_sequences_of_faults_leave_no_device_held_and_no_pipeline_stuck(policy):
    play_all(policy, range(1200))
