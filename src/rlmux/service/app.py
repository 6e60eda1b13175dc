"""A lane that serves models and permits: its controller, and the APIs of clients and programs, in the server's process.

    lane ─▶ run folder ─┬─ controller (the main thread) ◀── Inbox ──┐
                        └─ HTTP server (a thread) ── doors ─▶ TinkerFront (its event loop)

The folder is a run's folder: the log has every decision, `tinker.db` every request and result. Pipelines are submitted
to it as to any lane. It ends with its server; the next one resumes it, and its clients continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlmux import plugins
from rlmux.broker.broker_run import SOCKET_NAME, environment_token
from rlmux.broker.embedded import EmbeddedBroker, token_check
from rlmux.broker.server import PermitServer
from rlmux.config.serve_file import ServeConfig, ServeSpec, read_written, written
from rlmux.config.service_file import Lane
from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.log.notes import Note
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime.controller import Listener
from rlmux.runtime.launch import resume_run, spec_of, start_run
from rlmux.runtime.records.folders import SERVED
from rlmux.runtime.run import RunOptions
from rlmux.service.http_server import Server
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.devices import NOT_HELD, LaneDevices
from rlmux.service.model_serving import LEDGER, ClientEvents, Serving, budgets_of, with_bases
from rlmux.service.rollouts.rollout_routes import routes as rollout_routes
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.ledger import Ledger
from rlmux.service.tinker.project_budgets import Charges, ProjectBudgets
from rlmux.service.tinker.routes import routes

TINKER = "/tinker"
"""Path of the Tinker door."""
TOKENIZERS = "tokenizers"
"""Folder with the tokenizers of new models."""
_SWEEP_S = 1.0
_RETURN_S = 60.0
"""Seconds after the server's start in which no session expires: clients send a heartbeat every 10 s, and it may have
had no receiver."""
_LEAVING_S = 30.0
"""Seconds without a heartbeat until the session of a program that announced its end expires."""


def served_of(folder: Path) -> ServeSpec:
    """What a lane's folder serves. Raises UserError for a folder that serves nothing."""
    file = folder / SERVED
    if not file.is_file():
        raise UserError(f"{folder}: serves no models; accepted: the folder of a lane with serve")
    spec = spec_of(folder)
    with LogReader(folder) as log:
        _look_for_policy(spec.policy, log.header["spec"]["source"])
    serve = read_written(file.read_text(encoding="utf-8"), str(file))
    return ServeSpec(cluster=spec.cluster, policy=spec.policy, serve=serve)


def _look_for_policy(policy: str, source: str) -> None:
    """Let a policy of the user's own be found beside the service's file, or in the working folder."""
    if plugins.is_plugin("policy", policy):
        for place in (Path.cwd(), Path(source).absolute().parent):
            plugins.look_in(place)


@contextlib.contextmanager
def open_budgets(folder: Path) -> Iterator[tuple[ProjectBudgets, list[str]]]:
    """Budgets and project names of a lane, running or not. Raises UserError."""
    serve = served_of(folder).serve
    ledger = Ledger(folder / LEDGER)
    try:
        budgets = budgets_of(serve, ledger)
        yield budgets, budgets.projects(key.project for key in serve.keys.values())
    finally:
        ledger.close()


def check_permits(serve: ServeConfig) -> None:
    """Raises UserError for an address of permits that is open to any program."""
    address = serve.permits and serve.permits.listen
    if address and address.startswith("tcp:") and not environment_token():
        raise UserError(f"serve.permits.listen {address}: needs a token; accepted: RLMUX_TOKEN=... set")


class HostedLane(LaneController):
    """A lane whose controller runs in the server's own process."""

    def __init__(self, root: Path, name: str, lane: Lane, part: LaneDevices = NOT_HELD) -> None:
        """Raises UserError where its run began with another cluster, or has clients of other models."""
        super().__init__(root, name, lane, part)
        assert lane.serve is not None
        self._serve = lane.serve
        if self._is_locked():
            raise UserError(f"{self.folder}: its controller still runs by itself; first: rlmux stop {self.folder}")
        if (self.folder / SERVED).is_file():
            self._check_same_models(served_of(self.folder).serve)

    def poll(self) -> None:
        """Its controller lives as long as the server."""

    def run(self, server: Server, open_server: Callable[[Doors], None], check: Callable[[], None]) -> None:
        """Run its controller until Ctrl-C or SIGTERM.

        `open_server`: called once its APIs are mounted. `check`: called in every turn of the controller.
        Raises UserError, before anything is made, for memory that its models do not have and for a taken address.
        """
        self._hold_to_part()
        _look_for_policy(self.spec.policy, self.spec.source)
        policy = make_policy(self.spec.policy)
        doors = Doors(ServeSpec(cluster=self.spec.cluster, policy=policy.name, serve=self._serve), self.folder, server)
        try:
            is_resuming = self._has_begun()
            starter = _Starter(doors, open_server, check, is_resuming=is_resuming)
            options = RunOptions(listeners=[starter], is_kept_open=True, inbox=doors.inbox)
            spec = replace(self.spec, cluster=with_bases(self.spec.cluster, self._serve))
            if is_resuming:
                resume_run(spec, self.folder, policy=policy, options=options)
            else:
                self._begin()
                start_run(spec, self.folder, policy=policy, options=options)
        finally:
            server.close()
            doors.close()

    def _check_same_models(self, before: ServeConfig) -> None:
        """A model's clients rely on its weights, and the checks of their results on its settings."""
        here = f"{self.spec.source}: lanes.{self.name}.serve"
        for name, model in before.models.items():
            if self._serve.models.get(name) != model:
                raise UserError(
                    f"{here}.models.{name}: not as it was served in {self.folder}; accepted: the model as it is in "
                    f"{self.folder / SERVED}, or a lane of another name"
                )
        if self._serve.parameters != before.parameters:
            raise UserError(
                f"{here}.parameters is {self._serve.parameters}; accepted: {before.parameters}, as in {self.folder}, "
                "or a lane of another name"
            )

    def _hold_to_part(self) -> None:
        """Keep this process, and what it starts from now on, on the lane's devices."""
        if self._part.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._part.gpus)
        if self._part.cores:
            os.sched_setaffinity(0, self._part.cores)


