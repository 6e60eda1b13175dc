"""The object inside a rollout process of several tenants: their calls, one engine.

    serve(left, calls) ──▶ those that left go ──▶ every call by itself ──▶ one chunk of all that call `run_chunk`
           ▲                                                                     │
    tenant_process.py ◀──────────── a result or an error for each call ◀─────────┘

Invariant: an error in a call of one tenant is that tenant's alone, and no call changes another tenant's results.

A module of its own: it lives in the worker process, beside `planned_workers`, and the supervisor only names it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmux.core.errors import IllegalTransitionError, PipelineError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.rl.types import ChunkReport
from rlmux.runtime.workers.heartbeat import beating
from rlmux.runtime.workers.planned_workers import ChunkInputs, RolloutWorker, device_in_use, make_rollout_engine
from rlmux.runtime.workers.processes import BUILD, portable_error
from rlmux.runtime.workers.tenant_process import TenantCall, TenantResult
from rlmux.runtime.workers.worker_calls import RolloutChunk

if TYPE_CHECKING:
    from rlmux.engines.device_fraction import FractionSetter
    from rlmux.engines.rollout.tenants import SharedEngine

_SHARED_CHUNK_S = 0.1
"""Longest chunk in seconds while several tenants are on the device: so long at most a call of one waits for a chunk of
another."""


class RolloutHost:
    """A `RolloutWorker` for each tenant, over one engine."""

    def __init__(self) -> None:
        self._shared: SharedEngine | None = None
        self._fraction: FractionSetter | None = None
        self._workers: dict[str, RolloutWorker] = {}

    def serve(self, left: Sequence[str], calls: Sequence[TenantCall]) -> list[TenantResult]:
        """Drop tenants, then carry out at most one call of each other one; results in the order of the calls."""
        for tenant in left:
            self._leave(tenant)
        results: dict[str, TenantResult] = {}
        chunks: dict[str, tuple[RolloutChunk, ChunkInputs]] = {}
        for call in calls:
            try:
                if call.tenant not in self._workers:
                    self._join(call.tenant, *call.joins)
                worker = self._workers[call.tenant]
                if call.method == "run_chunk":
                    inputs = worker.take_inputs(call.args[0])
                    self._check_loaded(call.tenant)
                    chunks[call.tenant] = call.args[0], inputs
                else:
                    value = None if call.method == BUILD else getattr(worker, call.method)(*call.args)
                    results[call.tenant] = TenantResult(value=value)
            except (Exception, SystemExit) as error:  # what user code raises is one pipeline's fault
                results[call.tenant] = _failed(call, error)
        if chunks:
            decoding = [call for call in calls if call.tenant in chunks]
            try:
                reports = self._run([chunk for chunk, _ in chunks.values()], list(chunks))
            except Exception as error:  # no memory: of all of them
                return [results.get(call.tenant) or _failed(call, error) for call in calls]
            tokens = {tenant: _num_computed(report) for tenant, report in reports.items()}
            num_together = sum(map(bool, tokens.values()))
            for call in decoding:
                result = _result(call, chunks[call.tenant][1], reports[call.tenant])
                if num_together > 1 and result.value is not None:
                    share = tokens[call.tenant] / sum(tokens.values())
                    shared = replace(result.value, num_together=num_together, token_share=share)
                    result = TenantResult(value=shared)
                results[call.tenant] = result
        return [results[call.tenant] for call in calls]

    def _run(self, chunks: Sequence[RolloutChunk], tenants: Sequence[str]) -> Mapping[str, ChunkReport | PipelineError]:
        """One chunk within the smallest limits; its device fraction is the sum of the tenants'."""
        assert self._shared is not None
        assert self._fraction is not None
        shared_limit = [_SHARED_CHUNK_S] if self._shared.num_loaded > 1 else []
        self._fraction.set(min(1.0, sum(chunk.device_fraction for chunk in chunks)))
        return self._shared.run(
            tenants,
            max_decode_steps=min(chunk.max_decode_steps for chunk in chunks),
            max_seconds=min([*(chunk.max_seconds for chunk in chunks), *shared_limit]),
        )

    def _check_loaded(self, tenant: str) -> None:
        assert self._shared is not None
        if not self._shared.is_loaded(tenant):
            raise IllegalTransitionError(f"rollouts of {tenant} cannot run while its state is offloaded")

    @beating()
    def _join(self, tenant: str, config: TrainingConfig, origin: Origin | None, bases: Path | None) -> None:
        """Serve a pipeline from now on; the first one builds the engine."""
        import torch

        from rlmux.engines.device_fraction import fraction_setter
        from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
        from rlmux.engines.rollout.tenants import SharedEngine
        from rlmux.rl.tasks import make_task
        from rlmux.rl.vocabulary import load_vocabulary

        vocabulary = load_vocabulary(config.model)
        task = make_task(config.task, seed=config.seed, vocabulary=vocabulary)
        if self._shared is None or self._fraction is None:
            torch.set_num_threads(config.train.num_threads)
            device = device_in_use()
            engine = make_rollout_engine(config, vocabulary.vocab_size, task.is_single_turn, device, bases)
            assert isinstance(engine, SlotRolloutEngine), "tenancies are of our own engine"
            self._shared = SharedEngine(engine)
            self._fraction = fraction_setter(device)
        assert config.adapter is not None
        own = self._shared.join(
            tenant, config.adapter, staleness=config.algorithm.staleness, is_single_turn=task.is_single_turn
        )
        self._workers[tenant] = RolloutWorker.over(own, origin)

    def _leave(self, tenant: str) -> None:
        if self._workers.pop(tenant, None) is not None and self._shared is not None:
            self._shared.leave(tenant)


def _num_computed(report: ChunkReport | PipelineError) -> int:
    return 0 if isinstance(report, PipelineError) else report.sampled_tokens + report.prefill_tokens


def _result(call: TenantCall, inputs: ChunkInputs, report: ChunkReport | PipelineError) -> TenantResult:
    return _failed(call, report) if isinstance(report, PipelineError) else TenantResult(value=inputs.result(report))


def _failed(call: TenantCall, error: BaseException) -> TenantResult:
    """The error as the call's result; its traceback goes to the log of the tenant's own pipeline."""
    with call.log_path.open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    return TenantResult(error=portable_error(error))
