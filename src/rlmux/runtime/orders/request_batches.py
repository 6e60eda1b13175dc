"""One on-demand pipeline: its clients' requests, and the batches in which its workers carry them out.

    train(request) ─▶ waiting ─▶ WorkArrived(TRAIN) ─▶ run(order) ─▶ training batch: up to an optimizer step, and the
                                                                     saves behind it ─▶ StageFinished
    sample(request) ─▶ waiting ─▶ WorkArrived(ROLLOUT) ─▶ run(order) ─▶ sampling batch: all that waits ─▶ StageFinished

A batch includes requests that arrive while it runs, up to `batch_s` of sampling or of losses without gradients, and
waits briefly for more before it ends: a client that returns at once keeps its device, one that thinks releases it.
Clients wait for samples and for saved weights: weights are loaded before requests for them are handed over, so that
requests that arrive meanwhile join the same batch; an update's checkpoint is written behind the saves that follow it.
Requests since the newest checkpoint are kept: a train worker that is lost starts there and repeats them, to the same
bits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.actions import Switch
from rlmux.core.events import BatchShare, WorkArrived
from rlmux.core.model import DeviceId, Phase, PipelineId, Stage
from rlmux.log.notes import SharedBatchNote
from rlmux.rl.client_requests import Loss, OptimizerStep, SampleRequest, SaveState, TrainRequest, WriteWeights
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.orders.idle_timeout import IdleTimeout
from rlmux.runtime.orders.running_orders import OrderWork, RunningOrder
from rlmux.runtime.orders.shared_sampling import SampleQueue, SharedSampler, SharedSamplers, shared_base
from rlmux.runtime.orders.shared_training import SharedTrainers, shared_train_base
from rlmux.runtime.workers.call_loop import CallLoop, Future, Work
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.request_workers import BatchReport, DatumWorker, RequestChunk, RequestResult, SampleWorker
from rlmux.runtime.workers.tenant_hosts import DatumHost
from rlmux.runtime.workers.tenant_process import TenantWorkplace
from rlmux.runtime.workers.worker_pool import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How request batches are run; none of it can change a result."""

    chunk_s: float = 0.5
    """Longest uninterrupted piece of work, in seconds."""
    batch_s: float = 2.0
    """Seconds of work without gradients after which a batch ends with work left, for the sake of others."""
    step_s: float = 20.0
    """Seconds after which a training batch ends between the losses of one step, whose gradients then move with it."""
    idle_s: float = 0.05
    """Longest wait for more requests before a batch ends, in seconds, where a switch costs less."""
    call_limit_s: float = 120.0
    """Seconds within which a worker's call must be answered, or show that it lives."""
    max_losses: int = 3
    """Deaths in a row of a pipeline's workers of one phase that it survives, no request being answered in between."""


