"""LoRA tenants of one base together against in turns.

    python benchmarks/tenants.py [--parts rollout,train] [--sizes 5M,60M] [--tenants 2,4,8] [--slots 8,16]
                                 [--tokens 64,512] [--rounds N] [--device cpu] [--json FILE]

Part `rollout`: each tenant samples as many answers of up to 64 tokens as it has slots. A round samples the same
requests in one batch (`SharedEngine`) and in turns (an engine each). Answers and log-probs must be equal, bit for bit.

Part `train`: each tenant trains with an adapter of its own. A round is one update of each, of micro-batches of about so
many tokens; the same batches are trained together (`JointTraining`) and in turns (an engine each), alternately, one
thread, medians of all rounds but the first. The first round together also probes the numbers of rows. At the end the
weights of both kinds must be equal, bit for bit. Memory is what a process grows by, one process for each kind,
with tenants that have trained: together, an engine each, and full models without adapters.

Seconds are processor time of the one thread: what else runs on the machine takes nothing from either; on a GPU
(`--device cuda`) they are elapsed. Latency is the time from the begin of a round to a tenant's end, as a mean.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from rlmux.core.model import Stage
from rlmux.engines.residency import release_storage
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.rollout.tenants import SharedEngine
from rlmux.engines.train.joint_training import JointTraining
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.rl.config import AdapterConfig, AlgorithmConfig, ModelConfig, RolloutConfig, SftWarmupConfig, TrainingConfig
from rlmux.rl.types import ChunkReport, TrainingBatch, TrainReport, Trajectory, TrajectoryId, TrajectoryRequest

SIZES = {
    "5M": ModelConfig(hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=768, seed=0),
    "60M": ModelConfig(hidden_size=768, num_layers=8, num_heads=12, num_kv_heads=4, intermediate_size=2304, seed=0),
}
MICRO_BATCHES = 4
"""Of an update."""
SEQUENCES = 2
"""Of a micro-batch."""
PROMPT_TOKENS = 8
RANKS = (8, 4, 16, 8)
"""Of the tenants' adapters, again and again."""


DEVICE = os.environ.get("RLMUX_TENANTS_DEVICE", "cpu")
"""Device of all engines; processes of a measurement inherit it from `--device`."""


def now_s() -> float:
    """Processor seconds of this process; on a GPU seconds of a clock, once its work is done."""
    if DEVICE == "cpu":
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


def config_of(size: str, tenant: int, tokens: int) -> TrainingConfig:
    return TrainingConfig(
        name=f"tenant-{tenant}",
        seed=tenant,
        model=SIZES[size],
        adapter=AdapterConfig(rank=RANKS[tenant % len(RANKS)], alpha=16.0),
        sft_warmup=SftWarmupConfig(num_updates=0),
        algorithm=AlgorithmConfig(
            prompts_per_step=MICRO_BATCHES, group_size=SEQUENCES, micro_batch_size=SEQUENCES, learning_rate=1e-3
        ),
        rollout=RolloutConfig(max_new_tokens=tokens),
    )


def batch_of(tenant: int, step: int, tokens: int) -> TrainingBatch:
    """Random tokens in sequences of about `tokens / SEQUENCES`, of equal lengths in every step."""
    rng = random.Random(f"{tenant}/{step}")
    lengths = random.Random(tenant)
    trajectories = []
    for prompt in range(MICRO_BATCHES):
        for sample in range(SEQUENCES):
            length = round(tokens / SEQUENCES * lengths.uniform(0.875, 1.125)) - PROMPT_TOKENS
            trajectories.append(
                Trajectory(
                    id=TrajectoryId(step, prompt, sample),
                    prompt_tokens=tuple(rng.randrange(2, 40) for _ in range(PROMPT_TOKENS)),
                    tokens=tuple(rng.randrange(2, 40) for _ in range(length)),
                    is_sampled=(True,) * length,
                    logprobs=(-3.8,) * length,
                    versions=(step - 1,) * length,
                    reward=0.0,
                    stop_reason="length",
                    num_turns=1,
                )
            )
    return TrainingBatch(step=step, trajectories=trajectories, advantages=[rng.gauss(0.0, 1.0) for _ in trajectories])


