"""RunStage orders being carried out, and the time and tokens of each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from rlmux.core.actions import Admit, Park, Relocate, RunStage
from rlmux.core.events import BatchShare, ChunkFinished, DecodeSpan, Event, StageFinished, StagePaused
from rlmux.core.model import DeviceId, NodeId, OrderId, PipelineId, Resident, SubStage
from rlmux.rl.types import SubStageIterations
from rlmux.runtime.workers.call_loop import Future, LoopTask
from rlmux.runtime.workers.worker_pool import Worker

OrderWork = Generator[Future, Any, Event]
"""An order being carried out; returns the event that ends it."""


@dataclass(slots=True, eq=False)
class RunningOrder:
    """An order being carried out."""

    action: RunStage
    device_fraction: float
    """Device fraction of the order, from its next call on."""
    seconds: float = 0.0
    """Seconds of computing, switches left out."""
    switch_s: float = 0.0
    """Seconds of others' offloading and of this order's loading."""
    tokens: int = 0
    prefill_s: float = 0.0
    """Part of `seconds` before its first decode step."""
    batches: dict[int, BatchShare] = field(default_factory=dict)
    """What was computed in batches with other pipelines, by the number of pipelines."""
    decoded: dict[int, DecodeSpan] = field(default_factory=dict)
    """Decode iterations by the binary digits of their rows."""
    has_decoded: bool = False
    is_pausing: bool = False
    is_calling: bool = True
    """Whether a call of the order is pending, or follows without a wait for anything outside the order."""
    input: Future | None = None
    """Set while the order has nothing to compute; done when it has, or when the order is paused."""
    waits_since_s: float | None = None
    """Time since which the order only waits for user code; None if it computes, or the wait was reported."""
    task: LoopTask | None = None

    def wait_for_input(self, answer: Future, now_s: float) -> Future:
        """Wait for input or a pause; returns the future for the order's work to yield."""
        self.input, self.waits_since_s = answer, now_s
        return answer

    def add(self, *, seconds: float, switch_s: float, tokens: int) -> None:
        self.seconds += seconds
        self.switch_s += switch_s
        self.tokens += tokens

    def add_batch(self, num_together: int, tokens: int, seconds: float, token_share: float) -> None:
        """Count a call that computed for so many pipelines together; `add` counts it too."""
        if num_together > 1:
            self.add_share(
                BatchShare(
                    num_together=num_together,
                    tokens=tokens,
                    seconds=seconds,
                    held_s=seconds * self.device_fraction,
                    charged_s=seconds * token_share,
                )
            )

    def add_share(self, share: BatchShare) -> None:
        """Add to what was computed with so many pipelines."""
        before = self.batches.get(share.num_together)
        if before is not None:
            share = replace(
                share,
                tokens=before.tokens + share.tokens,
                seconds=before.seconds + share.seconds,
                held_s=before.held_s + share.held_s,
                charged_s=before.charged_s + share.charged_s,
            )
        self.batches[share.num_together] = share

    def add_iterations(self, iterations: Sequence[SubStageIterations]) -> None:
        """Count the decode iterations of a rollout's chunk, and its prefill until one has decoded."""
        for part in iterations:
            if part.sub_stage is not SubStage.PREFILL:
                key = part.num_rows.bit_length()
                num, rows, seconds = self.decoded.get(key, (0, 0, 0.0))
                self.decoded[key] = DecodeSpan(
                    num + part.num_iterations,
                    rows + part.num_iterations * part.num_rows,
                    round(seconds + 1e-3 * part.ms, 6),
                )
        if not self.has_decoded:
            self.prefill_s += sum(1e-3 * part.ms for part in iterations if part.sub_stage is SubStage.PREFILL)
            self.has_decoded = any(part.sub_stage is not SubStage.PREFILL for part in iterations)

    def pause(self) -> None:
        """Stop at the next safe point, which is now if the order has nothing to compute."""
        self.is_pausing = True
        self.wake()

    def wake(self) -> None:
        """Resume an order that has nothing to compute. Nothing happens to one that computes."""
        if self.input is not None:
            waited_for, self.input, self.waits_since_s = self.input, None, None
            if not waited_for.is_done:
                waited_for.set_result()

    def progress(self, *, num_active: int, num_waiting: int, num_waiting_for_env: int = 0) -> ChunkFinished:
        return ChunkFinished(
            order=self.action.order,
            num_active=num_active,
            num_waiting=num_waiting,
            num_waiting_for_env=num_waiting_for_env,
            tokens=self.tokens,
            seconds=round(self.seconds, 6),
        )

    def finished(self) -> StageFinished:
        return StageFinished(
            order=self.action.order,
            seconds=round(self.seconds, 6),
            switch_s=round(self.switch_s, 6),
            tokens=self.tokens,
            prefill_s=round(self.prefill_s, 6),
            batches=tuple(self.batches[number] for number in sorted(self.batches)),
            decoded=tuple(self.decoded[key] for key in sorted(self.decoded)),
        )

    def paused(self, *, is_waiting: bool = False) -> StagePaused:
        return StagePaused(
            order=self.action.order,
            seconds=round(self.seconds, 6),
            switch_s=round(self.switch_s, 6),
            tokens=self.tokens,
            prefill_s=round(self.prefill_s, 6),
            batches=tuple(self.batches[number] for number in sorted(self.batches)),
            decoded=tuple(self.decoded[key] for key in sorted(self.decoded)),
            is_waiting=is_waiting,
        )


