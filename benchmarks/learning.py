"""Do the demo pipelines learn, and where does a step's time go? Environment and both engines in one process.

    python benchmarks/learning.py [--pipelines sort,sort-long,...] [--steps N] [--seeds N] [--json]

Each pipeline runs alone on one thread, phases one after another: the `solo` of a laptop. Reward is the mean over
the first and the last 20 steps of what was sampled. Seconds are CPU seconds of this process, so that a busy machine
does not change them.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlmux.core.model import Stage
from rlmux.engines.rollout import SlotRolloutEngine
from rlmux.engines.train import RL_STAGES, TorchTrainEngine
from rlmux.rl.batch_metrics import batch_metrics
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainingConfig
from rlmux.rl.pipeline_env import PipelineEnv

AVERAGED_STEPS = 20


def demo(name: str, task: str, params: dict[str, Any], sft_warmup: int, max_new_tokens: int) -> TrainingConfig:
    """A 0.1M-parameter model, 16 prompts of 8 trajectories a step."""
    return TrainingConfig(
        name=name,
        num_steps=150,
        task=TaskConfig(name=task, params=params),
        algorithm=AlgorithmConfig(learning_rate=1e-3),
        sft_warmup=SftWarmupConfig(num_updates=sft_warmup),
        rollout=RolloutConfig(max_new_tokens=max_new_tokens, max_prompt_tokens=32),
    )


LONG_TAIL = {"min_digits": 2, "mean_digits": 6, "max_digits": 24}
CONFIGS = {
    each.name: each
    for each in (
        demo("sort", "sort", {"digits": 5}, 50, 12),
        demo("sort-long", "sort", LONG_TAIL, 60, 32),
        demo("reverse", "reverse", {"letters": 5, "alphabet": 8}, 60, 12),
        demo("calculator", "calculator", {"min_digits": 1, "max_digits": 2}, 80, 24),
        demo("guess", "guess", {}, 40, 24),
    )
}


class Stopwatch:
    """CPU seconds by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name] += time.process_time() - started


def learn(config: TrainingConfig) -> dict[str, Any]:
    """The whole run, and what it was like. With staleness k, each step samples with the weights of k versions ago."""
    watch = Stopwatch()
    env, trainer = PipelineEnv(config), TorchTrainEngine(config)
    rollout = SlotRolloutEngine(
        config.model,
        config.rollout,
        vocab_size=env.vocabulary.vocab_size,
        seed=config.seed,
        is_single_turn=env.is_single_turn,
    )
    with watch.part("sft_warmup"):
        trainer.run_stage(Stage.SFT_WARMUP, max_seconds=float("inf"))
    rewards, lengths, gaps, longest = [], [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, config.num_steps + 1):
            with watch.part("publish"):
                trainer.export_weights(Path(folder) / f"{step - 1}.safetensors")
                version = max(0, step - 1 - config.algorithm.staleness)
                rollout.load_weights(Path(folder) / f"{version}.safetensors", version)
                (Path(folder) / f"{version - 1}.safetensors").unlink(missing_ok=True)
            with watch.part("env"):
                rollout.submit(env.begin_step(step))
            while not env.is_step_complete(step):
                with watch.part("rollout"):
                    chunk = rollout.run_chunk(max_decode_steps=10**6, max_seconds=10)
                with watch.part("env"):
                    rollout.reply(*env.on_turns(chunk.finished))
            with watch.part("env"):
                batch = env.finish_step(step)
            with watch.part("update"):
                trainer.begin_step(batch)
            for stage in RL_STAGES:
                with watch.part(stage):
                    report = trainer.run_stage(stage, max_seconds=float("inf"))
            metrics = batch_metrics(batch)
            rewards.append(metrics.reward_mean)
            lengths.append(metrics.response_tokens_mean)
            longest = max(longest, metrics.response_tokens_max)
            gaps.append(report.metrics["logprob_gap"])
    return {
        "pipeline": config.name,
        "seed": config.seed,
        "steps": config.num_steps,
        "reward_first": fmean(rewards[:AVERAGED_STEPS]),
        "reward_last": fmean(rewards[-AVERAGED_STEPS:]),
        "cpu_s": sum(watch.seconds.values()),
        "seconds": {name: round(seconds, 2) for name, seconds in watch.seconds.items() if seconds >= 0.005},
        "response_tokens_mean": fmean(lengths),
        "response_tokens_max": longest,
        "logprob_gap_max": max((gap for gap in gaps if not math.isnan(gap)), default=None),  # NaN: nothing compared
        "weights_sha256": trainer.weights_sha256(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipelines", default="sort,sort-long", help=f"any of {','.join(CONFIGS)}")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.pipelines.split(","):
        for seed in range(arguments.seeds):
            config = replace(CONFIGS[name], seed=seed)
            result = learn(replace(config, num_steps=arguments.steps or config.num_steps))
            if arguments.json:
                print(json.dumps(result), flush=True)
                continue
            print(
                f"{name:12} seed {seed}  reward {result['reward_first']:.2f} -> {result['reward_last']:.2f}  "
                f"in {result['steps']} steps, {result['cpu_s']:.0f} s  "
                f"tokens {result['response_tokens_mean']:.1f} (max {result['response_tokens_max']:.0f})  "
                + "  ".join(f"{part} {seconds:.1f}" for part, seconds in result["seconds"].items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
