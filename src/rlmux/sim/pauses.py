"""Pauses of orders: an order stops at once, a filler's at its next safe point.

Pause ─▶ order ── safe point ─▶ its work is kept, and StagePaused is handled at that instant

A module of its own: it decides when a pause takes effect, without the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from rlmux.core.events import StagePaused
from rlmux.core.model import DeviceId, OrderId, PipelineId
from rlmux.sim.kernel import WORK_ENDS, Kernel
from rlmux.sim.sim_orders import SimOrders
from rlmux.sim.sim_state import PausedWork, SimOrder, SimPipeline


class SafePoint(NamedTuple):
    """The safe point at which an order that is to pause stops, if it has not ended before."""

    order: OrderId


class Pauses:
    """Stops orders; see the module."""

    def __init__(
        self, kernel: Kernel, running: SimOrders, schedule_reply: Callable[[PipelineId, DeviceId, float], None]
    ) -> None:
        """`schedule_reply`: lets an environment reply to a shard that is paused on a device, after so many seconds."""
        self._kernel = kernel
        self._running = running
        self._schedule_reply = schedule_reply
        self._stopped: dict[OrderId, SimPipeline] = {}
        """Pipelines by stopped order, until StagePaused is handled at the same instant."""

    def pause(self, order: OrderId) -> None:
        """Stop the order at its next safe point."""
        safe_point_s = self._running[order].pipeline.arrival.safe_point_s
        if safe_point_s > 0.0:
            self._kernel.schedule(self._kernel.now_s + safe_point_s, WORK_ENDS, SafePoint(order))
        else:
            self._kernel.schedule(self._kernel.now_s, WORK_ENDS, self._stop(self._running[order]))

    def at(self, point: SafePoint) -> StagePaused | None:
        """The order is at its safe point; None where it has ended before."""
        if point.order not in self._running:
            return None
        paused = self._stop(self._running[point.order])
        del self._stopped[point.order]
        return paused

    def take(self, paused: StagePaused) -> bool:
        """Whether the stop is still to be reported."""
        return self._stopped.pop(paused.order, None) is not None

    def drop(self, pipelines: Collection[SimPipeline]) -> None:
        """Forget what was stopped of these."""
        self._stopped = {order: pipeline for order, pipeline in self._stopped.items() if pipeline not in pipelines}

    def _stop(self, running: SimOrder) -> StagePaused:
        now_s, order = self._kernel.now_s, running.action.order
        self._running.advance(running)
        self._running.stop(running)
        running.pipeline.paused[running.key] = PausedWork(running.work, now_s)
        self._stopped[order] = running.pipeline
        idle_s = running.work.idle_s
        if idle_s > 0.0:
            self._schedule_reply(running.action.pipeline, running.devices[0], idle_s)
        return StagePaused(
            time_s=now_s,
            order=order,
            seconds=self._running.computed_s(running),
            switch_s=running.switch_s,
            prefill_s=running.prefill_s,
            is_waiting=idle_s > 0.0,
        )
