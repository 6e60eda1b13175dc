"""JigsawRL's published figures: the paper's, ours, and the cause of each difference.

    two pipelines alike, 8 H100       jigsaw over colocated, over rollmux, latency of each pipeline
    two unlike (0.6B beside 8B)       latency
    more GPUs, 16 to 64               jigsaw over colocated
    asynchronous, one step off        jigsaw over a StreamRL-like and an AReaL-like deployment

Throughput is tokens of all pipelines per second of makespan. Every comparison has the same GPUs and the same steps:
`colocated` runs one pipeline after another on all of them, or, at equal parallelism, each on its half; `rollmux` and
the asynchronous ones divide them into a rollout and a training pool in the way that is best for the workload. The
AReaL-like one is given in closed form: its rollouts never see a tail, as sequences of later steps fill every slot.
Workloads are drawn from recorded lengths; interference between sub-stages is the estimate of `interference.py`, as
no pair was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.papers.paper_rows import MissCause, PaperRow, Range, mean, row_over, within
from rlmux.sim.models.costs import rollout_costs
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.models.substages import SubStageWorld
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import Progress, SimRun, sweep
from rlmux.sim.workloads.substage_pairs import (
    AIME_4B,
    GSM8K_06B,
    GSM8K_4B,
    GSM8K_8B,
    HOMOGENEOUS,
    MATH_06B,
    MATH_4B,
    MATH_8B,
    Recorded,
    crowd,
)

_NUM_STEPS = 5
_TOLERANCE = 0.1
"""Relative deviation of a published figure that counts as reached."""
_SCALES = (16, 32, 64)
_ASYNC = (GSM8K_4B, MATH_4B, MATH_06B, AIME_4B)
_HETEROGENEOUS = ((GSM8K_06B, GSM8K_8B), (MATH_06B, MATH_8B))
_ESTIMATED = MissCause(text="slowdowns of shared devices are estimated from rooflines, not measured")
_PARTS = (0.25, 0.5, 0.75)
_POOLS = MissCause(text="the best of three divisions into pools is taken; the paper does not name its own")
_ROLLOUTS_ONLY = MissCause(text="training beside decoding is where the two differ, and its gain is estimated")
_UNLIKE = MissCause(text="the small one's steps are a third as long and wait for the large one's training; no SLO")
_FIXED_PART = MissCause(
    text="an update has a fixed part (offloaded weights come back, 17 to 51 s); a pipeline on its own half pays it at "
    "half width"
)
_HALVES = MissCause(text=f"each pipeline has its own half of the GPUs, whole devices only; {_POOLS.text}")

_Key = tuple[str, str, int, int]


def reproduce(*, num_seeds: int = 1, progress: Progress | None = None, out: Path | None = None) -> dict[str, Any]:
    """{"paper", "num_seeds", "rows", "workloads": the same by workload}."""
    work: dict[_Key, SimRun] = {}
    for seed in range(num_seeds):
        _add_pairs(work, seed)
    for number in _SCALES:
        _add(work, "scale", (MATH_4B, MATH_4B), number, 0, "colocated", "jigsaw")
    results = dict(zip(work, sweep(tuple(work.values()), progress=progress), strict=True))
    rows = [*_pair_rows(results, num_seeds), *_scale_rows(results), *_async_rows(results, num_seeds)]
    return {
        "paper": "JigsawRL (arXiv 2604.23838)",
        "num_seeds": num_seeds,
        "rows": [row.as_dict() for row in rows],
        "workloads": _by_workload(results, num_seeds),
    }


def _add_pairs(work: dict[_Key, SimRun], seed: int) -> None:
    for one in HOMOGENEOUS:
        pair = (one, one)
        _add(work, "shared", pair, 8, seed, "colocated", "jigsaw", "mux-rollouts", "mux-all")
        _add(work, "halves", pair, 8, seed, "colocated")
        _add(work, "shared", pair, 16, seed, "jigsaw")
        for part in _PARTS:
            _add(work, f"pools-{part}", pair, 16, seed, "rollmux")
    for pair in _HETEROGENEOUS:
        _add(work, "shared", pair, 8, seed, "colocated", "jigsaw")
    for one in _ASYNC:
        _add(work, "one-off", (one, one), 32, seed, "jigsaw")
        for part in _PARTS:
            _add(work, f"stream-{part}", (one, one), 32, seed, "solo")


_DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "scale": {"gpu": "A100"},
    "halves": {"num_parts": 2},
    "one-off": {"staleness": 1},
    **{f"pools-{part}": {"deployment": "disaggregated", "train_part": part} for part in _PARTS},
    **{
        f"stream-{part}": {"deployment": "disaggregated", "train_part": part, "num_parts": 2, "staleness": 1}
        for part in _PARTS
    },
}


def _add(
    work: dict[_Key, SimRun], how: str, pair: Sequence[Recorded], num_gpus: int, seed: int, *policies: str
) -> None:
    made = crowd(pair, num_gpus=num_gpus, num_steps=_NUM_STEPS, seed=seed, **_DEPLOYMENTS[how])
    for policy in policies:
        work[_name(pair), f"{how}/{policy}", num_gpus, seed] = SimRun(workload=made, policy=policy)


def _name(pair: Sequence[Recorded]) -> str:
    return " + ".join(f"{one.lengths_of}/{one.model}" for one in pair)


# --- rows ---------------------------------------------------------------------------------------------------


def _pair_rows(results: dict[_Key, SimResult], num_seeds: int) -> list[PaperRow]:
    pairs = [_name((one, one)) for one in HOMOGENEOUS]
    over_colocated = _ratios(results, pairs, "shared/colocated", "shared/jigsaw", 8, num_seeds)
    over_halves = _ratios(results, pairs, "halves/colocated", "shared/jigsaw", 8, num_seeds)
    over_rollmux = _ratios(results, pairs, "pools/rollmux", "shared/jigsaw", 16, num_seeds)
    over_rollouts = _ratios(results, pairs, "shared/mux-rollouts", "shared/jigsaw", 8, num_seeds)
    slowdowns = [_slowdown(results, pair, num_seeds) for pair in pairs]
    unlike = [
        max(
            one.step_slowdown or 0.0
            for seed in range(num_seeds)
            for one in results[_name(pair), "shared/jigsaw", 8, seed].pipelines
        )
        for pair in _HETEROGENEOUS
    ]
    alike, pools, unlike_pair = "8 H100, two alike", "16 H100, two alike", "0.6B beside 8B"
    colocated, halves = "tokens/s over colocated", "over colocated at equal parallelism"
    shares, latency = "over sharing rollouts only (MuxServe), mean", "latency of a pipeline over alone"
    mfu = "Fig. 19: MFU 3.89 over 2.57 %"
    return [
        _row(alike, f"{colocated}, mean", 1.56, "text", over_colocated, mean(over_colocated), _ESTIMATED),
        _row(alike, f"{colocated}, max", 1.85, "abstract", over_colocated, max(over_colocated), _ESTIMATED),
        _row(alike, f"{halves}, least", 1.16, "Fig. 18", over_halves, min(over_halves), _FIXED_PART),
        _row(alike, f"{halves}, max", 1.48, "Fig. 18", over_halves, max(over_halves), _FIXED_PART),
        _row(pools, "tokens/s over RollMux, mean", 1.27, "text", over_rollmux, mean(over_rollmux), _POOLS),
        _row(alike, shares, round(3.89 / 2.57, 2), mfu, over_rollouts, mean(over_rollouts), _ROLLOUTS_ONLY),
        _row(alike, f"{latency}, mean", 1.48, "text", slowdowns, mean(slowdowns), _ESTIMATED),
        _row(alike, f"{latency}, least", 1.14, "text", slowdowns, min(slowdowns), _ESTIMATED),
        _row(unlike_pair, "largest latency over alone", 1.34, "text", unlike, max(unlike), _UNLIKE, (1.0, 1.34)),
    ]


def _scale_rows(results: dict[_Key, SimResult]) -> list[PaperRow]:
    pair = _name((MATH_4B, MATH_4B))
    rows = []
    for number in _SCALES:
        gain = _ratio(results, pair, "scale/colocated", "scale/jigsaw", number, 0)
        published = 1.75 if number == 64 else None
        source = "Fig. 13" if published else ""
        rows.append(_row(f"{number} A100", "tokens/s over colocated", published, source, [gain], gain, _ESTIMATED))
    return rows


def _async_rows(results: dict[_Key, SimResult], num_seeds: int) -> list[PaperRow]:
    names = [_name((one, one)) for one in _ASYNC]
    stream = _ratios(results, names, "stream/solo", "one-off/jigsaw", 32, num_seeds)
    areal = [
        mean([_tokens_per_s(results, name, "one-off/jigsaw", 32, seed) for seed in range(num_seeds)])
        / areal_like_tokens_per_s(one, num_gpus=32)
        for one, name in zip(_ASYNC, names, strict=True)
    ]
    section = "32 H100, one step off"
    return [
        _row(section, "tokens/s over StreamRL-like, mean", 1.25, "text", stream, mean(stream), _HALVES),
        _row(section, "tokens/s over StreamRL-like, max", 1.54, "abstract", stream, max(stream), _HALVES),
        _row(section, "tokens/s over AReaL-like, mean", 1.21, "text", areal, mean(areal), _HALVES),
        _row(section, "tokens/s over AReaL-like, max", 1.41, "text", areal, max(areal), _HALVES),
    ]


def areal_like_tokens_per_s(one: Recorded, *, num_gpus: int) -> float:
    """Two such pipelines, each on half of the GPUs: full slots at all times, training beside them."""
    best = 0.0
    for part in _PARTS:
        made = crowd((one, one), num_gpus=num_gpus, num_parts=2, deployment="disaggregated", train_part=part)
        world = made.arrivals[0].world
        assert isinstance(world, SubStageWorld)
        lengths = length_distribution(one.lengths_of)
        costs = rollout_costs(world.model, world.gpu, world.tp)
        slots = min(world.slots, world.num_sequences // world.num_rollout_devices)
        step_s = costs.decode_step_s(slots, lengths.prompt_tokens + lengths.mean / 2)
        rollout_s = world.num_sequences * lengths.mean * step_s / (slots * world.num_rollout_devices)
        best = max(best, 2 * world.tokens(1) / max(rollout_s, world.train_s(1)))
    return best


def _row(
    section: str,
    figure: str,
    published: float | None,
    source: str,
    values: Sequence[float],
    ours: float,
    cause: MissCause | None = None,
    accepted: Range | None = None,
) -> PaperRow:
    any_gain = (1.0, float("inf"))
    return row_over(
        values, section=section, figure=figure, published=published, source=source, ours=ours, cause=cause,
        accepted=accepted or (any_gain if published is None else within(published, _TOLERANCE)),
    )  # fmt: skip


def _ratios(
    results: dict[_Key, SimResult], pairs: Sequence[str], before: str, after: str, num_gpus: int, num_seeds: int
) -> list[float]:
    """Ratio of each pair, mean over seeds."""
    return [mean([_ratio(results, pair, before, after, num_gpus, seed) for seed in range(num_seeds)]) for pair in pairs]


def _ratio(results: dict[_Key, SimResult], pair: str, before: str, after: str, num_gpus: int, seed: int) -> float:
    return _tokens_per_s(results, pair, after, num_gpus, seed) / _tokens_per_s(results, pair, before, num_gpus, seed)


def _tokens_per_s(results: dict[_Key, SimResult], pair: str, how: str, num_gpus: int, seed: int) -> float:
    """Tokens/s of a deployment, or of the best of several that divide the pools in different ways."""
    deployment, _, policy = how.partition("/")
    parts = [f"{deployment}-{part}/{policy}" for part in _PARTS]
    runs = [results[pair, name, num_gpus, seed] for name in (how, *parts) if (pair, name, num_gpus, seed) in results]
    return max(run.tokens_per_s or 0.0 for run in runs)


def _slowdown(results: dict[_Key, SimResult], pair: str, num_seeds: int) -> float:
    return mean([results[pair, "shared/jigsaw", 8, seed].mean_step_slowdown for seed in range(num_seeds)])


def _by_workload(results: dict[_Key, SimResult], num_seeds: int) -> list[dict[str, Any]]:
    """Tokens per second of every deployment and policy, means over seeds."""
    keys = dict.fromkeys((pair, how, gpus) for pair, how, gpus, _ in results)
    table = []
    for pair, how, gpus in keys:
        runs = [results[key] for seed in range(num_seeds) if (key := (pair, how, gpus, seed)) in results]
        table.append(
            {
                "workload": pair,
                "gpus": gpus,
                "deployment": how,
                "tokens_per_s": round(mean([run.tokens_per_s or 0.0 for run in runs]), 1),
                "mean_step_slowdown": round(mean([run.mean_step_slowdown for run in runs]), 3),
                "num_migrations": sum(run.num_migrations for run in runs),
            }
        )
    return table
