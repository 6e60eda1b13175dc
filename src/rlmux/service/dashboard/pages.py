"""The built pages as static files: scripts in `assets`, and one HTML page under every other path.

/api, /v1, ...         405 for an address of an API that takes other methods, 404 for an unknown one; never a page
/assets/NAME-HASH.js   cached by browsers: the name has a content hash
/favicon.svg, ...      any other file
everything else        index.html: shows the page of the path
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import compile_path

from rlmux.service.http_server import Server
from rlmux.service.problems import ProblemError

DIST = Path(__file__).parents[1] / "pages" / "dist"
"""Output folder of `make pages`."""

_OF_APIS = ("api", "v1", "inference", "tinker")
"""First parts of the paths of APIs, whether or not this server has them."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NOT_BUILT = (
    'The pages are not built: run "make pages" in the checkout (it needs Node.js), or install a wheel.\n'
    "The API under /api/v1 works without them.\n"
)


def router(server: Server) -> APIRouter:
    """`server`: has the addresses of every API."""
    router = APIRouter()
    refuse = _refusal_of(server)
    for first in _OF_APIS:
        router.add_api_route(f"/{first}", refuse, methods=["GET", "HEAD"])
        router.add_api_route(f"/{first}/{{path:path}}", refuse, methods=[*_METHODS])
    router.add_api_route("/{path:path}", _page, methods=["GET", "HEAD"])
    return router


def _refusal_of(server: Server) -> Callable[[Request], Response]:
    """The answer to requests that no address of an API takes."""

    def refuse(request: Request) -> Response:
        path = request.url.path
        taken = [
            method
            for at, route in server.routes
            if route.endpoint not in (_page, refuse) and compile_path(at)[0].match(path)
            for method in route.methods or ()
        ]
        if not taken:
            return ProblemError(404, "no such address", accepted="those of docs/reference/service.md").response(path)
        allowed = ", ".join(sorted(set(taken)))
        problem = ProblemError(405, f"takes no {request.method}", where=path, accepted=allowed)
        response = problem.response(path)
        response.headers["Allow"] = allowed
        return response

    return refuse


async def _page(request: Request) -> Response:
    return await run_in_threadpool(_file, request.url.path)


def _file(path: str) -> Response:
    files = {file.relative_to(DIST).as_posix(): file for file in DIST.rglob("*") if file.is_file()}
    name = path.removeprefix("/")
    if name.startswith("assets/") and name not in files:
        return ProblemError(404, "no such file").response(path)
    if name not in files:
        name = "index.html"
    if name not in files:
        return PlainTextResponse(_NOT_BUILT, 503)
    is_kept = name.startswith("assets/")
    return FileResponse(
        files[name], headers={"Cache-Control": "public, max-age=31536000, immutable" if is_kept else "no-cache"}
    )
