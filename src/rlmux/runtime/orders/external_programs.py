"""Programs under permits: they keep their own engines, and the scheduler decides when each uses a device.

    broker's thread ── Inbox ──▶ ExternalPrograms ── report(event) ──▶ the order that it ends, or the outbox
           ▲                        │
           └── begin, evict ────────┘ ◀── orders, states that must leave a device

An order of a program waits for its StageFinished. The eviction of a state waits for the program's confirmation. Reports
about an order or a program that has ended are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rlmux.core.actions import Park, RunStage
from rlmux.core.events import (
    ChunkFinished,
    ClientFinished,
    Event,
    PipelineFailed,
    PipelineSubmitted,
    StageFinished,
    WorkArrived,
    WorkWithdrawn,
)
from rlmux.core.model import DeviceId, OrderId, Pipeline, PipelineId, Resident
from rlmux.runtime.orders.running_orders import Carrier, OrderWork, RunningOrder
from rlmux.runtime.workers.call_loop import CallLoop, Future
from rlmux.runtime.workers.outbox import Outbox

Report = ChunkFinished | StageFinished | WorkArrived | WorkWithdrawn | ClientFinished | PipelineFailed
"""Events that a program may report."""


class ExternalProgram(Protocol):
    """One program. Methods are called in the controller's thread and must not wait."""

    def begin(self, order: RunStage) -> None:
        """Grant the order's devices to the program; its StageFinished goes to `ExternalPrograms.report`."""

    def evict(self, resident: Resident, devices: Sequence[DeviceId], on_left: Callable[[], None]) -> None:
        """Evict the program's state from the devices; `on_left` is then called in the controller's thread."""


class ExternalPrograms(Carrier):
    """All programs of a run; lives in the controller's thread."""

    def __init__(self, calls: CallLoop, outbox: Outbox) -> None:
        self._calls = calls
        self._outbox = outbox
        self._programs: dict[PipelineId, ExternalProgram] = {}
        self._end_by_order: dict[OrderId, Future] = {}
        self._leaving: dict[PipelineId, list[Future]] = {}
        """States that are about to leave a device, by program."""
        self._leftovers: dict[DeviceId, dict[Resident, ExternalProgram]] = {}
        """States from before this process, unknown to the scheduler."""

    def __contains__(self, pipeline: PipelineId) -> bool:
        return pipeline in self._programs

    # ------------------------------------------------------------------ from the broker

    def add(self, pipeline: Pipeline, program: ExternalProgram) -> None:
        """A program joins the run."""
        self._programs[pipeline.id] = program
        self._outbox.add(PipelineSubmitted(pipeline=pipeline))

    def add_leftover(self, device: DeviceId, resident: Resident, program: ExternalProgram) -> None:
        """Register a program's state left on a device by an earlier process. The first order of another pipeline there
        evicts it."""
        self._leftovers.setdefault(device, {})[resident] = program

    def report(self, event: Report) -> None:
        """Handle a program's report."""
        match event:
            case StageFinished():
                if (end := self._end_by_order.pop(event.order, None)) is not None:
                    end.set_result(event)
            case ChunkFinished():
                if event.order in self._end_by_order:
                    self._outbox.add(event)
            case _ if event.pipeline in self._programs:
                if isinstance(event, PipelineFailed):
                    self._calls.close_all_of(event.pipeline)
                self._outbox.add(event)

    # ------------------------------------------------------------------ from the backend

    def run(self, order: RunningOrder) -> OrderWork:
        """Grant the order's devices to its program, and wait until it is done."""
        if order.is_pausing:  # cancelled while others left the devices
            return order.paused()
        end = self._end_by_order[order.action.order] = self._calls.future()
        try:
            self._programs[order.action.pipeline].begin(order.action)
            event: Event = yield end
        finally:
            self._end_by_order.pop(order.action.order, None)
        return event

    def leftovers(self, devices: Sequence[DeviceId], pipeline: PipelineId) -> dict[Resident, ExternalProgram]:
        """Leftover states on the devices, until they have left. Forgets the pipeline's own, which it reuses."""
        found: dict[Resident, ExternalProgram] = {}
        for device in devices:
            here = self._leftovers.get(device, {})
            for resident in [leftover for leftover in here if leftover.pipeline == pipeline]:
                del here[resident]
            found |= here
        return found

    def evict(self, resident: Resident, devices: Sequence[DeviceId], program: ExternalProgram | None = None) -> Future:
        """Evict a state from the devices; the future is done once it has left, or its program is over."""
        left = self._calls.future()
        self._leaving.setdefault(resident.pipeline, []).append(left)

        def on_left() -> None:
            for here in self._leftovers.values():
                here.pop(resident, None)
            if not left.is_done:
                self._leaving[resident.pipeline].remove(left)
                left.set_result()

        (program or self._programs[resident.pipeline]).evict(resident, devices, on_left)
        return left

    def offload(self, resident: Resident, action: RunStage) -> Sequence[Future]:
        is_own = resident.pipeline == action.pipeline  # a program moves its own states itself
        return () if is_own else (self.evict(resident, action.devices),)

    def park(self, action: Park) -> None:
        """Take the program's nodes: its orders end, and its states are off the devices."""
        self._take_nodes(action.pipeline)

    def release(self, pipeline: PipelineId) -> None:
        del self._programs[pipeline]
        self._take_nodes(pipeline)

    def _take_nodes(self, pipeline: PipelineId) -> None:
        self._calls.close_all_of(pipeline)
        for left in self._leaving.pop(pipeline, []):
            left.set_result()