# --- part rollout -----------------------------------------------------------------------------------------------


def requests_of(tenant: int, step: int, slots: int) -> list[TrajectoryRequest]:
    """Answers of 16 to 64 tokens, of equal lengths for every step."""
    lengths = random.Random(tenant)
    return [
        TrajectoryRequest(
            id=TrajectoryId(step, 0, sample),
            prompt_tokens=tuple(range(2, 10)),
            max_new_tokens=lengths.randint(16, 64),
            stop_tokens=(),
            seed=1000 * tenant + sample,
        )
        for sample in range(slots)
    ]


def rollout_engine(size: str, tenant: int, slots: int) -> SlotRolloutEngine:
    rollout = RolloutConfig(num_slots=slots, max_new_tokens=64, max_prompt_tokens=16)
    adapter = AdapterConfig(rank=RANKS[tenant % len(RANKS)], alpha=16.0)
    return SlotRolloutEngine(SIZES[size], rollout, vocab_size=64, seed=0, device=DEVICE, adapter=adapter)


Sampled = dict[tuple[int, TrajectoryId], tuple[object, ...]]
"""Tokens and log-probs by tenant and trajectory."""


class SampledTogether:
    """All tenants in one batch."""

    def __init__(self, size: str, num_tenants: int, slots: int) -> None:
        self._shared = SharedEngine(rollout_engine(size, 0, slots))
        adapters = [AdapterConfig(rank=RANKS[tenant % len(RANKS)], alpha=16.0) for tenant in range(num_tenants)]
        self._tenants = {
            str(tenant): self._shared.join(str(tenant), adapter, staleness=0, is_single_turn=True)
            for tenant, adapter in enumerate(adapters)
        }

    def sample(self, requests: Sequence[Sequence[TrajectoryRequest]]) -> tuple[Sampled, list[float]]:
        """Answers, and seconds until each tenant's end."""
        started = now_s()
        for tenant, its in zip(self._tenants.values(), requests, strict=True):
            tenant.submit(its)
        found: Sampled = {}
        ends: dict[str, float] = {}
        while len(ends) < len(self._tenants):
            names = [name for name in self._tenants if name not in ends]
            for name, report in self._shared.run(names, max_decode_steps=10**6, max_seconds=600.0).items():
                assert isinstance(report, ChunkReport), report
                found |= {(int(name), turn.id): (turn.tokens, turn.logprobs) for turn in report.finished}
                if not report.num_active + report.num_waiting:
                    ends[name] = now_s() - started
        return found, list(ends.values())


class SampledInTurns:
    """An engine each."""

    def __init__(self, size: str, num_tenants: int, slots: int) -> None:
        self._engines = [rollout_engine(size, tenant, slots) for tenant in range(num_tenants)]

    def sample(self, requests: Sequence[Sequence[TrajectoryRequest]]) -> tuple[Sampled, list[float]]:
        started = now_s()
        found: Sampled = {}
        ends = []
        for tenant, (engine, its) in enumerate(zip(self._engines, requests, strict=True)):
            engine.submit(its)
            report = engine.run_chunk(max_decode_steps=10**6, max_seconds=600.0)
            found |= {(tenant, turn.id): (turn.tokens, turn.logprobs) for turn in report.finished}
            ends.append(now_s() - started)
        return found, ends


