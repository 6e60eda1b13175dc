"""How long a rollout took on the engine of the logged runs: continuous batching under its admission rule.

The cost model is calibrated with it (cost_model.py): the logs give the seconds of whole rollouts, of an engine whose
cache was full. The simulator's decoders count slots instead of cache, and neither reserve nor preempt.

    lengths ─> per worker: waiting ──admit──> running ──finish──> done
                              ^ only when something finished, and while the cache can hold what is reserved

A sequence is admitted when  cache in use + reserved for the running + its own prompt and budget  fits the cache pool.
For itself it counts its whole budget (at most 4096 tokens); a running one reserves `reserve` of its remaining budget,
and `reserve` falls by 0.001 with every decode iteration from 0.7 to 0.098. That is SGLang's rule; `reserve_start=0`
gives an engine that reserves nothing and preempts instead.

The active count changes only when a sequence ends or is admitted, so time is summed over the spans between
those moments in closed form: the cost is one pass per finishing moment, never one per token. When everything
fits at once there is nothing to admit and the whole rollout is a single vectorised sum over the sorted
lengths.

Limits: sequences are admitted in the order given; the prompts of one group share their cache; a later turn
continues its sequence and costs an extra prefill iteration; tools are a queue with so many servers that
overlaps decoding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlmux.core.errors import UserError
from rlmux.sim.models.costs import MEASURED_GPU, MEASURED_NUM_GPUS, RolloutCosts, rollout_costs
from rlmux.sim.models.hardware import ModelSize, gpu_spec

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MEASURED_MEMORY_FRACTION = 0.2
"""Fraction of each device given to the engine in the measured runs, inferred from their first admissions."""
TURN_PREFILL_FRACTION = 0.3
"""Fraction of later turns that need a prefill iteration of their own; the others share one (read off one log)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What bounds the number of active sequences of one engine."""

    kv_pool_tokens: float = math.inf
    """Tokens of cache the engine can hold."""
    max_active: int = 1_000_000
    """Slots of the engine."""
    reserve_start: float = 0.7
    """Fraction of a running sequence's remaining budget that is kept free for it, when the rollout begins."""
    reserve_floor: float = 0.098
    """Fraction below which the reserve does not fall."""
    reserve_decay: float = 0.001
    """Fall of the fraction per decode iteration."""
    reserve_clip_tokens: int = 4096
    """Tokens that one sequence counts for at most."""
    preempt_room: int = 20
    """Tokens for which every sequence must have room after the engine ran out of cache and put some out."""

    def __post_init__(self) -> None:
        if self.max_active < 1 or not self.kv_pool_tokens > 0:
            raise UserError(
                f"an engine needs a slot and some cache: max_active={self.max_active}, "
                f"kv_pool_tokens={self.kv_pool_tokens}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCalls:
    """Waits outside the engine: a queue of calls for a few servers."""

    num_calls: int
    seconds_per_call: float
    num_servers: int = 1

    @property
    def busy_s(self) -> float:
        return self.num_calls * self.seconds_per_call / self.num_servers


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRollout:
    """One worker's predicted rollout."""

    seconds: float
    decode_s: float
    """Forward time of decode iterations."""
    prefill_s: float
    """Forward time of prefill iterations."""
    host_s: float
    """Everything between the forwards, wake-up included."""
    num_iterations: int
    num_prefills: int
    peak_active: int
    tokens: int
    times_s: FloatArray = field(repr=False)
    """Start of each span, then the end of the last; one more than `active`."""
    active: IntArray = field(repr=False)
    """Active sequences in each span."""
    span_tokens: FloatArray = field(repr=False)

    def time_to_active(self, count: int) -> float:
        """Seconds until at most `count` sequences are active for good."""
        above = np.flatnonzero(self.active > count)
        return float(self.times_s[above[-1] + 1]) if above.size else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPrediction:
    """A whole rollout: it ends with its slowest worker."""

    seconds: float
    tool_s: float
    """The part of `seconds` that only waits for tools."""
    workers: tuple[WorkerRollout, ...]

    @property
    def tokens(self) -> int:
        return sum(worker.tokens for worker in self.workers)

    def time_to_active(self, count: int) -> float:
        """Seconds until at most `count` sequences are active over all workers, for good."""
        moments = np.unique(np.concatenate([worker.times_s for worker in self.workers]))
        total = sum(_active_at(worker, moments) for worker in self.workers)
        above = np.flatnonzero(np.asarray(total) > count)
        return float(moments[min(above[-1] + 1, moments.size - 1)]) if above.size else 0.0


def kv_pool_tokens(
    shape: ModelSize, gpu: str = MEASURED_GPU, tp: int = MEASURED_NUM_GPUS, memory_fraction: float = 0.9
) -> float:
    """Tokens of cache beside the weights when an engine may use `memory_fraction` of each GPU."""
    room = memory_fraction * gpu_spec(gpu).hbm_gb * 1e9 - shape.weight_bytes / tp
    if room <= 0:
        raise UserError(
            f"model {shape.name!r} needs {shape.weight_bytes / tp / 1e9:.1f} GB of weights "
            f"on each of {tp} {gpu}, more than {memory_fraction} of {gpu_spec(gpu).hbm_gb:g} GB; "
            "raise tp or memory_fraction"
        )
    return room / shape.kv_bytes_per_gpu_token(tp)


def predict_rollout(
    lengths: Sequence[float] | FloatArray | IntArray,
    model: str | ModelSize | RolloutCosts,
    num_workers: int = 1,
    *,
    gpu: str = MEASURED_GPU,
    tp: int = MEASURED_NUM_GPUS,
    prompt_tokens: float = 100.0,
    group_size: int = 1,
    max_new_tokens: int = 8192,
    limits: EngineLimits | None = None,
    extra_turns: int = 0,
    tools: ToolCalls | None = None,
    is_first: bool = False,
) -> RolloutPrediction:
    """Seconds of the rollout that generates `lengths` tokens per sequence, all submitted at the start.

    `lengths` are in submission order; consecutive `group_size` of them share a prompt and a worker, and
    groups go round the workers. `limits` defaults to the cache of an engine that has 0.9 of the device.
    """
    costs = model if isinstance(model, RolloutCosts) else rollout_costs(model, gpu, tp)
    sizes = np.maximum(np.asarray(lengths, dtype=np.float64).round().astype(np.int64), 1)
    if sizes.ndim != 1 or not sizes.size:
        raise UserError("lengths must be a non-empty list of token counts")
    if num_workers < 1 or group_size < 1:
        raise UserError(f"num_workers and group_size must be at least 1, not {num_workers} and {group_size}")
    limits = limits or EngineLimits(kv_pool_tokens=kv_pool_tokens(costs.shape, costs.gpu, costs.tp))
    job = _Job(
        costs=costs,
        limits=limits,
        prompt=prompt_tokens,
        group=group_size,
        budget=max(max_new_tokens, int(sizes.max())),
        turn_prefills=TURN_PREFILL_FRACTION * extra_turns / num_workers,
        start_s=costs.host.rollout_s + (costs.host.first_rollout_s if is_first else 0.0),
    )
    groups = np.arange(sizes.size) // group_size
    by_worker = [sizes[groups % num_workers == worker] for worker in range(num_workers)]
    workers = tuple(_run(job, mine) for mine in by_worker if mine.size)
    engine_s = max(worker.seconds for worker in workers)
    # The engine decodes while other sequences wait for their tools: only what does not fit beside it is added.
    tool_s = max(0.0, tools.busy_s - engine_s) if tools else 0.0
    return RolloutPrediction(seconds=engine_s + tool_s, tool_s=tool_s, workers=workers)


# --- one worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    costs: RolloutCosts
    limits: EngineLimits
    prompt: float
    group: int
    budget: int
    turn_prefills: float
    start_s: float

    @property
    def held_prompt(self) -> float:
        """Cache that one sequence's prompt takes when its group shares it."""
        return self.prompt / self.group


def _run(job: _Job, lengths: IntArray) -> WorkerRollout:
    everything = lengths.size * (job.held_prompt + min(job.budget, job.limits.reserve_clip_tokens))
    if lengths.size <= job.limits.max_active and everything <= job.limits.kv_pool_tokens:
        return _all_at_once(job, lengths)
    return _admitting(job, lengths)


def _all_at_once(job: _Job, lengths: IntArray) -> WorkerRollout:
    ends, counts = np.unique(lengths, return_counts=True)
    active = lengths.size - np.concatenate([[0], np.cumsum(counts)[:-1]])
    begins = np.concatenate([[0], ends[:-1]])
    tokens = np.zeros(ends.size)
    tokens[0] = lengths.size * job.held_prompt
    return _summed(job, lengths, ends - begins, active, begins + job.prompt, tokens, tokens > 0)


def _admitting(job: _Job, lengths: IntArray) -> WorkerRollout:
    """One pass per moment at which the running set can change: sequences end, or the cache is full.

    The engine looks at its waiting ones only after something ended.
    """
    limits, n = job.limits, lengths.size
    done = np.zeros(n, dtype=np.int64)
    waiting = deque(range(n))
    running = np.zeros(0, dtype=np.int64)
    reserve = limits.reserve_start
    is_open = True
    spans: list[tuple[int, int, float, int, float]] = []
    while waiting or running.size:
        count, prefill_tokens = 0, 0.0
        if waiting and (is_open or not running.size):
            admitted = _admissible(job, lengths, done, running, waiting, reserve)
            count, prefill_tokens = (
                len(admitted),
                float(done[admitted].sum()) + len(admitted) * job.held_prompt,
            )
            running = np.concatenate([running, np.array(admitted, dtype=np.int64)])
            is_open = False
        progress = done[running]
        total = float(progress.sum())
        ending = int((lengths[running] - progress).min())
        held = total + running.size * job.held_prompt
        length = ending
        if math.isfinite(limits.kv_pool_tokens) and running.size > 1:
            length = min(ending, max(int((limits.kv_pool_tokens - held) // running.size), 0))
        if length > 0:
            spans.append((length, running.size, total / running.size + job.prompt, count, prefill_tokens))
        progress += length
        done[running] = progress
        reserve = max(reserve - limits.reserve_decay * length, min(limits.reserve_floor, limits.reserve_start))
        if length == ending:
            running = running[progress < lengths[running]]
            is_open = True
        if length < ending:
            running, evicted = _preempted(job, done, running)
            waiting.extend(evicted)
            if limits.reserve_start > 0:
                # The engine learns from running out: it now reserves what its sequences turned out to use.
                used = float(done[running].sum()) + limits.preempt_room * running.size
                reserve = min(1.0, used / (running.size * job.budget))
    durations, active, contexts, admitted_counts, tokens = (np.array(c) for c in zip(*spans, strict=True))
    return _summed(job, lengths, durations, active, contexts, tokens, admitted_counts > 0)


def _admissible(
    job: _Job, lengths: IntArray, done: IntArray, running: IntArray, waiting: deque[int], reserve: float
) -> list[int]:
    """Take from the front of `waiting` as many as fit; an empty engine takes at least one."""
    limits = job.limits
    clip = limits.reserve_clip_tokens
    progress = done[running]
    held = float(np.minimum(job.budget - progress, clip).sum()) * reserve
    held += float(progress.sum()) + running.size * job.held_prompt
    taken: list[int] = []
    while waiting and running.size + len(taken) < limits.max_active:
        first = waiting[0]
        ahead = min(job.budget - int(done[first]), clip) if limits.reserve_start > 0 else 0
        need = job.held_prompt + int(done[first]) + ahead
        if held + need > limits.kv_pool_tokens and (running.size or taken):
            break
        held += need
        taken.append(waiting.popleft())
    return taken


def _preempted(job: _Job, done: IntArray, running: IntArray) -> tuple[IntArray, list[int]]:
    """Put out the sequences with the least progress until the rest has room; their cache is rebuilt later."""
    order = running[np.argsort(done[running], kind="stable")]
    held = done[order] + job.held_prompt + job.limits.preempt_room
    total = float(held.sum())
    first_kept = 0
    while first_kept < order.size - 1 and total > job.limits.kv_pool_tokens:
        total -= float(held[first_kept])
        first_kept += 1
    evicted = order[:first_kept]
    return running[~np.isin(running, evicted)], [int(i) for i in evicted]


def _summed(
    job: _Job,
    lengths: IntArray,
    durations: IntArray,
    active: IntArray,
    contexts: FloatArray,
    prefill_tokens: FloatArray,
    is_admitting: npt.NDArray[np.bool_],
) -> WorkerRollout:
    """Turn spans of decode iterations into seconds; `prefill_tokens` are prefilled at the start of each span."""
    host, decode, prefill = job.costs.host, job.costs.decode, job.costs.prefill
    decode_by_span = np.array(
        [decode.span_s(a, c, d) for a, c, d in zip(active, contexts, durations, strict=True)],
        dtype=np.float64,
    )
    prefills_by_span = np.where(is_admitting, np.maximum(np.ceil(prefill_tokens / prefill.chunk_tokens), 1), 0.0)
    prefill_by_span = (prefills_by_span * prefill.fixed_ms + prefill.ktoken_ms * prefill_tokens * 1e-3) * 1e-3
    # A later turn prefills little more than its own message; such iterations fall anywhere in the rollout.
    prefill_by_span += job.turn_prefills / durations.size * prefill.fixed_ms * 1e-3
    prefills_by_span += job.turn_prefills / durations.size
    span_tokens = (active * durations).astype(np.float64)
    host_by_span = durations * host.iteration_ms * 1e-3 + span_tokens * host.token_us * 1e-6
    host_by_span += prefills_by_span * (host.iteration_ms + host.prefill_ms) * 1e-3
    spans_s = decode_by_span + prefill_by_span + host_by_span
    # The first span's admission comes before anything decodes.
    first_s = job.start_s + float(prefill_by_span[0])
    spans_s[0] -= prefill_by_span[0]
    times = first_s + np.concatenate([[0.0], np.cumsum(spans_s)])
    return WorkerRollout(
        seconds=float(times[-1]),
        decode_s=float(decode_by_span.sum()),
        prefill_s=float(prefill_by_span.sum()),
        host_s=float(host_by_span.sum()) + job.start_s,
        num_iterations=int(durations.sum()),
        num_prefills=round(float(prefills_by_span.sum())),
        peak_active=int(active.max()),
        tokens=int(lengths.sum()),
        times_s=times,
        active=active.astype(np.int64),
        span_tokens=span_tokens,
    )


def _active_at(worker: WorkerRollout, moments: FloatArray) -> IntArray:
    index = np.searchsorted(worker.times_s, moments, side="right") - 1
    padded = np.concatenate([worker.active, [0]])
    return np.where(index < 0, 0, padded[np.minimum(index, worker.active.size)])