class Client(Protocol):
    """Gets the results of a pipeline's requests, in the controller's thread. No method may wait."""

    def on_result(self, pipeline: PipelineId, result: RequestResult) -> None: ...
    def on_checkpoint(self, pipeline: PipelineId, request_id: str, folder: Path, sha256: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the on-demand pipelines of a run share."""

    workplace: TenantWorkplace
    calls: CallLoop
    outbox: Outbox
    trainers: SharedTrainers
    options: BatchOptions = BatchOptions()
    samplers: SharedSamplers = field(default_factory=SharedSamplers)


class OnDemandPipeline:
    """The queues, workers and running batches of one pipeline; lives in the controller's thread."""

    def __init__(
        self,
        pipeline_id: PipelineId,
        config: TrainingConfig,
        folder: Path,
        client: Client,
        surroundings: Surroundings,
        *,
        restore_from: Path | None = None,
    ) -> None:
        """`restore_from`: a checkpoint `update-NUMBER` to resume from."""
        self.id = pipeline_id
        self._config = config
        self._folder = folder
        self._client = client
        self._calls, self._outbox, self._options = surroundings.calls, surroundings.outbox, surroundings.options
        self._workplace, self._samplers = surroundings.workplace, surroundings.samplers
        self._base = shared_base(config)
        self._trainers, self._train_base = surroundings.trainers, shared_train_base(config)
        self._tenancy: str | None = None
        """`_train_base` while the train worker is in a shared process."""
        self._sampler: SharedSampler | None = None
        self._samples = SampleQueue(pipeline_id, config.adapter, self._on_sample_result)
        self._checkpoint = restore_from
        self._num_updates = 0 if restore_from is None else int(restore_from.name.rpartition("-")[2])
        self._to_train: deque[tuple[str, TrainRequest]] = deque()
        self._since_checkpoint: list[tuple[str, TrainRequest]] = []
        self._num_handed_over = 0
        """Requests pending at the train worker: the last ones of `_since_checkpoint`."""
        self._answered_since_checkpoint: set[str] = set()
        """Ids of requests of `_since_checkpoint` that some worker has answered."""
        self._ridden_tokens = 0
        """Tokens computed in orders of other pipelines and not reported by an order of its own yet."""
        self._ridden_s = 0.0
        """Its share by tokens of the seconds of those chunks, not reported either."""
        self._num_losses: Counter[Phase] = Counter()
        """Workers lost in a row, by phase: no new request was answered in between."""
        self._worker_by_phase: dict[Phase, tuple[Worker, DeviceId]] = {}
        self._order_by_phase: dict[Phase, RunningOrder] = {}
        self._timeout_by_kind: dict[tuple[Phase, bool], IdleTimeout] = {}
        self._idle_by_phase: dict[Phase, tuple[IdleTimeout, float]] = {}
        """Idle timeout and start of the idle time, by phase without requests."""
        self._load_s = 0.0
        """Seconds of the last load of a state."""
        self.sha256: str | None = None
        """Hash of the newest checkpoint's weights; None before the first."""

    # --- requests ---------------------------------------------------------------------------------------------

    def train(self, request_id: str, request: TrainRequest) -> None:
        """Queue a training request."""
        self._to_train.append((request_id, request))
        self._announce(Phase.TRAIN, _train_units(request))

    def sample(self, request: SampleRequest, weights: Path | None) -> None:
        """Queue a sampling request, with the weights of a file or (None) the model's initial ones."""
        self._samples.waiting.append((request, weights))
        self._announce(Phase.ROLLOUT, request.max_new_tokens)

    def withdraw(self, ids: Sequence[str]) -> None:
        """Cancel waiting sampling requests. Those begun by a worker are finished and answered."""
        self._samples.withdraw(ids)

    def _announce(self, phase: Phase, units: int) -> None:
        """Have the running batch include new work, or emit WorkArrived."""
        if (idle := self._idle_by_phase.pop(phase, None)) is not None:
            idle[0].observe(self._outbox.now_s() - idle[1])
        order = self._order_by_phase.get(phase)
        if order is None:
            self._outbox.add(WorkArrived(pipeline=self.id, phases=(phase,), units=units))
        else:
            order.wake()

    # --- batches ----------------------------------------------------------------------------------------------

    def run(self, order: RunningOrder) -> OrderWork:
        """One request batch, on the order's device."""
        phase = Phase.ROLLOUT if order.action.stage is Stage.GENERATE else Phase.TRAIN
        self._order_by_phase[phase] = order
        try:
            if phase is Phase.ROLLOUT:
                has_more = yield from self._run_sampling(order)
            else:
                has_more = yield from self._run_training(order)
        finally:
            if self._order_by_phase.get(phase) is order:
                del self._order_by_phase[phase]
        if has_more and order.is_pausing:
            return order.paused()
        if has_more:  # before the end, so that the client is not taken for thinking
            samples = [request.max_new_tokens for request in self._samples.all_work()]
            trained = [_train_units(request) for _, request in self._to_train]
            units = sum(samples if phase is Phase.ROLLOUT else trained)
            self._outbox.add(WorkArrived(pipeline=self.id, phases=(phase,), units=units))
        return order.finished()

    def offload(self, phase: Phase) -> Future | None:
        """Offload a state. None if it can stay, because its worker serves others on the device."""
        worker = self._worker_by_phase.get(phase)
        if phase is Phase.TRAIN:
            self._trainers.leave(self.id)
        is_needed = phase is Phase.ROLLOUT and self._sampler is not None and not self._sampler.leave_device(self.id)
        return None if worker is None or is_needed else self._calls.call(worker[0], "offload")

    def _run_sampling(self, order: RunningOrder) -> Generator[Future, Any, bool]:
        """Returns whether work is left."""
        yield from self._prepare_worker(order, Phase.ROLLOUT)
        sampler, samples, has_begun = self._sampler, self._samples, False
        num_together, batches_s = 0, 0.0
        assert sampler is not None
        while not order.is_pausing and order.seconds < self._options.batch_s:
            # other pipelines' orders may have done all the work
            if not samples.has_work and not (has_begun and (yield from self._has_more(order, Phase.ROLLOUT))):
                break
            report: BatchReport = yield sampler.run_round(self._options.chunk_s)
            has_begun = True
            order.seconds += report.seconds
            if (num := sum(map(bool, report.tokens_by_tenant.values()))) > 1:
                num_together, batches_s = max(num_together, num), batches_s + report.seconds
            self._note_others(order, report)
        order.tokens = samples.take_tokens()
        charged_s = samples.take_seconds()
        if num_together or charged_s:
            share = BatchShare(
                num_together=max(2, num_together),
                tokens=order.tokens,
                seconds=batches_s,
                held_s=batches_s,
                charged_s=charged_s,
            )
            order.add_share(share)
        return samples.has_work

    def _note_others(self, order: RunningOrder, report: BatchReport) -> None:
        """Log whose requests an order of this pipeline carried out besides its own."""
        tokens = {name: count for name, count in sorted(report.tokens_by_tenant.items()) if count}
        if any(name not in ("", self.id) for name in tokens):
            self._outbox.add_note(SharedBatchNote(order=order.action.order, tokens=tokens, seconds=report.seconds))

    def _run_training(self, order: RunningOrder) -> Generator[Future, Any, bool]:
        """Returns whether work is left."""
        worker, has_stepped = (yield from self._prepare_worker(order, Phase.TRAIN)), False
        has_begun = False
        while not order.is_pausing:
            if not self._num_handed_over:
                taken = list(self._take_segment(has_stepped=has_stepped))
                may_wait = has_begun and not self._to_train  # else other pipelines' orders have done all the work
                if not taken and not (may_wait and (yield from self._has_more(order, Phase.TRAIN, has_stepped))):
                    break
                yield from self._hand_over_training(worker, taken)
                has_stepped |= any(isinstance(request, OptimizerStep) for _, request in taken)
                continue
            report: BatchReport = yield self._run_train_chunk(worker)
            has_begun = True
            order.add(seconds=report.seconds, switch_s=0.0, tokens=report.tokens)
            order.add_batch(report.num_together, report.tokens, report.seconds, report.token_share)
            self._note_others(order, report)
            self._settle_chunk(report)
            if not self._num_handed_over and (update := self._newest_update()) is not None:
                if saves := list(self._take_saves()):
                    yield from self._hand_over_training(worker, saves)
                else:
                    yield from self._write_checkpoint(worker, update)
            if order.seconds >= self._longest_train_s():
                break
        self._report_rides(order)
        return bool(self._num_handed_over or self._to_train)

    def _run_train_chunk(self, worker: Worker) -> Future:
        """A chunk of what was handed over; losses of other pipelines are computed beside losses."""
        has_losses = any(isinstance(request, Loss) for _, request in self._handed_over)
        own = self._calls.call(worker, "run_chunk", RequestChunk(max_seconds=self._options.chunk_s))
        return self._trainers.run_chunk(own, self.id, self._options.chunk_s) if has_losses else own

    @property
    def _handed_over(self) -> Sequence[tuple[str, TrainRequest]]:
        """Requests pending at the train worker."""
        return self._since_checkpoint[len(self._since_checkpoint) - self._num_handed_over :]

    def ride(self, max_seconds: float) -> Future | None:
        """As of `Companion`. An update without a checkpoint gets that first, from its own order."""
        pending = self._handed_over
        is_of_losses = all(isinstance(request, Loss) for _, request in pending)
        if Phase.TRAIN in self._order_by_phase or self._newest_update() is not None or not is_of_losses:
            return None
        taken = list(takewhile(lambda entry: isinstance(entry[1], Loss), self._to_train))
        if not pending and not taken:
            return None
        for _ in taken:
            self._to_train.popleft()
        self._since_checkpoint += taken
        self._num_handed_over += len(taken)
        worker, _ = self._worker_by_phase[Phase.TRAIN]
        return self._calls.call(worker, "run_chunk", RequestChunk(max_seconds=max_seconds, requests=taken))

    def settle_ride(self, report: BatchReport) -> None:
        """As of `Companion`."""
        self._ridden_tokens += report.tokens
        self._ridden_s += report.seconds * report.token_share
        self._settle_chunk(report)

    def _settle_chunk(self, report: BatchReport) -> None:
        self._num_handed_over = report.num_active + report.num_waiting
        self._on_training_results(report.answers)

    def _report_rides(self, order: RunningOrder) -> None:
        """Count what orders of other pipelines computed for this one."""
        tokens, self._ridden_tokens = self._ridden_tokens, 0
        charged_s, self._ridden_s = self._ridden_s, 0.0
        if tokens:
            order.tokens += tokens
            order.add_share(BatchShare(num_together=2, tokens=tokens, seconds=0.0, held_s=0.0, charged_s=charged_s))

    def _on_training_results(self, results: Sequence[RequestResult]) -> None:
        for result in results:
            self._client.on_result(self.id, result)
        answered = {result.id for result in results}
        if answered - self._answered_since_checkpoint:
            self._num_losses[Phase.TRAIN] = 0
        self._forget_forwards(answered)
        self._answered_since_checkpoint |= answered & {name for name, _ in self._since_checkpoint}

    def _on_sample_result(self, result: RequestResult) -> None:
        self._num_losses[Phase.ROLLOUT] = 0
        self._client.on_result(self.id, result)

    def _forget_forwards(self, answered: AbstractSet[str]) -> None:
        """Forget answered losses without gradients: they changed nothing and need no repetition."""
        self._since_checkpoint = [
            (name, request)
            for name, request in self._since_checkpoint
            if name not in answered or not (isinstance(request, Loss) and request.is_forward_only)
        ]

    def _longest_train_s(self) -> float:
        """Seconds of computing after which a training batch ends with work left."""
        holds_gradients = any(_is_of_step(request) for _, request in self._since_checkpoint)
        return self._options.step_s if holds_gradients else self._options.batch_s

    def _hand_over_training(self, worker: Worker, taken: Sequence[tuple[str, TrainRequest]]) -> Work:
        self._since_checkpoint += taken
        self._num_handed_over = len(taken)
        if taken:
            yield self._calls.call(worker, "add", taken)

    def _take_segment(self, *, has_stepped: bool) -> Iterable[tuple[str, TrainRequest]]:
        """Requests up to the next optimizer step and the saves behind it; after a step, only saves."""
        if has_stepped:
            behind = list(takewhile(lambda entry: not _is_of_step(entry[1]), self._to_train))
        else:
            steps = (n for n, entry in enumerate(self._to_train, 1) if isinstance(entry[1], OptimizerStep))
            behind = list(self._to_train)[: next(steps, len(self._to_train))]
        for _ in behind:
            yield self._to_train.popleft()
        if behind and isinstance(behind[-1][1], OptimizerStep):
            yield from self._take_saves()

    def _take_saves(self) -> Iterable[tuple[str, TrainRequest]]:
        """The saves at the head of the queue: they change nothing, and a client waits for them."""
        while self._to_train and _is_save(self._to_train[0][1]):
            yield self._to_train.popleft()

    def _newest_update(self) -> str | None:
        """The optimizer step that made the present state, if no checkpoint has it; None for any other state."""
        newest = next((entry for entry in reversed(self._since_checkpoint) if not _is_save(entry[1])), None)
        return newest[0] if newest is not None and isinstance(newest[1], OptimizerStep) else None

    def _write_checkpoint(self, worker: Worker, request_id: str) -> Work:
        """Write the state after this request's update: no earlier request is repeated from then on."""
        folder, previous = self._folder / f"update-{self._num_updates + 1}", self._checkpoint
        self._num_updates += 1
        kept = [each for each in (previous, folder) if each is not None]
        self.sha256 = sha256 = yield self._calls.call(worker, "keep_update", folder, kept)
        self._checkpoint, self._since_checkpoint = folder, []
        self._answered_since_checkpoint = set()
        self._num_losses[Phase.TRAIN] = 0
        self._client.on_checkpoint(self.id, request_id, folder, sha256)

    def _has_more(self, order: RunningOrder, phase: Phase, has_stepped: bool = False) -> Generator[Future, Any, bool]:
        """Wait a moment for more work; returns whether some arrived."""
        if not self._is_waiting(phase):
            timeout = self._timeout_by_kind.setdefault((phase, has_stepped), IdleTimeout())
            self._idle_by_phase[phase] = timeout, self._outbox.now_s()
            seconds = timeout.seconds(max(self._options.idle_s, self._load_s))
            if not seconds:
                return False
            order.input = self._calls.after(seconds)
            yield order.input
            order.input = None
        return self._is_waiting(phase)

    def _is_waiting(self, phase: Phase) -> bool:
        return bool(self._samples.waiting if phase is Phase.ROLLOUT else self._to_train)

    # --- workers ----------------------------------------------------------------------------------------------

    def _prepare_worker(self, order: RunningOrder, phase: Phase) -> Generator[Future, Any, Worker]:
        """The worker of a phase on the order's device, with its state there."""
        start, device = self._outbox.now_s(), order.action.devices[0]
        found = self._worker_by_phase.get(phase)
        if found is not None and found[1] != device:
            self._end_worker(phase)
            found = None
        shared = self._samplers.find(self._base, device) if phase is Phase.ROLLOUT and found is None else None
        if shared is not None:
            worker = shared.worker
            self._use_sampler(shared, device)
            yield self._calls.call(worker, "load")
        elif found is None:
            worker = self._spawn(phase, device)
            yield self._calls.call(worker, "build")
        else:
            worker = found[0]
            if order.action.switch is not Switch.NONE:
                load_from_s = self._outbox.now_s()
                yield self._calls.call(worker, "load")
                self._load_s = self._outbox.now_s() - load_from_s
        if phase is Phase.ROLLOUT and self._sampler is not None:
            yield from self._sampler.join(self._samples)
        if phase is Phase.TRAIN:
            self._trainers.enter(self._tenancy, device, self)
        order.switch_s += self._outbox.now_s() - start
        return worker

    def _spawn(self, phase: Phase, device: DeviceId) -> Worker:
        make: Callable[..., object]
        args: tuple[object, ...]
        tenancy: str | None = None
        if phase is Phase.ROLLOUT:
            make, args = SampleWorker, (self._config, self._folder, self._workplace.bases)
        else:
            is_alone = self._num_losses[phase] > 1  # perhaps it is the one that ends the process
            tenancy = self._tenancy = None if is_alone else self._train_base
            make = DatumWorker if tenancy is None else DatumHost
            args = self._config, self._checkpoint, self._workplace.bases
        worker = self._workplace.spawn(
            f"{self.id}/{phase}",
            make,
            args,
            device=device,
            log_path=self._folder / "workers.log",
            call_limit_s=self._options.call_limit_s,
            tenancy=tenancy,
        )
        self._worker_by_phase[phase] = worker, device
        if phase is Phase.ROLLOUT:
            sampler = SharedSampler(worker, self._calls)
            self._samplers.keep(self._base, device, sampler)
            self._use_sampler(sampler, device)
        return worker

    def _use_sampler(self, sampler: SharedSampler, device: DeviceId) -> None:
        self._worker_by_phase[Phase.ROLLOUT] = sampler.worker, device
        self._sampler = sampler
        sampler.reserve(self.id)

    def stop_sharing(self) -> None:
        """Sample with a separate worker from now on: the shared one failed, perhaps through another pipeline."""
        self._base = None

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker, _ in self._worker_by_phase.values()]

    def count_loss(self, worker: Worker) -> int:
        """Count a lost worker; returns the losses of its phase in a row. Repeated work does not break a row, so that no
        request that ends every worker is retried forever."""
        phase = self._phase_of(worker)
        self._num_losses[phase] += 1
        return self._num_losses[phase]

    def forget(self, worker: Worker) -> DeviceId:
        """Drop a lost worker: the orders on its device end, and their unanswered requests are repeated. Returns the
        device."""
        phase = self._phase_of(worker)
        device = self._worker_by_phase[phase][1]
        ended = {each: order for each, order in self._order_by_phase.items() if device in order.action.devices}
        for order in ended.values():
            if order.task is not None:
                self._calls.close(order.task)
        for each in dict.fromkeys([phase, *ended]):
            if each in self._worker_by_phase:
                self._end_worker(each)
        return device

    def _phase_of(self, worker: Worker) -> Phase:
        return next(phase for phase, (mine, _) in self._worker_by_phase.items() if mine is worker)

    def _end_worker(self, phase: Phase) -> None:
        worker, _ = self._worker_by_phase.pop(phase)
        if phase is Phase.TRAIN:
            self._trainers.leave(self.id)
        if phase is Phase.TRAIN or self._leave_sampler():
            self._workplace.forget(worker)
            self._calls.fail_calls(worker)
            worker.kill()
        if phase is Phase.TRAIN:
            self._to_train.extendleft(reversed(self._since_checkpoint))
            self._since_checkpoint, self._num_handed_over = [], 0

    def _leave_sampler(self) -> bool:
        """Leave the sampling worker; returns whether it is then unused."""
        sampler, self._sampler = self._sampler, None
        assert sampler is not None
        sampler.leave(self._samples)
        if sampler.is_unused:
            self._samplers.drop(sampler)
        return sampler.is_unused

    def park(self) -> None:
        """Release all devices until the next order, which repeats unanswered requests."""
        self._calls.close_all_of(self.id)
        for phase in list(self._worker_by_phase):
            self._end_worker(phase)


def _is_of_step(request: TrainRequest) -> bool:
    return isinstance(request, OptimizerStep) or (isinstance(request, Loss) and not request.is_forward_only)


def _is_save(request: TrainRequest) -> bool:
    return isinstance(request, WriteWeights | SaveState)


def _train_units(request: TrainRequest) -> int:
    """Tokens of a training request."""
    return request.num_tokens if isinstance(request, Loss) else 0
