"""An estimate for a model, GPU or group size without a measurement: bytes over bandwidth, operations over speed.

    weights / tp / (hbm * e_weights) ──┐       (of a mixture: all but the experts, which are read as they are picked)
    layers * (launch + collectives) ───┴─> fixed
    part of 2 * active params / tp / (tflops * e) + sampling ──> per active sequence
    cache bytes / tp / (hbm * e_kv) ────────────────────> per cached token
    layers * eager launch, 2 * active params / tp / (tflops * e) ──> prefill: fixed, per token

The efficiencies were fitted once to kernel tables and to the measured decode curves (`data/roofline.csv` states
to which); only those constants are empirical, so the estimate extends to other shapes and devices. Its error
against end-to-end serving measurements is in docs/how-it-works/cost-model.md. Of mixtures of experts the reading of
experts was compared with measured kernels; expert parallelism is outside it.

A module of its own: its constants are fitted and compared with measurements without any pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rlmux.core.errors import UserError
from rlmux.sim import data_tables
from rlmux.sim.models.curves import DecodeCurve, PrefillCurve
from rlmux.sim.models.hardware import GpuSpec, ModelSize, gpu_spec, model_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineConstants:
    """The empirical part, all fitted on H100."""

    weight_efficiency: float
    """Fraction of peak memory bandwidth at which weights are read."""
    kv_efficiency: float
    """Fraction of peak memory bandwidth at which decode attention reads the cache."""
    layer_us: float
    """Microseconds of launch and latency of one layer's kernels in a captured graph, on one GPU."""
    collective_us: float
    """Microseconds that one layer's two reductions add when the layer is split over GPUs."""
    active_us: float
    """Microseconds per active sequence and iteration: logits, sampling, bookkeeping on the device."""
    active_low_us: float
    """The same for each of the first 32 sequences."""
    compute_efficiency: float
    """Fraction of the reachable matrix speed that large products sustain."""
    decode_compute_share: float
    """Part of its arithmetic that one more active sequence adds; the rest hides behind reading the weights."""
    eager_layer_us: float
    """Microseconds of one layer whose kernels are launched one by one: the floor of a prefill iteration."""


@cache
def roofline_constants() -> RooflineConstants:
    return RooflineConstants(**{row["constant"]: float(row["value"]) for row in data_tables.rows("roofline")})


def estimate_curves(
    shape: ModelSize, gpu: str, tp: int, constants: RooflineConstants | None = None
) -> tuple[DecodeCurve, PrefillCurve]:
    """Decode and prefill curves of `shape` on `tp` GPUs of one kind."""
    k = constants or roofline_constants()
    spec = gpu_spec(gpu)
    if tp < 1:
        raise UserError(f"tp must be at least 1, not {tp}")
    layer_us = k.layer_us + (k.collective_us if tp > 1 else 0.0)
    param_ms = shape.bytes_per_weight / tp / (spec.hbm_tbps * 1e12 * k.weight_efficiency) * 1e3
    weights_ms = (shape.params - shape.expert_params) * param_ms
    experts_ms = shape.expert_params * param_ms
    token_ms = _token_compute_ms(shape, spec, tp, k)
    decode = DecodeCurve(
        fixed_ms=weights_ms + shape.layers * layer_us * 1e-3,
        low_active_ms=k.active_low_us * 1e-3,
        active_ms=k.active_us * 1e-3 + k.decode_compute_share * token_ms,
        kv_us=shape.kv_bytes_per_gpu_token(tp) / (spec.hbm_tbps * 1e12 * k.kv_efficiency) * 1e6,
        eager_floor_ms=shape.layers * k.eager_layer_us * 1e-3,
        experts_ms=experts_ms,
        idle_share=shape.idle_share,
    )
    fixed_ms = max(shape.layers * k.eager_layer_us * 1e-3, experts_ms)  # a prompt's tokens pick every expert
    prefill = PrefillCurve(fixed_ms=fixed_ms, ktoken_ms=1000 * token_ms)
    return decode, prefill


def decode_step_s(model: str | ModelSize, gpu: str, tp: int, active: float, context: float) -> float:
    """Forward seconds of one decode iteration by the roofline alone, measured curves or not."""
    shape = model if isinstance(model, ModelSize) else model_shape(model)
    return estimate_curves(shape, gpu, tp)[0].step_s(active, context)


def _token_compute_ms(shape: ModelSize, spec: GpuSpec, tp: int, k: RooflineConstants) -> float:
    return 2 * shape.computing_params / tp / (spec.tflops * 1e12 * k.compute_efficiency) * 1e3
