"""Error responses (RFC 9457): what, where, and accepted values.

{"type": "about:blank", "title": "Not Found", "status": 404, "detail": "no lane 'demo2'",
 "where": "/api/v1/lanes/demo2", "accepted": "demo", "request_id": "5f0c..."}
"""

from __future__ import annotations

import errno
import json
import secrets
import sqlite3
from http import HTTPStatus
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic.fields import FieldInfo
from starlette.responses import Response

from rlmux.core.errors import LogError

MEDIA_TYPE = "application/problem+json"
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "What is wrong, and what would be accepted",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""Error responses in the OpenAPI document."""


class ProblemError(Exception):
    """A refused request."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        where: str = "",
        accepted: str = "",
        line: int | None = None,
        again_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.where = where
        """Part of the request that is wrong; its path by default."""
        self.accepted = accepted
        self.line = line
        """Wrong line of a file in the request; None outside files."""
        self.again_s = again_s
        """Seconds until a retry may succeed; None if unknown."""

    def response(self, path: str) -> Response:
        body: dict[str, Any] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "where": self.where or path,
            "accepted": self.accepted or None,
            "request_id": secrets.token_hex(8),
        }
        if self.line is not None:
            body["line"] = self.line
        headers = {"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else {}
        if self.again_s is not None:
            headers["Retry-After"] = str(self.again_s)
        return Response(json.dumps(body), self.status, headers, MEDIA_TYPE)


def invalid(error: RequestValidationError, route: APIRoute) -> ProblemError:
    """FastAPI's first validation error; a 404 for a wrong path."""
    first = error.errors()[0]
    place, *names = first["loc"]
    name, message = ".".join(map(str, names)), first["msg"].removeprefix("Value error, ")
    if place == "body":
        return _invalid_body(first, name or "body", message, route)
    fields = query_params(route.dependant) if place == "query" else route.dependant.path_params
    field = next(candidate for candidate in fields if candidate.alias == names[0])
    wrong = f"{name} is missing" if first["type"] == "missing" else f"{name} is {str(first['input'])[:80]!r}"
    accepted = _accepted(field.field_info) or message
    if place == "path":
        return ProblemError(404, wrong, accepted=accepted)
    return ProblemError(400, wrong, where=f"?{names[0]}", accepted=accepted)


def query_params(dependant: Dependant) -> list[Any]:
    """Query parameters of a handler and of its dependencies."""
    return [*dependant.query_params, *(param for each in dependant.dependencies for param in query_params(each))]


def _invalid_body(first: Any, name: str, message: str, route: APIRoute) -> ProblemError:
    assert route.body_field is not None
    shape = route.body_field.field_info.annotation
    fields = ", ".join(getattr(shape, "model_fields", {})) or "{}"
    if first["type"] == "extra_forbidden":
        return ProblemError(400, f"no field {name[:80]!r}", where="body", accepted=fields)
    if name == "body":
        return ProblemError(400, f"the body is wrong: {message}", where=name, accepted=f"an object with {fields}")
    wrong = f"{name} is missing" if first["type"] == "missing" else f"{name} is {str(first['input'])[:80]!r}"
    return ProblemError(400, wrong, where=name, accepted=message)


def _accepted(field: FieldInfo) -> str:
    """A parameter's description, or its bounds."""
    low = [bound.ge for bound in field.metadata if hasattr(bound, "ge")]
    high = [bound.le for bound in field.metadata if hasattr(bound, "le")]
    return field.description or (f"a whole number from {low[0]} to {high[0]}" if low and high else "")


def of_storage(error: LogError | sqlite3.Error | OSError) -> ProblemError:
    """Response to a failed read or write. Reraises an OSError other than a full disk: it is a bug."""
    is_sqlite_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    if is_sqlite_full or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return ProblemError(507, "the disk is full, and nothing was kept", accepted="a disk with room")
    if isinstance(error, OSError):
        raise error
    return ProblemError(503, str(error))


def unwritten(error: OSError) -> ProblemError:
    return ProblemError(507, f"the audit cannot be written: {error.strerror}", accepted="a disk with room")
