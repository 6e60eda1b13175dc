"""One HTTP server on one address, in a thread: doors are mounted under paths of their own.

Server(Listening(...)) ─▶ mount("", router), mount_app("/tinker", app) ─▶ start ─▶ ... ─▶ close
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from rlmux.broker.certificate import Tls
from rlmux.core.errors import UserError
from rlmux.runtime.control.supervised_thread import SupervisedThread
from rlmux.runtime.workers.processes import raise_file_limit
from rlmux.service.addresses import Listening, Proxied
from rlmux.service.http_patience import MAX_HEAD_BYTES, PatientHttp, PatientServer, listen

_START_LIMIT_S = 30.0
_KEEP_ALIVE_S = 30
"""Seconds that a connection without requests stays open. Clients show life every 10 s, and should find the connection
that they have. Their HTTP libraries drop one after 5 s or not at all: a server that drops it first, or at the same
time, breaks a request that is on its way."""


class Server:
    """See the module. The address is taken at once, so that a second server on it fails before anything starts."""

    def __init__(self, listening: Listening) -> None:
        """Raises UserError for an address that cannot be had."""
        host, port = listening.host, listening.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends a response's body without waiting for its head's ACK (up to 40 ms) where the protocol is named
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise UserError(
                f"--listen {host}:{port}: {error.strerror}; accepted: a free address of this machine"
            ) from None
        self.host = host
        self._listening = listening
        self._app = FastAPI(lifespan=self._lifespan, openapi_url=None)
        self.routes: list[tuple[str, APIRoute]] = []
        """(whole path, route) of every application, with its parameters and bodies."""
        self._tasks: list[Callable[[], Awaitable[None]]] = []
        self._running: list[asyncio.Task[None]] = []
        self._is_started = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._app_by_path: dict[str, ASGIApp] = {}
        self._outermost: ASGIApp = _ByPath(self._app_by_path, self._app)
        self._before_close: list[Callable[[], None]] = []
        self._server: uvicorn.Server | None = None
        self.thread = SupervisedThread(self._run, "http")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._listening.tls is None else 'https'}://{host}:{self.port}"

    @property
    def listening(self) -> Listening:
        return self._listening

    @property
    def tls(self) -> Tls | None:
        return self._listening.tls

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def mount(self, path: str, router: APIRouter) -> None:
        """Put a door under a path; before `start`."""
        self._app.include_router(router, prefix=path)
        self.routes += [(path + route.path, route) for route in router.routes if isinstance(route, APIRoute)]

    def mount_app(self, path: str, app: ASGIApp) -> None:
        """Put an application under a path; before `start`. Its requests go past FastAPI, which takes most of the CPU
        time of a small one."""
        self._app_by_path[path] = app

    def wrap(self, around: Callable[[ASGIApp], ASGIApp]) -> None:
        """Put an application around all doors; before `start`."""
        self._outermost = around(self._outermost)

    def before_close(self, call: Callable[[], None]) -> None:
        """Run this in the server's loop when it begins to close."""
        self._before_close.append(call)

    def run_beside(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a coroutine in the server's loop as long as it lives; before `start`."""
        self._tasks.append(task)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run this in the server's loop; from any thread. Nothing happens once it is closed."""
        assert self.loop is not None, "the server has started"
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    def start(self) -> None:
        """Returns once requests are answered."""
        tls, app = self._listening.tls, self._outermost
        config = uvicorn.Config(
            Proxied(app, self._listening) if self._listening.proxies else app,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=PatientHttp,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=_KEEP_ALIVE_S,
            proxy_headers=False,  # by default uvicorn trusts any local program's forwarded address
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
        )
        raise_file_limit()
        self._server = PatientServer(config)
        listen(self._socket)
        self.thread.start()
        self._is_started.wait(_START_LIMIT_S)

    def close(self) -> None:
        """Answer what is being answered, then end. Safe to call twice."""
        if self._server is not None and self.thread.is_alive():
            for call in self._before_close:
                self.call_soon(call)
            self._server.should_exit = True
            self.thread.join()
        self._socket.close()

    def _run(self) -> None:
        assert self._server is not None
        asyncio.run(self._server.serve(sockets=[self._socket]))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        self._running = [asyncio.ensure_future(task()) for task in self._tasks]
        for each in self._running:
            each.add_done_callback(self._check_task)
        self._is_started.set()
        yield
        for task in self._running:
            task.cancel()

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A task beside the requests that an error has ended is missed as the thread is."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.thread.fail(error)


class _ByPath:
    """Routes requests under a path to its application, and all others on."""

    def __init__(self, app_by_path: Mapping[str, ASGIApp], other: ASGIApp) -> None:
        self._app_by_path = app_by_path
        self._other = other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for path, app in self._app_by_path.items():
            if scope["type"] == "http" and scope["path"].startswith(f"{path}/"):
                await app({**scope, "root_path": path}, receive, send)
                return
        await self._other(scope, receive, send)
