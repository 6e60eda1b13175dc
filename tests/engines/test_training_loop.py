"""Env, rollout engine and train engine in one process: the whole of RL without the runtime."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.model import Stage
from rlmux.engines.rollout import SlotRolloutEngine
from rlmux.engines.train import RL_STAGES, TorchTrainEngine
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainingConfig
from rlmux.rl.pipeline_env import PipelineEnv


def config(task: str = "sort", params: dict[str, Any] | None = None, **algorithm: Any) -> TrainingConfig:
    fields = {"prompts_per_step": 4, "group_size": 4, "micro_batch_size": 6, "learning_rate": 1e-3, **algorithm}
    return TrainingConfig(
        name="p",
        task=TaskConfig(name=task, params=params or {}),
        algorithm=AlgorithmConfig(**fields),
        sft_warmup=SftWarmupConfig(num_updates=4, batch_size=16),
        rollout=RolloutConfig(max_new_tokens=24, max_prompt_tokens=16, num_slots=8),
    )


class Loop:
    """One pipeline, one step after another."""

    def __init__(self, training_config: TrainingConfig, folder: Path, *, is_disturbed: bool = False) -> None:
        self.env = PipelineEnv(training_config)
        self.trainer = TorchTrainEngine(training_config)
        self.rollout = SlotRolloutEngine(
            training_config.model,
            training_config.rollout,
            vocab_size=self.env.vocabulary.vocab_size,
            seed=training_config.seed,
            staleness=training_config.algorithm.staleness,
            is_single_turn=self.env.is_single_turn,
        )
        self.weights = folder / "weights.safetensors"
        self.is_disturbed = is_disturbed
        self.metrics: dict[str, float] = {}
        self.run_stage(Stage.SFT_WARMUP)
        self.publish()

    def run_stage(self, stage: Stage) -> None:
        while True:
            report = self.trainer.run_stage(stage, max_seconds=0 if self.is_disturbed else 1e9)
            if self.is_disturbed:
                self.trainer.offload()
                self.trainer.load()
            if report.is_done:
                self.metrics.update(report.metrics)
                return

    def publish(self) -> None:
        self.rollout.load_weights(self.weights, self.trainer.export_weights(self.weights))

    def sample(self, step: int, *, stop_after: int = 10**6) -> None:
        """Decode until the step is complete or so many chunks are done."""
        for _ in range(stop_after):
            if self.env.is_step_complete(step):
                return
            chunk = self.rollout.run_chunk(max_decode_steps=2 if self.is_disturbed else 10**6, max_seconds=60)
            finished = list(chunk.finished)[::-1] if self.is_disturbed else chunk.finished
            self.rollout.reply(*self.env.on_turns(finished))
            if self.is_disturbed:
                self.rollout.offload()
                self.rollout.load()

    def train(self, step: int) -> float:
        batch = self.env.finish_step(step)
        self.trainer.begin_step(batch)
        for stage in RL_STAGES:
            self.run_stage(stage)
        return sum(each.reward for each in batch.trajectories) / len(batch.trajectories)

    def run(self, num_steps: int) -> list[float]:
        rewards = []
        for step in range(1, num_steps + 1):
            self.rollout.submit(self.env.begin_step(step))
            self.sample(step)
            rewards.append(self.train(step))
            self.publish()
        return rewards


@pytest.mark.parametrize(
    "training_config", [config(), config(kl_coef=0.1, name="dr-grpo"), config("calculator", {"digits": 1})]
)
def test_pauses_chunks_offloads_and_the_order_of_turns_change_nothing(
    training_config: TrainingConfig, tmp_path: Path
) -> None:
    calm, disturbed = (Loop(training_config, tmp_path, is_disturbed=each) for each in (False, True))
    assert calm.run(3) == disturbed.run(3)
    assert calm.trainer.weights_sha256() == disturbed.trainer.weights_sha256()


def test_on_policy_both_engines_agree_on_every_log_probability(tmp_path: Path) -> None:
    loop = Loop(config("guess"), tmp_path)
    loop.run(3)
    assert 0 < loop.metrics["logprob_gap"] < 1e-4


def test_one_step_off_policy_trains_within_its_bound(tmp_path: Path) -> None:
    loop = Loop(config(staleness=1), tmp_path)
    loop.rollout.submit(loop.env.begin_step(1))
    shares = []
    for step in range(1, 4):
        loop.sample(step)
        # The next step begins under the weights that are about to become stale.
        loop.rollout.submit(loop.env.begin_step(step + 1))
        loop.sample(step + 1, stop_after=1)
        loop.train(step)
        shares.append(loop.metrics["stale_token_share"])
        loop.publish()
    assert shares[0] == 0
    assert shares[1] > 0
    assert loop.trainer.version == 3


def test_the_reward_rises(tmp_path: Path) -> None:
    training_config = config("sort", {"digits": 4}, prompts_per_step=8, group_size=8, micro_batch_size=64)
    sft_warmup = SftWarmupConfig(num_updates=60, batch_size=32)
    rewards = Loop(replace(training_config, sft_warmup=sft_warmup), tmp_path).run(40)
    first, last = sum(rewards[:8]) / 8, sum(rewards[-8:]) / 8
    assert last > first + 0.05, rewards
