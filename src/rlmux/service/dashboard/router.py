"""The table of addresses, and the one place where each request is let in or refused.

Address(method="GET", path="/lanes/{lane}", scope="read", answer=..., summary=...)
    │
Door ── method other than GET and HEAD? by token, or by a page of this server, with JSON ── else 403, 415
     ── token or session? ── else 401, 403              ── within the rate? ── else 429
     ── every query parameter known, and given once? ── else 400
     ── may the pipeline that it names be seen? ── else 404
     ── may have an effect? a line in the audit first ── else 507
     ── FastAPI: parameters and body of their types ── else 400
     ── answer: in a thread, as what it does may read a file; what may take long, in its `LongWork` ── 429, 507
     ── 304 where the caller has it already

FastAPI reads the body before it runs any dependency. Rights are therefore checked in a route class of each address,
before FastAPI reads the request.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_origin, get_type_hints
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from rlmux.core.errors import LogError
from rlmux.service.addresses import PROXY_USER
from rlmux.service.dashboard.auth.access import Access, Principal
from rlmux.service.dashboard.auth.audit import Audit
from rlmux.service.dashboard.parameters import CallerContext
from rlmux.service.index.store import dumps
from rlmux.service.problems import PROBLEMS, ProblemError, invalid, of_storage, query_params, unwritten

PREFIX = "/api/v1"
JSON = "application/json"
_SAFE = ("GET", "HEAD")
_MAX_JSON_DEPTH = 32

Observe = Callable[[str, int, float], None]
"""Called after each response with the route's path, the status and the seconds until it started."""
RouteHandler = Callable[[Request], Awaitable[Response]]


class VisibilityFilter(Protocol):
    """Checks and filters what a caller sees."""

    def check_visible(self, caller: CallerContext, scope: str | None) -> None:
        """Raises ProblemError if the caller may not see the path's pipeline. `scope`: the route's scope."""

    def mask(self, caller: CallerContext, value: Any) -> Any:
        """A response's JSON or text without hidden names."""


class LongWork:
    """Bounded queue for slow handlers, which leaves threads for other requests."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._room = asyncio.Semaphore(max_running)
        self._num = 0

    async def run(self, answer: Callable[..., Any], *caller: Any) -> Any:
        """Run a handler in a thread. Raises ProblemError for a full queue. Bound to one event loop."""
        if self._num >= self._max_running + self._max_waiting:
            response = f"{self._max_running} at once, {self._max_waiting} waiting"
            raise ProblemError(429, "too many such requests are being answered", accepted=response, again_s=5)
        self._num += 1
        try:
            async with self._room:
                return await run_in_threadpool(answer, *caller)
        finally:
            self._num -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One row of the table."""

    method: str
    path: str
    scope: str | None
    """Required scope; None: open to anyone."""
    answer: Callable[..., Any]
    """Handler, called by FastAPI in a thread unless it is a coroutine function."""
    summary: str
    """Purpose, for the document."""
    status: int = 200
    others: Sequence[int] = ()
    """Additional success statuses."""
    answers: type[Response] = JSONResponse
    """Response type."""
    takes: str = JSON
    """Media type of the request body."""
    long_work: LongWork | None = None
    """Queue of a handler that waits for a controller or a process; None: the shared thread pool."""

    def add_to(self, router: APIRouter, route_class: type[APIRoute]) -> None:
        """Add the route; a GET also adds an undocumented HEAD."""
        more: dict[str, Any] = {"x-scope": self.scope, "security": [] if self.scope is None else SECURITY}
        if self.takes != JSON:
            schema = {"type": "string", "format": "binary"}
            more["requestBody"] = {"required": True, "content": {self.takes: {"schema": schema}}}
        others: dict[int | str, dict[str, Any]] = {
            status: {"description": self.summary, "model": get_type_hints(self.answer)["return"]}
            for status in self.others
        }
        for method in ("GET", "HEAD") if self.method == "GET" else (self.method,):
            router.add_api_route(
                self.path,
                self._endpoint(),
                methods=[method],
                summary=self.summary,
                status_code=self.status,
                response_class=self.answers,
                response_model_exclude_unset=True,
                responses={**PROBLEMS, **others},
                openapi_extra=more,
                include_in_schema=method != "HEAD",
                route_class_override=route_class,
            )

    def _endpoint(self) -> Callable[..., Any]:
        if self.long_work is None:
            return self.answer
        run, answer = self.long_work.run, self.answer

        @functools.wraps(answer)
        async def run_as_long_work(**given: Any) -> Any:
            return await run(functools.partial(answer, **given))

        return run_as_long_work


