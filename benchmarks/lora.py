"""Four LoRA tenants of one base against four pipelines that train the whole model, and one shared batch against turns.

    python benchmarks/lora.py [--size 5M] [--rounds 5]

memory     megabytes of a train and a rollout worker for each of four pipelines, all of them off their devices: the
           proportional set size (a page that n processes map counts 1/n in each), less that of a worker without an
           engine
switch     seconds in which a worker leaves its device for host memory and comes back, median over rounds
rollout    tokens/s of one engine that decodes four tenants in one batch, against four engines that take turns with the
           same requests; interleaved rounds, medians

Workers are processes of their own. The switches of the two kinds are measured in turn, round by round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rlmux.rl.config import AdapterConfig, AlgorithmConfig, ModelConfig, RolloutConfig, TrainingConfig
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import CharVocabulary

SIZES = {
    "1M": ModelConfig(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=384, seed=0),
    "5M": ModelConfig(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=768, seed=0),
    "20M": ModelConfig(hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=1536, seed=0),
}
RANKS = (4, 8, 16, 16)
ROLLOUT = RolloutConfig(num_slots=64, max_new_tokens=128, max_prompt_tokens=64)


def config_of(model: ModelConfig, tenant: int, *, is_lora: bool) -> TrainingConfig:
    adapter = AdapterConfig(rank=RANKS[tenant], alpha=16.0) if is_lora else None
    algorithm = AlgorithmConfig(prompts_per_step=4, group_size=4)
    return TrainingConfig(name=f"t{tenant}", seed=tenant, model=model, adapter=adapter, algorithm=algorithm)


def make_engine(config: TrainingConfig, role: str, bases: Path | None) -> Any:
    if role == "train":
        from rlmux.engines.train import TorchTrainEngine

        return TorchTrainEngine(config, bases=bases)
    from rlmux.engines.rollout import SlotRolloutEngine

    return SlotRolloutEngine(
        config.model,
        ROLLOUT,
        vocab_size=CharVocabulary().vocab_size,
        seed=config.model_seed,
        adapter=config.adapter,
        bases=bases,
    )


def work(config: TrainingConfig, role: str, bases: Path | None, pipe: Connection) -> None:
    """A worker's process: `switch` answers with seconds, `memory` with bytes, anything else ends it."""
    import torch

    torch.set_num_threads(1)
    engine = None
    if role != "empty":
        engine = make_engine(config, role, bases)
        engine.offload()
    pipe.send("ready")
    while (asked := pipe.recv()) in ("switch", "memory"):
        if asked == "memory":
            pipe.send(psutil.Process().memory_full_info().pss)
            continue
        assert engine is not None
        began = time.perf_counter()
        engine.load()
        engine.offload()
        pipe.send(time.perf_counter() - began)


