"""The object inside a process of several tenants: their calls, and those that are computed together.

    serve(left, calls) ──▶ those that left go ──▶ every call by itself ──▶ one batch of all calls of `TOGETHER`
           ▲                                                                     │
    tenant_process.py ◀──────────── a result or an error for each call ◀─────────┘

    RolloutHost   run_chunk   trajectories of all tenants in one batch      engines/rollout/tenants.py
    TrainHost     run_stage   micro-batches of all tenants in one step      engines/train/joint_training.py
    DatumHost     run_chunk   micro-batches of all clients' requests        engines/train/joint_training.py

Invariant: an error in a call of one tenant is that tenant's alone, and no call changes another tenant's results.

A module of its own: it lives in the worker process, beside `planned_workers` and `request_workers`; the controller only
names it.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rlmux.core.errors import IllegalTransitionError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.runtime.workers.heartbeat import beating
from rlmux.runtime.workers.planned_workers import (
    ChunkInputs,
    RolloutWorker,
    StageInputs,
    TrainWorker,
    device_in_use,
    make_rollout_engine,
)
from rlmux.runtime.workers.processes import BUILD, portable_error
from rlmux.runtime.workers.request_workers import BatchReport, DatumWorker, RequestChunk, RequestResult
from rlmux.runtime.workers.tenant_process import TenantCall, TenantResult
from rlmux.runtime.workers.worker_calls import (
    AdapterRoom,
    RolloutChunk,
    RolloutChunkResult,
    TrainCall,
    TrainCallResult,
)

if TYPE_CHECKING:
    from rlmux.engines.device_fraction import FractionSetter
    from rlmux.engines.rollout.tenants import SharedEngine
    from rlmux.engines.train.joint_training import JointTraining
    from rlmux.engines.train.stage_work import TrainWork

_SHARED_CHUNK_S = 0.2
"""Longest batch in seconds while another tenant may join it: so long at most a call waits for a batch of others."""

Tenant = TypeVar("Tenant", RolloutWorker, TrainWorker, DatumWorker)
Call = TypeVar("Call", RolloutChunk, TrainCall, RequestChunk)
Inputs = TypeVar("Inputs", ChunkInputs, StageInputs, None)
Result = TypeVar("Result", RolloutChunkResult, TrainCallResult, BatchReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed(Generic[Result]):
    """One tenant's part of a batch."""

    result: Result
    tokens: int
    """Tokens that the batch computed for it."""


class TenantHost(ABC, Generic[Tenant, Call, Inputs, Result]):
    """A worker for each tenant. See the module docstring."""

    TOGETHER: ClassVar[str]
    """Name of the method whose calls are computed together."""

    def __init__(self) -> None:
        self._workers: dict[str, Tenant] = {}
        self._own_fraction: FractionSetter | None = None

    def serve(self, left: Sequence[str], calls: Sequence[TenantCall]) -> list[TenantResult]:
        """Drop tenants, then carry out at most one call of each other one; results in the order of the calls."""
        for tenant in left:
            if self._workers.pop(tenant, None) is not None:
                self._leave(tenant)
        results: dict[str, TenantResult] = {}
        batch: dict[str, tuple[Call, Inputs]] = {}
        for call in calls:
            try:
                if call.tenant not in self._workers:
                    self._workers[call.tenant] = self._join(call.tenant, *call.joins)
                worker = self._workers[call.tenant]
                if call.method == self.TOGETHER:
                    batch[call.tenant] = call.args[0], self._take_inputs(call.tenant, call.args[0])
                else:
                    is_built = call.method == BUILD
                    value = self._room(call.tenant) if is_built else getattr(worker, call.method)(*call.args)
                    results[call.tenant] = TenantResult(value=value)
            except (Exception, SystemExit) as error:  # what user code raises is one pipeline's fault
                results[call.tenant] = _failed(call, error)
        results.update(self._compute({call.tenant: call for call in calls if call.tenant in batch}, batch))
        return [results[call.tenant] for call in calls]

    def _compute(
        self, calls: Mapping[str, TenantCall], batch: Mapping[str, tuple[Call, Inputs]]
    ) -> dict[str, TenantResult]:
        """One batch; each result says how many tenants it computed for, and which share was the tenant's."""
        if not batch:
            return {}
        self._fraction.set(min(1.0, sum(call.device_fraction for call, _ in batch.values())))
        try:
            found = self._run(batch)
        except Exception as error:  # no memory: of all of them
            return {tenant: _failed(call, error) for tenant, call in calls.items()}
        tokens = {tenant: outcome.tokens for tenant, outcome in found.items() if isinstance(outcome, Computed)}
        num_together, total = sum(map(bool, tokens.values())), max(1, sum(tokens.values()))
        results = {}
        for tenant, outcome in found.items():
            if isinstance(outcome, Exception):
                results[tenant] = _failed(calls[tenant], outcome)
            elif num_together < 2:
                results[tenant] = TenantResult(value=outcome.result)
            else:
                shared = replace(outcome.result, num_together=num_together, token_share=outcome.tokens / total)
                results[tenant] = TenantResult(value=shared)
        return results

    def _room(self, tenant: str) -> AdapterRoom:
        """Memory of a tenant that has just joined, and free memory."""
        import psutil
        import torch

        is_gpu = torch.cuda.is_available()
        free_bytes = torch.cuda.mem_get_info()[0] if is_gpu else psutil.virtual_memory().available
        return AdapterRoom(state_bytes=self._state_bytes(tenant), free_bytes=int(free_bytes))

    @property
    def _fraction(self) -> FractionSetter:
        """Sets the process's device fraction to the sum over computing tenants."""
        from rlmux.engines.device_fraction import fraction_setter

        if self._own_fraction is None:
            self._own_fraction = fraction_setter(device_in_use())
        return self._own_fraction

    @abstractmethod
    def _join(self, tenant: str, *args: Any) -> Tenant:
        """Serve a pipeline from now on; the first one builds what they share."""

    @abstractmethod
    def _leave(self, tenant: str) -> None: ...

    @abstractmethod
    def _state_bytes(self, tenant: str) -> int:
        """Device bytes of the tenant's own state: slots and adapter, or adapter, gradients and moments."""

    @abstractmethod
    def _take_inputs(self, tenant: str, call: Call) -> Inputs:
        """Everything of a call but what is computed together."""

    @abstractmethod
    def _run(self, batch: Mapping[str, tuple[Call, Inputs]]) -> Mapping[str, Computed[Result] | Exception]:
        """Compute the calls of these tenants, within the smallest of their limits."""