class _Starter:
    """A listener that opens the APIs at the controller's first turn and charges projects for their orders."""

    def __init__(
        self, doors: Doors, open_server: Callable[[Doors], None], check: Callable[[], None], *, is_resuming: bool
    ) -> None:
        self._doors = doors
        self._open_server = open_server
        self._check = check
        self._is_open = False
        self._is_resuming = is_resuming
        self._charges = Charges(doors.charge)

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        self._doors.check()
        self._check()
        if not self._is_open:
            self._is_open = True
            self._doors.open(is_resuming=self._is_resuming)
            self._open_server(self._doors)
        self._charges.update(events, actions, notes)
        for listener in self._doors.listeners():
            listener.update(now_s, events, actions, notes)


class Doors:
    """The APIs of one lane's clients and programs, and their backends."""

    def __init__(self, spec: ServeSpec, folder: Path, server: Server) -> None:
        """Raises UserError for an address of permits that is unavailable."""
        self.permits: EmbeddedBroker | None = None
        self.has_models = bool(spec.serve.models)
        self._spec = spec
        self._folder = folder
        self._server = server
        self._serving = Serving(spec, folder)
        self._tinker: TinkerFront | None = None
        self._events: ClientEvents | None = None
        self.inbox = self._serving.inbox
        listen = spec.serve.permits and spec.serve.permits.listen
        self._permit_server = PermitServer(listen) if listen else None

    def open(self, *, is_resuming: bool) -> None:
        """Replay the ledger and mount the APIs; they answer once the server has started."""
        self._open_permits(is_resuming=is_resuming)
        front, self._events = self._serving.furnish(self._server.call_soon)
        self._tinker = front
        keys = Keys({key: given.project for key, given in self._spec.serve.keys.items()})
        self._server.mount_app(TINKER, routes(front, keys, self._events.wait_reason))
        self._server.mount("", rollout_routes(front, keys, self._serving.vocabularies))
        self._server.run_beside(lambda: _sweep(front, self._spec.serve.session_timeout_s))
        self._server.run_beside(lambda: _fold(self._serving.fold))
        self._write_tokenizers()
        (self._folder / SERVED).write_text(written(self._spec.serve), encoding="utf-8")
        front.replay()

    def _open_permits(self, *, is_resuming: bool) -> None:
        """Called first: programs of a killed server may still be on the devices."""
        given = self._spec.serve.permits
        if given is None:
            return
        self.permits = EmbeddedBroker(
            self._spec.cluster,
            self.inbox,
            self._permit_server or PermitServer(f"unix:{self._folder / SOCKET_NAME}"),
            policy=self._spec.policy,
            is_allowed=token_check(environment_token()),
            leave_limit_s=given.leave_limit_s,
            max_hold_s=given.max_hold_s,
            lease_s=given.lease_s,
        )
        if is_resuming:
            self.permits.restore(self._folder)
        self.permits.start()

    def close(self) -> None:
        """Close the APIs and free their addresses."""
        if self.permits is not None:
            self.permits.close()
        elif self._permit_server is not None:
            self._permit_server.close()

    def listeners(self) -> list[Listener]:
        """Listeners of the controller."""
        return [each for each in (self.permits, self._events) if each is not None]

    def check(self) -> None:
        """Raises ThreadDiedError or StorageError if the thread of permits has ended."""
        if self.permits is not None:
            self.permits.thread.check()

    def charge(self, pipeline: PipelineId, device_s: float) -> None:
        """Charge device-seconds to a pipeline's project. Called by the controller's thread."""
        front = self._tinker
        if front is not None:
            self._server.call_soon(lambda: front.charge(pipeline, device_s))

    def _write_tokenizers(self) -> None:
        """Write the tokenizer of a new model, the only copy, to a folder of the model's name."""
        for name, served in self._serving.models.items():
            folder = self._folder / TOKENIZERS / name
            if served.model.path is None and not folder.exists():
                folder.mkdir(parents=True)
                self._serving.vocabularies[name].save_pretrained(folder)


async def _fold(fold: Callable[[], int]) -> None:
    """Sync to disk in another thread, so that no request waits."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        with contextlib.suppress(sqlite3.OperationalError):  # a full or busy disk: the next call retries
            await asyncio.to_thread(fold)


def silence_limits(now_s: float, begun_s: float, timeout_s: float) -> tuple[float, float]:
    """Oldest accepted heartbeats: of an ordinary session, and of one whose program announced its end. `begun_s`: start
    of the server."""
    if now_s < begun_s + min(timeout_s, _RETURN_S):
        return -math.inf, -math.inf
    return now_s - timeout_s, now_s - _LEAVING_S


async def _sweep(front: TinkerFront, timeout_s: float) -> None:
    """Delete expired checkpoints and end sessions without a recent heartbeat."""
    begun_s = time.monotonic()
    while True:
        await asyncio.sleep(_SWEEP_S)
        front.expire(time.time())
        front.end_silent_sessions(*silence_limits(time.monotonic(), begun_s, timeout_s))
