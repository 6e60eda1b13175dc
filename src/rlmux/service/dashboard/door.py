"""The table of addresses, and the one place where each request is let in or refused.

Address("GET", "/lanes/{lane}", scope="read", asks={...}, answer=...)
    │
Door ── method other than GET and HEAD? by token, or by a page of this server, with JSON ── else 403, 415
     ── who asks? token or session ── else 401, 403        ── how often? ── else 429
     ── every query parameter known and of its type? ── else 400
     ── may the pipeline that it names be seen? ── else 404
     ── may have an effect? a line in the audit first ── else 507
     ── answer: in a thread, as what it does may read a file; what may take long, in its `LongWork` ── 429, 507
     ── 304 where the caller has it already
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rlmux.core.errors import LogError
from rlmux.service.dashboard.access import Access, Who
from rlmux.service.dashboard.audit import Audit
from rlmux.service.dashboard.parameters import Parse
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.index.store import dumps
from rlmux.service.listening import PROXY_USER

PREFIX = "/api/v1"
_SAFE = ("GET", "HEAD")
_MAX_JSON_DEPTH = 32

Observe = Callable[[str, int, float], None]
"""Told of each answer: the address in the table, the status, the seconds until it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request that was let in."""

    path: Mapping[str, str]
    """Parts of the address that have a name."""
    query: Mapping[str, Any]
    """Parameters that were given, parsed; a list where one may be given several times."""
    body: Any
    """JSON of a POST, None without; chunks as they come, of an address that takes another type."""
    who: Who | None
    address: str
    """Network address of the caller."""
    headers: Mapping[str, str]
    cookie: str
    """The session's secret; empty without."""
    is_https: bool
    """Whether the caller's end speaks TLS, to this server or to a proxy before it."""


class Shown(Protocol):
    """Decides what a caller is shown."""

    def check_seen(self, asked: Asked, scope: str | None) -> None:
        """Raises ProblemError where the caller may not see what the address names. `scope`: what it needs."""

    def mask(self, asked: Asked, value: Any) -> Any:
        """An answer's JSON, or a text of it, without names that the caller is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an answer is made of."""

    value: Any = None
    """JSON, or bytes."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    is_final: bool = False
    """Whether the same address never has another answer."""
    user: str = ""
    """User who is known by the request alone: that of a login."""


class LongWork:
    """Answers that may take long: some at once, which leaves other requests their threads, and some that wait."""

    def __init__(self, *, at_once: int, waiting: int) -> None:
        self._at_once = at_once
        self._waiting = waiting
        self._room = asyncio.Semaphore(at_once)
        self._num = 0

    async def run(self, answer: Callable[..., Any], *asked: Any) -> Any:
        """Call it in a thread. Raises ProblemError where too many wait already. To be used on one event loop."""
        if self._num >= self._at_once + self._waiting:
            told = f"{self._at_once} at once, {self._waiting} waiting"
            raise ProblemError(429, "too many such requests are being answered", accepted=told, again_s=5)
        self._num += 1
        try:
            async with self._room:
                return await run_in_threadpool(answer, *asked)
        finally:
            self._num -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One row of the table."""

    method: str
    path: str
    scope: str | None
    """What a caller must be allowed; None: anyone may ask."""
    answer: Callable[[Asked], Any]
    """Returns JSON, `Told` or a `Response`; runs in a thread unless `is_async`."""
    asks: Mapping[str, Parse] = field(default_factory=dict)
    """Query parameters."""
    lists: tuple[str, ...] = ()
    """Parameters that may be given several times."""
    media_type: str = "application/json"
    """Type of the body that it takes."""
    is_async: bool = False
    long_work: LongWork | None = None
    """What it waits in where it may take long, for a controller or a process; None: in the threads of all requests."""

    async def answered(self, asked: Asked) -> Any:
        if self.is_async:
            return await self.answer(asked)
        return await (self.long_work.run if self.long_work else run_in_threadpool)(self.answer, asked)


def get(path: str, answer: Callable[[Asked], Any], asks: Mapping[str, Parse] | None = None, **more: Any) -> Address:
    """An address that is read, by default with the scope `read`."""
    return Address(method="GET", path=path, answer=answer, asks=asks or {}, **{"scope": "read", **more})


