"""`rlmux serve`: one controller and one HTTP server with its APIs.

    file ─▶ ServeSpec ─▶ run folder ─┬─ controller (this thread) ◀── Inbox ──┐
                                     └─ HTTP server (a thread) ── doors ─▶ TinkerFront (its event loop)

The folder is a run's folder: the log has every decision, `tinker.db` every request and result. A stopped or killed
server resumes from its folder, and its clients continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlmux import plugins
from rlmux.broker.broker_run import SOCKET_NAME, environment_token
from rlmux.broker.embedded import EmbeddedBroker, token_check
from rlmux.broker.server import PermitServer
from rlmux.config.serve_file import ServeSpec, parse_serve_file
from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.core.policy import Policy
from rlmux.log.run_log import LogReader
from rlmux.runtime.backend import Note, Submission
from rlmux.runtime.controller import Listener
from rlmux.runtime.run import RunOptions, RunResult, resume_pipelines, run_pipelines
from rlmux.service.addresses import Listening
from rlmux.service.dashboard.dashboard import Dashboard
from rlmux.service.http_server import Server
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
ADDRESS = "listen"
"""File with the address of the folder's newest server."""
_SWEEP_S = 1.0
_RETURN_S = 60.0
"""Seconds after the server's start in which no session expires: clients send a heartbeat every 10 s, and it may have
had no receiver."""
_LEAVING_S = 30.0
"""Seconds without a heartbeat until the session of a program that announced its end expires."""

OnReady = Callable[[str, "Doors"], None]
"""Receives the server's URL and its optional APIs: pages and permits."""


def spec_of(folder: Path, policies: Sequence[str]) -> ServeSpec:
    """The file that a server was started with. Raises UserError for another command's folder."""
    with LogReader(folder) as log:
        header = log.header
    written = header.get("spec") or {}
    if not written.get("is_server"):
        raise UserError(f"{folder}: not the folder of `rlmux serve`; accepted: rlmux resume {folder}")
    spec = parse_serve_file(written["resolved"], source=str(folder), folder=folder.absolute(), policies=policies)
    policy = str(header["policy"])
    if plugins.is_plugin("policy", policy):  # beside the server's file, or in the working folder
        for place in (Path.cwd(), Path(written["source"]).absolute().parent):
            plugins.look_in(place)
    return replace(spec, policy=policy)


@contextlib.contextmanager
def open_budgets(folder: Path, policies: Sequence[str]) -> Iterator[tuple[ProjectBudgets, list[str]]]:
    """Budgets and project names of a running or stopped server. Raises UserError."""
    spec = spec_of(folder, policies)
    ledger = Ledger(folder / LEDGER)
    try:
        budgets = budgets_of(spec, ledger)
        yield budgets, budgets.projects(key.project for key in spec.serve.keys.values())
    finally:
        ledger.close()


def permit_server(spec: ServeSpec) -> PermitServer | None:
    """The listener for permits at the file's address; None if the file has no address.

    Raises UserError for an address that is unavailable, or open to any program.
    """
    address = spec.serve.permits.listen if spec.serve.permits else None
    if address is None:
        return None
    if address.startswith("tcp:") and not environment_token():
        raise UserError(f"serve.permits.listen {address}: needs a token; accepted: RLMUX_TOKEN=... set")
    return PermitServer(address)


def last_address(folder: Path) -> str | None:
    """HOST:PORT of the folder's newest server; None before its first request."""
    file = folder / ADDRESS
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def serve(
    spec: ServeSpec,
    folder: Path,
    *,
    policy: Policy,
    listening: Listening,
    on_ready: OnReady,
    allowed_hosts: Collection[str] = (),
    is_resuming: bool = False,
) -> RunResult:
    """Serve until Ctrl-C or SIGTERM. `on_ready`: receives the server's URL and its APIs once they answer.

    An address with unencrypted traffic from other machines has no pages.

    Raises UserError, before anything is created, for an unavailable address or folder.
    """
    server = Server(listening)
    try:
        doors = Doors(spec, folder, server, allowed_hosts if listening.is_private else None)
    except BaseException:  # an interrupt frees the address too, and propagates
        server.close()
        raise
    try:
        header = {"source": spec.source, "resolved": spec.resolved, "is_server": True}
        listener = _Starter(doors, on_ready, is_resuming=is_resuming)
        options = RunOptions(listeners=[listener], parse=_refuse, is_kept_open=True, inbox=doors.inbox)
        if is_resuming:
            return resume_pipelines(with_bases(spec), [], policy, folder, options)
        return run_pipelines(with_bases(spec), [], policy, folder, options, spec=header)
    finally:
        server.close()
        doors.close()


def _refuse(text: str, source: str) -> Sequence[Submission]:
    raise UserError(f"{source}: this server takes pipelines from its clients only; accepted: rlmux run FILE")


class _Starter:
    """A listener that opens the APIs at the controller's first tick and charges projects for their orders."""

    def __init__(self, doors: Doors, on_ready: OnReady, *, is_resuming: bool) -> None:
        self._doors = doors
        self._on_ready = on_ready
        self._is_open = False
        self._is_resuming = is_resuming
        self._charges = Charges(doors.charge)

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        self._doors.check()
        if not self._is_open:
            self._is_open = True
            self._on_ready(self._doors.open(is_resuming=self._is_resuming), self._doors)
        self._charges.update(events, actions, notes)
        for listener in self._doors.listeners():
            listener.update(now_s, events, actions, notes)


class Doors:
    """The APIs of one server and their backends."""

    def __init__(self, spec: ServeSpec, folder: Path, server: Server, allowed_hosts: Collection[str] | None) -> None:
        """`allowed_hosts`: additional host names of the pages; None: no pages."""
        self.dashboard: Dashboard | None = None
        self.permits: EmbeddedBroker | None = None
        self._allowed_hosts = allowed_hosts
        self._spec = spec
        self._folder = folder
        self._server = server
        self._serving = Serving(spec, folder)
        self._tinker: TinkerFront | None = None
        self._events: ClientEvents | None = None
        self.inbox = self._serving.inbox
        self._permit_server = permit_server(spec)

    def open(self, *, is_resuming: bool) -> str:
        """Replay the ledger and start to answer requests. Returns the server's URL."""
        self._open_permits(is_resuming=is_resuming)
        front, self._events = self._serving.furnish(self._server.call_soon)
        self._tinker = front
        keys = Keys({key: given.project for key, given in self._spec.serve.keys.items()})
        self._server.mount_app(TINKER, routes(front, keys, self._events.wait_reason))
        self._server.mount("", rollout_routes(front, keys, self._serving.vocabularies))
        self._server.run_beside(lambda: _sweep(front, self._spec.serve.session_timeout_s))
        self._server.run_beside(lambda: _fold(self._serving.fold))
        if self._allowed_hosts is not None:
            self.dashboard = Dashboard(self._folder, self._server, allowed_hosts=self._allowed_hosts)
        self._write_tokenizers()
        front.replay()
        self._server.start()
        if self.dashboard is not None:
            self.dashboard.start()
        (self._folder / ADDRESS).write_text(self._server.url.partition("://")[2], encoding="utf-8")
        return self._server.url

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
        if self.dashboard is not None:
            self.dashboard.close()

    def listeners(self) -> list[Listener]:
        """Listeners of the controller."""
        return [each for each in (self.permits, self._events) if each is not None]

    def check(self) -> None:
        """Raises ThreadDiedError or StorageError if a background thread has ended."""
        for part in (self._server, self.permits):
            if part is not None:
                part.thread.check()
        if self.dashboard is not None:
            self.dashboard.check()

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
