"""The built pages as static files: scripts in `assets`, and one HTML page under every other path.

/assets/NAME-HASH.js   cached by browsers: the name has a content hash
/favicon.svg, ...      any other file
everything else        index.html: shows the page of the path
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, PlainTextResponse, Response

from rlmux.service.dashboard.problems import ProblemError

DIST = Path(__file__).parents[1] / "pages" / "dist"
"""Output folder of `make pages`."""

_NOT_BUILT = (
    'The pages are not built: run "make pages" in the checkout (it needs Node.js), or install a wheel.\n'
    "The API under /api/v1 works without them.\n"
)


def router() -> APIRouter:
    router = APIRouter()
    router.add_api_route(
        "/api/{path:path}", _no_such_address, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    )
    router.add_api_route("/{path:path}", _page, methods=["GET", "HEAD"])
    return router


async def _no_such_address(request: Request) -> Response:
    problem = ProblemError(404, "no such address", accepted="those of docs/reference/service.md")
    return problem.response(request.url.path)


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
