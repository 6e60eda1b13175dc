"""What the controller needs of whatever runs the workers: an action in, the event that ends it out.

    controller ── execute(action) ──▶ Backend        starts it, never waits for it
    controller ◀── poll(timeout) ──── Backend        what has happened since

Implementations: `local` (processes on this machine), `ray_backend` (actors of a cluster, where that extra is
installed), and `fake_backend` (virtual durations, for tests of the controller). The first two share `worker_backend`
and pass the same conformance tests: those in tests/runtime that take `make_backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.actions import Action
from rlmux.core.events import Event
from rlmux.core.model import FailureCause, Pipeline, PipelineId
from rlmux.log.notes import Note
from rlmux.rl.config import TrainingConfig
from rlmux.rl.determinism_class import DeterminismClass
from rlmux.rl.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """What of a machine a device is."""

    gpus: tuple[str, ...] = ()
    """GPUs, as CUDA_VISIBLE_DEVICES names them."""
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How workers are run; none of it can change a result."""

    chunk_s: float = 0.5
    """Longest uninterrupted piece of work, in seconds: a Pause is served within it."""
    chunk_decode_steps: int = 1_000_000
    """Most decode steps in one chunk; tests that want many safe points lower it."""
    multi_turn_decode_steps: int = 8
    """Most decode steps in one chunk of a multi-turn task: finished turns wait that long for their environment."""
    call_limit_s: float = 120.0
    """Seconds within which a call must be answered or show life; otherwise the worker is lost."""
    checkpoint_every: int = 1
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """Number of checkpoints kept to fall back from damaged ones, beyond what staleness needs."""
    shares_devices: bool = False
    """Whether work of several pipelines may be on one device at once."""
    max_losses: int = 3
    """Deaths of one worker that its pipeline survives without publishing a new step in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """How often a pipeline that failed is tried again without a user's word."""

    any_reason: int = 0
    """Tries for whatever made it fail, in all."""
    by_cause: Mapping[FailureCause, int] = field(default_factory=dict)
    """Tries after each cause; none with `any_reason`."""

    @property
    def total(self) -> int:
        """Most tries that it gives."""
        return self.any_reason + sum(self.by_cause.values())

    def allows(self, cause: FailureCause, tries: Sequence[FailureCause]) -> bool:
        """Whether it gives another try after this failure. `tries`: causes of those that it gave before."""
        return len(tries) < self.any_reason or tries.count(cause) < self.by_cause.get(cause, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A pipeline as submitted to the runtime: what the scheduler and the workers need."""

    pipeline: Pipeline
    config: TrainingConfig
    submit_at_s: float = 0.0
    origin: Origin | None = None
    """Origin marked in the pipeline's files and checked when they are read; None: neither."""
    determinism_class: DeterminismClass | None = None
    """Weakest determinism class that is accepted; None accepts any."""
    inputs: Sequence[Path] = ()
    """Files of the user that the pipeline reads; a resumed run reports those that changed."""
    code_folder: Path | None = None
    """Folder that its env worker searches first for reward and environment modules; None: the process's search path."""
    call_limit_s: float | None = None
    """Per-pipeline override of `WorkerOptions.call_limit_s`; None uses the backend's value."""
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = None
    keeps_samples: bool = True
    """Whether its trajectories are kept as text."""
    retries: RetryRule = RetryRule()
    """How often it is tried again when it fails."""
    alerts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Overrides of `level` and `steps` by alert rule; None keeps the default."""

    def worker_options(self, options: WorkerOptions) -> WorkerOptions:
        """The backend's options with the pipeline's overrides."""
        own = {name: getattr(self, name) for name in ("call_limit_s", "checkpoint_every", "keep_checkpoints")}
        return replace(options, **{name: value for name, value in own.items() if value is not None})


class Backend(Protocol):
    """Carries out actions. Time is the backend's own: seconds since the run began, never going back."""

    def now_s(self) -> float:
        """Seconds since the run began."""

    def add_pipeline(self, submission: Submission) -> None:
        """Register a pipeline before it is submitted to the scheduler, again before one that failed is retried."""

    def execute(self, action: Action) -> None:
        """Start an action; an event from `poll` ends it."""

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        """Events and notes since the last poll, oldest first; waits up to `timeout_s` if there are none."""

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        """Hash of the weights of the newest checkpoint; None before the first one."""

    def close(self) -> None:
        """End every worker. Safe to call twice."""
