"""The protocol of all rollout engines, ours and servers, and all that workers and probes use.

    submit / continue_from ──▶ waiting ──▶ decoding ──▶ FinishedTurn ──▶ reply, or released
                                  ▲            │
                                  └────────────┴── take_partials, offload: tokens and log-probs stay, KV may go

    SlotRolloutEngine     engines/rollout/slot_engine.py     in the worker's process; KV can migrate
    ServerRolloutEngine   engines/servers/server_engine.py   vLLM or SGLang in a process of its own; KV is recomputed

An engine's determinism (promise 1) is not part of the protocol: it is probed (engines/determinism_probe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlmux.engines.rollout.request_limits import RequestLimits
from rlmux.rl.types import ChunkReport, PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply


class RolloutEngine(Protocol):
    """Samples trajectories with one model on one device. Nothing is computed outside `run_chunk`."""

    @property
    def version(self) -> int:
        """Weight version of the next token."""

    @property
    def limits(self) -> RequestLimits:
        """Sizes of the engine."""

    @property
    def is_unused(self) -> bool:
        """Whether it is loaded and has no trajectory."""

    @property
    def num_unfinished(self) -> int:
        """Unfinished trajectories of the engine."""

    def submit(self, requests: Sequence[TrajectoryRequest]) -> None:
        """Queue new trajectories. Raises UserError for a request that cannot run, before any is taken."""

    def continue_from(self, partials: Sequence[PartialTrajectory]) -> None:
        """Queue unfinished trajectories of another engine."""

    def reply(self, replies: Sequence[TurnReply], released: Sequence[TrajectoryId]) -> None:
        """Continue trajectories with their environment's replies; drop finished ones."""

    def take_partials(self, ids: Sequence[TrajectoryId] | None, *, with_kv: bool) -> list[PartialTrajectory]:
        """Remove unfinished trajectories (None: all), in id order; also while offloaded."""

    def run_chunk(self, *, max_decode_steps: int, max_seconds: float) -> ChunkReport:
        """Decode until nothing is left to decode or a limit is reached; its return is a safe point."""

    def load_weights(self, path: Path, version: int) -> None:
        """Load weights from a safetensors file; also while offloaded."""

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Leave the device, with unfinished trajectories. Does nothing when offloaded."""

    def load(self) -> None:
        """Come back to the device. Does nothing when already there."""

    def resident_bytes(self) -> int:
        """Device bytes that the engine holds."""