SECURITY: list[Any] = [{"token": []}, {"session": []}]


def get(path: str, answer: Callable[..., Any], summary: str, **more: Any) -> Address:
    """A GET route, by default with the scope `read`."""
    return Address(method="GET", path=path, answer=answer, summary=summary, **{"scope": "read", **more})


def post(path: str, answer: Callable[..., Any], summary: str, **more: Any) -> Address:
    return Address(method="POST", path=path, answer=answer, summary=summary, **more)


class ApiRouter:
    """Makes a router of the table."""

    def __init__(
        self,
        access: Access,
        port: int,
        observe: Observe,
        shown: VisibilityFilter,
        audit: Audit | None = None,
    ) -> None:
        """`port`: the server's. `audit`: records every request that may have an effect; None: no audit."""
        self._audit = audit
        self._access = access
        self._port = port
        self._shown = shown
        self._observe = observe

    def router(self, addresses: Sequence[Address]) -> APIRouter:
        """To be mounted under `PREFIX`."""
        router = APIRouter()
        for address in addresses:
            address.add_to(router, self._route_class(address))
        return router

    def _route_class(self, address: Address) -> type[APIRoute]:
        door = self

        class Route(APIRoute):
            def get_route_handler(self) -> Any:
                return door._answering(address, self, super().get_route_handler())

        return Route

    def _answering(self, address: Address, route: APIRoute, answer: RouteHandler) -> RouteHandler:
        async def respond(request: Request) -> Response:
            started_s = time.monotonic()
            line, response = await respond_to_admitted(request)
            response = await run_in_threadpool(self._record_outcome, request, line, response)
            self._observe(address.path, response.status_code, time.monotonic() - started_s)
            return response

        async def respond_to_admitted(request: Request) -> tuple[str | None, Response]:
            """(line id in the audit log or None, response)."""
            caller = line = None
            try:
                caller = request.state.caller = self._admit(address, request)
                _check_query(route, request)
                if request.method not in _SAFE and address.takes == JSON:
                    _check_json(await request.body())
                await run_in_threadpool(self._shown.check_visible, caller, address.scope)
                line = await run_in_threadpool(self._record_start, request)
                response = await answer(request)
                return line, _tagged(request, await run_in_threadpool(self._masked, caller, response))
            except RequestValidationError as error:
                return line, invalid(error, route).response(request.url.path)
            except ProblemError as problem:
                if caller is not None and problem.status != 404:  # a 404 repeats only the caller's own words
                    problem.detail = await run_in_threadpool(self._shown.mask, caller, problem.detail)
                    problem.accepted = await run_in_threadpool(self._shown.mask, caller, problem.accepted)
                return line, problem.response(request.url.path)
            except (LogError, sqlite3.Error, OSError) as error:
                return line, of_storage(error).response(request.url.path)

        return respond

    def _masked(self, caller: CallerContext, response: Response) -> Response:
        if caller.principal is None or caller.principal.sees_all or response.media_type != JSON or not response.body:
            return response
        response.body = dumps(self._shown.mask(caller, json.loads(bytes(response.body)))).encode()
        response.headers["Content-Length"] = str(len(response.body))
        return response

    def _record_start(self, request: Request) -> str | None:
        """Record a request that may have an effect; returns its line id. Raises ProblemError on a failed write."""
        if self._audit is None or request.method in _SAFE:
            return None
        try:
            return self._audit.begin(**self._audit_fields(request))
        except OSError as error:
            raise unwritten(error) from None

    def _record_outcome(self, request: Request, line: str | None, response: Response) -> Response:
        """The response, after its outcome or refusal is recorded."""
        if self._audit is None:
            return response
        if line is not None:
            self._audit.end(line, response.status_code, user=getattr(request.state, "user", ""))
        elif request.method not in _SAFE:
            try:
                self._audit.refused(response.status_code, **self._audit_fields(request))
            except OSError as error:
                return unwritten(error).response(request.url.path)
        elif response.status_code in (401, 403):
            self._audit.refused_read(response.status_code, **self._audit_fields(request))
        return response

    def _audit_fields(self, request: Request) -> dict[str, str]:
        principal, _, is_bearer = self._authenticate(request)
        by = "token" if is_bearer else "session" if principal and principal.is_session else "proxy"
        return {
            "user": principal.user if principal else "",
            "by": by if principal else "",
            "token": principal.token if principal else "",
            "address": request.client.host if request.client else "",
            "method": request.method,
            "path": request.url.path,
        }

    def _admit(self, address: Address, request: Request) -> CallerContext:
        client_host = request.client.host if request.client else ""
        principal, cookie, is_bearer = self._authenticate(request)
        if not self._access.is_within_rate(principal.key if principal else f"address {client_host}"):
            raise ProblemError(429, "too many requests", accepted="50 a second, 100 at once", again_s=1)
        if request.method not in _SAFE:
            _check_origin(request, address.takes, is_bearer=is_bearer)
        if address.scope is not None:
            if principal is None:
                raise ProblemError(
                    401,
                    "the caller is not authenticated",
                    where="Authorization",
                    accepted="Bearer TOKEN, the token that you were given (the owner's: admin.token), or a login",
                )
            if not principal.may(address.scope):
                raise ProblemError(403, f"needs the scope {address.scope}", accepted=f"a token with {address.scope}")
        return CallerContext(
            path=dict(request.path_params),
            principal=principal,
            address=client_host,
            headers=request.headers,
            cookie=cookie,
            is_https=request.url.scheme == "https",
        )

    def _authenticate(self, request: Request) -> tuple[Principal | None, str, bool]:
        """(the caller, the session's secret, whether by token).

        A wrong token is not replaced by a valid session; a proxy's user takes precedence over a session.
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
    """Name of a server's cookie, distinct per port because browsers share cookies between the ports of a host.

    Over TLS its prefix binds it to this host and to `Secure`.
    """
    return f"{'__Host-' if is_https else ''}rlmux_{port}"


def _check_origin(request: Request, media_type: str, *, is_bearer: bool) -> None:
    """Raises ProblemError for an effect without a token or one of this server's pages as its origin (CSRF)."""
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


