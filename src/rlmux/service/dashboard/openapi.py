"""The OpenAPI 3.1 document: FastAPI's, with this project's error responses and access rules."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from rlmux.service.dashboard.router import JSON, PREFIX, get
from rlmux.service.dashboard.schemas.run_schemas import Problem


def document(router: APIRouter) -> dict[str, Any]:
    made = get_openapi(title="rlmux serve", version=version("rlmux"), routes=router.routes, servers=[{"url": PREFIX}])
    made["components"]["schemas"]["Problem"] = Problem.model_json_schema(mode="serialization")
    made["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": "rlmux_PORT"},
    }
    return made


class Document:
    """The handler; the document is built at the first request."""

    def __init__(self) -> None:
        self.address = get("/openapi.json", self.answer, "This document")
        self._router = APIRouter()
        self._data = b""

    def added_to(self, router: APIRouter) -> APIRouter:
        self._router = router
        return router

    def answer(self) -> Response:
        self._data = self._data or json.dumps(document(self._router)).encode()
        return Response(self._data, media_type=JSON)
