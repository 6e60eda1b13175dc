"""`rlmux serve`: one controller, one HTTP server, and the doors under it, until it is stopped.

    file ─▶ ServeSpec ─▶ run folder ─┬─ controller (this thread) ◀── ForeignFront ──┐
                                     ├─ HTTP server (a thread) ── doors ─▶ TinkerFront (its event loop)
                                     └─ model host (a thread) ── workers ◀──────────┘

The folder is that of a run: its log has every decision, `tinker.db` every request and result. A server that was stopped
or killed goes on from its folder, and its clients with it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from rlmux.config.serve import ServeSpec, parse_serve_file
from rlmux.core.errors import UserError
from rlmux.core.model import Footprint, Pipeline, PipelineId
from rlmux.core.policy import Policy
from rlmux.report.log import LogReader
from rlmux.rl.arriving import SampleRequest, TrainRequest
from rlmux.rl.config import TrainingConfig
from rlmux.rl.vocabulary import load_vocabulary
from rlmux.runtime.backend import Submission
from rlmux.runtime.burst_workers import Answer
from rlmux.runtime.foreign import ForeignFront
from rlmux.runtime.local import LocalProcesses, assign_cores, assign_gpus, visible_gpus
from rlmux.runtime.memory import with_footprint
from rlmux.runtime.model_host import ModelHost
from rlmux.runtime.run import RunResult, resume_pipelines, run_pipelines
from rlmux.service.dashboard.app import Dashboard
from rlmux.service.open_folder import LOOPBACK
from rlmux.service.rollouts.routes import routes as rollout_routes
from rlmux.service.server import Server
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.ledger import Ledger
from rlmux.service.tinker.routes import routes
from rlmux.service.tinker.served import ServedModel
from rlmux.service.tinker.tags import Hints

TINKER = "/tinker"
"""Path of the Tinker door."""
LEDGER = "tinker.db"
TOKENIZERS = "tokenizers"
"""Folder with the tokenizers of new models."""
_SWEEP_S = 1.0

OnReady = Callable[[str, Dashboard | None], None]
"""Gets the server's URL, and its pages where it has some."""


def spec_of(folder: Path, policies: Sequence[str]) -> ServeSpec:
    """The file that a server's folder began with. Raises UserError for the folder of another command."""
    with LogReader(folder) as log:
        header = log.header
    written = header.get("spec") or {}
    if not written.get("is_server"):
        raise UserError(f"{folder}: not the folder of `rlmux serve`; accepted: rlmux resume {folder}")
    spec = parse_serve_file(written["resolved"], source=str(folder), folder=folder.absolute(), policies=policies)
    return replace(spec, policy=str(header["policy"]))


def serve(
    spec: ServeSpec,
    folder: Path,
    *,
    policy: Policy,
    address: tuple[str, int],
    on_ready: OnReady,
    allowed_hosts: Collection[str] = (),
    is_resuming: bool = False,
) -> RunResult:
    """Serve until Ctrl-C or SIGTERM. `on_ready`: gets the server's URL once it answers, and its pages.

    An address that other machines reach has no pages: they would be read in the clear.

    Raises UserError, before anything is made, for an address or a folder that cannot be had.
    """
    server = Server(*address)
    doors = Doors(spec, folder, server, allowed_hosts if address[0] in LOOPBACK else None)
    try:
        header = {"source": spec.source, "resolved": spec.resolved, "is_server": True}
        listener = _Starter(doors, on_ready)
        if is_resuming:
            return resume_pipelines(
                spec.cluster,
                [],
                policy,
                folder,
                listeners=[listener],
                parse=_refuse,
                is_kept_open=True,
                front=doors.front,
            )
        return run_pipelines(
            spec.cluster,
            [],
            policy,
            folder,
            spec=header,
            listeners=[listener],
            parse=_refuse,
            is_kept_open=True,
            front=doors.front,
        )
    finally:
        server.close()
        if doors.dashboard is not None:
            doors.dashboard.close()


def _refuse(text: str, source: str) -> Sequence[Submission]:
    raise UserError(f"{source}: this server takes pipelines from its clients only; accepted: rlmux run FILE")


class _Starter:
    """A listener that opens the doors with the controller's first tick: from then on events are taken."""

    def __init__(self, doors: Doors, on_ready: OnReady) -> None:
        self._doors = doors
        self._on_ready = on_ready
        self._is_open = False

    def update(self, now_s: float, events: object, actions: object, notes: object) -> None:
        if not self._is_open:
            self._is_open = True
            self._on_ready(self._doors.open(), self._doors.dashboard)


