"""Costs of an engine and a trainer of a given model: measured, or estimated without a measurement.

    data/decode_curves.csv, host_costs.csv  (fitted to logs of real runs) ─┐
    roofline.py                             (everything else) ─────────────┴─> rollout_costs(model, gpu, tp)
    data/train_costs.csv                    (else by parameter count) ───────> train_costs(model, gpu, num_gpus)

Invariant: an answer has its origin: whether it was measured (`is_measured`), and its `source`.
This module is independent of the running sequences (`decoder.py`) and of other work on the device
(`interference.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.sim import data_tables
from rlmux.sim.models.curves import DecodeCurve, HostCosts, PrefillCurve, StageCost
from rlmux.sim.models.hardware import ModelSize, gpu_spec, model_shape, model_shapes
from rlmux.sim.models.roofline import estimate_curves

MEASURED_GPU = "H100-80GB-SXM"
"""The device of the measured runs."""
MEASURED_NUM_GPUS = 4
"""GPUs of the measured runs: one tensor-parallel engine, and the trainer sharded over the same four."""
TRAIN_STAGES = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
"""Stages that follow a rollout, in order."""
_ANCHOR_TOKENS = (0.5e6, 4.0e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCosts:
    """One rollout engine: one model on one tensor-parallel group."""

    shape: ModelSize
    gpu: str
    tp: int
    decode: DecodeCurve
    prefill: PrefillCurve
    host: HostCosts
    is_measured: bool
    """Whether the curves are fitted to logs of this model on this device and group size."""
    source: str

    def decode_step_s(self, active: float, context: float) -> float:
        """Wall seconds of one decode iteration, the host's share included."""
        return self.decode_span_s(active, context, 1)

    def decode_span_s(self, active: float, context: float, num_iterations: float) -> float:
        """Wall seconds of consecutive decode iterations of the same sequences, which grow by a token each time."""
        host = self.host.iteration_ms * 1e-3 + self.host.token_us * 1e-6 * active
        return self.decode.span_s(active, context, num_iterations) + num_iterations * host

    def prefill_s(self, tokens: float) -> float:
        """Wall seconds to prefill `tokens`, the host's share included; a migrated cache is rebuilt in as many."""
        host = (self.host.iteration_ms + self.host.prefill_ms) * 1e-3
        return self.prefill.seconds(tokens) + self.prefill.num_iterations(tokens) * host

    def kv_copy_s(self, tokens: float, gigabytes_per_s: float = 50.0) -> float:
        """Seconds to copy the cache of `tokens` tokens; each GPU of the group copies its own part at this speed."""
        return tokens * self.shape.kv_bytes_per_gpu_token(self.tp) / (gigabytes_per_s * 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCosts:
    """The training side of one step, by stage."""

    shape: ModelSize
    gpu: str
    num_gpus: int
    cost_by_stage: dict[Stage, StageCost]
    is_measured: bool

    def stage_s(self, stage: Stage, tokens: float) -> float:
        """Seconds of one of `TRAIN_STAGES` for a step of `tokens` prompt and response tokens."""
        if stage not in self.cost_by_stage:
            raise UserError(f"training stage {stage!r} is unknown; accepted: {', '.join(TRAIN_STAGES)}")
        return self.cost_by_stage[stage].seconds(tokens)

    def total_s(self, tokens: float) -> float:
        return sum(cost.seconds(tokens) for cost in self.cost_by_stage.values())


def rollout_costs(model: str | ModelSize, gpu: str = MEASURED_GPU, tp: int = MEASURED_NUM_GPUS) -> RolloutCosts:
    """The measured curves where there are any for (model, gpu, tp), else the roofline estimate."""
    shape = model if isinstance(model, ModelSize) else model_shape(model)
    gpu = gpu_spec(gpu).name
    measured = _measured_curves().get((shape.name, gpu, tp))
    if measured is not None and measured.shape == shape:
        return measured
    decode, prefill = estimate_curves(shape, gpu, tp)
    return RolloutCosts(
        shape=shape,
        gpu=gpu,
        tp=tp,
        decode=decode,
        prefill=prefill,
        host=host_costs(shape.name),
        is_measured=False,
        source="roofline",
    )


def host_costs(model: str) -> HostCosts:
    """The host's share for a measured model, or the typical one."""
    rows = {row["model"]: row for row in data_tables.rows("host_costs")}
    row = rows.get(model, rows["typical"])
    return HostCosts(**{key: float(value) for key, value in row.items() if key != "model"})


def train_costs(model: str | ModelSize, gpu: str = MEASURED_GPU, num_gpus: int = MEASURED_NUM_GPUS) -> TrainCosts:
    """Training seconds by stage: as measured on 4 H100, other sizes by parameter count, other devices by speed.

    A mixture computes as its active parameters do and publishes all of them. That flatters it: published runs of
    Qwen3-30B-A3B on H100 reach 3 to 28 % of the peak. (PrimeIntellect-ai/prime-rl, benchmarks/results/BENCHMARKS.md)

    Only the part per token scales with devices; the fixed part (loading offloaded weights, launching) does
    not, and neither does publishing weights.
    """
    shape = model if isinstance(model, ModelSize) else model_shape(model)
    spec = gpu_spec(gpu)
    if num_gpus < 1:
        raise UserError(f"num_gpus must be at least 1, not {num_gpus}")
    speed = spec.tflops / gpu_spec(MEASURED_GPU).tflops * num_gpus / MEASURED_NUM_GPUS
    measured = measured_train_costs()
    cost_by_stage = {}
    for stage in TRAIN_STAGES:
        size = shape.params if stage is Stage.PUBLISH else shape.computing_params
        cost = measured.get((shape.name, stage)) or train_cost_by_size(stage, size, measured)
        scale = 1.0 if stage is Stage.PUBLISH else 1.0 / speed
        cost_by_stage[stage] = replace(cost, mtoken_s=cost.mtoken_s * scale)
    is_measured = (shape.name, Stage.UPDATE) in measured and (spec.name, num_gpus) == (
        MEASURED_GPU,
        MEASURED_NUM_GPUS,
    )
    return TrainCosts(
        shape=shape, gpu=spec.name, num_gpus=num_gpus, cost_by_stage=cost_by_stage, is_measured=is_measured
    )


def train_cost_by_size(stage: Stage, params: float, measured: dict[tuple[str, Stage], StageCost]) -> StageCost:
    """A stage of an unmeasured model: at two loads, log(seconds) is a line in log(parameters) of the measured ones."""
    rows = [(model_shapes()[model].params, cost) for (model, at), cost in measured.items() if at == stage]
    low, high = (_power_law([(size, cost.seconds(tokens)) for size, cost in rows], params) for tokens in _ANCHOR_TOKENS)
    slope = max(0.0, (high - low) / (_ANCHOR_TOKENS[1] - _ANCHOR_TOKENS[0]) * 1e6)
    return StageCost(fixed_s=max(0.0, low - slope * _ANCHOR_TOKENS[0] * 1e-6), mtoken_s=slope)


@cache
def measured_train_costs() -> dict[tuple[str, Stage], StageCost]:
    """Measured costs by (model, stage)."""
    return {
        (row["model"], Stage(row["stage"])): StageCost(fixed_s=float(row["fixed_s"]), mtoken_s=float(row["mtoken_s"]))
        for row in data_tables.rows("train_costs")
    }


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope through points, by least squares; points of one abscissa give a level line."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope


@cache
def _measured_curves() -> dict[tuple[str, str, int], RolloutCosts]:
    return {
        (row["model"], row["gpu"], int(row["tp"])): RolloutCosts(
            shape=model_shape(row["model"]),
            gpu=row["gpu"],
            tp=int(row["tp"]),
            decode=DecodeCurve(
                fixed_ms=float(row["fixed_ms"]),
                low_active_ms=float(row["low_active_ms"]),
                active_ms=float(row["active_ms"]),
                kv_us=float(row["kv_us"]),
                eager_floor_ms=float(row["eager_floor_ms"]),
            ),
            prefill=PrefillCurve(fixed_ms=float(row["prefill_fixed_ms"]), ktoken_ms=float(row["prefill_ktoken_ms"])),
            host=host_costs(row["model"]),
            is_measured=True,
            source=row["source"],
        )
        for row in data_tables.rows("decode_curves")
    }


def _power_law(points: Sequence[tuple[float, float]], at: float) -> float:
    usable = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if not usable:
        return 0.0
    intercept, slope = fit_line(usable)
    return math.exp(intercept + slope * math.log(at))
