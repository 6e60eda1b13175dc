"""Seconds of a training step on 1 and on more ranks, each on a core of its own.

    python benchmarks/train_ranks.py [--ranks 1,2] [--size M|L] [--rounds N] [--quick] [--json]
    python benchmarks/train_ranks.py --halt [--rounds N] [--quick] [--json]

The gangs are the worker processes of a run, pinned to cores. They are given the same batches: rollouts of long-tailed
lengths (lognormal, at most 128 tokens), one update, no KL. Rounds interleave the gangs, one thread a rank, medians of
all rounds but the first. A step is everything between handing the batch over and the last rank's answer; publishing
and checkpoints are left out. `busiest` is the processor time of the rank that used most: what is left of a step where
nothing else runs on the machine. After the last round the weights of all gangs are compared.

`--halt`: for how long a checkpoint halts two ranks that have parts of one model with 1 GB of weights and moments, when
the checkpoint before is durable; and how long it then takes to be durable. `gathered`: ranks that are told that they
are on two machines, so that the first of them writes what all gather. The first checkpoint, whose copies take fresh
memory, is told by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rlmux.core.model import Stage
from rlmux.engines.train.state import row_files
from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainingConfig
from rlmux.rl.memory.memory_parts import train_state_bytes
from rlmux.rl.memory.model_shape import shape_of
from rlmux.rl.types import TrainingBatch, TrainReport, Trajectory, TrajectoryId
from rlmux.runtime.weights.checkpoints import Written
from rlmux.runtime.workers.planned_workers import TrainWorker
from rlmux.runtime.workers.processes import WorkerProcess
from rlmux.runtime.workers.worker_calls import HandOut, TrainCall, TrainCallResult

CALL_LIMIT_S = 600.0
MAX_NEW_TOKENS = 128
STATE_OF_1_GB = ModelConfig(hidden_size=1024, num_layers=6, intermediate_size=3200, num_heads=8)
SIZES = {
    "S": ModelConfig(hidden_size=64, num_layers=2, intermediate_size=128),
    "M": ModelConfig(hidden_size=128, num_layers=4, intermediate_size=256),
    "L": ModelConfig(hidden_size=256, num_layers=6, intermediate_size=512),
}


def config_of(size: str, num_trajectories: int, micro_batch_size: int) -> TrainingConfig:
    return TrainingConfig(
        name="ranks",
        model=SIZES[size],
        task=TaskConfig(name="sort"),
        sft_warmup=SftWarmupConfig(num_updates=0),
        algorithm=AlgorithmConfig(
            prompts_per_step=num_trajectories // 8, group_size=8, micro_batch_size=micro_batch_size
        ),
        rollout=RolloutConfig(max_new_tokens=MAX_NEW_TOKENS),
    )


def batch_of(config: TrainingConfig, step: int) -> TrainingBatch:
    """Random tokens of long-tailed lengths."""
    rng = random.Random(step)
    trajectories = []
    for prompt in range(config.algorithm.prompts_per_step):
        for sample in range(config.algorithm.group_size):
            length = max(4, min(MAX_NEW_TOKENS, int(rng.lognormvariate(3.4, 0.8))))
            trajectories.append(
                Trajectory(
                    id=TrajectoryId(step, prompt, sample),
                    prompt_tokens=tuple(rng.randrange(2, 40) for _ in range(12)),
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


class ApartWorker(TrainWorker):
    """A train worker that takes every rank for one on a machine of its own."""

    def __init__(self, *given: Any) -> None:
        row_files._machine = lambda: str(os.getpid())
        super().__init__(*given)


class Gang:
    """The train workers of one pipeline, rank r on the r-th core."""

    def __init__(
        self, config: TrainingConfig, count: int, folder: Path, worker: type[TrainWorker] = TrainWorker
    ) -> None:
        self.count = count
        self._folder = folder
        cores = sorted(os.sched_getaffinity(0))
        self._workers = [
            WorkerProcess(
                f"ranks-{count}/train-{rank}",
                worker,
                (config, None),
                cores=[cores[rank % len(cores)]],
                log_path=folder / "workers.log",
                call_limit_s=CALL_LIMIT_S,
            )
            for rank in range(count)
        ]
        self._ask("build")
        if count > 1:
            (store,) = _answers([(self._workers[0], "open_rank_store", ("127.0.0.1",))])
            _answers(
                [(each, "join_ranks", (store, rank, count, each.address)) for rank, each in enumerate(self._workers)]
            )

    def step(self, batch: TrainingBatch) -> tuple[float, float, TrainReport]:
        """Seconds until the last rank has answered, processor seconds of the busiest, and what the first found."""
        payload = pickle.dumps(batch)
        before = self._processor_s()
        began = time.perf_counter()
        results = self._train(payload)
        seconds = time.perf_counter() - began
        busiest_s = max(now - then for now, then in zip(self._processor_s(), before, strict=True))
        return seconds, busiest_s, results[0].report

    def _processor_s(self) -> list[float]:
        """Processor time of each rank so far."""
        return [sum(psutil.Process(worker.pid).cpu_times()[:2]) for worker in self._workers]

    def finish(self, batch: TrainingBatch) -> str | None:
        """One more step, with which the ranks compare and hand out their weights; their hash."""
        results = self._train(pickle.dumps(batch), self._hand_out(batch.step))
        self._ask("finish_checkpoint")
        checksum: str | None = results[0].weights_checksum
        return checksum

    def _hand_out(self, step: int) -> HandOut:
        return HandOut(
            weights=self._folder / f"{self.count}.safetensors",
            checkpoint=self._folder / f"{self.count}" / f"step_{step}",
            writers=(0,),
            num_kept=1,
        )

    def checkpoint(self, batch: TrainingBatch) -> Written:
        """One more step, and its checkpoint, which is durable."""
        self._train(pickle.dumps(batch), self._hand_out(batch.step))
        written: Written = self._ask("finish_checkpoint")[0][0]
        return written

    def _train(self, payload: bytes, hand_out: HandOut | None = None) -> list[TrainCallResult]:
        """All stages of a step on all ranks, of which the first call brings the batch."""
        first, *_, last = stages = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE)
        results: list[TrainCallResult] = []
        for stage in stages:
            call = TrainCall(
                stage=stage,
                payload=payload if stage is first else None,
                max_seconds=CALL_LIMIT_S,
                is_load_needed=False,
                hand_out=hand_out if stage is last else None,
            )
            results = self._ask("run_stage", call)
        return results

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return _answers([(worker, method, args) for worker in self._workers])


def _answers(calls: list[tuple[WorkerProcess, str, tuple[Any, ...]]]) -> list[Any]:
    """Make all calls at once; their results."""
    results: list[list[Any]] = [[] for _ in calls]
    for (worker, method, args), result in zip(calls, results, strict=True):
        worker.call(0.0, method, args, result.append)
    for (worker, _, _), result in zip(calls, results, strict=True):
        while not result:
            if worker.connection.poll(1.0):  # a step without a sign of life may take longer than an answer's transfer
                worker.receive(0.0)
    return [result[0] for result in results]


def measure(size: str, counts: list[int], rounds: int, num_trajectories: int, micro_batch_size: int) -> dict[str, Any]:
    config = config_of(size, num_trajectories, micro_batch_size)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    busiest: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        gangs = [Gang(config, count, Path(folder)) for count in counts]
        try:
            for step in range(1, rounds + 2):
                found = []
                for gang in gangs if step % 2 else gangs[::-1]:
                    spent, of_busiest, report = gang.step(batch_of(config, step))
                    seconds[gang.count].append(spent)
                    busiest[gang.count].append(of_busiest)
                    found.append(report.metrics)
                texts = {repr(sorted(each.items())) for each in found}  # NaN, of what was not measured, equals as text
                assert len(texts) == 1, "the figures of a step depend on the number of ranks"
            hashes = {gang.finish(batch_of(config, rounds + 2)) for gang in gangs}
        finally:
            for gang in gangs:
                gang.end()
    return {
        "size": size,
        "parameters": shape_of(config.model).num_parameters,
        "trajectories": num_trajectories,
        "micro_batches": -(-num_trajectories // micro_batch_size),
        "step_s": {count: statistics.median(each[1:]) for count, each in seconds.items()},
        "ratio": _ratios(seconds),
        "busiest_s": {count: statistics.median(each[1:]) for count, each in busiest.items()},
        "busiest_ratio": _ratios(busiest),
        "has_equal_weights": len(hashes) == 1,
    }


def measure_halt(rounds: int, *, is_quick: bool) -> dict[str, Any]:
    """Seconds by which checkpoints halt training, beside training and gathered by all ranks."""
    from train_ranks import ApartWorker  # by a name that a worker process can import, too

    tiny = config_of("S", 8, 8)
    model = SIZES["S"] if is_quick else STATE_OF_1_GB
    config = replace(tiny, model=model, train=replace(tiny.train, num_workers=2, sharding="shard"))
    found: dict[str, Any] = {"state_bytes": train_state_bytes(config)}
    for name, worker in (("beside", TrainWorker), ("gathered", ApartWorker)):
        with tempfile.TemporaryDirectory() as folder:
            gang = Gang(config, 2, Path(folder), worker)
            try:
                first, *others = [gang.checkpoint(batch_of(config, step)) for step in range(1, rounds + 2)]
            finally:
                gang.end()
        found[name] = {
            "halt_s": statistics.median(each.stall_s for each in others),
            "first_halt_s": first.stall_s,
            "durable_s": statistics.median(each.seconds for each in others),
        }
    return found


def _ratios(seconds: dict[int, list[float]]) -> dict[int, float]:
    """How much faster than the first gang, by rounds: a machine that slows down slows all gangs of a round."""
    first = next(iter(seconds.values()))[1:]
    return {
        count: statistics.median(one / each for one, each in zip(first, of_count[1:], strict=True))
        for count, of_count in seconds.items()
    }


def _told(halt: dict[str, Any]) -> str:
    lines = [f"{halt.pop('state_bytes') / 1e6:,.0f} MB of weights and moments on two ranks"]
    lines.append(f"{'checkpoint':>10}  {'halt s':>8}  {'first s':>8}  {'durable s':>9}")
    for name, each in halt.items():
        lines.append(f"{name:>10}  {each['halt_s']:>8.3f}  {each['first_halt_s']:>8.3f}  {each['durable_s']:>9.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, powers of two")
    parser.add_argument("--size", default="L", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--halt", action="store_true", help="the halt by a checkpoint of two ranks in place of steps")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    counts = [int(word) for word in given.ranks.split(",")]
    size, rounds = ("S", 1) if given.quick else (given.size, given.rounds)
    if given.halt:
        halt = measure_halt(rounds, is_quick=given.quick)
        print(json.dumps(halt) if given.json else _told(halt))
        return
    result = measure(size, counts, rounds, given.trajectories, given.micro_batch_size)
    if given.json:
        print(json.dumps(result))
        return
    print(
        f"{result['parameters'] / 1e6:.1f}M parameters, {result['trajectories']} trajectories in "
        f"{result['micro_batches']} micro-batches, {rounds} rounds, weights "
        f"{'equal bit for bit' if result['has_equal_weights'] else 'DIFFERENT'}"
    )
    print(f"{'ranks':>5}  {'step s':>8}  {'faster':>6}  {'busiest s':>9}  {'faster':>6}")
    for count, spent in result["step_s"].items():
        print(
            f"{count:>5}  {spent:>8.3f}  {result['ratio'][count]:>6.2f}  {result['busiest_s'][count]:>9.3f}  "
            f"{result['busiest_ratio'][count]:>6.2f}"
        )


if __name__ == "__main__":
    main()
