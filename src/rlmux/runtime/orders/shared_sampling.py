"""Sampling of on-demand pipelines: their requests, and the workers that several of them share.

    OnDemandPipeline ── the order's turn ─▶ Sampler.run_round ─▶ hand over what waits, of every tenant
                                                            ─▶ one chunk of the worker, all tenants in one batch
    SampleQueue  ◀── answers, and what was sampled for it ──┘

A whole model has a worker of its own. Adapters of one base have one worker on each device: a tenant's requests are
taken along by whichever tenant's order runs there, and its own order does what is left. A sequence is the same alone
and beside others (`engines/rollout/slot_engine.py`), so this decides when something is sampled, never what. An order
is charged the seconds of its own rounds; tokens are reported by an order of their own pipeline.

A round outlives the order that started it, so that no answer is lost when a tenant ends. Such a round may meet an
offload, so it makes no call to a worker without any pipeline's state on the device.

A module of its own: several pipelines share its workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmux.core.errors import WorkerLostError
from rlmux.core.model import DeviceId, PipelineId
from rlmux.rl.client_requests import SampleRequest
from rlmux.rl.config import AdapterConfig, TrainingConfig
from rlmux.rl.memory.adapter_base import base_name
from rlmux.runtime.workers.call_loop import CallLoop, Future, Work
from rlmux.runtime.workers.request_workers import BatchReport, RequestResult
from rlmux.runtime.workers.worker_pool import Worker

QueuedRequest = tuple[SampleRequest, Path | None]
"""A request, and the file of its weights; None: the model's initial weights."""

_SHARED_CHUNK_S = 0.05
"""Longest chunk of a worker that several pipelines have, in seconds: so long requests of one wait at most before they
are decoded beside those of another."""


class SampleQueue:
    """The sampling requests of one pipeline."""

    def __init__(
        self, pipeline: PipelineId, adapter: AdapterConfig | None, on_result: Callable[[RequestResult], None]
    ) -> None:
        """`adapter`: of the pipeline; None: it has a whole model and a worker of its own."""
        self.pipeline = pipeline
        self.adapter = adapter
        self.name = "" if adapter is None else str(pipeline)
        """Name of the tenant in its worker."""
        self.waiting: deque[QueuedRequest] = deque()
        self.begun: dict[str, QueuedRequest] = {}
        """Requests pending at a worker, by id."""
        self.unreported_tokens = 0
        """Tokens sampled for it and not reported by an order of its own yet."""
        self.unreported_s = 0.0
        """Its share by tokens of the seconds of batches with others, not reported either."""
        self._on_result = on_result

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.begun)

    def all_work(self) -> list[SampleRequest]:
        return [request for request, _ in (*self.begun.values(), *self.waiting)]

    def take_tokens(self) -> int:
        """Tokens sampled for it since the last call."""
        tokens, self.unreported_tokens = self.unreported_tokens, 0
        return tokens

    def take_seconds(self) -> float:
        """Seconds of batches with others that are its own by its share of their tokens, since the last call."""
        seconds, self.unreported_s = self.unreported_s, 0.0
        return seconds

    def settle(self, answers: Sequence[RequestResult]) -> None:
        """Forward the worker's answers; those to requeued requests are dropped."""
        for answer in answers:
            if self.begun.pop(answer.id, None) is not None:
                self._on_result(answer)

    def requeue(self) -> None:
        """Requeue the requests of a lost worker."""
        self.waiting.extendleft(reversed(self.begun.values()))
        self.begun = {}

    def withdraw(self, ids: Sequence[str]) -> None:
        """Cancel requests that wait; each gets an error as its result."""
        gone = {request.id for request, _ in self.waiting}.intersection(ids)
        self.waiting = deque(each for each in self.waiting if each[0].id not in gone)
        for each in ids:
            if each in gone:
                self._on_result(RequestResult(id=each, error="it was cancelled before it began"))


@dataclass(slots=True, eq=False)
class _Tenant:
    """A pipeline that a worker serves, from a `join` to the next `leave`."""

    queue: SampleQueue
    weights: Path | None = None
    """File of the weights that the worker holds for it; None: the model's initial weights."""