class Carrier(Protocol):
    """Carries out the orders of one kind of pipelines, and moves what they need: planned ones, clients', programs'."""

    makes_room: ClassVar[bool] = False
    """Whether its orders have evicted states leave their devices themselves; else that is done before each begins."""

    @abstractmethod
    def __contains__(self, pipeline: PipelineId) -> bool:
        """Whether the pipeline is of this kind, and not over."""

    @abstractmethod
    def run(self, order: RunningOrder) -> OrderWork:
        """Carry the order out."""

    @abstractmethod
    def offload(self, resident: Resident, action: RunStage) -> Sequence[Future]:
        """Have a state leave the devices of another's order; each future is done once a part of it has left."""

    @abstractmethod
    def park(self, action: Park) -> None:
        """End the pipeline's orders and free its devices."""

    @abstractmethod
    def release(self, pipeline: PipelineId) -> None:
        """The pipeline is over."""

    def admit(self, action: Admit) -> None:
        """The pipeline has nodes. Without a method of its own, its workers start with its first order."""
        return

    def relocate(self, action: Relocate) -> None:
        """The pipeline has other nodes from its next order on."""
        return

    def receive(self, worker: Worker) -> bool:
        """Handle a worker's answer or its loss; returns whether the worker is of these pipelines."""
        return False

    def end_overdue_workers(self) -> None:
        """Replace workers whose call exceeded its limit without a sign of life."""
        return

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        """Hash of the weights of the newest checkpoint; None before the first one."""
        return None

    def close(self) -> None:
        """End every worker."""
        return


class RunningOrders:
    """All orders being carried out, of all pipelines, in the order in which they began."""

    def __init__(self) -> None:
        self._order_by_id: dict[OrderId, RunningOrder] = {}
        self._orders_by_device: dict[DeviceId, list[RunningOrder]] = {}

    def begin(self, action: RunStage) -> RunningOrder:
        order = RunningOrder(action, action.device_fraction)
        self._order_by_id[action.order] = order
        for device in action.devices:
            self._orders_by_device.setdefault(device, []).append(order)
        return order

    def end(self, order: RunningOrder) -> None:
        del self._order_by_id[order.action.order]
        for device in order.action.devices:
            self._orders_by_device[device].remove(order)

    def find(self, order: OrderId) -> RunningOrder | None:
        """None for an order that has ended."""
        return self._order_by_id.get(order)

    def on_device(self, device: DeviceId) -> Sequence[RunningOrder]:
        """Orders that lease a part of the device."""
        return self._orders_by_device.get(device, ())

    def waiting_since(self, time_s: float) -> list[RunningOrder]:
        """Orders that have only waited for user code since that time or longer."""
        return [
            order
            for order in self._order_by_id.values()
            if order.waits_since_s is not None and order.waits_since_s <= time_s
        ]

    def on_node(self, node: NodeId) -> list[RunningOrder]:
        """Orders that lease a device of the node."""
        return [order for order in self._order_by_id.values() if any(d.node_id == node for d in order.action.devices)]

    def of(self, pipeline: PipelineId) -> list[RunningOrder]:
        return [order for order in self._order_by_id.values() if order.action.pipeline == pipeline]
