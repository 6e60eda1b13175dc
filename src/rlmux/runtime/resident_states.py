"""Pipelines' states on devices, in host memory and on disk: which must leave, and where they go.

    an order's evicted states ── offload ──▶ host memory, or a file where a pool spills and has no room
    an order's own state      ◀── load ───── with its first call

What a worker does with its state is in engines/residency.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from rlmux.core.errors import WorkerLostError
from rlmux.core.model import PipelineId
from rlmux.runtime.call_loop import CallLoop, Work
from rlmux.runtime.memory import HostMemory
from rlmux.runtime.orders import RunningOrder
from rlmux.runtime.outbox import Outbox
from rlmux.runtime.pipeline_workers import PipelineWorkers
from rlmux.runtime.workplace import Worker


class ResidentStates:
    """Moves states for orders, within the host memory there is."""

    def __init__(
        self,
        calls: CallLoop,
        outbox: Outbox,
        host_memory: HostMemory,
        find_workers: Callable[[PipelineId], PipelineWorkers | None],
    ) -> None:
        self._calls = calls
        self._outbox = outbox
        self._host_memory = host_memory
        self._find_workers = find_workers

    def make_room(self, order: RunningOrder) -> Work:
        """Have the evicted states leave the order's devices, which is part of its switch."""
        began_s = self._outbox.now_s()
        leaving = [
            self._calls.call(worker, "offload", self._spill_path(workers, worker))
            for resident in order.action.evicted
            if (workers := self._find_workers(resident.pipeline)) is not None
            for worker in workers.of_phase(resident.phase, order.action.devices)
            if worker in workers.built
        ]
        for left in leaving:
            with contextlib.suppress(WorkerLostError):  # a worker that was ended holds nothing any more
                yield left
        if leaving:
            order.switch_s += self._outbox.now_s() - began_s

    def load(self, worker: Worker) -> None:
        """A worker's next call loads its state."""
        self._host_memory.load(worker.name)

    def _spill_path(self, workers: PipelineWorkers, worker: Worker) -> Path | None:
        """The file for a worker's state; None: it goes to host memory."""
        if self._host_memory.offload(worker.name):
            return None
        self._outbox.note("spill", pipeline=workers.id, worker=worker.name)
        return workers.folder / f"spilled-{worker.name.rpartition('/')[2]}.safetensors"
