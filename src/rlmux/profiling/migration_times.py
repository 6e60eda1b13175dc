"""Measures how long the KV cache of a trajectory that migrates takes to be copied, and to be recomputed.

    copy        slot ─▶ host memory ─▶ bytes ─▶ controller ─▶ bytes ─▶ slot
    recompute   slot ─▶ tokens ──────▶ bytes ─▶ controller ─▶ bytes ─▶ prefill ─▶ slot

These are the calls of a migration in a run. One engine is source and target, so that the device holds the model once.
Trajectories have half of the longest prompt and half of the longest response. Rounds are interleaved, and medians
of them count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from statistics import median
from time import perf_counter

import torch

from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.profiling.step_estimates import model_of
from rlmux.profiling.switch_times import rollout_engine_of, unlike, worker_threads
from rlmux.rl.config import RolloutConfig, TrainingConfig
from rlmux.rl.types import PartialTrajectory, TrajectoryId, TrajectoryRequest
from rlmux.runtime.workers.packed_partials import packed, unpacked

_NUM_TRAJECTORIES = 8
_MOST_DECODED = 1024
"""Most response tokens that are decoded, so that a long limit does not make a long measurement."""
_LONG_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationTimes:
    """Seconds that a trajectory's KV cache takes to reach another rollout engine on a device of this kind."""

    model: str
    """The measured model, as `model_of` describes it."""
    num_slots: int
    """Slots of the measured engine."""
    context_tokens: float
    """Tokens of each trajectory's context."""
    kv_bytes_per_token: float
    """Bytes of KV for each token of context."""
    copy_s_per_token: float
    """Seconds to copy the KV, for each token of context."""
    recompute_s_per_token: float
    """Seconds to recompute the KV from the tokens, for each token of context."""
    is_recompute_exact: bool
    """Whether recomputed KV had the bits of decoded KV."""


def expected_context(rollout: RolloutConfig) -> int:
    """Tokens of context with which a trajectory is expected to migrate: half a prompt and half a response at most."""
    return max(1, rollout.max_prompt_tokens // 2 + rollout.max_new_tokens // 2)


def measure_migrations(
    configs: Sequence[TrainingConfig],
    device: str,
    *,
    num_rounds: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, MigrationTimes]:
    """Migration times by pipeline; pipelines that are alike are measured once, under the first one's name.

    `progress`: called with (pipelines done, pipelines in all).
    """
    measured = {}
    pipelines = unlike(configs)
    for config in pipelines:
        measured[config.name] = migration_times(config, device, num_rounds=num_rounds)
        if progress is not None:
            progress(len(measured), len(pipelines))
    return measured


def migration_times(config: TrainingConfig, device: str, *, num_rounds: int = 5) -> MigrationTimes:
    """Times of the config's rollout engine; one round before the others is not counted."""
    rollout = replace(
        config.rollout,
        max_prompt_tokens=max(2, config.rollout.max_prompt_tokens),
        max_new_tokens=max(2, config.rollout.max_new_tokens),
    )
    with worker_threads(config.train.num_threads):
        engine = rollout_engine_of(replace(config, rollout=rollout), device)()
        engine.submit(_requests(engine, rollout))
        engine.run_chunk(max_decode_steps=min(rollout.max_new_tokens // 2, _MOST_DECODED), max_seconds=_LONG_S)
        rounds = [_round(engine) for _ in range(num_rounds + 1)][1:]
        taken = engine.take_partials(None, with_kv=True)
    num_tokens = sum(partial.kv.shape[3] for partial in taken if partial.kv is not None)
    num_bytes = sum(partial.kv.nbytes for partial in taken if partial.kv is not None)
    copy_s, recompute_s, are_equal = zip(*rounds, strict=True)
    return MigrationTimes(
        model=model_of(config),
        num_slots=config.rollout.num_slots,
        context_tokens=num_tokens / len(taken),
        kv_bytes_per_token=num_bytes / num_tokens,
        copy_s_per_token=median(copy_s) / num_tokens,
        recompute_s_per_token=median(recompute_s) / num_tokens,
        is_recompute_exact=all(are_equal),
    )


def _requests(engine: SlotRolloutEngine, rollout: RolloutConfig) -> list[TrajectoryRequest]:
    """As many as migrate at once, with random prompts; none of them stops early."""
    generator = random.Random(0)
    return [
        TrajectoryRequest(
            id=TrajectoryId(step=0, prompt=number, sample=0),
            prompt_tokens=tuple(
                generator.randrange(engine.limits.vocab_size) for _ in range(max(2, rollout.max_prompt_tokens // 2))
            ),
            max_new_tokens=rollout.max_new_tokens,
            stop_tokens=(),
            seed=0,
        )
        for number in range(min(rollout.num_slots, _NUM_TRAJECTORIES))
    ]


def _round(engine: SlotRolloutEngine) -> tuple[float, float, bool]:
    """(seconds to copy, seconds to recompute, whether both have the same bits); the engine is left as it was."""
    copy_s, decoded = _migrated(engine, with_kv=True)
    recompute_s, _ = _migrated(engine, with_kv=False)
    recomputed = engine.take_partials(None, with_kv=True)
    are_equal = all(torch.equal(first.kv, other.kv) for first, other in zip(decoded, recomputed, strict=True))  # type: ignore[arg-type]
    engine.continue_from(decoded)
    engine.run_chunk(max_decode_steps=0, max_seconds=_LONG_S)
    return copy_s, recompute_s, are_equal


def _migrated(engine: SlotRolloutEngine, *, with_kv: bool) -> tuple[float, list[PartialTrajectory]]:
    """(seconds of a migration, the trajectories that left)."""
    start = perf_counter()
    taken = engine.take_partials(None, with_kv=with_kv)
    at_controller = _sent([packed(partial) for partial in taken])
    engine.continue_from([unpacked(partial) for partial in _sent(at_controller)])
    engine.run_chunk(max_decode_steps=0, max_seconds=_LONG_S)  # seats them, and decodes nothing
    return perf_counter() - start, taken


def _sent(partials: list[PartialTrajectory]) -> list[PartialTrajectory]:
    """The trajectories after a way between two processes, which is through a pipe."""
    receiver, sender = Pipe()
    with receiver, sender, ThreadPoolExecutor(1) as pool:
        pool.submit(sender.send, partials)
        received: list[PartialTrajectory] = receiver.recv()
    return received
