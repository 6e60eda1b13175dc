"""Calibrate the cost model on logged runs and predict runs that the calibration did not see.

    RLMUX_DATA=<folder> python benchmarks/cost_model.py [--json] [--write DIR]

The folder holds `rl_runs/` (steps.csv, RUN.lengths.csv.gz, RUN.iterations.csv.gz), `perf/` and `rollouts/`.
`--write DIR` stores the fitted tables that the package carries; without it nothing is written.

For every run, `held out` means: decode curve, host costs and training costs are fitted without any file of
that run. A model with no other log gets the estimate by shape (`roofline.py`), itself refitted without that
model.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from logged_engine import MEASURED_MEMORY_FRACTION, EngineLimits, ToolCalls, kv_pool_tokens, predict_rollout

from rlmux.core.model import Stage
from rlmux.sim.models.costs import MEASURED_GPU, TRAIN_STAGES, RolloutCosts, rollout_costs, train_cost_by_size
from rlmux.sim.models.curves import LOW_ACTIVE, DecodeCurve, HostCosts, PrefillCurve, StageCost
from rlmux.sim.models.hardware import ModelSize, gpu_spec, model_shape
from rlmux.sim.models.lengths import (
    PROBABILITIES,
    LengthDistribution,
    length_distribution,
    length_distribution_names,
)
from rlmux.sim.models.roofline import RooflineConstants, estimate_curves, roofline_constants

TP = 4
SAMPLES_PER_STEP = 1024
GROUP = 4
STAGE_COLUMN = {
    Stage.REFERENCE_LOGPROBS: "ref_s",
    Stage.OLD_LOGPROBS: "old_log_prob_s",
    Stage.UPDATE: "update_actor_s",
    Stage.PUBLISH: "update_weights_s",
}
LENGTHS_OF = {"aime_deepseek": "math_deepseek", "aime_searchr1_qwen3_4b_32": "search_r1_qwen3_4b_faiss32"}
"""Runs whose lengths are filed under another name (the means agree to the last digit)."""
SOURCE = "Rabenda/verl_customize logs (verl + SGLang, TP 4 on 4 H100), fitted by benchmarks/cost_model.py"
EXPERT_SHAPES = (("qwen3-30b-a3b", 2048, 768), ("mixtral-8x7b", 4096, 14336), ("qwen3-235b-a22b", 4096, 1536))
"""Models whose experts were measured, with hidden size and width of an expert."""
MEMORY_FRACTIONS = (0.15, 0.18, 0.2, 0.22, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85)


def model_of(run: str) -> str:
    for mark, name in (
        ("deepseek", "qwen2.5-14b"),
        ("llama3_1_8b", "llama-3.1-8b"),
        ("qwen3_0_6b", "qwen3-0.6b"),
        ("qwen3_4b", "qwen3-4b"),
        ("qwen3_8b", "qwen3-8b"),
        ("qwen3_32b", "qwen3-32b"),
    ):
        if mark in run:
            return name
    raise ValueError(f"no model for run {run}")


# --- the logs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    run: str
    step: int
    seconds: dict[str, float]
    prompt_mean: float
    total_tokens: float
    lengths: np.ndarray
    extra_turns: int

    @property
    def gen_s(self) -> float:
        return self.seconds["gen_s"]

    @property
    def is_search(self) -> bool:
        return "search" in self.run


@dataclass(frozen=True, kw_only=True, slots=True)
class Iterations:
    is_prefill: np.ndarray
    batch: np.ndarray
    prefill_tokens: np.ndarray
    context: np.ndarray
    ms: np.ndarray

    def steps(self) -> list[slice]:
        """Cut at bursts of prefill that follow a nearly empty engine."""
        starts = [0]
        for i in range(1, len(self.ms)):
            burst = self.is_prefill[i] and not self.is_prefill[i - 1] and self.batch[i - 1] <= 8
            if burst and i - starts[-1] > 300 and self.prefill_tokens[i : i + 6].sum() > 5000:
                starts.append(i)
        return [slice(a, z) for a, z in itertools.pairwise([*starts, len(self.ms)])]


def data_folder() -> Path:
    folder = os.environ.get("RLMUX_DATA", "")
    if not folder or not (Path(folder) / "rl_runs" / "steps.csv").is_file():
        sys.exit(
            f"RLMUX_DATA={folder!r} is not a folder with rl_runs/steps.csv: "
            "set it to the folder of recorded runs. Nothing was measured."
        )
    return Path(folder)


def read_rows(path: Path) -> list[dict[str, str]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(data.decode("utf-8").splitlines()))


def load_steps(folder: Path) -> dict[str, list[Step]]:
    by_run: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read_rows(folder / "rl_runs" / "steps.csv"):
        by_run[row["run"]].append(row)
    found = {}
    for run, rows in by_run.items():
        samples = read_rows(folder / "rl_runs" / f"{LENGTHS_OF.get(run, run)}.lengths.csv.gz")
        lengths = np.array([float(s["length"]) for s in samples])
        turns = np.array([float(s["turn"] or 2) for s in samples])
        steps = []
        for i, row in enumerate(rows):
            part = slice(i * SAMPLES_PER_STEP, (i + 1) * SAMPLES_PER_STEP)
            if lengths[part].size < SAMPLES_PER_STEP:
                continue
            steps.append(
                Step(
                    run=run,
                    step=int(row["step"]),
                    seconds={k: float(v) for k, v in row.items() if k.endswith("_s")},
                    prompt_mean=float(row["prompt_mean"]),
                    total_tokens=float(row["total_tokens"]),
                    lengths=lengths[part],
                    extra_turns=int((turns[part] / 2 - 1).sum()),
                )
            )
        found[run] = steps
    return found


@cache
def load_iterations(path: Path) -> Iterations:
    rows = read_rows(path)
    return Iterations(
        is_prefill=np.array([r["mode"] == "EXTEND" for r in rows]),
        batch=np.array([float(r["batch_size"]) for r in rows]),
        prefill_tokens=np.array([float(r["prefill_tokens"]) for r in rows]),
        context=np.array([float(r["avg_seq_len"]) for r in rows]),
        ms=np.array([float(r["forward_time_ms"]) for r in rows]),
    )


def logged_runs(folder: Path) -> dict[str, list[str]]:
    """Model to the runs that have an iteration log."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((folder / "rl_runs").glob("*.iterations.csv.gz")):
        run = path.name.removesuffix(".iterations.csv.gz")
        found[model_of(run)].append(run)
    return found