class RolloutHost(TenantHost[RolloutWorker, RolloutChunk, ChunkInputs, RolloutChunkResult]):
    """Rollouts of adapters of one base, over one engine."""

    TOGETHER = "run_chunk"

    def __init__(self) -> None:
        super().__init__()
        self._engine: SharedEngine | None = None

    @property
    def _shared(self) -> SharedEngine:
        assert self._engine is not None, "the first tenant builds it"
        return self._engine

    @beating()
    def _join(self, tenant: str, config: TrainingConfig, origin: Origin | None, bases: Path | None) -> RolloutWorker:
        import torch

        from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
        from rlmux.engines.rollout.tenants import SharedEngine
        from rlmux.rl.tasks import make_task
        from rlmux.rl.vocabulary import load_vocabulary

        vocabulary = load_vocabulary(config.model)
        task = make_task(config.task, seed=config.seed, vocabulary=vocabulary)
        if self._engine is None:
            torch.set_num_threads(config.train.num_threads)
            device = device_in_use()
            engine = make_rollout_engine(config, vocabulary.vocab_size, task.is_single_turn, device, bases)
            assert isinstance(engine, SlotRolloutEngine), "tenancies are of our own engine"
            self._engine = SharedEngine(engine)
        assert config.adapter is not None
        own = self._shared.join(
            tenant, config.adapter, staleness=config.algorithm.staleness, is_single_turn=task.is_single_turn
        )
        return RolloutWorker.over(own, origin)

    def _leave(self, tenant: str) -> None:
        self._shared.leave(tenant)

    def _state_bytes(self, tenant: str) -> int:
        return self._shared.state_bytes(tenant)

    def _take_inputs(self, tenant: str, call: RolloutChunk) -> ChunkInputs:
        inputs = self._workers[tenant].take_inputs(call)
        if not self._shared.is_loaded(tenant):
            raise IllegalTransitionError(f"rollouts of {tenant} cannot run while its state is offloaded")
        return inputs

    def _run(
        self, batch: Mapping[str, tuple[RolloutChunk, ChunkInputs]]
    ) -> Mapping[str, Computed[RolloutChunkResult] | Exception]:
        chunks = [chunk for chunk, _ in batch.values()]
        shared_limit = [_SHARED_CHUNK_S] if self._shared.num_loaded > len(batch) else []
        reports = self._shared.run(
            list(batch),
            max_decode_steps=min(chunk.max_decode_steps for chunk in chunks),
            max_seconds=min([*(chunk.max_seconds for chunk in chunks), *shared_limit]),
        )
        return {
            tenant: report
            if isinstance(report, Exception)
            else Computed(result=batch[tenant][1].result(report), tokens=report.sampled_tokens + report.prefill_tokens)
            for tenant, report in reports.items()
        }


class _TrainingHost(TenantHost[Tenant, Call, Inputs, Result]):
    """Tenants over one JointTraining."""

    def __init__(self) -> None:
        super().__init__()
        self._training: JointTraining | None = None

    @property
    def _shared(self) -> JointTraining:
        assert self._training is not None, "the first tenant builds it"
        return self._training

    def _begin(self, config: TrainingConfig, bases: Path | None) -> JointTraining:
        """What all tenants share, as the first one builds it."""
        import torch

        from rlmux.engines.train.joint_training import JointTraining

        if self._training is None:
            torch.set_num_threads(config.train.num_threads)
            self._training = JointTraining(device_in_use(), bases)
        return self._training

    def _leave(self, tenant: str) -> None:
        self._shared.remove(tenant)