class Door:
    """Makes a router of the table."""

    def __init__(
        self,
        access: Access,
        port: int,
        observe: Observe,
        shown: Shown,
        audit: Audit | None = None,
    ) -> None:
        """`port`: the server's. `audit`: is told of every request that may have an effect; None: nothing is kept."""
        self._audit = audit
        self._access = access
        self._port = port
        self._shown = shown
        self._observe = observe

    def router(self, addresses: tuple[Address, ...]) -> APIRouter:
        router = APIRouter(prefix=PREFIX)
        for address in addresses:
            methods = ["GET", "HEAD"] if address.method == "GET" else [address.method]
            router.add_api_route(address.path, self._answering(address), methods=methods)
        return router

    def _answering(self, address: Address) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            begun_s = time.monotonic()
            line, user, told = await respond(request)
            told = await run_in_threadpool(self._ended, request, line, user, told)
            self._observe(address.path, told.status_code, time.monotonic() - begun_s)
            return told

        async def respond(request: Request) -> tuple[str | None, str, Response]:
            """(the request's line in the audit, or None; the user who logs in by it; what is answered)."""
            asked = line = None
            try:
                asked = await self._let_in(address, request)
                await run_in_threadpool(self._shown.check_seen, asked, address.scope)
                line = await run_in_threadpool(self._begin, request)
                told = await run_in_threadpool(self._masked, asked, await address.answered(asked))
            except ProblemError as problem:
                if asked is not None and problem.status != 404:  # that says the caller's own word, and nothing else
                    problem.detail = await run_in_threadpool(self._shown.mask, asked, problem.detail)
                    problem.accepted = await run_in_threadpool(self._shown.mask, asked, problem.accepted)
                return line, "", problem.response(request.url.path)
            except (LogError, sqlite3.Error, OSError) as error:
                return line, "", _of_storage(error).response(request.url.path)
            if isinstance(told, Response):
                return line, "", told
            return line, told.user, _response(told, request)

        return answer

    def _masked(self, asked: Asked, told: Any) -> Told | Response:
        if isinstance(told, Response):
            return told
        answer = told if isinstance(told, Told) else Told(value=told)
        return (
            answer if isinstance(answer.value, bytes) else replace(answer, value=self._shown.mask(asked, answer.value))
        )

    def _begin(self, request: Request) -> str | None:
        """Write down a request that may have an effect; returns its line. Raises ProblemError where that cannot be."""
        if self._audit is None or request.method in _SAFE:
            return None
        try:
            return self._audit.begin(**self._caller(request))
        except OSError as error:
            raise _unwritten(error) from None

    def _ended(self, request: Request, line: str | None, user: str, told: Response) -> Response:
        """The answer, once what came of the request is written down, or that it was refused."""
        if self._audit is None:
            return told
        if line is not None:
            self._audit.end(line, told.status_code, user=user)
        elif request.method not in _SAFE:
            try:
                self._audit.refused(told.status_code, **self._caller(request))
            except OSError as error:
                return _unwritten(error).response(request.url.path)
        elif told.status_code in (401, 403):
            self._audit.refused_read(told.status_code, **self._caller(request))
        return told

    def _caller(self, request: Request) -> dict[str, str]:
        who, _, is_bearer = self._who(request)
        by = "token" if is_bearer else "session" if who and who.is_session else "proxy"
        return {
            "user": who.user if who else "",
            "by": by if who else "",
            "token": who.token if who else "",
            "address": request.client.host if request.client else "",
            "method": request.method,
            "path": request.url.path,
        }

    async def _let_in(self, address: Address, request: Request) -> Asked:
        caller = request.client.host if request.client else ""
        who, cookie, is_bearer = self._who(request)
        if not self._access.may_ask(who.key if who else f"address {caller}"):
            raise ProblemError(429, "too many requests", accepted="50 a second, 100 at once", again_s=1)
        if request.method not in _SAFE:
            _check_origin(request, address.media_type, is_bearer=is_bearer)
        if address.scope is not None:
            if who is None:
                raise ProblemError(
                    401,
                    "who asks is not known",
                    where="Authorization",
                    accepted="Bearer TOKEN of admin.token, or a login",
                )
            if not who.may(address.scope):
                raise ProblemError(403, f"needs the scope {address.scope}", accepted=f"a token with {address.scope}")
        return Asked(
            path=dict(request.path_params),
            query=_query(address, request),
            body=await _body_of(address, request),
            who=who,
            address=caller,
            headers=request.headers,
            cookie=cookie,
            is_https=request.url.scheme == "https",
        )

    def _who(self, request: Request) -> tuple[Who | None, str, bool]:
        """(the caller, the session's secret, whether by token).

        A token that is wrong is not helped by a session that is good; a proxy's word is before that of a session.
        """
        cookie = request.cookies.get(cookie_name(self._port, is_https=request.url.scheme == "https"), "")
        given = request.headers.get("authorization")
        if given is not None:
            scheme, _, token = given.partition(" ")
            return (self._access.of_token(token.strip()) if scheme.lower() == "bearer" else None), cookie, True
        user = getattr(request.state, PROXY_USER, None)
        if user is not None:
            return self._access.of_proxy(user), cookie, False
        return (self._access.of_session(cookie) if cookie else None), cookie, False


