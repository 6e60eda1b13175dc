"""What an engine can promise, measured with the engine itself on the device it is on.

    rollout   the same few trajectories, sampled again and again, must come out with the same tokens and log-probs:
                  repeat         as before                                 fails: statistical
                  slots          in other slots, beside others             fails: replayable
                  alone          one at a time                             fails: replayable
                  pause          one decode step a call                    fails: replayable
                  migration      moved half-way, with their KV cache       fails: replayable
                  recomputation  moved half-way, the cache computed anew   fails: the cache is always copied
    training  the gradient of a micro-batch must come out the same:
                  gradient       after another one                         fails: statistical

Trajectories have random prompts and no stop tokens; the engine is left as it was, with
the batch shapes that were measured on the way. A probe takes some hundred decode steps of a small batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError
from rlmux.engines.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.rollout import SlotRolloutEngine
from rlmux.engines.train import TorchTrainEngine
from rlmux.rl.promise import Check, ProbeReport
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest

NUM_TRAJECTORIES = 6
MAX_PROMPT_TOKENS = 24
MAX_NEW_TOKENS = 8
NUM_SEQUENCES = 8
"""Sequences of the micro-batch whose gradient is compared, where the pipeline's are not smaller."""
_LONGEST_SEQUENCE = {"cpu": 24, "cuda": 256}
"""Tokens of the longest of them. A GPU's attention splits its sums over blocks of tokens: one block shows nothing."""
_MANY = 1_000_000


Sampled = dict[TrajectoryId, FinishedTurn]


def probe_rollout(engine: SlotRolloutEngine) -> ProbeReport:
    """Compare the engine's own sampling under different schedules. Raises IllegalTransitionError for one at work."""
    if not engine.is_unused:
        raise IllegalTransitionError("a rollout engine that is offloaded or has trajectories was asked for a probe")
    began = time.perf_counter()
    requests = _requests(engine)
    expected = _together(engine, requests)
    backwards = requests[::-1]
    checks = [
        Check(
            name="repeat",
            failure="the same batch samples other bits when it is decoded again",
            is_equal=_together(engine, requests) == expected,
            is_repetition=True,
        ),
        Check(
            name="slots",
            failure="a trajectory samples other bits in another slot",
            is_equal=engine.is_schedule_exact and _together(engine, backwards) == expected,
        ),
        Check(
            name="alone",
            failure="a trajectory samples other bits alone than beside others",
            is_equal=all(_together(engine, [one])[one.id] == expected[one.id] for one in (requests[0], requests[-1])),
        ),
        Check(
            name="pause",
            failure="a rollout that is paused after each token samples other bits",
            is_equal=_one_by_one(engine, requests) == expected,
        ),
        Check(
            name="migration",
            failure="a trajectory that migrates with its KV cache samples other bits",
            is_equal=_migrated(engine, requests, with_kv=True) == expected,
        ),
        Check(
            name="recomputation",
            failure="a trajectory whose KV cache is computed anew samples other bits: prefill and decode differ",
            is_equal=_migrated(engine, requests, with_kv=False) == expected,
            is_avoidable=True,
        ),
    ]
    return ProbeReport(checks=tuple(checks), seconds=time.perf_counter() - began)


def probe_training(engine: TorchTrainEngine) -> ProbeReport:
    """Compare the gradient of one micro-batch with itself, another one computed in between."""
    began = time.perf_counter()
    batches = _micro_batches(engine)
    first = _gradient_fingerprint(engine, batches[0])
    _gradient_fingerprint(engine, batches[1])
    again = _gradient_fingerprint(engine, batches[0])
    check = Check(
        name="gradient",
        failure="the same micro-batch has other gradients when it is computed again",
        is_equal=first == again,
        is_repetition=True,
    )
    return ProbeReport(checks=(check,), seconds=time.perf_counter() - began)


# --- rollout ----------------------------------------------------------------------------------------------------


def _requests(engine: SlotRolloutEngine) -> list[TrajectoryRequest]:
    """Random prompts of different lengths: the same for every engine of these limits."""
    limits, generator = engine.limits, random.Random(0)
    longest = min(limits.max_prompt_tokens, MAX_PROMPT_TOKENS)
    return [
        TrajectoryRequest(
            id=TrajectoryId(step=0, prompt=number, sample=0),
            prompt_tokens=tuple(
                generator.randrange(limits.vocab_size) for _ in range(1 + number * (longest - 1) // NUM_TRAJECTORIES)
            ),
            max_new_tokens=min(limits.max_new_tokens, MAX_NEW_TOKENS),
            stop_tokens=(),
            seed=0,
        )
        for number in range(NUM_TRAJECTORIES)
    ]


def _together(engine: SlotRolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    return _drain(engine, max_decode_steps=_MANY)


def _one_by_one(engine: SlotRolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    return _drain(engine, max_decode_steps=1)


def _migrated(engine: SlotRolloutEngine, requests: Sequence[TrajectoryRequest], *, with_kv: bool) -> Sampled:
    engine.submit(requests)
    half = max(1, requests[0].max_new_tokens // 2)
    finished = _by_id(engine.run_chunk(max_decode_steps=half, max_seconds=_MANY).finished)
    engine.continue_from(engine.take_partials(None, with_kv=with_kv)[::-1])
    return finished | _drain(engine, max_decode_steps=_MANY)


def _drain(engine: SlotRolloutEngine, *, max_decode_steps: int) -> Sampled:
    finished: Sampled = {}
    while engine.num_unfinished:
        finished |= _by_id(engine.run_chunk(max_decode_steps=max_decode_steps, max_seconds=_MANY).finished)
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
