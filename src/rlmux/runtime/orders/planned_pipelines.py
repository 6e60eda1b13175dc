"""Planned pipelines: processes of their own, and drivers that carry out the steps that the scheduler planned.

PlannedPipelines ─▶ WorkerSupervisor   processes: start, watch, replace, end      (one)
                 ─▶ RolloutDriver      rollout shards, turns, migration           (per pipeline)
                 ─▶ TrainDriver        SFT warm-up, rewards, training, publishing (per pipeline)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlmux.core.actions import Admit, MigrateShard, Park, Relocate, RunStage
from rlmux.core.model import Cluster, PipelineId, Resident, Stage
from rlmux.log.notes import SpillNote
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.orders.determinism_check import EngineProbes
from rlmux.runtime.orders.resident_states import ResidentStates
from rlmux.runtime.orders.rollout_driver import RolloutDriver
from rlmux.runtime.orders.running_orders import Carrier, OrderWork, RunningOrder, RunningOrders
from rlmux.runtime.orders.train_driver import TrainDriver
from rlmux.runtime.workers.call_loop import CallLoop, Future
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers
from rlmux.runtime.workers.supervisor import WorkerSupervisor
from rlmux.runtime.workers.tenant_process import TenantWorkplace
from rlmux.runtime.workers.worker_pool import Worker


class _Drivers(NamedTuple):
    """The drivers of one pipeline, created at each start of its processes."""

    rollout: RolloutDriver
    train: TrainDriver


class PlannedPipelines(Carrier):
    """Every pipeline of a run whose steps are planned. It is looked at last: any pipeline may be one of these."""

    makes_room = True

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        weights_folder: Path,
        *,
        workplace: TenantWorkplace,
        calls: CallLoop,
        outbox: Outbox,
        orders: RunningOrders,
        states: ResidentStates,
        options: WorkerOptions,
    ) -> None:
        self._calls = calls
        self._outbox = outbox
        self._orders = orders
        self._states = states
        self._options = options
        self._probes = EngineProbes(calls, outbox)
        self._drivers: dict[PipelineId, _Drivers] = {}
        self.supervisor = WorkerSupervisor(
            cluster,
            folder,
            weights_folder,
            workplace=workplace,
            calls=calls,
            outbox=outbox,
            host_memory=states.host_memory,
            options=options,
            on_started=self._make_drivers,
            on_replaced=lambda workers, device: self._drivers[workers.id].rollout.replace_worker(device),
            on_ending=self._end_drivers,
        )

    def __contains__(self, pipeline: PipelineId) -> bool:
        return True

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return self.supervisor.weights_sha256(pipeline)

    def admit(self, action: Admit) -> None:
        self.supervisor.admit(action)

    def relocate(self, action: Relocate) -> None:
        self.supervisor.relocate(action)

    def park(self, action: Park) -> None:
        self.supervisor.park(action)

    def release(self, pipeline: PipelineId) -> None:
        self.supervisor.release(pipeline)

    def migrate(self, action: MigrateShard) -> None:
        """Migrate a shard's trajectories to a sibling."""
        self._drivers[action.pipeline].rollout.migrate(action)

    def run(self, order: RunningOrder) -> OrderWork:
        rollout, train = self._drivers[order.action.pipeline]
        match order.action.stage:
            case Stage.GENERATE:
                return rollout.run(order)
            case Stage.REWARD:
                return train.score(order)
            case Stage.PUBLISH:
                return train.publish(order)
            case _:
                return train.run_stage(order)

    def offload(self, resident: Resident, action: RunStage) -> Sequence[Future]:
        workers = self.supervisor.find(resident.pipeline)
        if workers is None:
            return ()
        return [
            self._calls.call(worker, "offload", self._spill_path(workers, worker))
            for worker in workers.of_phase(resident.phase, action.devices)
            if worker in workers.built
        ]

    def _spill_path(self, workers: PipelineWorkers, worker: Worker) -> Path | None:
        """The file for a worker's state; None: it goes to host memory."""
        if self._states.host_memory.offload(worker.name):
            return None
        self._outbox.add_note(SpillNote(pipeline=workers.id, worker=worker.name))
        return workers.folder / f"spilled-{worker.name.rpartition('/')[2]}.safetensors"

    def receive(self, worker: Worker) -> bool:
        self.supervisor.receive(worker)
        return True

    def end_overdue_workers(self) -> None:
        self.supervisor.end_overdue_workers()

    def close(self) -> None:
        for pipeline in list(self.supervisor.workers_by_pipeline):
            self.supervisor.release(pipeline, finishes_checkpoints=True)

    def _make_drivers(self, workers: PipelineWorkers) -> None:
        rollout = RolloutDriver(
            workers,
            calls=self._calls,
            outbox=self._outbox,
            orders=self._orders,
            states=self._states,
            probes=self._probes,
            options=self._options,
        )
        train = TrainDriver(
            workers,
            rollout,
            calls=self._calls,
            outbox=self._outbox,
            states=self._states,
            probes=self._probes,
            supervisor=self.supervisor,
            options=self._options,
        )
        self._drivers[workers.id] = _Drivers(rollout, train)

    def _end_drivers(self, workers: PipelineWorkers) -> None:
        del self._drivers[workers.id]
        self._calls.close_all_of(workers.id)
