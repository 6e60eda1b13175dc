"""Middleware around every router: host check, body limit, compression and security headers.

    request ─▶ Host is one of ours? no: 421 ─▶ body limit under /api ─▶ doors ─▶ compression, headers ─▶ answer

The host check refuses pages of other sites whose name resolves to this server (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlmux.service.problems import ProblemError

MAX_BODY_BYTES = 4 << 20
MAX_BUNDLE_BYTES = 64 << 20
BUNDLES = "/api/v1/bundles"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; worker-src 'self'; manifest-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("0.0.0.0", "::")


class Hosts:
    """Host names of this server."""

    def __init__(self, bound_to: str, others: Collection[str] = ()) -> None:
        """`bound_to`: listening address; 0.0.0.0 and :: mean all of the machine's."""
        self._is_any = bound_to in _ANY
        names = {*_LOOPBACK, bound_to, *others}
        if bound_to not in _LOOPBACK:
            names.add(socket.gethostname())
        self._names = {name.lower().rstrip(".") for name in names}

    def allows(self, host: str) -> bool:
        """Whether a Host header, with or without a port, names this server."""
        name = _name_of(host)
        if name is None:
            return False
        return name in self._names or (self._is_any and _is_address(name))


def _name_of(host: str) -> str | None:
    """The name without its port; None for an invalid host."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") or not port else "?"
        if not bracket or not _is_address(name):
            return None
    else:
        name, _, port = host.partition(":")
    if not name or (port and not (port.isascii() and port.isdecimal())):
        return None
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _compressed(app: ASGIApp) -> ASGIApp:
    """The application with compressed responses; event streams are not compressed."""
    return GZipMiddleware(app, minimum_size=1000, compresslevel=4)


class Gate:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._api = _compressed(RequestBodyLimitMiddleware(app, MAX_BODY_BYTES))
        self._bundles = RequestBodyLimitMiddleware(app, MAX_BUNDLE_BYTES)
        self._assets = _compressed(app)
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        is_ours = not scope["path"].startswith("/tinker/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and is_ours:
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1 or not self._hosts.allows(given[0]):
            answer = ProblemError(
                421,
                f"this server is not {given[0] if given else 'named'}",
                where="Host",
                accepted="the name in the address it printed; rlmux serve --allow-host NAME",
            ).response(scope["path"])
            await answer(scope, receive, send_with_headers)
            return
        app = self._app
        if scope["path"] == BUNDLES:
            app = self._bundles
        elif scope["path"].startswith("/api/"):
            app = self._api
        elif scope["path"].startswith("/assets/"):
            app = self._assets
        await app(scope, receive, send_with_headers)
