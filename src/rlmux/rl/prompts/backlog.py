"""State of an interruptible rollout after a step: its clock, and the trajectories that are not trained on yet.

    controller ── packed ──▶ TrainingBatch.backlog ──▶ backlog.bin of the step's checkpoint ──▶ the next start

    packed:   length of the header (8 bytes)   header (JSON)   tokens (int32)   log-probs (float64)

Invariant: packing loses nothing, to the last bit of a log-prob. Nothing is pickled. All trajectories are of one turn.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from rlmux.core.errors import CheckpointError
from rlmux.rl.prompts.epoch_clock import ClockState
from rlmux.rl.types import TrajectoryId

BACKLOG_FILE = "backlog.bin"
"""Name of the backlog's file in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The sampled part of a trajectory's response."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token when it was sampled."""
    versions: tuple[int, ...]
    """Weight version that made each token."""
    stop_reason: str | None
    """As in `FinishedTurn`; None for an unfinished one."""

    def first(self, num_tokens: int) -> SampledTokens:
        """Its first `num_tokens` tokens, unfinished."""
        return SampledTokens(
            tokens=self.tokens[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            versions=self.versions[:num_tokens],
            stop_reason=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Between two steps."""

    clock: ClockState = field(default_factory=ClockState)
    sampled: Mapping[TrajectoryId, SampledTokens] = field(default_factory=dict)
    """Responses of trajectories that have ended, or that have a slot and a token."""

    def pack(self) -> bytes:
        parts = list(self.sampled.values())
        rows = [[*id[:3], part.stop_reason, _runs(part.versions)] for id, part in self.sampled.items()]
        header = json.dumps({"clock": self.clock.fields(), "sampled": rows}).encode()
        tokens = array("i", chain.from_iterable(part.tokens for part in parts))
        logprobs = array("d", chain.from_iterable(part.logprobs for part in parts))
        if sys.byteorder == "big":
            tokens.byteswap()
            logprobs.byteswap()
        return b"".join([len(header).to_bytes(8, "little"), header, tokens.tobytes(), logprobs.tobytes()])

    @classmethod
    def unpack(cls, packed: bytes, where: str) -> Backlog:
        """Raises CheckpointError, beginning with `where`, for anything else."""
        try:
            header, start = _header_of(packed)
            counts = [sum(count for _, count in row[4]) for row in header["sampled"]]
            tokens, logprobs = array("i"), array("d")
            middle = start + tokens.itemsize * sum(counts)
            tokens.frombytes(packed[start:middle])
            logprobs.frombytes(packed[middle:])
            if len(logprobs) != sum(counts):
                raise ValueError(f"{len(logprobs)} log-probs for {sum(counts)} tokens")
            if sys.byteorder == "big":
                tokens.byteswap()
                logprobs.byteswap()
            sampled = dict(_sampled(header["sampled"], tokens, logprobs))
            return cls(clock=ClockState.of_fields(header["clock"]), sampled=sampled)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{where} is no backlog of a rollout: {type(error).__name__}: {error}") from error


def num_trajectories_of(packed: bytes) -> int:
    """Trajectories of a packed backlog: those that have a slot, and those that have ended."""
    clock = _header_of(packed)[0]["clock"]
    return len(clock["tokens_by_seated"]) + len(clock["ended"])


def _header_of(packed: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    start = 8 + int.from_bytes(packed[:8], "little")
    return json.loads(packed[8:start]), start


def _runs(versions: Sequence[int]) -> list[list[int]]:
    """[version, tokens in a row] of each run."""
    return [[version, len(list(run))] for version, run in groupby(versions)]


def _sampled(
    rows: Sequence[Sequence[Any]], tokens: Sequence[int], logprobs: Sequence[float]
) -> Iterator[tuple[TrajectoryId, SampledTokens]]:
    first = 0
    for step, prompt, sample, stop_reason, runs in rows:
        versions = tuple(version for version, count in runs for _ in range(count))
        last = first + len(versions)
        part = SampledTokens(
            tokens=tuple(tokens[first:last]),
            logprobs=tuple(logprobs[first:last]),
            versions=versions,
            stop_reason=stop_reason,
        )
        yield TrajectoryId(step, prompt, sample), part
        first = last
