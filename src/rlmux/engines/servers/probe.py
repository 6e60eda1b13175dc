"""What any rollout engine keeps of promise 1, found through the protocol alone.

    the same trajectories, sampled again and again, must come out with the same tokens and log-probs:
        repeat         all at once, once more                             fails: statistical
        batches        alone, and in batches of 1, 8, 255, 256, 257       fails: replayable
        shuffled       submitted in another order                         fails: replayable
        pause          held again and again                               fails: replayable
        recomputation  taken half-way, and continued from the tokens      fails: replayable
        residency      offloaded and loaded half-way                      fails: replayable

`num_trajectories` scales it: batches larger than that are left out. A server always recomputes the KV cache of what it
continues, so that check counts, unlike for our own engine (engines/promise_probe.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

from rlmux.core.errors import IllegalTransitionError
from rlmux.engines.rollout_protocol import RolloutEngine
from rlmux.rl.promise import Check, ProbeReport
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest

NUM_TRAJECTORIES = 64
FEW_TRAJECTORIES = 8
"""Trajectories of the probe that a worker makes of its own engine: it takes seconds."""
BATCH_SIZES = (1, 8, 255, 256, 257)
MAX_PROMPT_TOKENS = 24
MAX_NEW_TOKENS = 12
_MANY = 1_000_000
_LONG_S = 3600.0

Sampled = dict[TrajectoryId, FinishedTurn]


def probe_engine(
    engine: RolloutEngine,
    *,
    num_trajectories: int = FEW_TRAJECTORIES,
    is_recomputation_avoidable: bool = False,
) -> ProbeReport:
    """Compare the engine's own sampling under different schedules; it is left as it was.

    Raises IllegalTransitionError for an engine at work.
    """
    if not engine.is_unused:
        raise IllegalTransitionError("a rollout engine that is offloaded or has trajectories was asked for a probe")
    began = time.perf_counter()
    requests = _requests(engine, num_trajectories)
    expected = _together(engine, requests)
    shuffled = random.Random(1).sample(requests, len(requests))

    def check(name: str, failure: str, found: Sampled, **more: bool) -> Check:
        return Check(name=name, failure=failure, is_equal=found == expected, **more)

    checks = (
        check(
            "repeat",
            "the same batch samples other bits when it is decoded again",
            _together(engine, requests),
            is_repetition=True,
        ),
        check("batches", "a trajectory samples other bits in a batch of another size", _in_batches(engine, requests)),
        check("shuffled", "a trajectory samples other bits beside others", _together(engine, shuffled)),
        check("pause", "a rollout that is held again and again samples other bits", _held(engine, requests)),
        check(
            "recomputation",
            "a trajectory that goes on from its tokens samples other bits: prefill is not decode, or the noise differs",
            _continued(engine, requests),
            is_avoidable=is_recomputation_avoidable,
        ),
        check("residency", "a trajectory that was offloaded half-way samples other bits", _offloaded(engine, requests)),
    )
    return ProbeReport(checks=checks, seconds=time.perf_counter() - began)


def _requests(engine: RolloutEngine, num: int) -> list[TrajectoryRequest]:
    """Random prompts of different lengths: the same for every engine of these limits."""
    limits, generator = engine.limits, random.Random(0)
    longest = min(limits.max_prompt_tokens, MAX_PROMPT_TOKENS)
    return [
        TrajectoryRequest(
            id=TrajectoryId(step=0, prompt=number, sample=0),
            prompt_tokens=tuple(generator.randrange(limits.vocab_size) for _ in range(1 + number % longest)),
            max_new_tokens=min(limits.max_new_tokens, MAX_NEW_TOKENS),
            stop_tokens=(),
            seed=0,
        )
        for number in range(num)
    ]


def _together(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    return _drain(engine, max_seconds=_LONG_S)


def _in_batches(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    """The first two alone, the others in batches of every size that there are trajectories for."""
    found: Sampled = {}
    for size in BATCH_SIZES:
        if size <= len(requests):
            batches = requests[: 2 * size] if size == 1 else requests
            for first in range(0, len(batches), size):
                again = _together(engine, batches[first : first + size])
                for trajectory, turn in again.items():
                    if found.setdefault(trajectory, turn) != turn:
                        return {}
    return found


def _held(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    return _drain(engine, max_seconds=0.0)


def _continued(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    finished = _begun(engine, requests)
    engine.continue_from(engine.take_partials(None, with_kv=False)[::-1])
    return finished | _drain(engine, max_seconds=_LONG_S)


def _offloaded(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    finished = _begun(engine, requests)
    engine.offload()
    engine.load()
    return finished | _drain(engine, max_seconds=_LONG_S)


def _begun(engine: RolloutEngine, requests: Sequence[TrajectoryRequest]) -> Sampled:
    engine.submit(requests)
    half = max(1, requests[0].max_new_tokens // 2)
    return _by_id(engine.run_chunk(max_decode_steps=half, max_seconds=_LONG_S).finished)


def _drain(engine: RolloutEngine, *, max_seconds: float) -> Sampled:
    """Run until no trajectory is left; what waits for an environment is released."""
    finished: Sampled = {}
    while engine.num_unfinished:
        steps = _MANY if max_seconds else 1
        report = engine.run_chunk(max_decode_steps=steps, max_seconds=max_seconds or _LONG_S)
        finished |= _by_id(report.finished)
    return finished


def _by_id(turns: Iterable[FinishedTurn]) -> Sampled:
    return {turn.id: turn for turn in turns}