def _check_query(route: APIRoute, request: Request) -> None:
    """Raises ProblemError for unknown and repeated parameters, which FastAPI ignores."""
    params = query_params(route.dependant)
    known = {param.alias for param in params}
    lists = {param.alias for param in params if get_origin(param.field_info.annotation) is list}
    found = set()
    for name in (name for name, _ in request.query_params.multi_items()):
        if name not in known:
            accepted = ", ".join(param.alias for param in params) or "none"
            raise ProblemError(400, f"no parameter {name!r}", where=f"?{name}", accepted=accepted)
        if name in found and name not in lists:
            raise ProblemError(400, f"{name!r} is given twice", where=f"?{name}", accepted="one value")
        found.add(name)


def _check_json(data: bytes) -> None:
    """Raises ProblemError for a body that is not JSON, or too complex."""
    if data.count(b"[") + data.count(b"{") > 10_000:
        raise ProblemError(400, "too many lists and objects", where="body", accepted="10,000")
    try:
        value = json.loads(data or b"null")
    except (ValueError, RecursionError):
        raise ProblemError(400, "not JSON", where="body", accepted="an object") from None
    if _depth(value) > _MAX_JSON_DEPTH:
        raise ProblemError(400, "nested too deeply", where="body", accepted=f"{_MAX_JSON_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON has a way to write it, and UTF-8 has none
        raise ProblemError(400, "a text is not Unicode", where="body", accepted="whole surrogate pairs") from None


def _depth(value: Any) -> int:
    """Nesting depth, counted to one above the limit."""
    depth, level = 0, [value]
    while level and depth <= _MAX_JSON_DEPTH:
        level = [
            each
            for nested in level
            if isinstance(nested, dict | list)
            for each in (nested.values() if isinstance(nested, dict) else nested)
        ]
        depth += 1
    return depth


def _tagged(request: Request, response: Response) -> Response:
    """The response with its ETag, or a 304 for a cached one. Uncacheable responses stay unchanged."""
    if response.status_code == 204 or response.headers.get("Cache-Control") == "no-store":
        return response
    tag = f'"{hashlib.sha256(response.body).hexdigest()[:24]}"'
    response.headers["ETag"] = tag
    response.headers["Vary"] = "Cookie, Authorization"  # no shared cache between users
    response.headers.setdefault("Cache-Control", "no-cache")
    given = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if response.status_code == 200 and request.method in _SAFE and tag in given:
        kept = {name: response.headers[name] for name in ("ETag", "Vary", "Cache-Control")}
        return Response(status_code=304, headers=kept)
    return response
