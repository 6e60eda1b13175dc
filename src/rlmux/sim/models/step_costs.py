"""Seconds of a step's parts by the sizes of a pipeline alone: our engines, servers of others, weights on their way.

    device ── DeviceSpeed: a GPU's peak figures, or a core's ───────────────┐
    our rollout engine ── OwnEngine ──────────────┐                         ├──▶ seconds
    a server ── roofline.py, costs.py ────────────┴─▶ decoder.py: rollout   │
    training: products, launches, gathers ── train_seconds ─────────────────┘

The constants are in `data/step_costs.csv`, with what each was read off. They are one figure of one machine each, so
an estimate is good to a factor of about 2; docs/how-it-works/cost-model.md compares it with public runs and ours.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlmux.sim import data_tables
from rlmux.sim.models.costs import rollout_costs
from rlmux.sim.models.decoder import Decoder, DecodeSeconds, Unfinished
from rlmux.sim.models.hardware import ModelSize, gpu_spec
from rlmux.sim.models.roofline import roofline_constants

USUAL_ANSWERS = "math_qwen3_4b"
"""Public run whose answers, as parts of the token limit, stand for those of an unknown task: 0.52 of it in the mean."""
SHORT_ANSWERS = "gsm8k_qwen3_4b_instruct"
"""The same for a lower bound: 0.04 of the limit."""
_HALVINGS = 20
_GOLDEN = (math.sqrt(5) - 1) / 2


@cache
def constants(kind: str) -> dict[str, float]:
    """Constants of `gpu` or `core`, by name."""
    return {row["constant"]: float(row[kind]) for row in data_tables.rows("step_costs") if row[kind]}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Peak figures of a device that a worker computes on, and the constants that go with it."""

    name: str
    tflops: float
    """TFLOP/s of large bfloat16 products, as far as they are reached."""
    memory_tbps: float
    link_gbps: float
    """GB/s to another device of its machine, one direction."""
    host_gbps: float
    """GB/s to host memory, one direction."""
    constants: dict[str, float]

    @property
    def is_gpu(self) -> bool:
        return self.name != CORE

    def tflops_of(self, bytes_per_weight: float) -> float:
        """TFLOP/s of products in the type of these weights."""
        return self.tflops * (1.0 if bytes_per_weight <= 2 else self.constants["float32_share"])


CORE = "core"