# --- fitting ------------------------------------------------------------------------------------------------


def nnls(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with no negative coefficient, by trying every subset of the few columns."""
    best, best_loss = np.zeros(columns.shape[1]), float("inf")
    for size in range(1, columns.shape[1] + 1):
        for subset in itertools.combinations(range(columns.shape[1]), size):
            x, *_ = np.linalg.lstsq(columns[:, subset], target, rcond=None)
            loss = float(((columns[:, subset] @ x - target) ** 2).sum())
            if (x >= 0).all() and loss < best_loss - 1e-12:
                best, best_loss = np.zeros(columns.shape[1]), loss
                best[list(subset)] = x
    return best


@cache
def decode_bins(folder: Path, runs: tuple[str, ...]) -> np.ndarray:
    """Rows (active, context, mean ms, iterations) of the logs, binned by log2(active)/3 and 500 tokens of
    context."""
    rows = []
    for run in runs:
        log = load_iterations(folder / "rl_runs" / f"{run}.iterations.csv.gz")
        decoding = ~log.is_prefill
        active, context, ms = log.batch[decoding], log.context[decoding], log.ms[decoding]
        key = np.floor(np.log2(active) * 3) * 1000 + np.floor(context / 500) + 0.5 * (active > 512)
        for value in np.unique(key):
            inside = key == value
            if inside.sum() < 15:
                continue
            # Rare pauses of seconds are not a property of the batch.
            kept = ms[inside] <= 3 * np.quantile(ms[inside], 0.98)
            rows.append((active[inside].mean(), context[inside].mean(), ms[inside][kept].mean(), inside.sum()))
    return np.array(rows)


def fit_decode(folder: Path, runs: list[str], shape: ModelSize) -> tuple[DecodeCurve, float]:
    """The curve of one model and its median relative error over bins, weighted by iterations."""
    bins = decode_bins(folder, tuple(runs))
    captured = bins[bins[:, 0] <= 512]
    active, context, ms, count = captured.T
    cached = active * context / 1000
    columns = np.stack([np.ones_like(active), np.minimum(active, LOW_ACTIVE), active, cached], 1)
    weight = count**0.25 / ms
    target = ms * weight
    kv_us = shape.kv_bytes_per_gpu_token(TP) / (gpu_spec(MEASURED_GPU).hbm_tbps * 1e6 * 0.8)
    if np.ptp(cached) > 100:
        x = nnls(columns * weight[:, None], target)
    else:
        # Short answers only: the log cannot tell cache reading from the rest, so it takes the bytes over
        # bandwidth.
        x = np.append(nnls(columns[:, :3] * weight[:, None], target - kv_us * cached * weight), kv_us)
    eager = bins[bins[:, 0] > 512]
    prefill = fit_prefill(folder, runs)
    curve = DecodeCurve(
        fixed_ms=x[0],
        low_active_ms=x[1],
        active_ms=x[2],
        kv_us=x[3],
        eager_floor_ms=float(np.median(eager[:, 2])) if len(eager) else prefill.fixed_ms,
    )
    errors = np.abs([curve.step_s(a, c) * 1e3 / m - 1 for a, c, m, _ in captured])
    order = np.argsort(errors)
    middle = np.searchsorted(np.cumsum(count[order]), count.sum() / 2)
    return curve, float(errors[order][middle])


def fit_prefill(folder: Path, runs: list[str]) -> PrefillCurve:
    logs = [load_iterations(folder / "rl_runs" / f"{run}.iterations.csv.gz") for run in runs]
    tokens = np.concatenate([log.prefill_tokens[log.is_prefill] for log in logs])
    ms = np.concatenate([log.ms[log.is_prefill] for log in logs])
    fixed = float(np.median(ms[tokens < 256]))
    big = tokens > 1500
    slope = float(np.median(np.maximum(ms[big] - fixed, 0) / tokens[big] * 1000)) if big.any() else 0.0
    return PrefillCurve(fixed_ms=fixed, ktoken_ms=slope)


def fit_host(folder: Path, steps: dict[str, list[Step]], runs: list[str]) -> dict[str, HostCosts]:
    """Seconds of the measured rollouts beyond their logged forwards; the token part by model, the rest for all.

    A model whose steps generate under half a million tokens cannot tell the token part from the rest and
    takes the mean.
    """
    pieces = []
    for run in runs:
        log = load_iterations(folder / "rl_runs" / f"{run}.iterations.csv.gz")
        cuts = log.steps()
        if not any(s.is_search for s in steps.get(run, ())) and len(cuts) == len(steps.get(run, ())):
            pieces += [_host_piece(step, log, cut) for step, cut in zip(steps[run], cuts, strict=True)]
    warm = [piece for piece in pieces if piece[0].step > 1]
    if not warm:
        return {}
    told = sorted({model_of(step.run) for step, _, row in warm if row[3] > 0.5})
    columns = [row[:3] + [row[3] * (m == model_of(step.run)) for m in told] for step, _, row in warm]
    x = nnls(np.array(columns), np.array([over_s for _, over_s, _ in warm]))
    token_us = float(np.mean(x[3:])) if told else 0.0
    first = [over_s - float(np.dot(row, [*x[:3], token_us])) for step, over_s, row in pieces if step.step == 1]
    typical = HostCosts(
        iteration_ms=float(x[1]),
        prefill_ms=float(x[2]),
        token_us=token_us,
        rollout_s=float(x[0]),
        first_rollout_s=max(0.0, median(first)) if first else 0.0,
    )
    by_model = {m: replace(typical, token_us=float(v)) for m, v in zip(told, x[3:], strict=True)}
    return {"typical": typical} | by_model


def _host_piece(step: Step, log: Iterations, cut: slice) -> tuple[Step, float, list[float]]:
    decoding = ~log.is_prefill[cut]
    row = [
        1.0,
        len(log.ms[cut]) / 1e3,
        float((~decoding).sum()) / 1e3,
        float(log.batch[cut][decoding].sum()) / 1e6,
    ]
    return step, step.gen_s - float(log.ms[cut].sum()) / 1e3, row


def fit_train(steps: dict[str, list[Step]], runs: list[str]) -> dict[tuple[str, Stage], StageCost]:
    """Per model and stage a line in tokens, every run with the same weight; the first step is warm-up.

    The search runs used another trainer configuration (half the time at twice the tokens) and are left out.
    """
    found: dict[tuple[str, Stage], StageCost] = {}
    single: dict[tuple[str, Stage], tuple[float, float]] = {}
    models = sorted({model_of(run) for run in runs})
    for stage in TRAIN_STAGES:
        for model in models:
            points = []
            for run in runs:
                warm = [s for s in steps[run] if s.step > 1] or steps[run]
                if model_of(run) == model and not warm[0].is_search:
                    tokens = median(s.total_tokens for s in warm)
                    points.append((tokens / 1e6, median(s.seconds[STAGE_COLUMN[stage]] for s in warm)))
            if len(points) > 1:
                found[model, stage] = _robust_line(points)
            elif points:
                single[model, stage] = points[0]
    for (model, stage), (tokens, seconds) in single.items():
        # One load only: split it between fixed and per token as the other models do at this load.
        others = [cost for (_, at), cost in found.items() if at == stage]
        fixed_part = median(cost.fixed_s / cost.seconds(tokens * 1e6) for cost in others) if others else 0.25
        found[model, stage] = StageCost(fixed_s=fixed_part * seconds, mtoken_s=(1 - fixed_part) * seconds / tokens)
    return found


def _robust_line(points: list[tuple[float, float]]) -> StageCost:
    """The line with the least sum of relative errors, among those through two points, or level, or through
    zero."""
    best, best_loss = StageCost(fixed_s=0.0, mtoken_s=0.0), float("inf")
    candidates = [(y, 0.0) for _, y in points] + [(0.0, y / x) for x, y in points]
    for (x1, y1), (x2, y2) in itertools.combinations(points, 2):
        if x1 != x2:
            slope = (y2 - y1) / (x2 - x1)
            candidates.append((y1 - slope * x1, slope))
    for fixed, slope in candidates:
        if fixed < 0 or slope < 0:
            continue
        loss = sum(abs((fixed + slope * x) / y - 1) for x, y in points)
        if loss < best_loss:
            best, best_loss = StageCost(fixed_s=fixed, mtoken_s=slope), loss
    return best


def fit_roofline(folder: Path, logs: dict[str, list[str]]) -> RooflineConstants:
    """Efficiencies from the kernel tables, the rest from the measured decode curves of the models in
    `logs`."""
    base = replace(roofline_constants(), **kernel_efficiencies(str(folder)))
    columns, target = [], []
    eager = []
    for model, runs in logs.items():
        shape = model_shape(model)
        curve, _ = estimate_curves(shape, MEASURED_GPU, TP, _only_physics(base))
        for active, context, ms, count in decode_bins(folder, tuple(runs)):
            if active > 512:
                continue
            weight = count**0.25 / ms
            rest = ms - curve.step_s(active, context) * 1e3
            row = [shape.layers * 1e-3, min(active, LOW_ACTIVE) * 1e-3, active * 1e-3]
            columns.append(np.array(row) * weight)
            target.append(rest * weight)
        eager.append(fit_prefill(folder, runs).fixed_ms / shape.layers * 1e3)
    x = nnls(np.array(columns), np.array(target))
    return replace(
        base,
        layer_us=max(0.0, float(x[0]) - base.collective_us),
        active_low_us=float(x[1]),
        active_us=float(x[2]),
        eager_layer_us=float(np.median(eager)),
    )


def _only_physics(k: RooflineConstants) -> RooflineConstants:
    return replace(k, layer_us=0.0, collective_us=0.0, active_us=0.0, active_low_us=0.0, eager_layer_us=0.0)


@cache
def kernel_efficiencies(folder: str) -> dict[str, float]:
    """Bandwidth and speed that single kernels reach on H100, over peak (memory) or over the reachable
    speed."""
    import pyarrow.parquet as pq

    spec = gpu_spec(MEASURED_GPU)
    gemm = {k: np.array(v) for k, v in pq.read_table(Path(folder) / "perf/gemm_latency.parquet").to_pydict().items()}
    weights = gemm["n"].astype(float) * gemm["k"]
    h100 = (gemm["gpu"] == "h100_sxm") & (gemm["gemm_dtype"] == "bfloat16")
    read = h100 & (gemm["m"] == 1) & (weights > 2e7)
    big = h100 & (gemm["m"] == 4096) & (weights > 5e6)
    speed = 2 * gemm["m"] * weights / gemm["latency_ms"] / 1e9 / spec.tflops

    def row_ms(m: int) -> float:
        """Median milliseconds per unit of weights, against the time all of it would take at the reachable
        speed."""
        chosen = h100 & (gemm["m"] == m) & (weights > 5e6) & (weights < 1e8)
        return float(np.median(gemm["latency_ms"][chosen] / (2 * weights[chosen] / (spec.tflops * 1e9))))

    table = pq.read_table(Path(folder) / "perf/attention_decode_latency.parquet").to_pydict()
    attention = {k: np.array(v) for k, v in table.items()}
    cached = attention["batch_size"].astype(float) * attention["context_len"] * attention["num_key_value_heads"]
    cached_bytes = cached * attention["head_dim"] * 4
    busy = (attention["gpu"] == "h100_sxm") & (cached_bytes > 1e8)
    collective = [
        float(row["latency_ms"])
        for row in read_rows(Path(folder) / "perf/intranode_collectives.csv.gz")
        if row["gpu"] == "h100_sxm"
        and row["num_gpus"] == "4"
        and "graph" in row["op_name"]
        and 2048 <= int(row["message_elements"]) <= 32768
    ]
    return {
        "weight_efficiency": float(np.median(2 * weights[read] / gemm["latency_ms"][read] / 1e9 / spec.hbm_tbps)),
        "kv_efficiency": float(np.median(cached_bytes[busy] / attention["latency_ms"][busy] / 1e9 / spec.hbm_tbps)),
        "compute_efficiency": float(np.median(speed[big])),
        "decode_compute_share": (row_ms(512) - row_ms(16)) / (512 - 16),
        "collective_us": 2e3 * median(collective),
    }


# --- predictions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Everything fitted, from the logs that one prediction may use."""

    curves: dict[str, DecodeCurve]
    prefills: dict[str, PrefillCurve]
    errors: dict[str, float]
    host: dict[str, HostCosts]
    train: dict[tuple[str, Stage], StageCost]
    roofline: RooflineConstants

    def rollout_costs(self, model: str) -> RolloutCosts:
        shape = model_shape(model)
        decode, prefill = estimate_curves(shape, MEASURED_GPU, TP, self.roofline)
        return RolloutCosts(
            shape=shape,
            gpu=MEASURED_GPU,
            tp=TP,
            decode=self.curves.get(model, decode),
            prefill=self.prefills.get(model, prefill),
            host=self.host.get(model, self.host["typical"]),
            is_measured=model in self.curves,
            source=SOURCE,
        )

    def train_cost(self, model: str, stage: Stage) -> StageCost:
        return self.train.get((model, stage)) or train_cost_by_size(stage, model_shape(model).params, self.train)


def calibrate(folder: Path, steps: dict[str, list[Step]], exclude: str | None = None) -> Calibration:
    """Fit everything without any file of the run `exclude`."""
    logs = {m: [r for r in runs if r != exclude] for m, runs in logged_runs(folder).items()}
    logs = {m: runs for m, runs in logs.items() if runs}
    fitted = {m: fit_decode(folder, runs, model_shape(m)) for m, runs in logs.items()}
    return Calibration(
        curves={m: curve for m, (curve, _) in fitted.items()},
        prefills={m: fit_prefill(folder, runs) for m, runs in logs.items()},
        errors={m: error for m, (_, error) in fitted.items()},
        host=fit_host(folder, steps, [r for runs in logs.values() for r in runs]),
        train=fit_train(steps, [r for r in steps if r != exclude and steps[r]]),
        roofline=fit_roofline(folder, logs),
    )


def predict_gen_s(step: Step, costs: RolloutCosts, memory_fraction: float, tool_s_per_call: float) -> float:
    limits = EngineLimits(kv_pool_tokens=kv_pool_tokens(costs.shape, MEASURED_GPU, TP, memory_fraction))
    tools = ToolCalls(num_calls=step.extra_turns, seconds_per_call=tool_s_per_call) if step.is_search else None
    return predict_rollout(
        step.lengths,
        costs,
        prompt_tokens=step.prompt_mean,
        group_size=GROUP,
        limits=limits,
        extra_turns=step.extra_turns,
        tools=tools,
        is_first=step.step == 1,
    ).seconds


def best_memory_fraction(step: Step, costs: RolloutCosts) -> float:
    """The cache size that explains one observed step best: what a running pipeline would know about its own
    engine."""
    return min(MEMORY_FRACTIONS, key=lambda f: abs(predict_gen_s(step, costs, f, 0.0) / step.gen_s - 1))


def validate(folder: Path, steps: dict[str, list[Step]]) -> list[dict[str, Any]]:
    """One row per run: predictions with nothing of the run known, and with its first warm step observed."""
    rows = []
    for run, all_steps in steps.items():
        if not all_steps:
            continue
        model = model_of(run)
        fitted = calibrate(folder, steps, exclude=run)
        costs = fitted.rollout_costs(model)
        tool_s = tool_seconds(steps, exclude=run)
        warm = [s for s in all_steps if s.step > 1] or all_steps
        held_out = [predict_gen_s(s, costs, MEASURED_MEMORY_FRACTION, tool_s) / s.gen_s - 1 for s in warm]
        row = {
            "run": run,
            "model": model,
            "decode": "log of other run" if costs.is_measured else "by shape",
            "steps": len(warm),
            "gen_s": float(np.mean([s.gen_s for s in warm])),
            "gen_error": float(np.mean(held_out)),
            "gen_error_worst": max(held_out, key=abs),
            "is_search": warm[0].is_search,
        }
        if len(warm) > 1:
            seen, rest = warm[0], warm[1:]
            if seen.is_search:
                rate = seen.gen_s / max(seen.extra_turns, 1)
                after = [predict_gen_s(s, costs, MEASURED_MEMORY_FRACTION, rate) / s.gen_s - 1 for s in rest]
            else:
                fraction = best_memory_fraction(seen, costs)
                scale = seen.gen_s / predict_gen_s(seen, costs, fraction, 0.0)
                after = [predict_gen_s(s, costs, fraction, 0.0) * scale / s.gen_s - 1 for s in rest]
                row["memory_fraction"] = fraction
            row["gen_error_after_one_step"] = float(np.mean(np.abs(after)))
        for stage in TRAIN_STAGES:
            cost = fitted.train_cost(model, stage)
            errors = [cost.seconds(s.total_tokens) / s.seconds[STAGE_COLUMN[stage]] - 1 for s in warm]
            row[f"{stage}_error"] = float(np.mean(errors))
        train = [
            sum(fitted.train_cost(model, stage).seconds(s.total_tokens) for stage in TRAIN_STAGES)
            / sum(s.seconds[STAGE_COLUMN[stage]] for stage in TRAIN_STAGES)
            - 1
            for s in warm
        ]
        row["train_error"] = float(np.mean(train))
        rows.append(row)
    return rows


def tool_seconds(steps: dict[str, list[Step]], exclude: str | None) -> float:
    """Seconds per retrieval over the search runs, as if calls were served one at a time."""
    rates = [s.gen_s / s.extra_turns for run, ss in steps.items() if run != exclude for s in ss if s.is_search]
    return median(rates)


# --- serving measurements -----------------------------------------------------------------------------------


def validate_serving(folder: Path) -> list[dict[str, Any]]:
    """The roofline against end-to-end serving on H100 that no constant was fitted to: bf16 dense models."""
    rows = []
    for row in read_rows(folder / "perf" / "serving_ttft_tpot.csv.gz"):
        known = any(name in row["model"] for name in ("Llama-3.1-8B", "Qwen3-32B"))
        if not known or row["gpu"] != "h100_sxm" or row["precision"] != "unspecified" or row["pp"] not in ("", "1"):
            continue
        shape, tp = model_shape(row["model"]), int(row["tp"])
        decode, prefill = estimate_curves(shape, MEASURED_GPU, tp)
        prompt, output = int(row["input_len"]), int(row["output_len"])
        tpot_ms, ttft_ms = float(row["tpot_ms"]), float(row["ttft_ms"])
        # A client's request is first queued and prefilled, then decoding: only the second part is active.
        life_ms = ttft_ms + output * tpot_ms
        active = int(row["concurrency"]) * output * tpot_ms / life_ms
        step_ms = decode.step_s(active, prompt + output / 2) * 1e3
        # Between two tokens of one sequence the prompts of newly arrived ones are prefilled.
        prompts_per_token = int(row["concurrency"]) / life_ms * tpot_ms
        interference_ms = prompts_per_token * prefill.ktoken_ms * prompt / 1000
        rows.append(
            {
                "model": shape.name,
                "backend": row["backend"],
                "tp": tp,
                "active": active,
                "output": output,
                "tpot_ms": tpot_ms,
                "error": (step_ms + interference_ms) / tpot_ms - 1,
            }
        )
    return rows


# --- output -------------------------------------------------------------------------------------------------


def validate_experts(folder: Path, most_tokens: int = 256) -> dict[str, float]:
    """Median absolute error of reading a layer's experts in bf16 on one H100, against measured kernels, by model and
    by how uneven the router is."""
    import pyarrow.parquet as pq

    kernels = {k: np.array(v) for k, v in pq.read_table(folder / "perf/moe_latency.parquet").to_pydict().items()}
    whole = (kernels["moe_dtype"] == "bfloat16") & (kernels["moe_tp_size"] == 1) & (kernels["moe_ep_size"] == 1)
    errors = {}
    for model, hidden, width in EXPERT_SHAPES:
        shape = model_shape(model)
        decode, _ = estimate_curves(shape, MEASURED_GPU, 1)
        at = whole & (kernels["hidden_size"] == hidden) & (kernels["inter_size"] == width)
        for distribution in sorted(set(kernels["distribution"][at])):
            chosen = at & (kernels["distribution"] == distribution) & (kernels["num_tokens"] <= most_tokens)
            told = decode.experts_ms / shape.layers * (1 - shape.idle_share ** kernels["num_tokens"][chosen])
            error = np.abs(told / kernels["latency_ms"][chosen] - 1)
            errors[f"{model} {distribution}"] = float(np.median(error))
    return errors


def write_tables(folder: Path, fitted: Calibration, logs: dict[str, list[str]], steps: dict[str, list[Step]]) -> None:
    def write(name: str, source: str, rows: list[dict[str, Any]]) -> None:
        lines = [f"# source: {source}", ",".join(rows[0])]
        lines += [",".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()) for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    curves = []
    for model, curve in fitted.curves.items():
        prefill = fitted.prefills[model]
        curves.append(
            {
                "model": model,
                "gpu": MEASURED_GPU,
                "tp": TP,
                "fixed_ms": float(curve.fixed_ms),
                "low_active_ms": float(curve.low_active_ms),
                "active_ms": float(curve.active_ms),
                "kv_us": float(curve.kv_us),
                "eager_floor_ms": float(curve.eager_floor_ms),
                "prefill_fixed_ms": prefill.fixed_ms,
                "prefill_ktoken_ms": prefill.ktoken_ms,
                "median_error": fitted.errors[model],
                "source": "+".join(logs[model]),
            }
        )
    write("decode_curves", f"{SOURCE}; decode and prefill forward times by iteration", curves)
    write("host_costs", SOURCE, [{"model": m} | asdict(host) for m, host in fitted.host.items()])
    train = [{"model": m, "stage": stage} | asdict(cost) for (m, stage), cost in sorted(fitted.train.items())]
    write(
        "train_costs",
        f"{SOURCE}; FSDP on the same 4 GPUs, offloaded between stages; qwen2.5-14b is one first step",
        train,
    )
    write("length_quantiles", f"{SOURCE}; response tokens by sample", length_rows(data_folder(), steps))
    constants = [{"constant": k, "value": v} for k, v in asdict(fitted.roofline).items()]
    write("roofline", "aiconfigurator kernel tables for H100 and the measured decode curves", constants)


def length_rows(folder: Path, steps: dict[str, list[Step]]) -> list[dict[str, Any]]:
    """One row of quantiles per run; prompts of runs without a steps row take the task's usual size."""
    rows = []
    for path in sorted((folder / "rl_runs").glob("*.lengths.csv.gz")):
        run = path.name.removesuffix(".lengths.csv.gz")
        samples = read_rows(path)
        lengths = np.array([float(s["length"]) for s in samples])
        turns = np.array([float(s["turn"] or 2) for s in samples])
        known = steps.get(run) or steps.get(next((k for k, v in LENGTHS_OF.items() if v == run), ""), [])
        found = LengthDistribution.from_lengths(run, lengths, group_size=GROUP)
        row = {
            "run": run,
            "samples": len(lengths),
            "group_size": GROUP,
            "group_correlation": round(found.group_correlation, 3),
            "prompt_tokens": round(float(np.mean([s.prompt_mean for s in known])), 1) if known else 100.0,
            "mean_extra_turns": round(float((turns / 2 - 1).mean()), 3),
        }
        quantiles = zip(PROBABILITIES, found.quantiles, strict=True)
        rows.append(row | {f"q{p:g}": round(q, 1) for p, q in quantiles})
    return rows


def resampled_errors(steps: dict[str, list[Step]], num_seeds: int = 6) -> list[float]:
    """The carried tables alone: rollouts of lengths drawn from the quantiles, against the measured mean."""
    errors = []
    for run in length_distribution_names():
        warm = [s for s in steps.get(run, ()) if s.step > 1 and not s.is_search]
        if not warm:
            continue
        drawn_from, costs = length_distribution(run), rollout_costs(model_of(run))
        limits = EngineLimits(kv_pool_tokens=kv_pool_tokens(costs.shape, memory_fraction=MEASURED_MEMORY_FRACTION))
        seconds = [
            predict_rollout(
                drawn_from.sample(np.random.default_rng(seed), SAMPLES_PER_STEP),
                costs,
                prompt_tokens=drawn_from.prompt_tokens,
                group_size=GROUP,
                limits=limits,
                extra_turns=round(drawn_from.mean_extra_turns * SAMPLES_PER_STEP),
            ).seconds
            for seed in range(num_seeds)
        ]
        errors.append(float(np.mean(seconds) / np.mean([s.gen_s for s in warm]) - 1))
    return errors


def percent(value: float | None) -> str:
    return f"{100 * value:+6.1f}" if value is not None else "     -"


def summary(runs: list[dict[str, Any]], serving: list[dict[str, Any]], resampled: list[float]) -> dict[str, Any]:
    plain = [r for r in runs if not r["is_search"]]
    after = [r["gen_error_after_one_step"] for r in plain if "gen_error_after_one_step" in r]
    by_backend: dict[str, list[float]] = defaultdict(list)
    for row in serving:
        by_backend[f"{row['backend']} {row['model']} tp{row['tp']}"].append(abs(row["error"]))
    return {
        "gen_median_abs_error": median(abs(r["gen_error"]) for r in plain),
        "gen_within_10_percent": sum(abs(r["gen_error"]) <= 0.10 for r in plain),
        "gen_runs": len(plain),
        "gen_median_abs_error_by_shape": median(abs(r["gen_error"]) for r in plain if r["decode"] == "by shape"),
        "gen_after_one_step_median_abs_error": median(after),
        "gen_resampled_median_abs_error": median(abs(error) for error in resampled),
        "train_median_abs_error": median(abs(r["train_error"]) for r in plain),
        "search_median_abs_error": median(abs(r["gen_error"]) for r in runs if r["is_search"]),
        "serving_median_abs_error": median(abs(r["error"]) for r in serving),
        "serving_by_setup": {k: median(v) for k, v in sorted(by_backend.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="DIR", help="store the fitted tables")
    options = parser.parse_args()
    folder = data_folder()
    steps = load_steps(folder)
    if options.write:
        write_tables(options.write, calibrate(folder, steps), logged_runs(folder), steps)
        return
    runs, serving = validate(folder, steps), validate_serving(folder)
    totals = summary(runs, serving, resampled_errors(steps))
    if options.json:
        print(json.dumps({"runs": runs, "summary": totals}, indent=1, default=float))
        return
    print("rollout seconds of runs that the calibration did not see; error in % of the measured time")
    print(f"{'run':42} {'decode from':17} {'gen s':>7} {'error':>6} {'worst':>6} {'1 step':>6} {'train':>6}")
    for r in runs:
        print(
            f"{r['run']:42} {r['decode']:17} {r['gen_s']:7.1f} {percent(r['gen_error'])} "
            f"{percent(r['gen_error_worst'])} {percent(r.get('gen_error_after_one_step'))} "
            f"{percent(r['train_error'])}"
        )
    totals["experts_by_model"] = {key: round(error, 3) for key, error in validate_experts(folder).items()}
    for key, value in totals.items():
        print(f"{key}: {value if not isinstance(value, float) else round(value, 3)}")


if __name__ == "__main__":
    main()
