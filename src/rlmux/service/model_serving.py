"""The models of a server, their front, and its way to the controller.

TinkerFront ── requests ─▶ Inbox ─▶ OnDemandPipelines, in the controller's thread
     ▲                                    └── results, checkpoints, admissions, ends ──┐
     └──────────────── call_soon, in the front's own thread ◀─────────────────────────┘
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rlmux.config.serve_file import ServeConfig, ServeSpec
from rlmux.core.actions import Admit, Queue, Refuse, Release, Relocate
from rlmux.core.errors import UserError
from rlmux.core.events import PipelineCancelled, PipelineFailed
from rlmux.core.model import Cluster, Footprint, Pipeline, PipelineId
from rlmux.rl.client_requests import SampleRequest, TrainRequest
from rlmux.rl.config import AdapterConfig, TrainingConfig
from rlmux.rl.memory.footprint import BOTH_PHASES
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary
from rlmux.runtime.backend import Submission
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.gpus_here import visible_gpus
from rlmux.runtime.memory.memory_budget import with_footprint, with_machine_memory
from rlmux.runtime.orders.request_batches import Client
from rlmux.runtime.workers.request_workers import RequestResult
from rlmux.service.tinker.codec import write_head
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.ledger import ERROR, SERVER_ERROR, Ledger
from rlmux.service.tinker.model_catalog import ServedModel
from rlmux.service.tinker.project_budgets import ProjectBudgets
from rlmux.service.tinker.session_tags import Hints

LEDGER = "tinker.db"
CallSoon = Callable[[Callable[[], None]], None]
"""Has a call made in the thread of the front."""


class Serving:
    """Everything that answers requests needs, for one folder."""

    def __init__(self, spec: ServeSpec, folder: Path) -> None:
        """Raises UserError where adapters are to be trained and nothing here can."""
        if spec.serve.parameters == "lora" and find_spec("peft") is None:
            raise UserError("serve.parameters: lora needs peft; accepted: pip install 'rlmux[train]', or full")
        self.inbox = Inbox()
        self.vocabularies = {name: load_vocabulary(given.model) for name, given in spec.serve.models.items()}
        self.models = {name: _served(name, spec, each) for name, each in self.vocabularies.items()}
        self._spec = spec
        self._folder = folder
        self._is_gpu = bool(visible_gpus())
        self.fold: Callable[[], int] = lambda: 0
        """Brings the newest commits into the ledger's file, and keeps that within its bound; from any thread, again and
        again."""

    def furnish(self, call_soon: CallSoon) -> tuple[TinkerFront, ClientEvents]:
        """A front on the folder's ledger, and what is to follow the controller for it."""
        events = ClientEvents(call_soon)
        ledger = Ledger(self._folder / LEDGER)
        ledger.leave_folding()
        self.fold = partial(_fold, ledger, int(self._spec.serve.ledger_gb * 1e9))
        host = _Host(self.inbox, events, self._footprint)
        budgets, keep = budgets_of(self._spec.serve, ledger), self._spec.serve.keep_snapshots
        events.front = TinkerFront(self.models, ledger, self._folder / "models", host, budgets, keep)
        return events.front, events

    def _footprint(self, pipeline: Pipeline, config: TrainingConfig) -> Footprint:
        submission = Submission(pipeline=pipeline, config=config)
        found = with_footprint(
            submission, self._spec.cluster, is_gpu=self._is_gpu, own_bases=BOTH_PHASES if self._is_gpu else ()
        )
        return found.pipeline.footprint


def _fold(ledger: Ledger, max_bytes: int) -> int:
    """`max_bytes`: of the ledger; 0: no bound."""
    if max_bytes:
        ledger.compact(max_bytes, write_head, time.time())
    return ledger.fold()


def budgets_of(serve: ServeConfig, ledger: Ledger) -> ProjectBudgets:
    """Budgets of the file's projects, with the ledger's usage."""
    return ProjectBudgets(ledger, {name: given.device_hours_a_day for name, given in serve.projects.items()})


def with_bases(cluster: Cluster, serve: ServeConfig) -> Cluster:
    """The lane's cluster; where cores serve adapters, without the memory that their bases take, once each.

    Raises RefusedError where there is not so much.
    """
    if serve.parameters != "lora" or visible_gpus():
        return cluster
    tenants = []
    for number, given in enumerate(serve.models.values()):
        name = f"base-{number}"
        model = replace(given.model, seed=given.seed)
        config = TrainingConfig(name=name, model=model, adapter=AdapterConfig(rank=1, alpha=1.0))
        plain = Pipeline(id=PipelineId(name), num_steps=None, work_arrives=True)
        tenants.append(Submission(pipeline=plain, config=config))
    return with_machine_memory(cluster, tenants)