class SharedSampler:
    """One worker, and the pipelines whose requests it decodes in one batch."""

    def __init__(self, worker: Worker, calls: CallLoop) -> None:
        self.worker = worker
        self._calls = calls
        self._users: dict[PipelineId, None] = {}
        """Pipelines that use the worker or wait to join it."""
        self._tenants: dict[str, _Tenant] = {}
        self._on_device: dict[PipelineId, None] = {}
        """Pipelines with a state on the device."""
        self._waiting: list[Future] = []
        """Futures that wait for the present round."""
        self._is_running = False

    @property
    def is_unused(self) -> bool:
        """Whether no pipeline uses the worker."""
        return not self._users

    def reserve(self, pipeline: PipelineId) -> None:
        """Reserve the worker for a pipeline."""
        self._users[pipeline] = None

    def join(self, queue: SampleQueue) -> Work:
        """Serve a pipeline whose state is on the device, from now on. The worker is loaded."""
        self._on_device[queue.pipeline] = None
        if queue.name not in self._tenants:
            self._tenants[queue.name] = _Tenant(queue)
            if queue.adapter is not None:
                yield self._calls.call(self.worker, "join", queue.name, queue.adapter)

    def leave(self, queue: SampleQueue) -> None:
        """Stop serving a pipeline; its begun requests are requeued."""
        self._users.pop(queue.pipeline, None)
        self._on_device.pop(queue.pipeline, None)
        was_here = self._tenants.pop(queue.name, None) is not None
        queue.requeue()
        if was_here and self._users:
            self._calls.call(self.worker, "leave", queue.name)

    def leave_device(self, pipeline: PipelineId) -> bool:
        """Take the pipeline's state off the device; returns whether the worker has to be offloaded."""
        self._on_device.pop(pipeline, None)
        return not self._on_device

    def run_round(self, max_seconds: float) -> Future:
        """Serve all tenants' requests in a bounded chunk; the future gets its BatchReport."""
        done = self._calls.future()
        self._waiting.append(done)
        if not self._is_running:
            self._is_running = True
            chunk_s = max_seconds if len(self._users) == 1 else min(max_seconds, _SHARED_CHUNK_S)
            self._calls.start(self._round(chunk_s), pipeline=None)
        return done

    def _round(self, chunk_s: float) -> Work:
        report = BatchReport(answers=(), num_active=0, num_waiting=0, tokens=0, seconds=0.0, load_s=0.0)
        try:
            for tenant in list(self._tenants.values()):
                yield from self._hand_over(tenant)
            if self._on_device and any(tenant.queue.begun for tenant in self._tenants.values()):
                report = yield self._calls.call(self.worker, "run_chunk", chunk_s)
                self._distribute(report)
        except WorkerLostError as error:
            for each in self._waiting:
                each.set_error(error)
            raise
        self._is_running = False
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.set_result(report)

    def _hand_over(self, tenant: _Tenant) -> Work:
        """Send requests for the oldest request's weights, or for the weights in use; others wait."""
        queue = tenant.queue
        if not queue.waiting or not self._is_served(tenant):
            return
        begun = next(iter(queue.begun.values()), None)
        weights = begun[1] if begun else queue.waiting[0][1]
        if not begun and tenant.weights != weights:
            yield self._calls.call(self.worker, "load_weights", weights, queue.name)
            tenant.weights = weights
            if not self._is_served(tenant):
                return
        taken = [each for each in queue.waiting if each[1] == weights]
        if taken:
            queue.waiting = deque(each for each in queue.waiting if each[1] != weights)
            queue.begun.update((each[0].id, each) for each in taken)
            queue.settle((yield self._calls.call(self.worker, "add", [request for request, _ in taken], queue.name)))

    def _is_served(self, tenant: _Tenant) -> bool:
        """Whether the tenant has not left and the worker is loaded."""
        return self._tenants.get(tenant.queue.name) is tenant and bool(self._on_device)

    def _distribute(self, report: BatchReport) -> None:
        """Distribute answers and tokens to their tenants."""
        tokens = report.tokens_by_tenant
        num_together, total = sum(map(bool, tokens.values())), sum(tokens.values())
        for name, tenant in list(self._tenants.items()):
            tenant.queue.unreported_tokens += tokens.get(name, 0)
            if num_together > 1:
                tenant.queue.unreported_s += report.seconds * tokens.get(name, 0) / total
            tenant.queue.settle([answer for answer in report.answers if answer.tenant == name])


class SharedSamplers:
    """Workers shared by adapters of one base, by base and device."""

    def __init__(self) -> None:
        self._samplers: dict[tuple[str, DeviceId], SharedSampler] = {}

    def find(self, base: str | None, device: DeviceId) -> SharedSampler | None:
        """The worker, if any. `base`: from `shared_base`."""
        return None if base is None else self._samplers.get((base, device))

    def keep(self, base: str | None, device: DeviceId, sampler: SharedSampler) -> None:
        if base is not None:
            self._samplers[base, device] = sampler

    def drop(self, sampler: SharedSampler) -> None:
        """Its worker ends."""
        self._samplers = {key: each for key, each in self._samplers.items() if each is not sampler}


def shared_base(config: TrainingConfig) -> str | None:
    """The key that pipelines with a common sampling worker share; None for a whole model."""
    if config.adapter is None:
        return None
    return f"{base_name(config.model, config.model_seed)} {config.rollout} {config.train.num_threads}"
