"""The workers of an on-demand pipeline: they carry out requests, in bounded calls.

    SampleWorker   a rollout engine; of each tenant, requests of one file of weights at a time
    DatumWorker    a train engine; requests in the order they are handed over (several in a process: tenant_hosts.py)

A request that cannot be carried out is answered with its error and changes nothing else.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.client_requests import (
    ForwardBackward,
    ForwardBackwardDone,
    LoadState,
    OptimizerStep,
    PackedLoss,
    SampleDone,
    SampledSequence,
    SampleRequest,
    SaveState,
    TrainRequest,
    WriteWeights,
)
from rlmux.rl.config import AdapterConfig, TrainingConfig
from rlmux.rl.types import ChunkReport, FinishedTurn, TrajectoryId
from rlmux.runtime.workers.heartbeat import beating
from rlmux.runtime.workers.planned_workers import device_in_use, offload_engine

if TYPE_CHECKING:
    from rlmux.engines.train.datum_train import DatumTrainEngine
    from rlmux.engines.train.stage_work import TrainWork

_Key = tuple[str, str]
"""Tenant of a request, and its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The result of one request."""

    id: str
    value: Any = None
    """A value of rl/client_requests.py, the output of the request's `write`, or a weight hash; None with an error."""
    error: str | None = None
    is_fault_of_server: bool = False
    """Whether the server, not the request, caused the error."""
    tenant: str = ""
    """Name of the requesting tenant of a sampling worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChunk:
    """A bounded call of a training worker."""

    max_seconds: float
    requests: Sequence[tuple[str, TrainRequest]] = ()
    """Requests by id, queued first."""
    device_fraction: ClassVar[float] = 1.0
    """Requests are computed with the whole device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Report of a bounded call of either worker."""

    answers: Sequence[RequestResult]
    num_active: int
    """Sequences being decoded, or training requests under way."""
    num_waiting: int
    """Sequences, or training requests, that wait."""
    tokens: int
    seconds: float
    load_s: float
    """Seconds of loading state and weights, `seconds` left out."""
    tokens_by_tenant: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each tenant of the worker, or of the process of a training worker."""
    num_together: int = 1
    """Models that were trained together."""
    token_share: float = 1.0
    """Share of this model's tokens in all that were trained together."""


