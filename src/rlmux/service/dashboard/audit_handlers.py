"""`GET audit`: the audit log, newest first, for administrators."""

from __future__ import annotations

from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.service.dashboard.auth import audit
from rlmux.service.dashboard.parameters import Cursor, Limit, Line
from rlmux.service.dashboard.router import Address, get
from rlmux.service.dashboard.schemas.run_schemas import AuditRow, Page
from rlmux.service.problems import ProblemError


class AuditReads:
    """The handler."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def addresses(self) -> tuple[Address, ...]:
        return (get("/audit", self.newest, "The audit log, newest first", scope="admin"),)

    def newest(self, limit: Limit = 100, cursor: Cursor = 0, user: Line = None) -> Page[AuditRow]:
        try:
            rows, is_more = audit.read(self._folder, skip=cursor, limit=limit, user=user)
        except UserError as error:
            raise ProblemError(503, str(error)) from None
        items = [AuditRow.model_validate(row) for row in rows]
        return Page[AuditRow](items=items, next=str(cursor + limit) if is_more else None, as_of_seq=None)
