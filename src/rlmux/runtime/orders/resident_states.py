"""Moves pipelines' states between devices, host memory and disk.

    an order's evicted states ── offload ──▶ host memory, or a file where a pool spills and has no room
    an order's own state      ◀── load ───── with its first call

States leave alike for all kinds of pipelines: a worker of a planned or on-demand pipeline offloads its state, a program
evicts it. The worker's side is in engines/residency.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rlmux.core.errors import WorkerLostError
from rlmux.core.model import PipelineId
from rlmux.runtime.memory.memory_budget import HostMemory
from rlmux.runtime.orders.external_programs import ExternalPrograms
from rlmux.runtime.orders.running_orders import Carrier, RunningOrder
from rlmux.runtime.workers.call_loop import Work
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.worker_pool import Worker


class ResidentStates:
    """Moves states for orders, within the host memory."""

    def __init__(
        self,
        outbox: Outbox,
        host_memory: HostMemory,
        external: ExternalPrograms,
        carrier_of: Callable[[PipelineId], Carrier],
    ) -> None:
        self._outbox = outbox
        self.host_memory = host_memory
        self._external = external
        self._carrier_of = carrier_of

    def make_room(self, order: RunningOrder) -> Work:
        """Move the evicted states off the order's devices, as part of its switch."""
        began_s, action = self._outbox.now_s(), order.action
        leftovers = self._external.leftovers(action.devices, action.pipeline)
        leaving = [self._external.evict(resident, action.devices, program) for resident, program in leftovers.items()]
        for resident in action.evicted:
            if resident not in leftovers:
                leaving += self._carrier_of(resident.pipeline).offload(resident, action)
        for left in leaving:
            with contextlib.suppress(WorkerLostError):  # an ended worker holds nothing
                yield left
        if leaving:
            order.switch_s += self._outbox.now_s() - began_s

    def load(self, worker: Worker) -> None:
        """Record that a worker's next call loads its state."""
        self.host_memory.load(worker.name)