def measure_sampling(size: str, num_tenants: int, slots: int, rounds: int) -> dict[str, Any]:
    """Tokens a second and latency of both kinds. Runs in a process of its own."""
    torch.set_num_threads(1)
    made: dict[str, SampledTogether | SampledInTurns] = {
        "together": SampledTogether(size, num_tenants, slots),
        "in turns": SampledInTurns(size, num_tenants, slots),
    }
    rates: dict[str, list[float]] = {name: [] for name in made}
    latencies: dict[str, list[float]] = {name: [] for name in made}
    for step in range(1, rounds + 2):
        requests = [requests_of(tenant, step, slots) for tenant in range(num_tenants)]
        order = list(made.items())
        results = []
        for name, kind in order if step % 2 else order[::-1]:
            found, ends = kind.sample(requests)
            results.append(found)
            if step > 1:
                tokens = sum(one.max_new_tokens for its in requests for one in its)
                rates[name].append(tokens / max(ends))
                latencies[name].append(statistics.fmean(ends))
        assert results[0] == results[1], "tenants in one batch sample what they sample alone"
    found_rates = {name: {"tokens_per_s": statistics.median(rates[name])} for name in made}
    for name, each in found_rates.items():
        each["latency_s"] = statistics.median(latencies[name])
    speedups = [one / other for one, other in zip(*rates.values(), strict=True)]
    return {**found_rates, "speedup": statistics.median(speedups), "is_equal": True}


