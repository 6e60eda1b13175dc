"""Calls from drivers to workers and their results: frozen values that cross processes.

RolloutChunk ──▶ RolloutWorker.run_chunk ──▶ RolloutChunkResult
TrainCall    ──▶ TrainWorker.run_stage   ──▶ TrainCallResult ── of all ranks ──▶ joined
                 EnvWorker.finish_step   ──▶ StepBatch
                 a tenant's build        ──▶ AdapterRoom
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmux.core.model import Stage
from rlmux.log.notes import StepNote
from rlmux.rl.batch_metrics import BatchMetrics
from rlmux.rl.packed_turns import NO_TURNS, PackedTurns
from rlmux.rl.types import (
    ChunkReport,
    PartialTrajectory,
    TrainReport,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)
from rlmux.runtime.weights.checkpoints import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChunk:
    """The argument of one bounded call of a rollout worker, with everything that must happen before it decodes."""

    weights: tuple[Path, int] | None
    """(file, version) to load first."""
    published: str | None = None
    """Checksum that the trainer published for that file; None: not known."""
    requests: Sequence[TrajectoryRequest]
    partials: Sequence[PartialTrajectory]
    replies: Sequence[TurnReply]
    released: Sequence[TrajectoryId]
    max_decode_steps: int
    max_seconds: float
    is_load_needed: bool
    device_fraction: float = 1.0
    """Device fraction of the worker, from this call on."""
    cut: Sequence[TrajectoryId] = ()
    """Unfinished trajectories to forget."""
    hands_back: bool = False
    """Whether all that is unfinished leaves the worker, and nothing is decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChunkResult:
    """The answer to a RolloutChunk."""

    report: ChunkReport
    """The engine's report, without the turns."""
    load_s: float
    """Seconds of loading state and weights."""
    turns: PackedTurns = NO_TURNS
    """Turns that the chunk finished."""
    input_s: float = 0.0
    """Seconds of taking in requests, replies and migrated trajectories, before the report's own."""
    partials: Sequence[PartialTrajectory] | None = None
    """Returned trajectories, without KV; None if `hands_back` was off."""
    loaded: str | None = None
    """Checksum of the loaded weights, verified by the engine; None if none were loaded, or the engine reports none."""
    num_together: int = 1
    """Pipelines whose tokens the chunk computed in one batch."""
    token_share: float = 1.0
    """The pipeline's share of these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """The answer to a tenant's `build`: its bytes on the device beside the shared base, and what is left there."""

    state_bytes: int
    """Device bytes of the tenant's own state, as built."""
    free_bytes: int
    """Free bytes afterwards: of the GPU, or of the machine where devices are cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOut:
    """What a train worker writes of its weights in the last call of a step, while it still has its device."""

    weights: Path
    """File for rollout workers."""
    writers: tuple[int, ...]
    """Ranks that write that file, each on its machine; the first of all is among them."""
    checkpoint: Path | None
    """Folder of the checkpoint that is written beside what comes next; None: this step has none."""
    num_kept: int
    """Number of checkpoints kept once this one is durable."""
    note: StepNote | None = None
    """Note of the step, for the checkpoint, but for what this call adds; None for the SFT warm-up, and without a
    checkpoint."""

    def whole_note(self, report: TrainReport, checksum: str, file_checksum: str) -> StepNote | None:
        """The note with the figures of the step's last call and the sums of its weights, as the driver writes it."""
        if self.note is None or self.note.delivery is None:
            return None
        published = {**self.note.delivery.published, self.note.step: sorted({checksum, file_checksum})}
        return replace(
            self.note,
            metrics={**self.note.metrics, **noted_metrics(report.metrics)},
            weights_checksum=checksum,
            delivery=replace(self.note.delivery, published=published),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCall:
    """The argument of one bounded call of a train worker, with everything that must happen before it trains."""

    stage: Stage
    payload: bytes | None = None
    """A pickled TrainingBatch, with which its step begins; None: the step is under way, or the stage needs no batch."""
    max_logprob_gap: float = math.inf
    """Nats by which that batch's log-probs may differ from the trainer's, as `TorchTrainEngine.begin_step` takes it."""
    max_seconds: float
    is_load_needed: bool
    device_fraction: float = 1.0
    """Device fraction of the worker, from this call on."""
    hand_out: HandOut | None = None
    """Handing out of the weights at the end of the stage; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCallResult:
    """The answer to a TrainCall."""

    report: TrainReport
    load_s: float
    """Seconds of loading state."""
    input_s: float = 0.0
    """Seconds of taking in the step's batch, before the report's own."""
    hand_out_s: float = 0.0
    """Seconds of handing out the weights, after the report's own."""
    weights_checksum: str | None = None
    """Checksum of the weights that were handed out; None if none were."""
    file_checksum: str | None = None
    """Checksum in the file for rollout workers; another than `weights_checksum` if the model computes in bfloat16."""
    written: Sequence[Written] = ()
    """Durable checkpoints since the last report."""
    num_together: int = 1
    """Pipelines whose micro-batches the call computed together."""
    token_share: float = 1.0
    """The pipeline's share of their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOver:
    """The env worker's input for a step's batch."""

    ids: Sequence[TrajectoryId]
    """Trajectories to train on, in id order."""
    backlog: bytes
    """A packed `Backlog`: the state from which the next step continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A scored step, as the env worker hands it over."""

    payload: bytes
    """A pickled TrainingBatch, made and read by our own workers."""
    metrics: BatchMetrics


def noted_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """A stage's figures as the log has them: None where there was nothing to measure."""
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def joined(results: Sequence[TrainCallResult]) -> TrainCallResult:
    """The combined result of a call of all ranks, in rank order: the seconds of the last rank, and all tokens."""
    first = results[0]
    slowest = max(results, key=lambda rank: rank.load_s + rank.input_s + rank.report.seconds + rank.hand_out_s)
    tokens = sum(result.report.tokens for result in results)
    return replace(
        first,
        report=replace(first.report, tokens=tokens, seconds=slowest.report.seconds),
        load_s=slowest.load_s,
        input_s=slowest.input_s,
        hand_out_s=slowest.hand_out_s,
    )