class TrainHost(_TrainingHost[TrainWorker, TrainCall, StageInputs, TrainCallResult]):
    """Training of adapters of one base, one rank each."""

    TOGETHER = "run_stage"

    @beating()
    def _join(
        self, tenant: str, config: TrainingConfig, restore_from: Path | None, origin: Origin | None, bases: Path | None
    ) -> TrainWorker:
        training = self._begin(config, bases)
        engine = training.add(tenant, config, origin=origin)
        try:
            return TrainWorker.over(engine, origin, restore_from)
        except BaseException:
            training.remove(tenant)
            raise

    def _state_bytes(self, tenant: str) -> int:
        return self._workers[tenant].resident_bytes()

    def _take_inputs(self, tenant: str, call: TrainCall) -> StageInputs:
        return self._workers[tenant].take_inputs(call)

    def _run(
        self, batch: Mapping[str, tuple[TrainCall, StageInputs]]
    ) -> Mapping[str, Computed[TrainCallResult] | Exception]:
        """A tenant's seconds are those of the whole batch: the orders run beside each other."""
        start = perf_counter()
        shared_limit = [_SHARED_CHUNK_S] if len(self._workers) > len(batch) else []
        max_seconds = min([*(call.max_seconds for call, _ in batch.values()), *shared_limit])
        reports = self._shared.run_stages(
            {tenant: call.stage for tenant, (call, _) in batch.items()}, max_seconds=max_seconds
        )
        seconds = perf_counter() - start
        found: dict[str, Computed[TrainCallResult] | Exception] = {}
        for tenant, report in reports.items():
            try:
                if isinstance(report, Exception):
                    raise report
                result = self._workers[tenant].result(*batch[tenant], replace(report, seconds=seconds))
                found[tenant] = Computed(result=result, tokens=report.tokens)
            except Exception as error:  # whatever it is, it ends this tenant alone
                found[tenant] = error
        return found


class DatumHost(_TrainingHost[DatumWorker, RequestChunk, None, BatchReport]):
    """Models that clients train by requests: adapters of one base, one rank each."""

    TOGETHER = "run_chunk"

    @beating()
    def _join(self, tenant: str, config: TrainingConfig, restore_from: Path | None, bases: Path | None) -> DatumWorker:
        training = self._begin(config, bases)
        engine = training.add_model(tenant, config)
        try:
            return DatumWorker.over(engine, restore_from)
        except BaseException:
            training.remove(tenant)
            raise

    def _state_bytes(self, tenant: str) -> int:
        return self._workers[tenant].resident_bytes()

    def _take_inputs(self, tenant: str, call: RequestChunk) -> None:
        self._workers[tenant].add(call.requests)

    @beating()
    def _run(self, batch: Mapping[str, tuple[RequestChunk, None]]) -> Mapping[str, Computed[BatchReport] | Exception]:
        """Rounds of a micro-batch of each, until one of them has nothing left or the time is up; at least one round."""
        start = perf_counter()
        shared_limit = [_SHARED_CHUNK_S] if len(self._workers) > len(batch) else []
        max_seconds = min([*(chunk.max_seconds for chunk, _ in batch.values()), *shared_limit])
        answers: dict[str, list[RequestResult]] = {tenant: [] for tenant in batch}
        tokens = dict.fromkeys(batch, 0)
        errors: dict[str, Exception] = {}
        num_working = 0
        while not any(tokens.values()) or perf_counter() - start < max_seconds:
            works = self._next_works(answers, errors)
            if not works or (any(tokens.values()) and len(works) < num_working):
                break
            num_working = len(works)
            before = {tenant: work.tokens for tenant, work in works.items()}
            self._shared.run_round(works)
            for tenant, work in works.items():
                tokens[tenant] += work.tokens - before[tenant]
        seconds, computed = perf_counter() - start, {tenant: count for tenant, count in tokens.items() if count}
        found: dict[str, Computed[BatchReport] | Exception] = dict(errors)
        for tenant in answers:
            if tenant not in errors:
                report = self._workers[tenant].report(answers[tenant], tokens[tenant], seconds)
                result = replace(report, tokens_by_tenant=computed)
                found[tenant] = Computed(result=result, tokens=tokens[tenant])
        return found

    def _next_works(
        self, answers: Mapping[str, list[RequestResult]], errors: dict[str, Exception]
    ) -> dict[str, TrainWork]:
        """The work of each tenant that has one; other requests are carried out before it."""
        works: dict[str, TrainWork] = {}
        for tenant, own in answers.items():
            try:
                work = None if tenant in errors else self._workers[tenant].next_work(own)
            except Exception as error:  # whatever it is, it ends this tenant alone
                errors[tenant] = error
            else:
                if work is not None:
                    works[tenant] = work
        return works


def _failed(call: TenantCall, error: BaseException) -> TenantResult:
    """The error as the call's result; its traceback goes to the log of the tenant's own pipeline."""
    with call.log_path.open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    return TenantResult(error=portable_error(error))
