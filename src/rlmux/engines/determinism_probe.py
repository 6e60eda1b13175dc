"""Probes an engine's determinism (promise 1) through its protocol alone, on its device.

    rollout   the same trajectories, sampled again and again, must come out with the same tokens and log-probs:
                  repeat         all at once, once more                             fails: statistical
                  batches        alone, and in batches of 1, 8, 255, 256, 257       fails: replayable
                  shuffled       submitted in another order, so in other slots      fails: replayable
                  pause          one decode step a call                             fails: replayable
                  migration      moved half-way, with their KV cache, where it can  fails: replayable
                  recomputation  moved half-way, from their tokens                  fails: replayable, where it cannot
                  residency      offloaded and loaded half-way                      fails: replayable
    training  the gradient of a micro-batch must come out the same:
                  gradient       after another one                                  fails: statistical

Batches larger than the number of trajectories are left out. Trajectories have random prompts and no stop tokens; the
engine is left as it was, with the batch shapes that were measured on the way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError
from rlmux.engines.rollout.protocol import RolloutEngine
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.rollout.tenants import TenantEngine
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.rl.determinism_class import ProbeCheck, ProbeReport
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest

NUM_TRAJECTORIES = 8
"""Trajectories of a worker's probe of its own engine, which takes seconds."""
BATCH_SIZES = (1, 8, 255, 256, 257)
MAX_PROMPT_TOKENS = 24
MAX_NEW_TOKENS = 8
NUM_SEQUENCES = 8
"""Sequences of the micro-batch whose gradient is compared, where the pipeline's are not smaller."""
_LONGEST_SEQUENCE = {"cpu": 24, "cuda": 256}
"""Tokens of the longest of them. A GPU's attention splits its sums over blocks of tokens: one block shows nothing."""
_MANY = 1_000_000
_LONG_S = 3600.0

Sampled = dict[TrajectoryId, FinishedTurn]


def probe_rollout(engine: RolloutEngine, *, num_trajectories: int = NUM_TRAJECTORIES) -> ProbeReport:
    """Compare the engine's sampling under different schedules. Raises IllegalTransitionError for a busy engine."""
    if not engine.is_unused:
        raise IllegalTransitionError("cannot probe a rollout engine that is offloaded or has trajectories")
    began = time.perf_counter()
    is_ours = isinstance(engine, SlotRolloutEngine | TenantEngine)
    requests = _requests(engine, num_trajectories)
    expected = _together(engine, requests)
    is_any_order_exact = not isinstance(engine, SlotRolloutEngine | TenantEngine) or engine.is_schedule_exact

    def check(name: str, failure: str, found: Sampled, **more: bool) -> ProbeCheck:
        return ProbeCheck(name=name, failure=failure, is_equal=found == expected, **more)

    checks = [
        check(
            "repeat",
            "the same batch samples other bits when it is decoded again",
            _together(engine, requests),
            is_repetition=True,
        ),
        check(
            "batches",
            "a trajectory samples other bits in a batch of another size",
            _in_batches(engine, requests, expected),
        ),
        check(
            "shuffled",
            "a trajectory samples other bits beside others, or in another slot",
            _together(engine, requests[::-1]) if is_any_order_exact else {},
        ),
        check("pause", "a rollout that is paused after each token samples other bits", _one_by_one(engine, requests)),
        check(
            "recomputation",
            "a trajectory that goes on from its tokens samples other bits: prefill is not decode, or the noise differs",
            _migrated(engine, requests, with_kv=False),
            is_avoidable=is_ours,
        ),
        check("residency", "a trajectory that was offloaded half-way samples other bits", _offloaded(engine, requests)),
    ]
    if is_ours:
        moved = _migrated(engine, requests, with_kv=True)
        checks.append(check("migration", "a trajectory that migrates with its KV cache samples other bits", moved))
    return ProbeReport(checks=tuple(checks), seconds=time.perf_counter() - began)


def probe_training(engine: TorchTrainEngine) -> ProbeReport:
    """Compare a micro-batch's gradient with itself after another micro-batch."""
    began = time.perf_counter()
    batches = _micro_batches(engine)
    first = _gradient_fingerprint(engine, batches[0])
    _gradient_fingerprint(engine, batches[1])
    again = _gradient_fingerprint(engine, batches[0])
    check = ProbeCheck(
        name="gradient",
        failure="the same micro-batch has other gradients when it is computed again",
        is_equal=first == again,
        is_repetition=True,
    )
    return ProbeReport(checks=(check,), seconds=time.perf_counter() - began)


