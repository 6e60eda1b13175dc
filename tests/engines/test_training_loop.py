"""Env, rollout engine and train engine in one process: the whole of RL without the runtime."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmux.core.errors import PipelineError
from rlmux.core.model import Stage
from rlmux.engines.model import weight_checksum
from rlmux.engines.model.weight_checksum import weights_checksum
from rlmux.engines.model.weights import check_weights, read_tensors, read_weights, weights_sha256, write_tensors
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.train.state import trainer_state
from rlmux.engines.train.state.checkpoint import read_checkpoint
from rlmux.engines.train.train_engine import RL_STAGES, TorchTrainEngine
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainConfig, TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.rl.user_code.pipeline_env import PipelineEnv


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
            adapter=training_config.adapter,
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
    assert calm.run(2) == disturbed.run(2)
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


def test_weights_that_are_not_those_that_were_published_are_refused(tmp_path: Path) -> None:
    loop = Loop(config(), tmp_path)
    content = bytearray(loop.weights.read_bytes())
    content[-1] ^= 1
    loop.weights.write_bytes(content)
    with pytest.raises(PipelineError, match=r"weights of version 1 in .* are damaged: their checksum is [0-9a-f]{32}"):
        loop.rollout.load_weights(loop.weights, 1)
    assert loop.rollout.version == 0


def test_of_a_large_model_a_sample_of_each_version_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_checksum, "_SAMPLED_ABOVE_BYTES", 0)
    loop = Loop(config(), tmp_path)
    loop.run(2)
    assert re.match(r"16\.2-[0-9a-f]{32}$", loop.trainer.weights_checksum())
    whole = loop.weights.read_bytes()
    outcomes = set()
    for place in range(-1, -len(whole) // 2, -997):
        content = bytearray(whole)
        content[place] ^= 1
        loop.weights.write_bytes(content)
        try:
            read_weights(loop.weights, 2)
            outcomes.add("not covered")
        except PipelineError as error:
            outcomes.add("damaged" if "are damaged: their checksum is 16.2-" in str(error) else str(error))
    assert outcomes == {"damaged", "not covered"}


def test_whole_checksums_cover_every_version_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_checksum, "_SAMPLED_ABOVE_BYTES", 0)
    loop = Loop(replace(config(), train=TrainConfig(whole_checksums=True)), tmp_path)
    loop.run(2)
    tensors, written = read_tensors(loop.weights)
    assert written["weights_checksum"] == weights_checksum(tensors)


def test_publishing_computes_a_checksum_once_and_no_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, computed = Loop(config(), tmp_path), []
    monkeypatch.setattr(trainer_state, "weights_sha256", lambda tensors: pytest.fail("a hash of every byte"))
    compute = trainer_state.weights_checksum
    monkeypatch.setattr(trainer_state, "weights_checksum", lambda *given: computed.append(1) or compute(*given))
    loop.run(3)
    assert loop.trainer.weights_checksum() == read_tensors(loop.weights)[1]["weights_checksum"]
    assert len(computed) == 3


def test_a_checkpoints_weights_carry_both_sums_and_both_are_asserted_when_they_are_loaded(tmp_path: Path) -> None:
    loop = Loop(config(), tmp_path)
    loop.trainer.save(tmp_path / "step_0")
    path = tmp_path / "step_0" / "model.safetensors"
    tensors, written = read_tensors(path)
    assert written["weights_sha256"] == loop.trainer.weights_sha256() == weights_sha256(tensors)
    assert written["weights_checksum"] == loop.trainer.weights_checksum() == weights_checksum(tensors)
    state = read_checkpoint(tmp_path / "step_0")
    assert {key: state[key] for key in ("weights_sha256", "weights_checksum")} == {
        key: written[key] for key in ("weights_sha256", "weights_checksum")
    }
    loop.rollout.load_weights(path, 0)
    for key, name in (("weights_sha256", "sha256"), ("weights_checksum", "checksum")):
        write_tensors(path, tensors, {**written, key: "0"})
        with pytest.raises(PipelineError, match=f"their {name} is [0-9a-f]+, and 0 was written"):
            loop.rollout.load_weights(path, 0)


def test_published_weights_without_a_checksum_are_refused(tmp_path: Path) -> None:
    origin = Origin(run_id="r", pipeline="p", plan_sha256="0")
    path = tmp_path / "1.safetensors"
    write_tensors(path, {"weight": torch.zeros(1)}, {"version": "1", **origin.fields()})
    with pytest.raises(PipelineError, match=r"weights of version 1 in .* are without a checksum"):
        check_weights(path, 1, origin)
    for key in ("weights_checksum", "weights_sha256"):  # the second alone: a checkpoint of before
        write_tensors(path, {"weight": torch.zeros(1)}, {"version": "1", key: "0", **origin.fields()})
        check_weights(path, 1, origin)


def test_weights_with_another_checksum_than_the_published_one_are_refused(tmp_path: Path) -> None:
    """Whole weights of the right run and version, but not those that the trainer published."""
    origin = Origin(run_id="r", pipeline="p", plan_sha256="0")
    path = tmp_path / "1.safetensors"
    write_tensors(path, {"weight": torch.zeros(1)}, {"version": "1", "weights_checksum": "a", **origin.fields()})
    assert check_weights(path, 1, origin, "a") == check_weights(path, 1, origin) == "a"
    with pytest.raises(PipelineError, match=r"other weights: their checksum is a, and the trainer published b"):
        check_weights(path, 1, origin, "b")
