"""Training of on-demand pipelines of one base: the losses of all are computed in the chunks of one's order.

    OnDemandPipeline ── the order's turn ─▶ SharedTrainers.run_chunk ─┬─▶ the order's own requests ─┐ one call of the
                                                                      └─▶ losses of companions ─────┴─▶ shared process
    OnDemandPipeline.settle_ride ◀── results of a companion

Adapters of one base have one process on each device (`workers/tenant_hosts.py`). While an order computes losses there,
waiting losses of companions, whose states are on the device, are computed in the same chunks. Optimizer steps, saves
and loads are left to orders of their own pipeline. A loss has the bits that it has alone, so this decides when
something is computed, never what.

A chunk outlives the order that started it, so that no companion's result is lost with the order.
"""

from __future__ import annotations

from typing import Protocol

from rlmux.core.errors import WorkerLostError
from rlmux.core.model import DeviceId, PipelineId
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.adapter_base import train_base
from rlmux.runtime.workers.call_loop import CallLoop, Future, Work
from rlmux.runtime.workers.request_workers import BatchReport


class Companion(Protocol):
    """A pipeline whose losses other orders may compute."""

    @property
    def id(self) -> PipelineId: ...

    def ride(self, max_seconds: float) -> Future | None:
        """Begin a chunk of waiting losses; None if there are none, or its own order computes."""

    def settle_ride(self, report: BatchReport) -> None:
        """Take the results of the chunk."""


class SharedTrainers:
    """Pipelines with a training state on a device, by base and device."""

    def __init__(self, calls: CallLoop) -> None:
        self._calls = calls
        self._on_device: dict[tuple[str, DeviceId], dict[PipelineId, Companion]] = {}

    def enter(self, base: str | None, device: DeviceId, pipeline: Companion) -> None:
        """The pipeline's state is on the device. `base`: of its process; None for a process of its own."""
        if base is not None:
            self._on_device.setdefault((base, device), {})[pipeline.id] = pipeline

    def leave(self, pipeline: PipelineId) -> None:
        """The pipeline's state is on no device."""
        for pipelines in self._on_device.values():
            pipelines.pop(pipeline, None)

    def run_chunk(self, own: Future, pipeline: PipelineId, max_seconds: float) -> Future:
        """A chunk of an order whose own call is `own`, with its companions; done with the order's report."""
        done = self._calls.future()
        beside = next((each for each in self._on_device.values() if pipeline in each), {})
        riding = [(each, each.ride(max_seconds)) for name, each in beside.items() if name != pipeline]
        self._calls.start(self._settle(own, [(each, chunk) for each, chunk in riding if chunk], done), pipeline=None)
        return done

    def _settle(self, own: Future, riding: list[tuple[Companion, Future]], done: Future) -> Work:
        for companion, chunk in riding:
            try:
                report: BatchReport = yield chunk
            except WorkerLostError:  # its losses are repeated
                continue
            companion.settle_ride(report)
        try:
            done.set_result((yield own))
        except WorkerLostError as error:
            done.set_error(error)


def shared_train_base(config: TrainingConfig) -> str | None:
    """Key of the pipelines whose requests one process computes; None for one that is always alone."""
    base = train_base(config)
    return f"requests {base}" if base else None
