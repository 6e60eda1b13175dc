"""The APIs of a lane's clients and programs: Tinker, rollouts and permits, each mounted on the server.

TinkerFront, rollout routes ─▶ Serving ─▶ Inbox ─▶ the lane's controller
EmbeddedBroker (a thread) ───────────────▲
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from rlmux.broker.broker_run import SOCKET_NAME, environment_token
from rlmux.broker.embedded import EmbeddedBroker, token_check
from rlmux.broker.server import PermitServer
from rlmux.config.serve_file import ServeSpec, written
from rlmux.core.model import PipelineId
from rlmux.runtime.controller import Listener
from rlmux.runtime.records.folders import SERVED
from rlmux.service.http_server import Server
from rlmux.service.model_serving import ClientEvents, Serving
from rlmux.service.rollouts.rollout_routes import routes as rollout_routes
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.routes import routes

TINKER = "/tinker"
"""Path of the Tinker API."""
TOKENIZERS = "tokenizers"
"""Folder with the tokenizers of new models."""
_SWEEP_S = 1.0
_RETURN_S = 60.0
"""Seconds after the server's start in which no session expires: clients send a heartbeat every 10 s, and it may have
had no receiver."""
_LEAVING_S = 30.0
"""Seconds without a heartbeat until the session of a program that announced its end expires."""


class LaneApis:
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
        self._permit_server = PermitServer(listen, server.tls) if listen else None

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