class Doors:
    """The doors of one server, and what is behind them."""

    def __init__(self, spec: ServeSpec, folder: Path, server: Server, allowed_hosts: Collection[str] | None) -> None:
        """`allowed_hosts`: names that browsers reach the pages by, beside the machine's own; None: no pages."""
        self.front = ForeignFront()
        self.dashboard: Dashboard | None = None
        self._allowed_hosts = allowed_hosts
        self._spec = spec
        self._folder = folder
        self._server = server
        self._vocabularies = {name: load_vocabulary(given.model) for name, given in spec.serve.models.items()}
        self._models = {name: _served(name, spec, each.stop_tokens) for name, each in self._vocabularies.items()}
        self._is_gpu = bool(visible_gpus())

    def open(self) -> str:
        """Take in what the ledger holds, and answer requests from now on; returns the server's URL."""
        workplace = _workplace(self._spec)
        news = _News(self._server)
        host = ModelHost(workplace, self.front, news, wake=workplace.wake)
        front = TinkerFront(
            self._models,
            Ledger(self._folder / LEDGER),
            self._folder / "models",
            _Host(host, self.front, self._footprint),
        )
        news.front = front
        keys = Keys({key: given.project for key, given in self._spec.serve.keys.items()})
        self._server.mount(TINKER, routes(front, keys, host.reason))
        self._server.mount("", rollout_routes(front, keys, self._vocabularies))
        self._server.run_beside(lambda: _sweep(front, self._spec.serve.session_timeout_s))
        if self._allowed_hosts is not None:
            self.dashboard = Dashboard(self._folder, self._server, allowed_hosts=self._allowed_hosts)
        self._write_tokenizers()
        front.replay()
        self._server.start()
        host.start()  # last: what it answers goes to the server's loop
        if self.dashboard is not None:
            self.dashboard.start()
        return self._server.url

    def _write_tokenizers(self) -> None:
        """Clients find the tokenizer of a new model in a folder of its name; nothing else has it."""
        for name, served in self._models.items():
            folder = self._folder / TOKENIZERS / name
            if served.model.path is None and not folder.exists():
                folder.mkdir(parents=True)
                self._vocabularies[name].save_pretrained(folder)

    def _footprint(self, pipeline: Pipeline, config: TrainingConfig) -> Footprint:
        submission = Submission(pipeline=pipeline, config=config)
        return with_footprint(submission, self._spec.cluster, is_gpu=self._is_gpu).pipeline.footprint


def _workplace(spec: ServeSpec) -> LocalProcesses:
    gpus = assign_gpus(spec.cluster, visible_gpus())
    return LocalProcesses({} if gpus else assign_cores(spec.cluster), None, gpu_by_device=gpus)


def _served(name: str, spec: ServeSpec, stop_tokens: Sequence[int]) -> ServedModel:
    given = spec.serve.models[name]
    return ServedModel(
        name=name,
        model=given.model,
        stop_tokens=stop_tokens,
        max_prompt_tokens=given.max_prompt_tokens,
        max_new_tokens=given.max_new_tokens,
        num_slots=given.num_slots,
        micro_batch_size=given.micro_batch_size,
        seed=given.seed,
    )


async def _sweep(front: TinkerFront, timeout_s: float) -> None:
    """End sessions that have shown no life for too long."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        front.end_silent_sessions(time.monotonic() - timeout_s)


class _Host:
    """Opens a pipeline with the controller and with the host's workers; all else is the host's."""

    def __init__(
        self, host: ModelHost, front: ForeignFront, footprint: Callable[[Pipeline, TrainingConfig], Footprint]
    ) -> None:
        self._host = host
        self._front = front
        self._footprint = footprint

    def open(
        self, pipeline: PipelineId, config: TrainingConfig, folder: Path, restore_from: Path | None, hints: Hints
    ) -> None:
        driver = self._host.open(pipeline, config, folder, restore_from=restore_from)
        slo = math.inf if hints.slo is None else hints.slo
        plain = Pipeline(id=pipeline, num_steps=None, work_arrives=True, slo_slowdown=slo)
        self._front.submit(replace(plain, footprint=self._footprint(plain, config)), driver)

    def train(self, pipeline: PipelineId, request_id: str, request: TrainRequest) -> None:
        self._host.train(pipeline, request_id, request)

    def sample(self, pipeline: PipelineId, request: SampleRequest, weights: Path | None) -> None:
        self._host.sample(pipeline, request, weights)

    def withdraw(self, pipeline: PipelineId, ids: Sequence[str]) -> None:
        self._host.withdraw(pipeline, ids)

    def finish(self, pipeline: PipelineId) -> None:
        self._host.finish(pipeline)


class _News:
    """Passes what the host's thread tells to the front's."""

    front: TinkerFront

    def __init__(self, server: Server) -> None:
        self._server = server

    def answered(self, pipeline_id: PipelineId, answer: Answer) -> None:
        self._server.call_soon(lambda: self.front.promises.settle(answer.id, answer.value, answer.error))

    def checkpointed(self, pipeline_id: PipelineId, request_id: str, folder: Path) -> None:
        self._server.call_soon(lambda: self.front.add_update(request_id, folder))

    def over(self, pipeline_id: PipelineId, reason: str) -> None:
        self._server.call_soon(
            lambda: self.front.promises.fail_pipeline(pipeline_id, f"pipeline {pipeline_id}: {reason}")
        )
