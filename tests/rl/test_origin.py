"""The hash of a plan: all that decides a pipeline's weights, and nothing that does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlmux.rl.config import AlgorithmConfig, RolloutConfig, TaskConfig, TrainConfig, TrainingConfig
from rlmux.rl.origin import plan_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterTrain(TrainConfig):
    """What a later version might make of it."""

    num_ranks_per_node: int = 1
    shards_optimizer: bool = False


def test_a_key_that_a_later_version_adds_leaves_the_plan_as_it_is():
    plain = TrainingConfig(name="a", train=TrainConfig(num_threads=2))
    later = TrainingConfig(name="a", train=LaterTrain(num_threads=2))
    assert plan_sha256(later) == plan_sha256(plain)
    used = TrainingConfig(name="a", train=LaterTrain(num_threads=2, shards_optimizer=True))
    assert plan_sha256(used) != plan_sha256(plain)


def test_what_only_decides_when_a_pipeline_fails_or_how_fast_it_is_leaves_the_plan_as_it_is():
    plain = TrainingConfig(name="a")
    same = [
        replace(plain, algorithm=AlgorithmConfig(max_logprob_gap=0.5)),
        replace(plain, rollout=RolloutConfig(num_workers=3)),
        replace(plain, train=TrainConfig(num_workers=3)),
        replace(plain, task=TaskConfig(name="sort", reward_timeout_s=9.0)),
        replace(plain, task=TaskConfig(name="sort", num_reward_processes=2, reward_memory_gb=1.0, reward_file_gb=0.1)),
    ]
    assert {plan_sha256(each) for each in same} == {plan_sha256(plain)}


def test_every_other_field_is_of_the_plan():
    plain = TrainingConfig(name="a")
    changed = [
        replace(plain, name="b"),
        replace(plain, seed=1),
        replace(plain, num_steps=7),
        replace(plain, task=TaskConfig(name="reverse")),
        replace(plain, task=TaskConfig(name="sort", params={"digits": 3})),
        replace(plain, algorithm=AlgorithmConfig(adam_betas=(0.8, 0.99))),
        replace(plain, algorithm=AlgorithmConfig(name="rloo")),
    ]
    assert len({plan_sha256(each) for each in [plain, *changed]}) == 1 + len(changed)
