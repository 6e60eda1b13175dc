"""How fast the rollout engine samples, against `generate` of transformers on the same requests.

    python benchmarks/rollout_engine.py [--sizes S,M,L] [--rounds N] [--json]
    python benchmarks/rollout_engine.py --bounded-cache       `rollout.kv_tokens` at a quarter, on the size M alone

Every request has its own length (lognormal, mean about 42 tokens, at most 128), forced through its budget
with no stop token, as both sides then do the same useful work. `generate` runs padded batches, each until its
longest request ends; tokens beyond a request's own length do not count. Rounds interleave the variants, one
thread, medians. Seconds are the processor's: nothing here waits, and other programs count less.
The second table is one decode step at a given number of active sequences.

The third is the share of the roofline: the least time that the arithmetic of the useful tokens takes at the rate of a
large matrix product, or the weights and the cache at the rate of a large copy, whichever is more, over the time taken.
Both rates are measured in the same run. `matmul` is the time of a full step's matrix products alone, in the step's own
shapes, over that of the step: what is missing is attention, norms, the sampler and the calls between them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from rlmux.engines.model.model_io import build_model
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import ModelConfig, RolloutConfig
from rlmux.rl.memory.model_shape import ModelShape, shape_of
from rlmux.rl.types import TrajectoryId, TrajectoryRequest

VOCAB_SIZE = 46
MAX_NEW_TOKENS = 128
NUM_SLOTS = 64
SIZES = {
    "S": ModelConfig(hidden_size=64, num_layers=2, intermediate_size=128),
    "M": ModelConfig(hidden_size=128, num_layers=4, intermediate_size=256),
    "L": ModelConfig(hidden_size=256, num_layers=6, intermediate_size=512),
}


def long_tailed_requests(num_requests: int, seed: int) -> list[TrajectoryRequest]:
    """Prompts of 8 to 24 tokens, all different."""
    rng = random.Random(seed)
    return [
        TrajectoryRequest(
            id=TrajectoryId(1, index, 0),
            prompt_tokens=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(8, 24))),
            max_new_tokens=max(4, min(MAX_NEW_TOKENS, int(rng.lognormvariate(3.4, 0.8)))),
            stop_tokens=(),
            seed=seed,
        )
        for index in range(num_requests)
    ]


def new_engine(model_config: ModelConfig) -> SlotRolloutEngine:
    rollout = RolloutConfig(max_new_tokens=MAX_NEW_TOKENS, max_prompt_tokens=24, num_slots=NUM_SLOTS)
    return SlotRolloutEngine(model_config, rollout, vocab_size=VOCAB_SIZE, seed=0)


def sample_with_engine(engine: SlotRolloutEngine, requests: Sequence[TrajectoryRequest]) -> None:
    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=1_000_000, max_seconds=600.0)
    assert len(report.finished) == len(requests)


def sample_with_generate(model: Any, requests: Sequence[TrajectoryRequest], batch_size: int) -> None:
    """Left-padded batches in the order of the requests."""
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(request.prompt_tokens) for request in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(batch):
            tokens[row, width - len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
            mask[row, width - len(request.prompt_tokens) :] = 1
        model.generate(
            tokens,
            attention_mask=mask,
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=True,
                top_k=0,
                max_new_tokens=max(request.max_new_tokens for request in batch),
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,  # the trainer needs log-probs of both sides
            ),
        )


def tokens_per_second(model_config: ModelConfig, num_rounds: int, num_requests: int) -> dict[str, float]:
    model = build_model(model_config, VOCAB_SIZE, 0)
    engine = new_engine(model_config)
    variants: dict[str, Callable[[list[TrajectoryRequest]], None]] = {
        "engine": lambda requests: sample_with_engine(engine, requests),
        "generate_32": lambda requests: sample_with_generate(model, requests, 32),
        f"generate_{NUM_SLOTS}": lambda requests: sample_with_generate(model, requests, NUM_SLOTS),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for name, run in variants.items():  # warm up, and let the engine probe its shapes
        run(long_tailed_requests(num_requests if name == "engine" else 8, 0))
    for round_index in range(num_rounds):
        requests = long_tailed_requests(num_requests, round_index + 1)
        useful = sum(request.max_new_tokens for request in requests)
        for name, run in random.Random(round_index).sample(sorted(variants.items()), len(variants)):
            start = time.process_time()
            run(requests)
            rates[name].append(useful / (time.process_time() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def bounded_cache_rates(num_rounds: int) -> dict[str, dict[str, float]]:
    """Useful tokens/s with all slots at full length, with a quarter of that cache, and with a quarter of the slots.

    256 answers with long tails (up to 512 tokens), and 128 that all have full length (232 tokens).
    """
    rates: dict[str, dict[str, float]] = {}
    for name, longest, num_requests, mean in (("long_tails", 512, 256, 3.4), ("full_length", 232, 128, math.inf)):
        full = RolloutConfig(max_new_tokens=longest, max_prompt_tokens=24, num_slots=NUM_SLOTS)
        variants = {
            "full": full,
            "quarter_of_cache": replace(full, kv_tokens=full.cached_tokens // 4),
            "quarter_of_slots": replace(full, num_slots=NUM_SLOTS // 4),
        }
        engines = {
            key: SlotRolloutEngine(SIZES["M"], rollout, vocab_size=VOCAB_SIZE, seed=0)
            for key, rollout in variants.items()
        }
        measured: dict[str, list[float]] = {key: [] for key in engines}
        for seed in range(num_rounds + 1):
            rng = random.Random(seed)
            requests = [
                request_of_length(one, max(4, int(min(longest, math.exp(rng.gauss(mean, 1.0))))))
                for one in long_tailed_requests(num_requests, seed)
            ]
            for key, engine in engines.items():
                start = time.process_time()
                sample_with_engine(engine, requests)
                if seed:  # engines probe their shapes in the first round
                    useful = sum(request.max_new_tokens for request in requests)
                    measured[key].append(useful / (time.process_time() - start))
        rates[name] = {key: statistics.median(values) for key, values in measured.items()}
    return rates


def decode_step_ms(model_config: ModelConfig, num_actives: Sequence[int]) -> dict[int, float]:
    """Median over 5 rounds of 32 steps at contexts of 24 to 56 tokens, the counts interleaved."""
    engine = new_engine(model_config)
    times: dict[int, list[float]] = {num_active: [] for num_active in num_actives}
    for _ in range(6):
        for num_active in num_actives:
            requests = long_tailed_requests(num_active, 0)
            engine.submit([request_of_length(request, 40) for request in requests])
            engine.run_chunk(max_decode_steps=4, max_seconds=60.0)
            start = time.process_time()
            report = engine.run_chunk(max_decode_steps=32, max_seconds=60.0)
            times[num_active].append(1e3 * (time.process_time() - start) / report.decode_steps)
            engine.take_partials(None, with_kv=False)
    return {num_active: statistics.median(values[1:]) for num_active, values in times.items()}


def machine_rates() -> tuple[float, float]:
    """(floating-point operations a second of a large matrix product, bytes a second that a large copy moves)."""
    side = 1024
    left, right = torch.randn(side, side), torch.randn(side, side)
    source = torch.zeros(2**25)
    target = torch.empty_like(source)
    multiply_s = least_seconds(lambda: torch.mm(left, right))
    copy_s = least_seconds(lambda: target.copy_(source))
    return 2 * side**3 / multiply_s, 2 * source.nbytes / copy_s


def least_seconds(work: Callable[[], object], num_times: int = 20) -> float:
    work()
    times = []
    for _ in range(num_times):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def roofline(model_config: ModelConfig, rates: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """Shares of the roofline of a step with all slots active, and of a whole run of long tails."""
    shape = shape_of(model_config)
    flops_per_s, bytes_per_s = machine_rates()
    matrices = shape.num_layers * shape.layer_matrices + VOCAB_SIZE * shape.hidden_size
    window = 64  # the largest context of `decode_step_ms`, rounded up
    attention = shape.num_layers * 2 * shape.query_size * window
    flops_of_token = 2 * (matrices + attention)
    kv_bytes = 4 * 2 * shape.num_layers * shape.kv_size * window * NUM_SLOTS
    least_s = max(NUM_SLOTS * flops_of_token / flops_per_s, (4 * matrices + kv_bytes) / bytes_per_s)
    return {
        "gflop_per_s": flops_per_s / 1e9,
        "gb_per_s": bytes_per_s / 1e9,
        "full_step": 1e3 * least_s / step_ms,
        "long_tails": least_s / NUM_SLOTS * rates["engine"],
        "matmul": 1e3 * _matmul_seconds(shape) / step_ms,
    }


def _matmul_seconds(shape: ModelShape) -> float:
    """The matrix products of one step with all slots active, one after another."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = [(hidden, shape.query_size + 2 * shape.kv_size), (shape.query_size, hidden), (hidden, 2 * inner)]
    sizes = [*sizes, (inner, hidden)] * shape.num_layers + [(hidden, VOCAB_SIZE)]
    pairs = [(torch.randn(NUM_SLOTS, size[0]), torch.randn(size)) for size in sizes]
    return least_seconds(lambda: [torch.mm(rows, matrix) for rows, matrix in pairs])


