"""One admitted pipeline's processes and where they keep things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlmux.core.model import DeviceId, Phase, PipelineId, Placement
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Submission
from rlmux.runtime.call_loop import CallLoop, Work
from rlmux.runtime.checkpoints import CheckpointFolder
from rlmux.runtime.workplace import Worker


@dataclass(slots=True, eq=False)
class PipelineWorkers:
    """The processes of one pipeline since its last start; owned by the supervisor, read by the drivers."""

    submission: Submission
    placement: Placement
    folder: Path
    """The pipeline's folder in the run's: checkpoints and the workers' log."""
    weights: Path
    """The folder in shared memory where the trainer publishes."""
    checkpoints: CheckpointFolder
    env_worker: Worker
    trainer: Worker
    rollout: dict[DeviceId, Worker]
    train_devices: Sequence[DeviceId]
    """Devices of the training nodes."""
    log_path: Path
    """The file that all its processes write their output to."""
    furthest_step: int
    """The newest step ever published."""
    built: set[Worker] = field(default_factory=set)
    """Workers whose engine was built, or is being built (membership tests only)."""
    num_losses_by_worker: dict[str, int] = field(default_factory=dict)
    """Deaths by name of the worker, since `furthest_step` was published."""

    @property
    def id(self) -> PipelineId:
        return self.submission.pipeline.id

    @property
    def config(self) -> TrainingConfig:
        return self.submission.config

    @property
    def processes(self) -> list[Worker]:
        return [self.env_worker, self.trainer, *self.rollout.values()]

    def build(self, worker: Worker, calls: CallLoop) -> Work:
        """Have a worker build its engine, once: the first order on its device does, as it has the lease."""
        if worker not in self.built:
            self.built.add(worker)
            yield calls.call(worker, "build")

    def devices_of(self, worker: Worker) -> Sequence[DeviceId]:
        """Devices that the worker computes on; none for the env worker."""
        if worker is self.trainer:
            return self.train_devices
        return [device for device, other in self.rollout.items() if other is worker]

    def of_phase(self, phase: Phase, devices: Sequence[DeviceId]) -> list[Worker]:
        """The workers that hold the pipeline's state of a phase on these devices."""
        if phase is Phase.ROLLOUT:
            return [self.rollout[device] for device in devices if device in self.rollout]
        return [self.trainer]

    def weights_path(self, version: int) -> Path:
        """The file that rollout workers load a version from."""
        published = self.published_path(version)
        return published if published.exists() else self.checkpoints.weights(version)

    def published_path(self, version: int) -> Path:
        """The file that the trainer publishes a version to."""
        return self.weights / f"{version}.safetensors"