# --- rollout ----------------------------------------------------------------------------------------------------


def _requests(engine: RolloutEngine, num: int) -> list[TrajectoryRequest]:
    """Random prompts of different lengths: the same for every engine of these limits."""
    limits, generator = engine.limits, random.Random(0)
    longest = min(limits.max_prompt_tokens, MAX_PROMPT_TOKENS)
    return [
        TrajectoryRequest(
            id=TrajectoryId(step=0, prompt=number, sample=0),
            prompt_tokens=tuple(generator.randrange(limits.vocab_size) for _ in range(1 + 5 * number % longest)),
            max_new_tokens=min(limits.max_new_tokens, MAX_NEW_TOKENS),
            stop_tokens=(),
            seed=0,
        )
        for number in range(num)
    ]


def _together(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    return _drain(engine, max_decode_steps=_MANY)


def _in_batches(engine: RolloutEngine, requests: Sequence[TrajectoryRequest], expected: Sampled) -> Sampled:
    """The first and the last alone, all in batches of every other size that there are trajectories for; nothing where a
    batch gives other bits than expected."""
    for size in BATCH_SIZES:
        if size <= len(requests):
            batches = [requests[0], requests[-1]] if size == 1 else requests
            for first in range(0, len(batches), size):
                again = _together(engine, batches[first : first + size])
                if any(expected[trajectory] != turn for trajectory, turn in again.items()):
                    return {}
    return expected


def _one_by_one(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    return _drain(engine, max_decode_steps=1)


def _migrated(engine: RolloutEngine, requests: Sequence[TrajectoryRequest], *, with_kv: bool) -> Sampled:
    finished = _begun(engine, requests)
    engine.continue_from(engine.take_partials(None, with_kv=with_kv)[::-1])
    return finished | _drain(engine, max_decode_steps=_MANY)


def _offloaded(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    finished = _begun(engine, requests)
    engine.offload()
    engine.load()
    return finished | _drain(engine, max_decode_steps=_MANY)


def _begun(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    half = max(1, requests[0].max_new_tokens // 2)
    return _by_id(engine.run_chunk(max_decode_steps=half, max_seconds=_LONG_S).finished)


def _drain(engine: RolloutEngine, *, max_decode_steps: int) -> Sampled:
    finished: Sampled = {}
    while engine.num_unfinished:
        finished |= _by_id(engine.run_chunk(max_decode_steps=max_decode_steps, max_seconds=_LONG_S).finished)
    return finished


def _by_id(turns: Iterable[FinishedTurn]) -> Sampled:
    return {turn.id: turn for turn in turns}


# --- training ---------------------------------------------------------------------------------------------------


def _micro_batches(engine: TorchTrainEngine) -> list[MicroBatch]:
    """Two micro-batches of random sequences of different lengths."""
    generator, size = random.Random(0), min(engine.micro_batch_size, NUM_SEQUENCES)
    longest = _LONGEST_SEQUENCE[engine.device_type]

    def tokens(count: int) -> list[int]:
        return [generator.randrange(engine.vocab_size) for _ in range(count)]

    sequences = [
        TrainingSequence(
            prompt_tokens=tokens(1 + number % 4),
            tokens=tokens(length := 4 + (longest - 4) * number // (2 * size)),
            is_sampled=[True] * length,
            weight=1.0 / length,
        )
        for number in range(2 * size)
    ]
    return cut(sequences, size)


def _gradient_fingerprint(engine: TorchTrainEngine, batch: MicroBatch) -> tuple[int, ...]:
    """Sums of the bits of the gradient of the weighted log-probs: a gradient of its own, held for a moment."""
    return tuple(part for gradient in engine.gradient_of(batch) for part in _sums_of_bits(gradient))


def _sums_of_bits(tensor: Tensor) -> tuple[int, int]:
    """Integer sums, whose order does not matter, of all elements' bits and of every other one's."""
    bits = tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16).flatten()
    return int(bits.sum(dtype=torch.int64)), int(bits[::2].sum(dtype=torch.int64))
