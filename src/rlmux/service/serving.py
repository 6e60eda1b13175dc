"""What is behind the doors of a server: the models it serves, their front, and the host of their workers.

TinkerFront ── requests ─▶ ModelHost (a thread) ── bursts ─▶ ForeignFront ─▶ controller
     ▲                          └── answers, checkpoints ──┐
     └────────── call_soon, in the front's own thread ◀────┘
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

from rlmux.config.serve import ServeSpec
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Footprint, Pipeline, PipelineId
from rlmux.rl.arriving import SampleRequest, TrainRequest
from rlmux.rl.config import AdapterConfig, TrainingConfig
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary
from rlmux.runtime.backend import Submission
from rlmux.runtime.burst_workers import Answer
from rlmux.runtime.foreign import ForeignFront
from rlmux.runtime.local import BASES, LocalProcesses, SharedMemoryFolder, assign_cores, assign_gpus, visible_gpus
from rlmux.runtime.memory import with_footprint, with_machine_memory
from rlmux.runtime.model_host import ModelHost
from rlmux.service.tinker.budgets import Budgets
from rlmux.service.tinker.codec import write_head
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.ledger import ERROR, SERVER_ERROR, Ledger
from rlmux.service.tinker.served import ServedModel
from rlmux.service.tinker.tags import Hints

LEDGER = "tinker.db"
CallSoon = Callable[[Callable[[], None]], None]
"""Has a call made in the thread of the front."""


class Serving:
    """Everything that answers requests needs, for one folder."""

    def __init__(self, spec: ServeSpec, folder: Path) -> None:
        """Raises UserError where adapters are to be trained and nothing here can."""
        if spec.serve.parameters == "lora" and find_spec("peft") is None:
            raise UserError("serve.parameters: lora needs peft; accepted: pip install 'rlmux[train]', or full")
        self.front = ForeignFront()
        self.vocabularies = {name: load_vocabulary(given.model) for name, given in spec.serve.models.items()}
        self.models = {name: _served(name, spec, each) for name, each in self.vocabularies.items()}
        self._spec = spec
        self._folder = folder
        self._is_gpu = bool(visible_gpus())
        self.fold: Callable[[], int] = lambda: 0
        """Brings the newest commits into the ledger's file, and keeps that within its bound; from any thread, again and
        again."""

    def furnish(self, call_soon: CallSoon) -> tuple[TinkerFront, ModelHost]:
        """A front on the folder's ledger, and its host, which is to be started."""
        workplace = _workplace(self._spec, self._folder)
        news = News(call_soon)
        host = ModelHost(workplace, self.front, news, wake=workplace.wake)
        ledger = Ledger(self._folder / LEDGER)
        ledger.leave_folding()
        self.fold = partial(_fold, ledger, int(self._spec.serve.ledger_gb * 1e9))
        bridge = _Host(host, self.front, self._footprint)
        budgets, keep = budgets_of(self._spec, ledger), self._spec.serve.keep_snapshots
        news.front = TinkerFront(self.models, ledger, self._folder / "models", bridge, budgets, keep)
        return news.front, host

    def _footprint(self, pipeline: Pipeline, config: TrainingConfig) -> Footprint:
        submission = Submission(pipeline=pipeline, config=config)
        found = with_footprint(submission, self._spec.cluster, is_gpu=self._is_gpu, has_base=self._is_gpu)
        return found.pipeline.footprint


def _fold(ledger: Ledger, max_bytes: int) -> int:
    """`max_bytes`: of the ledger; 0: no bound."""
    if max_bytes:
        ledger.compact(max_bytes, write_head, time.time())
    return ledger.fold()


def budgets_of(spec: ServeSpec, ledger: Ledger) -> Budgets:
    """What the file's projects may use, and what the ledger says of them."""
    return Budgets(ledger, {name: given.device_hours_a_day for name, given in spec.serve.projects.items()})


def with_bases(spec: ServeSpec) -> Cluster:
    """The file's cluster; where cores serve adapters, without the memory that their bases take, once each.

    Raises RefusedError where there is not so much.
    """
    if spec.serve.parameters != "lora" or visible_gpus():
        return spec.cluster
    tenants = []
    for number, given in enumerate(spec.serve.models.values()):
        name = f"base-{number}"
        model = replace(given.model, seed=given.seed)
        config = TrainingConfig(name=name, model=model, adapter=AdapterConfig(rank=1, alpha=1.0))
        plain = Pipeline(id=PipelineId(name), num_steps=None, work_arrives=True)
        tenants.append(Submission(pipeline=plain, config=config))
    return with_machine_memory(spec.cluster, tenants)


def _workplace(spec: ServeSpec, folder: Path) -> LocalProcesses:
    """Bases of adapters lie in the shared memory of the folder's run, which ends with it."""
    gpus = assign_gpus(spec.cluster, visible_gpus())
    bases = SharedMemoryFolder.path_of(folder) / BASES
    return LocalProcesses({} if gpus else assign_cores(spec.cluster), None, gpu_by_device=gpus, bases=bases)


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
    """Opens a pipeline with the controller and with the host's workers; all else is the host's."""

    def __init__(
        self, host: ModelHost, front: ForeignFront, footprint: Callable[[Pipeline, TrainingConfig], Footprint]
    ) -> None:
        self._host = host
        self._front = front
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
        self._front.submit_made(whole, lambda: self._host.open(pipeline, config, folder, restore_from=restore_from))

    def train(self, pipeline: PipelineId, request_id: str, request: TrainRequest) -> None:
        self._host.train(pipeline, request_id, request)

    def sample(self, pipeline: PipelineId, request: SampleRequest, weights: Path | None) -> None:
        self._host.sample(pipeline, request, weights)

    def withdraw(self, pipeline: PipelineId, ids: Sequence[str]) -> None:
        self._host.withdraw(pipeline, ids)

    def finish(self, pipeline: PipelineId) -> None:
        self._host.finish(pipeline)


class News:
    """Passes what the host's thread tells to the front's."""

    front: TinkerFront

    def __init__(self, call_soon: CallSoon) -> None:
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        """Answers that the front's thread has not taken."""

    def admitted(self, pipeline_id: PipelineId) -> None:
        self._call_soon(lambda: self.front.admit(pipeline_id))

    def answered(self, pipeline_id: PipelineId, answer: Answer) -> None:
        with self._lock:
            self._answers.append(answer)
            is_first = len(self._answers) == 1
        if is_first:
            self._call_soon(self._settle)

    def _settle(self) -> None:
        """All that were answered until now have one commit."""
        with self._lock:
            answers, self._answers = self._answers, []
        self.front.promises.settle_all([(each.id, each.value, each.error, _kind(each)) for each in answers])

    def checkpointed(self, pipeline_id: PipelineId, request_id: str, folder: Path, sha256: str) -> None:
        self._call_soon(lambda: self.front.add_update(request_id, folder, sha256))

    def over(self, pipeline_id: PipelineId, reason: str) -> None:
        self._call_soon(lambda: self.front.promises.fail_pipeline(pipeline_id, f"pipeline {pipeline_id}: {reason}"))


def _kind(answer: Answer) -> str:
    return SERVER_ERROR if answer.is_fault_of_server else ERROR