class SampleWorker:
    """A rollout engine that samples with the weights that each request names.

    A whole model is its one tenant, named "". Adapters of the base are tenants that join, and are decoded in one batch.
    """

    @beating()
    def __init__(self, config: TrainingConfig, folder: Path, bases: Path | None = None) -> None:
        """`folder`: gets the model's initial weights, for later reloads. `bases`: folder in shared memory for adapters'
        base."""
        import torch

        from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
        from rlmux.rl.vocabulary import load_vocabulary

        torch.set_num_threads(config.train.num_threads)
        self._config = config
        self._vocabulary = load_vocabulary(config.model)
        self._engine = SlotRolloutEngine(
            config.model,
            config.rollout,
            vocab_size=self._vocabulary.vocab_size,
            seed=config.model_seed,
            device=device_in_use(),
            adapter=config.adapter,
            bases=bases,
            vocabulary=self._vocabulary,
        )
        if config.adapter is not None:
            self._engine.remove_adapter("")  # the pipeline joins, as others do
        self._first_weights = folder / "base.safetensors"
        self._adapters: dict[str, AdapterConfig] = {}
        self._loaded: dict[str, Path | None] = {}
        """File of a tenant's weights; None or missing: the model's initial weights."""
        self._num_loads = 0
        self._departed: list[str] = []
        """Tenants that left while the engine was offloaded."""
        self._is_offloaded = False
        self._requests: dict[_Key, SampleRequest] = {}
        self._turns_by_request: dict[_Key, dict[TrajectoryId, FinishedTurn]] = {}
        self._request_by_trajectory: dict[TrajectoryId, _Key] = {}
        self._num_made: dict[TrajectoryId, int] = {}
        """Tokens of unfinished trajectories that were reported."""

    def join(self, tenant: str, adapter: AdapterConfig) -> None:
        """Serve an adapter of the base from now on."""
        with beating():
            self._engine.add_adapter(tenant, adapter)
            self._adapters[tenant] = adapter

    def leave(self, tenant: str) -> None:
        """Stop serving an adapter, and drop its requests."""
        gone = [trajectory for trajectory, (name, _) in self._request_by_trajectory.items() if name == tenant]
        self._engine.take_partials(gone, with_kv=False)
        for trajectory in gone:
            del self._request_by_trajectory[trajectory]
            self._num_made.pop(trajectory, None)
        for key in [key for key in self._requests if key[0] == tenant]:
            del self._requests[key], self._turns_by_request[key]
        self._departed.append(tenant)
        if not self._is_offloaded:
            self._remove_departed()

    def load_weights(self, weights: Path | None, tenant: str = "") -> None:
        """Load weights after all earlier requests are answered; None: the model's initial weights."""
        with beating():
            self._load_weights(weights, tenant)

    def add(self, requests: Sequence[SampleRequest], tenant: str = "") -> list[RequestResult]:
        """Queue requests for the loaded weights; returns the errors of invalid ones."""
        refused = []
        for request in requests:
            trajectories = [replace(asked, id=asked.id._replace(adapter=tenant)) for asked in request.trajectories]
            try:
                self._engine.submit(trajectories)
            except UserError as error:
                refused.append(RequestResult(id=request.id, error=str(error), tenant=tenant))
                continue
            key = tenant, request.id
            self._requests[key] = request
            self._turns_by_request[key] = {}
            self._request_by_trajectory.update((trajectory.id, key) for trajectory in trajectories)
        return refused

    @beating()
    def run_chunk(self, max_seconds: float) -> BatchReport:
        """Decode until some request is answered, nothing is left, or the time is up."""
        start = time.perf_counter()
        report = self._engine.run_chunk(max_decode_steps=1_000_000, max_seconds=max_seconds)
        answers = []
        for turn in report.finished:
            key = self._request_by_trajectory.pop(turn.id)
            turns = self._turns_by_request[key]
            turns[turn.id] = turn
            if len(turns) == len(self._requests[key].trajectories):
                answers.append(self._answer(key[0], self._requests.pop(key), self._turns_by_request.pop(key)))
        return BatchReport(
            answers=answers,
            num_active=report.num_active,
            num_waiting=report.num_waiting,
            tokens=report.sampled_tokens,
            seconds=time.perf_counter() - start,
            load_s=0.0,
            tokens_by_tenant=self._tokens_by_tenant(report),
        )

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        with beating():
            self._engine.load()
            self._is_offloaded = False
            self._remove_departed()

    def offload(self, spill_to: Path | None = None) -> int:
        """Leave the device; what is unfinished goes along. Returns the device bytes still held."""
        self._is_offloaded = True
        return offload_engine(self._engine, spill_to)

    def _remove_departed(self) -> None:
        for tenant in self._departed:
            self._engine.remove_adapter(tenant)
            del self._adapters[tenant]
            self._loaded.pop(tenant, None)
        self._departed = []

    def _tokens_by_tenant(self, report: ChunkReport) -> dict[str, int]:
        """Tokens that a chunk made for each tenant."""
        made = dict(report.progress)
        made.update((turn.id, len(turn.tokens)) for turn in report.finished)
        tokens: Counter[str] = Counter()
        for trajectory, count in made.items():
            tokens[trajectory.adapter] += count - self._num_made.get(trajectory, 0)
        self._num_made = dict(report.progress)
        return dict(tokens)

    def _load_weights(self, weights: Path | None, tenant: str) -> None:
        if weights == self._loaded.get(tenant):
            return
        if weights is None and tenant:
            self._engine.remove_adapter(tenant)
            self._engine.add_adapter(tenant, self._adapters[tenant])
            self._loaded[tenant] = None
            return
        if weights is None and not self._first_weights.exists():
            from rlmux.engines.model.model_io import build_model
            from rlmux.engines.model.weights import write_tensors

            model = build_model(self._config.model, self._vocabulary.vocab_size, self._config.model_seed)
            write_tensors(self._first_weights, dict(model.named_parameters()), {})
        self._num_loads += 1
        try:
            self._engine.load_weights(weights or self._first_weights, self._num_loads, tenant)
        except FileNotFoundError as error:
            raise PipelineError(f"{weights}: these weights are gone") from error
        self._loaded[tenant] = weights

    def _answer(self, tenant: str, request: SampleRequest, turns: dict[TrajectoryId, FinishedTurn]) -> RequestResult:
        scored: Sequence[float] = ()
        if request.num_scored:
            scored = self._engine.score(request.prompt_tokens, request.num_scored, tenant)
        sequences = [
            SampledSequence(tokens=turn.tokens, logprobs=turn.logprobs, stop_reason=turn.stop_reason)
            for turn in (turns[trajectory.id._replace(adapter=tenant)] for trajectory in request.trajectories)
        ]
        done = SampleDone(id=request.id, sequences=sequences, prompt_logprobs=scored)
        return RequestResult(id=request.id, value=done if request.write is None else request.write(done), tenant=tenant)


