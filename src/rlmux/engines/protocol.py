"""What the runtime asks of an engine. Engines are passive: every call is bounded and returns.

    safe point = a call's return       to pause = not to call again       a lost worker = a call that raises

Neither protocol knows who shares the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlmux.rl.types import (
    ChunkReport,
    PartialTrajectory,
    TrainingBatch,
    TrainReport,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)


class RolloutEngine(Protocol):
    """Samples trajectories in fixed slots with continuous batching."""

    def submit(self, requests: Sequence[TrajectoryRequest]) -> None:
        """Queue trajectories; they take slots in the order given."""

    def reply(self, replies: Sequence[TurnReply], released: Sequence[TrajectoryId]) -> None:
        """Go on with parked trajectories, or give up the slots of those that are over."""

    def run_chunk(self, *, max_decode_steps: int, max_seconds: float, stop_active: int = 0) -> ChunkReport:
        """Decode until a limit is reached, nothing can decode, or at most `stop_active` are active and none wait."""

    def take_partials(self, ids: Sequence[TrajectoryId] | None, *, with_kv: bool) -> list[PartialTrajectory]:
        """Remove unfinished trajectories (all of them for None), in id order."""

    def continue_from(self, partials: Sequence[PartialTrajectory]) -> None:
        """Queue trajectories begun elsewhere; they go on where they stopped."""

    def load_weights(self, path: Path, version: int) -> None:
        """Take the weights of a safetensors file; refused while trajectories of a sync pipeline are unfinished."""

    def load(self) -> None:
        """Host to device. Does nothing when already there."""

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host: weights move, KV of unfinished trajectories too."""

    def prefetch(self) -> None:
        """Begin to read ahead what went to disk, so that `load` waits less. Returns at once."""

    def resident_bytes(self) -> int:
        """Device bytes held now."""


class TrainEngine(Protocol):
    """Trains one pipeline's model; one step is a sequence of stages, each a series of bounded calls."""

    def begin_step(self, batch: TrainingBatch) -> None:
        """Take the batch of a step; asserts its staleness bound token by token."""

    def run_stage(self, stage: str, *, max_seconds: float) -> TrainReport:
        """Work on `warm_start`, `reference_logprobs`, `old_logprobs` or `update` until done or out of time."""

    def export_weights(self, path: Path) -> int:
        """Write the weights for rollout workers (safetensors, atomically); returns their version."""

    def weights_sha256(self) -> str:
        """Hash of all parameters in name order."""

    def save(self, folder: Path) -> None:
        """Checkpoint: Hugging Face layout plus optimizer and version, written aside, fsynced, renamed."""

    def restore(self, folder: Path) -> None:
        """Take over a checkpoint; the next step repeats bit for bit."""

    def load(self) -> None: ...

    def offload(self, *, spill_to: Path | None = None) -> None: ...

    def prefetch(self) -> None: ...

    def resident_bytes(self) -> int: ...
