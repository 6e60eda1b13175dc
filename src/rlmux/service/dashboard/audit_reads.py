"""What the address of the audit answers: `GET audit`, newest first, for administrators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.service.dashboard import audit
from rlmux.service.dashboard.door import Address, Asked, get
from rlmux.service.dashboard.parameters import line, whole
from rlmux.service.dashboard.problems import ProblemError


class AuditReads:
    """The handler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def addresses(self) -> tuple[Address, ...]:
        asks = {"limit": whole(1, 500), "cursor": whole(0, 2**53), "user": line}
        return (get("/audit", self.newest, asks, scope="admin"),)

    def newest(self, asked: Asked) -> Any:
        at, limit = asked.query.get("cursor", 0), asked.query.get("limit", 100)
        try:
            rows, is_more = audit.read(self._folder, skip=at, limit=limit, user=asked.query.get("user"))
        except UserError as error:
            raise ProblemError(503, str(error)) from None
        return {"items": rows, "next": str(at + limit) if is_more else None, "as_of_seq": None}
