"""Moves pipelines' states between devices, host memory and disk.

    an order's evicted states ── offload ──▶ host memory, or a file where a pool spills and has no room
    an order's own state      ◀── load ───── with its first call

States leave alike for all kinds of pipelines: a worker of a planned or on-demand pipeline offloads its state, a program
evicts it. The worker's side is in engines/residency.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from rlmux.core.actions import RunStage
from rlmux.core.errors import WorkerLostError
from rlmux.core.model import PipelineId, Resident
from rlmux.log.notes import SpillNote
from rlmux.runtime.memory.memory_budget import HostMemory
from rlmux.runtime.orders.call_loop import CallLoop, Future, Work
from rlmux.runtime.orders.external_programs import ExternalPrograms
from rlmux.runtime.orders.on_demand import OnDemandPipelines
from rlmux.runtime.orders.outbox import Outbox
from rlmux.runtime.orders.running_orders import RunningOrder
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers
from rlmux.runtime.workers.worker_pool import Worker


class ResidentStates:
    """Moves states for orders, within the host memory."""

    def __init__(
        self,
        calls: CallLoop,
        outbox: Outbox,
        host_memory: HostMemory,
        find_workers: Callable[[PipelineId], PipelineWorkers | None],
        on_demand: OnDemandPipelines,
        external: ExternalPrograms,
    ) -> None:
        self._calls = calls
        self._outbox = outbox
        self._host_memory = host_memory
        self._find_workers = find_workers
        self._on_demand = on_demand
        self._external = external

    def make_room(self, order: RunningOrder) -> Work:
        """Move the evicted states off the order's devices, as part of its switch."""
        began_s, action = self._outbox.now_s(), order.action
        leftovers = self._external.leftovers(action.devices, action.pipeline)
        leaving = [self._external.evict(resident, action.devices, program) for resident, program in leftovers.items()]
        for resident in action.evicted:
            if resident not in leftovers:
                leaving += self._offload(resident, action)
        for left in leaving:
            with contextlib.suppress(WorkerLostError):  # an ended worker holds nothing
                yield left
        if leaving:
            order.switch_s += self._outbox.now_s() - began_s

    def _offload(self, resident: Resident, action: RunStage) -> list[Future]:
        """Move one state off the order's devices."""
        if resident.pipeline in self._external:
            is_own = resident.pipeline == action.pipeline  # a program moves its own states itself
            return [] if is_own else [self._external.evict(resident, action.devices)]
        if (on_demand := self._on_demand.find(resident.pipeline)) is not None:
            offloaded = on_demand.offload(resident.phase)
            return [] if offloaded is None else [offloaded]
        workers = self._find_workers(resident.pipeline)
        if workers is None:
            return []
        return [
            self._calls.call(worker, "offload", self._spill_path(workers, worker))
            for worker in workers.of_phase(resident.phase, action.devices)
            if worker in workers.built
        ]

    def load(self, worker: Worker) -> None:
        """Record that a worker's next call loads its state."""
        self._host_memory.load(worker.name)

    def _spill_path(self, workers: PipelineWorkers, worker: Worker) -> Path | None:
        """The file for a worker's state; None: it goes to host memory."""
        if self._host_memory.offload(worker.name):
            return None
        self._outbox.add_note(SpillNote(pipeline=workers.id, worker=worker.name))
        return workers.folder / f"spilled-{worker.name.rpartition('/')[2]}.safetensors"
