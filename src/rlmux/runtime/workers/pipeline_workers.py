"""One admitted pipeline's processes and paths."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmux.core.model import DeviceId, Phase, PipelineId, Placement
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Submission
from rlmux.runtime.weights.checkpoints import CheckpointStore
from rlmux.runtime.workers.call_loop import CallLoop, Future, Work
from rlmux.runtime.workers.worker_calls import AdapterRoom
from rlmux.runtime.workers.worker_pool import Worker


@dataclass(slots=True, eq=False)
class PipelineWorkers:
    """The processes of one pipeline since its last start; owned by the supervisor, read by the drivers."""

    submission: Submission
    placement: Placement
    folder: Path
    """The pipeline's folder in the run's: checkpoints and the workers' log."""
    weights: Path
    """The folder in shared memory where the trainer publishes."""
    checkpoints: CheckpointStore
    env_worker: Worker
    trainers: Sequence[Worker]
    """One for each training rank; the first publishes and writes checkpoints. None for a filler."""
    rollout: dict[DeviceId, Worker]
    train_devices: Sequence[DeviceId]
    """Devices of the training nodes."""
    log_path: Path
    """The file that all its processes write their output to."""
    furthest_step: int
    """The newest step ever published."""
    note_room: Callable[[Worker, AdapterRoom | None], None]
    """Called with the answer to a worker's `build`; None for one that is no tenant."""
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
    def trainer(self) -> Worker:
        """The first of its training ranks."""
        return self.trainers[0]

    @property
    def processes(self) -> list[Worker]:
        return [self.env_worker, *self.trainers, *self.rollout.values()]

    def build(self, worker: Worker, calls: CallLoop) -> Work:
        """Build a worker's engine, once, under the first order on its device, which has the lease."""
        if worker not in self.built:
            self.built.add(worker)
            self.note_room(worker, (yield calls.call(worker, "build")))

    def build_trainers(self, calls: CallLoop) -> Work:
        """Build the engines of all ranks, once, and connect the ranks."""
        new = [worker for worker in self.trainers if worker not in self.built]
        self.built.update(new)
        for worker, room in zip(new, (yield from all_of([calls.call(worker, "build") for worker in new])), strict=True):
            self.note_room(worker, room)
        count = len(self.trainers)
        if not new or count == 1:
            return
        store = yield calls.call(self.trainer, "open_rank_store", self.trainer.address)
        joining = [
            calls.call(worker, "join_ranks", store, rank, count, worker.address)
            for rank, worker in enumerate(self.trainers)
        ]
        yield from all_of(joining)

    def devices_of(self, worker: Worker) -> Sequence[DeviceId]:
        """Devices that the worker computes on; none for the env worker."""
        if worker in self.trainers:
            return rank_devices(self.train_devices, self.trainers.index(worker), len(self.trainers))
        return [device for device, other in self.rollout.items() if other is worker]

    def of_phase(self, phase: Phase, devices: Sequence[DeviceId]) -> list[Worker]:
        """The workers that hold the pipeline's state of a phase on these devices."""
        if phase is Phase.ROLLOUT:
            return [self.rollout[device] for device in devices if device in self.rollout]
        return [worker for worker in self.trainers if not set(devices).isdisjoint(self.devices_of(worker))]

    def weights_path(self, version: int) -> Path:
        """The file that rollout workers load a version from."""
        published = self.published_path(version)
        return published if published.exists() else self.checkpoints.weights(version)

    def published_path(self, version: int) -> Path:
        """The file that the trainer publishes a version to."""
        return self.weights / f"{version}.safetensors"


def rank_devices(train_devices: Sequence[DeviceId], rank: int, count: int) -> Sequence[DeviceId]:
    """Devices of a rank, which computes on the first. With several devices a node, a rank has a whole node."""
    per_rank = len(train_devices) // count
    return train_devices[rank * per_rank : (rank + 1) * per_rank]


def all_of(answers: Sequence[Future]) -> Generator[Future, Any, list[Any]]:
    """The results of concurrent calls, once all have arrived."""
    results = []
    for answer in answers:
        results.append((yield answer))
    return results
