"""service.db: every submission that was answered, durable before the answer.

    accepted ──▶ taken      its lane's controller has it in its log
             ├─▶ refused    by the controller, with a reason
             └─▶ over_quota the same, since too many pipelines of a project or user wait: later it may be taken

One row per idempotency key. The lane's log, not this file, has the pipelines' outcome.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlmux.core.errors import LogError

LEDGER_NAME = "service.db"
_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS submission (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, key TEXT UNIQUE NOT NULL, body_sha256 TEXT NOT NULL,
    user TEXT NOT NULL, lane TEXT NOT NULL, source TEXT NOT NULL, text TEXT NOT NULL, bundle TEXT, names TEXT NOT NULL,
    state TEXT NOT NULL, reason TEXT, pipelines TEXT, created TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS submission_by_state ON submission (state, lane, number);
"""
_COLUMNS = "id, body_sha256, user, lane, source, text, bundle, names, state, reason, pipelines, created"
ACCEPTED, TAKEN, REFUSED, OVER_QUOTA = "accepted", "taken", "refused", "over_quota"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionRow:
    """One submission."""

    id: str
    body_sha256: str
    """Hash of the request's body: the same key with another body is a mistake."""
    user: str
    lane: str
    source: str
    """Name of the file, as its user has it."""
    text: str
    """The file, with absolute paths."""
    bundle: str | None
    """Hash of the code and data that came with it."""
    names: tuple[str, ...]
    """Its pipelines."""
    state: str
    """`accepted`, `taken`, `refused` or `over_quota`."""
    reason: str | None
    """Why it was refused."""
    pipelines: Sequence[dict[str, Any]] | None
    """What the controller answered for each pipeline."""
    created: str
    """Wall time of the submission, RFC 3339."""

    def fields(self) -> dict[str, Any]:
        """The row in the API's keys."""
        waiting = "kept; it goes to the lane as soon as its controller answers"
        shown = self.pipelines or [{"pipeline": name, "outcome": ACCEPTED, "reason": waiting} for name in self.names]
        return {
            "id": self.id,
            "lane": self.lane,
            "user": self.user,
            "source": self.source,
            "bundle": self.bundle,
            "state": self.state,
            "reason": self.reason,
            "pipelines": [] if self.state in (REFUSED, OVER_QUOTA) else list(shown),
            "created": self.created,
        }


class SubmissionLedger:
    """See the module. May be used by any thread."""

    def __init__(self, root: Path) -> None:
        """Raises LogError for a file of another version."""
        path = root / LEDGER_NAME
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        execute = self._connection.execute
        (version,) = execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            self._connection.close()
            raise LogError(f"{path}: of version {version}; accepted: {_VERSION}, by the rlmux that wrote it")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        self._connection.executescript(f"{_TABLES} PRAGMA user_version = {_VERSION};")

    def add(
        self, key: str, *, body_sha256: str, user: str, lane: str, source: str, text: str, bundle: str | None,
        names: Sequence[str],
    ) -> SubmissionRow:  # fmt: skip
        """The submission of this key: the one that is there, or a new one, on disk when this returns."""
        id = f"{time.time_ns() // 1_000_000:011x}{secrets.token_hex(8)}"
        created = datetime.now(UTC).isoformat(timespec="seconds")
        row = (id, key, body_sha256, user, lane, source, text, bundle, json.dumps(list(names)), ACCEPTED, created)
        with self._lock:
            self._connection.execute(
                "INSERT INTO submission (id, key, body_sha256, user, lane, source, text, bundle, names, state, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
                row,
            )
        (found,) = self._rows("WHERE key = ?", key)
        return found

    def find_key(self, key: str) -> SubmissionRow | None:
        return next(iter(self._rows("WHERE key = ?", key)), None)

    def find_id(self, id: str) -> SubmissionRow | None:
        return next(iter(self._rows("WHERE id = ?", id)), None)

    def accepted(self, lane: str) -> list[SubmissionRow]:
        """Those that the lane's controller has not taken yet, oldest first."""
        return self._rows("WHERE state = ? AND lane = ? ORDER BY number", ACCEPTED, lane)

    def newest(self, limit: int, user: str | None = None) -> list[SubmissionRow]:
        """The newest first, of one user or of all."""
        if user is None:
            return self._rows("ORDER BY number DESC LIMIT ?", limit)
        return self._rows("WHERE user = ? ORDER BY number DESC LIMIT ?", user, limit)

    def take(self, id: str, pipelines: Sequence[dict[str, Any]]) -> None:
        self._settle(id, TAKEN, None, json.dumps(list(pipelines)))

    def refuse(self, id: str, reason: str, *, is_over_quota: bool = False) -> None:
        self._settle(id, OVER_QUOTA if is_over_quota else REFUSED, reason, None)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _settle(self, id: str, state: str, reason: str | None, pipelines: str | None) -> None:
        with self._lock:
            self._connection.execute(
                "UPDATE submission SET state = ?, reason = ?, pipelines = ? WHERE id = ? AND state = ?",
                (state, reason, pipelines, id, ACCEPTED),
            )

    def _rows(self, where: str, *values: Any) -> list[SubmissionRow]:
        with self._lock:
            rows = self._connection.execute(f"SELECT {_COLUMNS} FROM submission {where}", values).fetchall()
        return [_submitted(row) for row in rows]


def _submitted(row: Sequence[Any]) -> SubmissionRow:
    named = dict(zip(_COLUMNS.split(", "), row, strict=True))
    named["names"] = tuple(json.loads(named["names"]))
    named["pipelines"] = None if named["pipelines"] is None else json.loads(named["pipelines"])
    return SubmissionRow(**named)