def measure_rollout(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size in args.sizes:
        for num_tenants in args.tenants:
            for slots in args.slots:
                speed = in_own_process(measure_sampling, size, num_tenants, slots, args.rounds)
                rows.append({"size": size, "tenants": num_tenants, "slots": slots, **speed})
                print(f"rollout: {size}, {num_tenants} tenants, {slots} slots: {speed['speedup']:.2f}x", flush=True)
    return rows


def print_rollout(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Tenants that sample in one batch against in turns: equal answers and log-probs")
    names = ("base", "tenants", "slots of each", "tokens/s together", "in turns", "speedup", "latency s", "in turns")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        together, in_turns = row["together"], row["in turns"]
        table.add_row(
            row["size"],
            str(row["tenants"]),
            str(row["slots"]),
            f"{together['tokens_per_s']:,.0f}",
            f"{in_turns['tokens_per_s']:,.0f}",
            f"{row['speedup']:.2f}",
            f"{together['latency_s']:.2f}",
            f"{in_turns['latency_s']:.2f}",
        )
    Console(width=120).print(table)


# --- part train -------------------------------------------------------------------------------------------------


class Together:
    """All tenants by one `JointTraining`."""

    def __init__(self, configs: Sequence[TrainingConfig]) -> None:
        self._joint = JointTraining(DEVICE)
        self.engines = {given.name: self._joint.add(given.name, given) for given in configs}

    def update(self) -> list[float]:
        """Train the batches that have begun; seconds until each tenant's end."""
        started = now_s()
        reports = self._joint.run_stages(dict.fromkeys(self.engines, Stage.UPDATE), max_seconds=math.inf)
        assert all(isinstance(each, TrainReport) and each.is_done for each in reports.values()), reports
        return [now_s() - started] * len(self.engines)


class InTurns:
    """An engine each, with a base of its own."""

    def __init__(self, configs: Sequence[TrainingConfig]) -> None:
        self.engines = {given.name: TorchTrainEngine(given, device=DEVICE) for given in configs}

    def update(self) -> list[float]:
        started = now_s()
        ends = []
        for engine in self.engines.values():
            engine.run_stage(Stage.UPDATE, max_seconds=math.inf)
            ends.append(now_s() - started)
        return ends


KINDS: dict[str, Callable[[Sequence[TrainingConfig]], Together | InTurns]] = {
    "together": Together,
    "in turns": InTurns,
    "full models": lambda configs: InTurns([replace(given, adapter=None) for given in configs]),
}


def begin(kind: Together | InTurns, step: int, tokens: int) -> int:
    """Have every tenant begin a step; returns the tokens of all."""
    total = 0
    for tenant, engine in enumerate(kind.engines.values()):
        batch = batch_of(tenant, step, tokens)
        total += sum(len(each.tokens) + PROMPT_TOKENS for each in batch.trajectories)
        engine.begin_step(batch)
    return total


def measure_speed(size: str, num_tenants: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second and step latency of both kinds. Runs in a process of its own."""
    torch.set_num_threads(1)
    configs = [config_of(size, tenant, tokens) for tenant in range(num_tenants)]
    kinds = {name: KINDS[name](configs) for name in ("together", "in turns")}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    latencies: dict[str, list[float]] = {name: [] for name in kinds}
    first_s: dict[str, float] = {}
    for step in range(1, rounds + 2):
        order = list(kinds.items())
        for name, kind in order if step % 2 else order[::-1]:
            total = begin(kind, step, tokens)
            ends = kind.update()
            if step == 1:
                first_s[name] = ends[-1]
            else:
                rates[name].append(total / ends[-1])
                latencies[name].append(statistics.fmean(ends))
    hashes = [[engine.weights_sha256() for engine in kind.engines.values()] for kind in kinds.values()]
    assert hashes[0] == hashes[1], "the weights of tenants together are those of tenants in turns"
    found = {name: {"tokens_per_s": statistics.median(rates[name])} for name in kinds}
    for name, each in found.items():
        each |= {"latency_s": statistics.median(latencies[name]), "first_s": first_s[name]}
    speedups = [one / other for one, other in zip(*rates.values(), strict=True)]
    return {**found, "speedup": statistics.median(speedups), "is_equal": True}


def measure_memory(kind: str, size: str, num_tenants: int, tokens: int) -> float:
    """Bytes that a process grows by. Runs in a process of its own."""
    torch.set_num_threads(1)
    before = held_bytes()
    made = KINDS[kind]([config_of(size, tenant, tokens) for tenant in range(num_tenants)])
    begin(made, 1, tokens)
    made.update()
    release_storage(torch.device(DEVICE))
    return held_bytes() - before


def held_bytes() -> float:
    """Bytes of this process in host memory, or on the GPU."""
    return float(psutil.Process().memory_info().rss if DEVICE == "cpu" else torch.cuda.memory_reserved())


def in_own_process(function: Callable[..., Any], *args: object) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def measure_train(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size in args.sizes:
        for num_tenants in args.tenants:
            memory = {kind: in_own_process(measure_memory, kind, size, num_tenants, args.tokens[0]) for kind in KINDS}
            for tokens in args.tokens:
                speed = in_own_process(measure_speed, size, num_tenants, tokens, args.rounds)
                rows.append({"size": size, "tenants": num_tenants, "tokens": tokens, **speed, "rss_bytes": memory})
                print(f"train: {size}, {num_tenants} tenants, {tokens} tokens: {speed['speedup']:.2f}x", flush=True)
    return rows


def print_train(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="Tenants that train together against in turns: equal weights")
    for name in ("base", "tenants", "tokens of a micro-batch"):
        table.add_column(name, justify="right")
    for name in ("tokens/s together", "in turns", "speedup", "step s together", "in turns", "first, together"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        table.add_column(f"MB {kind}", justify="right")
    for row in rows:
        together, in_turns = row["together"], row["in turns"]
        table.add_row(
            row["size"],
            str(row["tenants"]),
            str(row["tokens"]),
            f"{together['tokens_per_s']:,.0f}",
            f"{in_turns['tokens_per_s']:,.0f}",
            f"{row['speedup']:.2f}",
            f"{together['latency_s']:.2f}",
            f"{in_turns['latency_s']:.2f}",
            f"{together['first_s']:.2f}",
            *(f"{row['rss_bytes'][kind] / 1e6:,.0f}" for kind in KINDS),
        )
    Console(width=150).print(table)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], None]]] = {
    "rollout": (measure_rollout, print_rollout),
    "train": (measure_train, print_train),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--tenants", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--slots", type=lambda text: [int(each) for each in text.split(",")], default=[8, 16])
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["RLMUX_TENANTS_DEVICE"] = args.device
    found: dict[str, Any] = {}
    for part in args.parts:
        measure, show = PARTS[part]
        found[part] = measure(args)
        show(found[part])
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
