"""Runs the pipelines whose work arrives: a thread with their workers, between those that ask and what grants devices.

    any thread ── open, train, sample, close ──▶ commands ─┐
    controller ── begin, pause, evict, release ─▶ commands ─┼─▶ this thread ─▶ PipelineBursts ─▶ workers
    workers ──── answers ───────────────────────▶ wait ─────┘                     │
    listener ◀── answered, checkpointed, over ────────────────────────────────────┘

Only this thread touches the pipelines' queues and workers, so nothing here is locked.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from rlmux.core.actions import Admit, Queue, Refuse, Relocate, RunStage
from rlmux.core.errors import RlmuxError, WorkerLostError
from rlmux.core.events import PipelineCancelled, PipelineFailed
from rlmux.core.model import DeviceId, OrderId, PipelineId, Resident
from rlmux.rl.arriving import SampleRequest, TrainRequest
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.bursts import BurstFront, BurstOptions, Listener, PipelineBursts
from rlmux.runtime.call_loop import Answer, CallLoop
from rlmux.runtime.foreign import News
from rlmux.runtime.sampling import Samplers
from rlmux.runtime.supervised import SupervisedThread
from rlmux.runtime.workplace import Worker, Workplace

_WAIT_S = 0.25
_MAX_LOSSES = 3
"""Deaths in a row of a pipeline's workers of one phase that it survives, no request being answered in between."""


class ModelHost:
    """See the module's picture."""

    def __init__(
        self,
        workplace: Workplace,
        front: BurstFront,
        listener: Listener,
        *,
        wake: Callable[[], None],
        options: BurstOptions | None = None,
    ) -> None:
        """`wake`: ends the workplace's `wait`, from any thread."""
        self._workplace = workplace
        self._front = front
        self._listener = listener
        self._wake = wake
        self._options = options or BurstOptions()
        self._calls = CallLoop(workplace, time.monotonic)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pipelines: dict[PipelineId, PipelineBursts] = {}
        self._samplers = Samplers()
        self._timers: list[tuple[float, int, Answer]] = []
        self._numbers = count()
        self._is_closing = False
        self.thread = SupervisedThread(self._run, "models")

    def start(self) -> None:
        self.thread.start()

    # --- from any thread --------------------------------------------------------------------------------------

    def open(
        self, pipeline_id: PipelineId, config: TrainingConfig, folder: Path, *, restore_from: Path | None = None
    ) -> PipelineDriver:
        """Make a pipeline known; returns what carries out its orders. `restore_from`: a checkpoint to go on from."""
        folder.mkdir(parents=True, exist_ok=True)
        bursts = PipelineBursts(
            pipeline_id,
            config,
            folder,
            restore_from=restore_from,
            front=self._front,
            listener=self._listener,
            workplace=self._workplace,
            calls=self._calls,
            samplers=self._samplers,
            options=self._options,
            start_timer=self._start_timer,
            now_s=time.monotonic,
        )
        self._do(lambda: self._pipelines.__setitem__(pipeline_id, bursts))
        return PipelineDriver(bursts, self._do)

    def train(self, pipeline_id: PipelineId, request_id: str, request: TrainRequest) -> None:
        """Carry out a training request; its answer goes to the listener."""
        self._do(lambda: self._pipelines[pipeline_id].train(request_id, request))

    def sample(self, pipeline_id: PipelineId, request: SampleRequest, weights: Path | None) -> None:
        """Sample; the answer goes to the listener."""
        self._do(lambda: self._pipelines[pipeline_id].sample(request, weights))

    def withdraw(self, pipeline_id: PipelineId, ids: Sequence[str]) -> None:
        """Forget sampling requests that have not begun."""
        self._do(lambda: self._pipelines[pipeline_id].withdraw(ids))

    def finish(self, pipeline_id: PipelineId) -> None:
        """The pipeline's program is done: its devices are given up once what runs there is over."""
        self._do(lambda: self._front.client_finished(pipeline_id))

    def reason(self, pipeline_id: PipelineId) -> str | None:
        """Why the pipeline's work does not run, in one clause; None: it does, or will soon."""
        bursts = self._pipelines.get(pipeline_id)
        return None if bursts is None or bursts.waits_for is None else f"rlmux: {bursts.waits_for}"

    def close(self) -> None:
        """End every worker and the thread. Safe to call twice."""
        self._is_closing = True
        self._wake()
        if self.thread.is_alive():
            self.thread.join()

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake()

    # --- this thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for worker in self._workplace.wait(self._seconds_to_wait()):
                    self._receive(worker)
                self._take_commands()
                self._fire_timers()
        finally:
            for bursts in self._pipelines.values():
                bursts.end_workers()
            self._workplace.close()

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _receive(self, worker: Worker) -> None:
        owners = [each for each in self._pipelines.values() if each.owns(worker)]
        if not owners:
            return
        try:
            worker.receive(time.monotonic())
        except RlmuxError as error:
            if len(owners) == 1 and not isinstance(error, WorkerLostError):
                self._fail(owners[0], str(error))
                return
            for bursts in owners:
                if len(owners) > 1:
                    bursts.share_no_more()  # alone, each shows whether it was its own fault
                self._replace(bursts, worker, str(error))

    def _replace(self, bursts: PipelineBursts, worker: Worker, reason: str) -> None:
        """A worker was lost: its order ends, and its work is ready for a successor."""
        losses = bursts.count_loss(worker)
        if losses > _MAX_LOSSES:
            self._fail(bursts, f"{reason}, {losses} times in a row")
            return
        _, device = bursts.forget(worker)
        self._front.worker_lost(bursts.id, device)

    def _fail(self, bursts: PipelineBursts, reason: str) -> None:
        bursts.release(reason)
        self._front.failed(bursts.id, reason)

    def _start_timer(self, seconds: float, answer: Answer) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), answer))

    def _fire_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            answer = heapq.heappop(self._timers)[2]
            if not answer.is_there:
                answer.arrive()

    def _seconds_to_wait(self) -> float:
        if not self._commands.empty():
            return 0.0
        return min(_WAIT_S, max(0.0, self._timers[0][0] - time.monotonic())) if self._timers else _WAIT_S


class PipelineDriver:
    """Carries out one pipeline's orders; called in the controller's thread, returns at once."""

    def __init__(self, bursts: PipelineBursts, do: Callable[[Callable[[], None]], None]) -> None:
        self._bursts = bursts
        self._do = do
        self._reason = "its client is done"

    def begin(self, order: RunStage) -> None:
        self._do(lambda: self._bursts.begin(order))

    def pause(self, order: OrderId) -> None:
        self._do(lambda: self._bursts.pause(order))

    def evict(self, resident: Resident, devices: tuple[DeviceId, ...], order: OrderId) -> None:
        self._do(lambda: self._bursts.evict(resident, order))

    def park(self) -> None:
        self._do(self._bursts.park)

    def release(self) -> None:
        self._do(lambda: self._bursts.release(self._reason))

    def tell(self, news: News) -> None:
        match news:
            case Refuse() | PipelineFailed():
                self._reason = news.reason
            case PipelineCancelled():
                self._reason = "cancelled"
            case Queue():
                self._do(lambda: self._bursts.wait_for(news.reason))
            case Admit() | Relocate():
                self._do(self._bursts.have_place)

    def weights_sha256(self) -> str | None:
        return self._bursts.sha256