def cookie_name(port: int, *, is_https: bool) -> str:
    """Name of a server's cookie: a browser sends its cookies to every port of a name, so that each has one of its own.

    Over TLS it has the prefix with which a browser takes it from no other name, and only if it is `Secure`.
    """
    return f"{'__Host-' if is_https else ''}rlmux_{port}"


def _of_storage(error: LogError | sqlite3.Error | OSError) -> ProblemError:
    """What is answered where a file is not read or written. Raises an OSError that is no full disk: it is a fault."""
    is_sqlite_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    if is_sqlite_full or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return ProblemError(507, "the disk is full, and nothing was kept", accepted="a disk with room")
    if isinstance(error, OSError):
        raise error
    return ProblemError(503, str(error))


def _unwritten(error: OSError) -> ProblemError:
    return ProblemError(507, f"the audit cannot be written: {error.strerror}", accepted="a disk with room")


def _check_origin(request: Request, media_type: str, *, is_bearer: bool) -> None:
    """Whatever may have an effect comes with a token, or from a page of this server: a browser says which."""
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0].strip().lower() != media_type:
        raise ProblemError(415, "a body of another type", where="Content-Type", accepted=media_type)
    if is_bearer:
        return
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_ours = site == "same-origin"
    else:
        origin = headers.get("origin", "")
        is_ours = origin != "" and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        is_ours = is_ours and urlsplit(origin).scheme == request.url.scheme
    if not is_ours:
        raise ProblemError(403, "not asked by a page of this server", where="Origin", accepted="a bearer token")


def _query(address: Address, request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        parse = address.asks.get(name)
        if parse is None:
            known = ", ".join(address.asks) or "none"
            raise ProblemError(400, f"no parameter {name!r}", where=f"?{name}", accepted=known)
        if name in found and name not in address.lists:
            raise ProblemError(400, f"{name!r} is given twice", where=f"?{name}", accepted="one value")
        try:
            value = parse(text)
        except ValueError as error:
            raise ProblemError(400, f"{name} is {text[:80]!r}", where=f"?{name}", accepted=str(error)) from None
        if name in address.lists:
            found.setdefault(name, []).append(value)
        else:
            found[name] = value
    return found


async def _body_of(address: Address, request: Request) -> Any:
    if request.method in _SAFE:
        return None
    return await _json_of(request) if address.media_type == "application/json" else request.stream()


async def _json_of(request: Request) -> Any:
    data = await request.body()
    if not data:
        return None
    if data.count(b"[") + data.count(b"{") > 10_000:
        raise ProblemError(400, "too many lists and objects", where="body", accepted="10,000")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ProblemError(400, "not JSON", where="body", accepted="an object") from None
    if _depth(value) > _MAX_JSON_DEPTH:
        raise ProblemError(400, "nested too deeply", where="body", accepted=f"{_MAX_JSON_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON has a way to write it, and UTF-8 has none
        raise ProblemError(400, "a text is not Unicode", where="body", accepted="whole surrogate pairs") from None
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted to one more than is allowed."""
    depth, level = 0, [value]
    while level and depth <= _MAX_JSON_DEPTH:
        level = [
            each
            for one in level
            if isinstance(one, dict | list)
            for each in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth


def _response(answer: Told, request: Request) -> Response:
    if answer.status == 204:
        return Response(status_code=204, headers=dict(answer.headers))
    data = answer.value if isinstance(answer.value, bytes) else dumps(answer.value).encode()
    tag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "private, max-age=31536000, immutable" if answer.is_final else "no-cache",
        "Vary": "Cookie, Authorization",  # what one user was told is not kept for the next
        **answer.headers,
    }
    given = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    if answer.status == 200 and request.method in _SAFE and tag in given:
        return Response(status_code=304, headers=headers)
    return Response(data, answer.status, headers, answer.media_type)