class DatumWorker:
    """A train engine that carries out training requests in their order."""

    @beating()
    def __init__(self, config: TrainingConfig, restore_from: Path | None, bases: Path | None = None) -> None:
        """`restore_from`: a checkpoint to go on from. `bases`: folder in shared memory for the base of adapters."""
        import torch

        from rlmux.engines.train.datum_train import DatumTrainEngine

        torch.set_num_threads(config.train.num_threads)
        self._take(DatumTrainEngine(config, device=device_in_use(), bases=bases), restore_from)

    @classmethod
    def over(cls, engine: DatumTrainEngine, restore_from: Path | None) -> DatumWorker:
        """A worker over a tenant's engine, for `next_work` and calls without a chunk."""
        worker = cls.__new__(cls)
        worker._take(engine, restore_from)
        return worker

    def _take(self, engine: DatumTrainEngine, restore_from: Path | None) -> None:
        self._engine = engine
        if restore_from is not None:
            engine.restore(restore_from)
        self._waiting: deque[tuple[str, TrainRequest]] = deque()
        self._under_way: tuple[str, TrainWork, Callable[[ForwardBackwardDone], Any]] | None = None
        """Id and work of a request, and the function that makes its answer."""

    def add(self, requests: Sequence[tuple[str, TrainRequest]]) -> None:
        """Queue requests by id."""
        self._waiting += requests

    @beating()
    def run_chunk(self, chunk: RequestChunk) -> BatchReport:
        """Carry out requests until none is left or the time is up; at least one micro-batch."""
        self.add(chunk.requests)
        start = time.perf_counter()
        answers: list[RequestResult] = []
        tokens = 0
        while not tokens or time.perf_counter() - start < chunk.max_seconds:
            work = self.next_work(answers)
            if work is None:
                break
            before = work.tokens
            work.run_alone(self._engine.state.answer)
            tokens += work.tokens - before
        return self.report(answers, tokens, time.perf_counter() - start)

    def next_work(self, answers: list[RequestResult]) -> TrainWork | None:
        """The work of the next micro-batch; requests without any are carried out before it."""
        while self._under_way is not None or self._waiting:
            if self._under_way is None:
                self._begin(*self._waiting.popleft(), answers)
            elif self._under_way[1].has_score():
                return self._under_way[1]
            else:
                answers.append(self._answer(*self._under_way))
        return None

    def report(self, answers: Sequence[RequestResult], tokens: int, seconds: float) -> BatchReport:
        """Report of a chunk."""
        return BatchReport(
            answers=answers,
            num_active=int(self._under_way is not None),
            num_waiting=len(self._waiting),
            tokens=tokens,
            seconds=seconds,
            load_s=0.0,
        )

    def resident_bytes(self) -> int:
        """Device bytes of the engine's state."""
        return self._engine.resident_bytes()

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        with beating():
            self._engine.load()

    def offload(self, spill_to: Path | None = None) -> int:
        """Leave the device; gradients go along. Returns the device bytes still held."""
        return offload_engine(self._engine, spill_to)

    def keep_update(self, folder: Path, kept: Sequence[Path]) -> str:
        """Write a checkpoint `update-NUMBER` of the present state, and remove other updates not in `kept`; returns the
        hash of its weights."""
        with beating():
            sha256 = self._engine.save_state(folder)
            for old in sorted(folder.parent.glob("update-*")):
                if old not in kept:
                    shutil.rmtree(old, ignore_errors=True)
            return sha256

    def _begin(self, name: str, request: TrainRequest, answers: list[RequestResult]) -> None:
        if isinstance(request, PackedLoss):
            self._under_way = name, self._engine.forward_backward(request.read(request.body)), request.write
        elif isinstance(request, ForwardBackward):
            self._under_way = name, self._engine.forward_backward(request), lambda done: done
        else:
            answers.append(self._carry_out(name, request))

    def _answer(self, name: str, work: TrainWork, write: Callable[[ForwardBackwardDone], Any]) -> RequestResult:
        """The result of a request that is over."""
        self._under_way = None
        if work.error is None:
            return RequestResult(id=name, value=write(work.result))
        if isinstance(work.error, UserError | PipelineError):
            return RequestResult(id=name, error=str(work.error))
        raise work.error

    def _carry_out(self, name: str, request: TrainRequest) -> RequestResult:
        value: Any
        try:
            match request:
                case OptimizerStep():
                    value = self._engine.optimizer_step(request)
                case WriteWeights():
                    value = self._engine.save_weights(request.path)
                case SaveState():
                    value = self._engine.save_state(request.folder)
                case LoadState():
                    value = self._engine.load_state(request)
        except (UserError, PipelineError) as error:
            return RequestResult(id=name, error=str(error))
        except OSError as error:  # a disk that is full: the model goes on
            return RequestResult(id=name, error=f"cannot be written or read: {error}", is_fault_of_server=True)
        return RequestResult(id=name, value=value)