class Workers:
    """The train and rollout workers of four pipelines."""

    def __init__(self, model: ModelConfig, *, is_lora: bool, bases: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rlmux.runtime.fork_server_imports"])
        self.pipes: dict[tuple[str, int], Connection] = {}
        self.processes = []
        for tenant in range(len(RANKS)):
            for role in ("train", "rollout", "empty"):
                ours, theirs = context.Pipe()
                config = config_of(model, tenant, is_lora=is_lora)
                process = context.Process(target=work, args=(config, role, bases if is_lora else None, theirs))
                process.start()
                self.pipes[role, tenant] = ours
                self.processes.append(process)
        for pipe in self.pipes.values():
            assert pipe.recv() == "ready"

    def ask(self, what: str, role: str) -> list[float]:
        answers = []
        for (each, _), pipe in self.pipes.items():
            if each == role:
                pipe.send(what)
                answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.send("end")
        for process in self.processes:
            process.join()


def measure_workers(model: ModelConfig, rounds: int) -> None:
    bases = Path(tempfile.mkdtemp(prefix="rlmux-lora-", dir="/dev/shm"))
    kinds = {"lora": Workers(model, is_lora=True, bases=bases), "full": Workers(model, is_lora=False, bases=bases)}
    print(f"base in shared memory: {sum(one.stat().st_size for one in bases.glob('*.safetensors')) / 1e6:.1f} MB")
    seconds: dict[tuple[str, str], list[float]] = {(kind, role): [] for kind in kinds for role in ("train", "rollout")}
    for _ in range(rounds):
        for kind, workers in kinds.items():
            for role in ("train", "rollout"):
                seconds[kind, role] += workers.ask("switch", role)
    print(
        f"{'worker':10} {'lora MB':>9} {'full MB':>9} {'ratio':>6} {'lora switch ms':>15} {'full ms':>9} {'ratio':>6}"
    )
    for role in ("train", "rollout"):
        memory = {
            kind: (sum(workers.ask("memory", role)) - sum(workers.ask("memory", "empty"))) / 1e6
            for kind, workers in kinds.items()
        }
        switch = {kind: 1e3 * statistics.median(seconds[kind, role]) for kind in kinds}
        print(
            f"4 {role:8} {memory['lora']:9.1f} {memory['full']:9.1f} {memory['lora'] / memory['full']:6.2f} "
            f"{switch['lora']:15.2f} {switch['full']:9.2f} {switch['lora'] / switch['full']:6.2f}"
        )
    for workers in kinds.values():
        workers.close()
    shutil.rmtree(bases)


def requests_of(tenant: int, name: str, num: int) -> list[TrajectoryRequest]:
    generator = random.Random(tenant)
    vocab_size = CharVocabulary().vocab_size
    return [
        TrajectoryRequest(
            id=TrajectoryId(1, number, 0, name),
            prompt_tokens=tuple(generator.randrange(vocab_size) for _ in range(20)),
            max_new_tokens=min(ROLLOUT.max_new_tokens, int(generator.lognormvariate(3.5, 0.7)) + 1),
            stop_tokens=(),
            seed=tenant,
        )
        for number in range(num)
    ]


def tokens_per_s(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    return run() / (time.perf_counter() - began)


def measure_rollouts(model: ModelConfig, rounds: int) -> None:
    import torch

    torch.set_num_threads(1)
    alone = [make_engine(config_of(model, tenant, is_lora=True), "rollout", None) for tenant in range(len(RANKS))]
    base = make_engine(replace(config_of(model, 0, is_lora=True), adapter=None), "rollout", None)
    plain = make_engine(replace(config_of(model, 0, is_lora=True), adapter=None), "rollout", None)
    for tenant, rank in enumerate(RANKS):
        base.add_adapter(f"t{tenant}", AdapterConfig(rank=rank, alpha=16.0))

    def together(num: int) -> int:
        base.submit([one for tenant in range(len(RANKS)) for one in requests_of(tenant, f"t{tenant}", num)])
        return int(base.run_chunk(max_decode_steps=10**6, max_seconds=1e6).sampled_tokens)

    def in_turns(num: int) -> int:
        total = 0
        for tenant, engine in enumerate(alone):
            engine.submit(requests_of(tenant, "", num))
            total += engine.run_chunk(max_decode_steps=10**6, max_seconds=1e6).sampled_tokens
        return total

    def without_adapters(num: int) -> int:
        for tenant in range(len(RANKS)):
            plain.submit([replace(one, id=one.id._replace(step=tenant)) for one in requests_of(tenant, "", num)])
        return int(plain.run_chunk(max_decode_steps=10**6, max_seconds=1e6).sampled_tokens)

    print(f"{'answers each':>12} {'one batch tok/s':>16} {'four turns':>11} {'ratio':>6} {'base alone, one batch':>22}")
    for num in (4, 16, 64):
        found: dict[Callable[[int], int], list[float]] = {together: [], in_turns: [], without_adapters: []}
        for number in range(rounds + 1):
            for run, rates in found.items():
                rate = tokens_per_s(partial(run, num))
                if number:  # the first round probes batch shapes
                    rates.append(rate)
        shared, turns, bare = (statistics.median(rates) for rates in found.values())
        print(f"{num:12} {shared:16,.0f} {turns:11,.0f} {shared / turns:6.2f} {bare:22,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measure_workers(SIZES[options.size], options.rounds)
    measure_rollouts(SIZES[options.size], options.rounds)


if __name__ == "__main__":
    main()
