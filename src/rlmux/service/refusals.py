"""Refusals of requests, the same in every API.

| error                                         | status                                   |
|-----------------------------------------------|------------------------------------------|
| UserError, a body that is malformed           | 400                                      |
| a key that is not known                       | 401                                      |
| BudgetError                                   | 402: the SDK waits and retries        |
| UnknownIdError, an address that is not served | 404                                      |
| ConflictError                                 | 409                                      |
| GoneError                                     | 410                                      |
| FloodError                                    | 429, with Retry-After                    |
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from rlmux.core.errors import UserError
from rlmux.service.tinker.keys import UnknownKeyError
from rlmux.service.tinker.project_budgets import BudgetError
from rlmux.service.tinker.registry import GoneError, UnknownIdError
from rlmux.service.tinker.requests import ConflictError, FloodError

REFUSALS = (
    *(ValidationError, UnknownKeyError, UserError, ConflictError, GoneError, FloodError, BudgetError),
    *(json.JSONDecodeError, UnicodeDecodeError),
)
"""Errors that are the request's own."""


def refusal(path: str, error: Exception) -> tuple[int, str]:
    """(status, reason in one line) of one of REFUSALS. `path`: where the request went."""
    match error:
        case ValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            return 400, f"{path}: {where}: {first['msg']}"
        case json.JSONDecodeError() | UnicodeDecodeError():
            return 400, f"{path}: body: {error}"
        case UnknownKeyError():
            return 401, str(error)
        case UnknownIdError():
            return 404, str(error)
        case ConflictError():
            return 409, str(error)
        case GoneError():
            return 410, str(error)
        case FloodError():
            return 429, str(error)
        case BudgetError():
            return 402, str(error)
    return 400, str(error)


def headers_of(status: int) -> dict[str, str]:
    """Headers of a refusal: after how many seconds the same request may be sent again."""
    return {"Retry-After": "1"} if status == 429 else {}
