"""Errors as answers (RFC 9457): what, where, and what would be accepted.

{"type": "about:blank", "title": "Not Found", "status": 404, "detail": "no lane 'demo2'",
 "where": "/api/v1/lanes/demo2", "accepted": "demo", "request_id": "5f0c..."}
"""

from __future__ import annotations

import json
import secrets
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"


class ProblemError(Exception):
    """A request that is not answered."""

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
        """Line of a file in the request that is wrong; None where it is no line of one."""
        self.again_s = again_s
        """Seconds after which the same request may be answered; None where that is not known."""

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