def device_speed(gpu: str | None) -> DeviceSpeed:
    """A known GPU by its name, or a core. Raises UserError for a GPU that the table does not have."""
    if gpu is None:
        known = constants(CORE)
        return DeviceSpeed(
            name=CORE, tflops=known["tflops"], memory_tbps=known["memory_tbps"],
            link_gbps=known["copy_gbps"], host_gbps=known["copy_gbps"], constants=known,
        )  # fmt: skip
    spec = gpu_spec(gpu)
    return DeviceSpeed(
        name=spec.name, tflops=spec.tflops, memory_tbps=spec.hbm_tbps,
        link_gbps=spec.nvlink_gbps / 2 or spec.pcie_gbps, host_gbps=spec.pcie_gbps, constants=constants("gpu"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnEngine:
    """Costs of our rollout engine, on one device. Its decode steps have one shape: a tail is as slow as a batch."""

    shape: ModelSize
    device: DeviceSpeed

    def decode_span_s(self, active: float, context: float, num_iterations: float) -> float:
        """Seconds of consecutive decode iterations of the same sequences, which grow by a token each time."""
        known = self.device.constants
        size_of = self.shape.bytes_per_weight
        middle = context + (num_iterations - 1) / 2
        cache_bytes = self.shape.kv_bytes_per_token / 2 * size_of * active * middle * known["cache_reread"]
        read_s = (self.shape.weight_bytes + cache_bytes) / (
            self.device.memory_tbps * 1e12 * roofline_constants().weight_efficiency
        )
        products_s = 2 * self.shape.computing_params * active / (self.device.tflops_of(size_of) * 1e12)
        return num_iterations * (self.shape.layers * known["decode_layer_us"] * 1e-6 + max(read_s, products_s))

    def prefill_s(self, tokens: float) -> float:
        """Seconds to prefill `tokens`, in passes of at most 4,096."""
        flops = self.device.tflops_of(self.shape.bytes_per_weight) * 1e12
        launch_s = math.ceil(tokens / 4096) * self.shape.layers * self.device.constants["decode_layer_us"] * 1e-6
        return launch_s + 2 * self.shape.computing_params * tokens / flops


def engine_costs(shape: ModelSize, device: DeviceSpeed, *, is_own: bool, num_gpus: int = 1) -> DecodeSeconds:
    """Costs of one engine: ours, or a server's copy of the model on so many GPUs. On a core both are as ours."""
    if is_own or not device.is_gpu:
        return OwnEngine(shape=shape, device=device)
    return rollout_costs(shape, device.name, num_gpus)


def answers_as_in(run: str, limit: int, number: int) -> Sequence[int]:
    """Tokens of so many answers, with the distribution of a public run over its longest; the order has no pattern."""
    parts = [(0.5 + index * _GOLDEN) % 1.0 for index in range(number)]
    return [max(1, round(_part_of_longest(run, part) * limit)) for part in parts]


def answers_of_mean(mean: float, limit: int, number: int) -> Sequence[int]:
    """The same of the usual run, stretched to a mean in tokens; the limit cuts the longest."""
    low, high = 0.0, 1.0
    lengths = answers_as_in(USUAL_ANSWERS, limit, number)
    while sum(_stretched(lengths, high, limit)) < mean * number and high < limit:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_stretched(lengths, middle, limit)) < mean * number else (low, middle)
    return _stretched(lengths, high, limit)


def _stretched(lengths: Sequence[int], factor: float, limit: int) -> Sequence[int]:
    return [max(1, min(limit, round(length * factor))) for length in lengths]


def _part_of_longest(run: str, probability: float) -> float:
    """Quantile of a public run's answers over its longest one."""
    known = _quantiles(run)
    index = min(bisect_right(known, (probability, math.inf)), len(known) - 1)
    (before, low), (after, high) = known[index - 1], known[index]
    return (low + (high - low) * (probability - before) / (after - before)) / known[-1][1]


@cache
def _quantiles(run: str) -> Sequence[tuple[float, float]]:
    """(probability, tokens), ascending; from the table itself, as `plan` needs no numpy."""
    row = next(row for row in data_tables.rows("length_quantiles") if row["run"] == run)
    return [(float(key[1:]), float(value)) for key, value in row.items() if re.fullmatch(r"q[0-9.]+", key)]


def rollout_seconds(
    costs: DecodeSeconds, lengths: Sequence[int], *, prompt_tokens: float, slots: int, group_size: int
) -> float:
    """Seconds in which one engine samples answers of these lengths."""
    waiting = [Unfinished(length, -prompt_tokens) for length in lengths]
    return Decoder(costs, waiting, slots=slots, group_size=group_size).seconds_left


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """What the training ranks compute in a step."""

    shape: ModelSize
    """Its `bytes_per_weight` are those that training computes with."""
    num_trained: float
    """Parameters that training changes."""
    tokens: float
    """Prompt and answer tokens of all trajectories."""
    tokens_per_pass: float
    """Tokens of a micro-batch; one is computed at least."""
    num_ranks: int = 1
    is_sharded: bool = False
    num_forward_passes: int = 0
    """Forward passes beside the update's: log-probs of the reference, and of the policy before several updates."""
    num_epochs: int = 1
    num_updates: int = 1
    recomputes: bool = False
    """Whether each layer is computed again for the gradient."""
    moments_on_host: bool = False


def train_seconds(work: TrainedStep, device: DeviceSpeed) -> float:
    """Seconds of a step's log-probs and updates on these ranks, all with one kind of device."""
    known, size_of = device.constants, work.shape.bytes_per_weight
    speed = device.tflops_of(size_of) * 1e12 * known["train_share"] * work.num_ranks
    of_weights = work.num_trained / work.shape.params
    passes = 2 + min(1.0, of_weights) + (1 if work.recomputes else 0)  # forward, inputs' gradients, weights'
    products = 2 * work.shape.computing_params * work.tokens
    num_passes = math.ceil(work.tokens / work.num_ranks / max(1.0, work.tokens_per_pass))
    launch_s = num_passes * work.shape.layers * known["train_layer_ms"] * 1e-3
    gather_s = num_passes * _gathered_s(work, device)
    update_s = work.num_epochs * (_slower(products * passes / speed, launch_s, device) + gather_s)
    forward_s = work.num_forward_passes * (_slower(products / speed, launch_s / 3, device) + gather_s / 4)
    return update_s + forward_s + work.num_updates * _optimizer_s(work, device)


def _slower(products_s: float, launch_s: float, device: DeviceSpeed) -> float:
    """A GPU computes while the host launches; a core does both."""
    return max(products_s, launch_s) if device.is_gpu else products_s + launch_s


def _gathered_s(work: TrainedStep, device: DeviceSpeed) -> float:
    """Seconds of a micro-batch for weights that are gathered twice, and gradients that are summed in float32."""
    if not work.is_sharded or work.num_ranks == 1:
        return 0.0
    moved = work.shape.params * (2 * work.shape.bytes_per_weight) + 4 * work.num_trained
    return moved / (device.link_gbps * 1e9 * device.constants["link_share"])


def _optimizer_s(work: TrainedStep, device: DeviceSpeed) -> float:
    """Seconds of an update itself: gradients over the link, then 28 bytes a weight are read or written."""
    own = work.num_trained / (work.num_ranks if work.is_sharded else 1)
    moved_s = 7 * 4 * own / (device.memory_tbps * 1e12)
    if work.moments_on_host:
        moved_s += 4 * 4 * own / (device.host_gbps * 1e9)
    if work.num_ranks > 1 and not work.is_sharded:
        exchanged = 4 * own * math.log2(work.num_ranks)
        moved_s += exchanged / (device.link_gbps * 1e9 * device.constants["link_share"])
    return moved_s