def request_of_length(request: TrajectoryRequest, num_tokens: int) -> TrajectoryRequest:
    return TrajectoryRequest(
        id=request.id,
        prompt_tokens=request.prompt_tokens,
        max_new_tokens=num_tokens,
        stop_tokens=(VOCAB_SIZE,),  # checked at every step, never sampled
        seed=request.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="S,M", help="of S (h64 l2), M (h128 l4), L (h256 l6)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bounded-cache", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.bounded_cache:
        print(json.dumps(bounded_cache_rates(arguments.rounds), indent=2))
        return
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows = []
    for size in arguments.sizes.split(","):
        rates = tokens_per_second(SIZES[size], arguments.rounds, arguments.requests)
        steps = decode_step_ms(SIZES[size], (1, 8, NUM_SLOTS))
        best = max(rate for name, rate in rates.items() if name != "engine")
        rows.append(
            {
                "size": size,
                "tokens_per_s": rates,
                "speedup_over_best_generate": rates["engine"] / best,
                "decode_step_ms": steps,
                "roofline": roofline(SIZES[size], rates, steps[NUM_SLOTS]),
            }
        )
        if not arguments.json:
            print_row(rows[-1], is_first=len(rows) == 1)
    if arguments.json:
        print(json.dumps(rows, indent=2))


def print_row(row: dict[str, Any], *, is_first: bool) -> None:
    rates, steps = row["tokens_per_s"], row["decode_step_ms"]
    if is_first:
        print("useful tokens/s, median" + " " * 31 + "| decode step, ms, at active")
        names = [*rates, "speedup", *(str(num_active) for num_active in steps)]
        print("size " + " ".join(f"{name:>12}" for name in names))
    values = [f"{rate:12,.0f}" for rate in rates.values()]
    values.append(f"{row['speedup_over_best_generate']:11.2f}x")
    values += [f"{ms:12.2f}" for ms in steps.values()]
    print(f"{row['size']:<5}" + " ".join(values), flush=True)
    share = row["roofline"]
    print(
        f"     roofline ({share['gflop_per_s']:.0f} GFLOP/s, {share['gb_per_s']:.0f} GB/s): full step "
        f"{share['full_step']:.2f}, long tails {share['long_tails']:.2f}; matmul {share['matmul']:.2f} of a full step",
        flush=True,
    )


if __name__ == "__main__":
    main()
