"""Probes for an orchestrator, on an address of their own: other machines may ask it, and it says nothing but yes or no.

    GET /healthz    200 where the server's loop answers
    GET /readyz     200 where every lane has a controller that answers; else 503, with how many have

The address is plain HTTP beside `--listen`: Kubernetes asks from the node, not from within the pod.
A module of its own: it is all that an unencrypted address beyond loopback may answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rlmux.core.errors import UserError

Ready = Callable[[], tuple[int, int]]
"""Returns (lanes that are ready, lanes)."""


class HealthAddress:
    """Run it beside the server, in its loop."""

    def __init__(self, host: str, port: int, ready: Ready) -> None:
        """Raises UserError for an address that cannot be had."""
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise UserError(
                f"--health {host}:{port}: {os.strerror(error.errno or 0)}; accepted: a free address of this machine"
            ) from None
        self._ready = ready
        routes = [Route("/healthz", self._live), Route("/readyz", self._lanes)]
        app = Starlette(routes=routes)
        quiet = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
        self._server = uvicorn.Server(quiet)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        try:
            await self._server.serve([self._socket])
        except asyncio.CancelledError:  # the server beside it ends
            await self._server.shutdown([self._socket])

    def close(self) -> None:
        self._socket.close()

    async def _live(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("alive\n")

    async def _lanes(self, request: Request) -> PlainTextResponse:
        num_ready, num = await run_in_threadpool(self._ready)
        return PlainTextResponse(f"{num_ready} of {num} lanes ready\n", 200 if num_ready == num else 503)