def _served(name: str, spec: ServeSpec, vocabulary: Vocabulary) -> ServedModel:
    given = spec.serve.models[name]
    return ServedModel(
        name=name,
        model=given.model,
        vocab_size=vocabulary.vocab_size,
        stop_tokens=vocabulary.stop_tokens,
        max_prompt_tokens=given.max_prompt_tokens,
        max_new_tokens=given.max_new_tokens,
        num_slots=given.num_slots,
        micro_batch_size=given.micro_batch_size,
        seed=given.seed,
        parameters=spec.serve.parameters,
        max_lora_rank=spec.serve.max_lora_rank,
    )


class _Host:
    """Passes a front's requests to the controller's thread."""

    def __init__(
        self, inbox: Inbox, client: Client, footprint: Callable[[Pipeline, TrainingConfig], Footprint]
    ) -> None:
        self._inbox = inbox
        self._client = client
        self._footprint = footprint

    def open(
        self,
        pipeline: PipelineId,
        config: TrainingConfig,
        folder: Path,
        restore_from: Path | None,
        hints: Hints,
        project: str,
    ) -> None:
        plain = Pipeline(
            id=pipeline,
            num_steps=None,
            work_arrives=True,
            slo_slowdown=math.inf if hints.slo is None else hints.slo,
            project=project,
            urgency=hints.urgency,
        )
        whole = replace(plain, footprint=self._footprint(plain, config))
        with self._inbox.claiming(pipeline):
            folder.mkdir(parents=True, exist_ok=True)
        self._inbox.call_soon(lambda backend: backend.on_demand.open(whole, config, folder, self._client, restore_from))

    def train(self, pipeline: PipelineId, request_id: str, request: TrainRequest) -> None:
        self._inbox.call_soon(lambda backend: backend.on_demand.train(pipeline, request_id, request))

    def sample(self, pipeline: PipelineId, request: SampleRequest, weights: Path | None) -> None:
        self._inbox.call_soon(lambda backend: backend.on_demand.sample(pipeline, request, weights))

    def withdraw(self, pipeline: PipelineId, ids: Sequence[str]) -> None:
        self._inbox.call_soon(lambda backend: backend.on_demand.withdraw(pipeline, ids))

    def finish(self, pipeline: PipelineId) -> None:
        self._inbox.call_soon(lambda backend: backend.on_demand.finish(pipeline))


class ClientEvents:
    """Notifies the front, in its own thread, of its pipelines: their client, and a listener of the controller."""

    front: TinkerFront

    def __init__(self, call_soon: CallSoon) -> None:
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._results: list[RequestResult] = []
        """Results that the front's thread has not taken."""
        self._wait_by_pipeline: dict[PipelineId, str] = {}
        """The scheduler's reasons why pipelines are not placed."""

    def wait_reason(self, pipeline: PipelineId) -> str | None:
        """Why the pipeline's work does not run, in one clause; None: it does, or will soon. From any thread."""
        reason = self._wait_by_pipeline.get(pipeline)
        return None if reason is None else f"rlmux: {reason}"

    def update(self, now_s: float, events: Sequence[object], actions: Sequence[object], notes: object) -> None:
        for each in (*events, *actions):
            match each:
                case Queue():
                    self._wait_by_pipeline[each.pipeline] = each.reason
                case Admit() | Relocate():
                    self._wait_by_pipeline.pop(each.pipeline, None)
                    self._admit(each.pipeline)
                case Refuse() | PipelineFailed():
                    self._end(each.pipeline, each.reason)
                case PipelineCancelled():
                    self._end(each.pipeline, "cancelled")
                case Release():
                    self._end(each.pipeline, "its client is done")

    def _admit(self, pipeline: PipelineId) -> None:
        self._call_soon(lambda: self.front.admit(pipeline))

    def _end(self, pipeline: PipelineId, reason: str) -> None:
        self._wait_by_pipeline.pop(pipeline, None)
        self._call_soon(lambda: self.front.futures.fail_pipeline(pipeline, f"pipeline {pipeline}: {reason}"))

    def on_result(self, pipeline: PipelineId, result: RequestResult) -> None:
        with self._lock:
            self._results.append(result)
            is_first = len(self._results) == 1
        if is_first:
            self._call_soon(self._settle)

    def on_checkpoint(self, pipeline: PipelineId, request_id: str, folder: Path, sha256: str) -> None:
        self._call_soon(lambda: self.front.add_update(request_id, folder, sha256))

    def _settle(self) -> None:
        """All results until now share one commit."""
        with self._lock:
            results, self._results = self._results, []
        self.front.futures.settle_all([(each.id, each.value, each.error, _kind(each)) for each in results])


def _kind(result: RequestResult) -> str:
    return SERVER_ERROR if result.is_fault_of_server else ERROR
