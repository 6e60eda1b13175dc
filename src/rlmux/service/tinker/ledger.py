"""What clients asked and what became of it, on disk: written before it is acted on, and before it is told.

    requests   number, id, path, body, what the front chose for it     in the order they were taken
    results    id, body or error
    updates    model, id of the optimizer step, folder, hash           checkpoints to begin again from
    usage      project, day, device-seconds
    budgets    project, device-hours a day     set while the server runs; before those of its file

A front is a fold over the requests: after a restart they are applied again in their order, and what has a result is
not done again. A request that could not be applied is not kept.

A commit appends to SQLite's own log and waits for no disk. That log is brought into the file now and then, which does:
by the commit that finds it long, or by `fold`, which another thread may call beside all else.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, path TEXT NOT NULL, body BLOB NOT NULL, chosen TEXT NOT NULL,
    project TEXT NOT NULL, at_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS results (id TEXT PRIMARY KEY, body BLOB NOT NULL, kind TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS updates (model TEXT NOT NULL, number INTEGER NOT NULL, folder TEXT NOT NULL,
    sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS usage (project TEXT NOT NULL, day INTEGER NOT NULL, device_s REAL NOT NULL,
    PRIMARY KEY (project, day));
CREATE TABLE IF NOT EXISTS budgets (project TEXT PRIMARY KEY, hours REAL NOT NULL);
"""


ERROR, SERVER_ERROR = "error", "server_error"
"""Kinds of results: the request's own fault, and the server's."""


class Taken(NamedTuple):
    """One request as it was taken."""

    id: str
    path: str
    body: bytes
    chosen: str
    """What the front added, see `requests.choose`; empty for most, and for some that an older version took."""
    project: str
    at_s: float
    """Seconds since 1970."""


class Result(NamedTuple):
    """What became of a request."""

    body: bytes
    kind: str
    """`json`, `protobuf`, or ERROR or SERVER_ERROR, whose body is the text."""

    @property
    def is_error(self) -> bool:
        return self.kind in (ERROR, SERVER_ERROR)


class Ledger:
    """An SQLite file; used by one thread at a time, `fold` left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """One commit, at the end, for all that is written meanwhile; nothing of it is kept where an error ends it."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def leave_folding(self) -> None:
        """Have later commits leave SQLite's log as it is: another thread calls `fold`."""
        self._database.execute("PRAGMA wal_autocheckpoint=0")

    def fold(self) -> int:
        """Bring what was committed into the file, by a connection of its own; returns the pages that are there now."""
        with contextlib.closing(sqlite3.connect(self._path)) as database:
            _, _, num_pages = database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(num_pages)

    def take(self, request: Taken) -> None:
        """Keep a request, before anything is done about it."""
        self._database.execute(
            "INSERT INTO requests (id, path, body, chosen, project, at_s) VALUES (?, ?, ?, ?, ?, ?)", request
        )

    def forget(self, request_id: str) -> None:
        """Drop a request that came to nothing: it was never taken."""
        self._database.execute("DELETE FROM requests WHERE id = ?", (request_id,))

    def body(self, request_id: str) -> bytes | None:
        """Body of a request; None for one that was never taken."""
        row = self._database.execute("SELECT body FROM requests WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else row[0]

    def project(self, request_id: str) -> str | None:
        """Project of a request; None for one that was never taken."""
        row = self._database.execute("SELECT project FROM requests WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else str(row[0])

    def taken(self) -> Iterator[Taken]:
        """All requests, in the order they were taken."""
        rows = self._database.execute("SELECT id, path, body, chosen, project, at_s FROM requests ORDER BY number")
        yield from (Taken(*row) for row in rows)

    def settle(self, request_id: str, result: Result) -> bool:
        """Keep a result. A request that was done again has it already: nothing changes, and False is returned."""
        cursor = self._database.execute(
            "INSERT OR IGNORE INTO results (id, body, kind) VALUES (?, ?, ?)", (request_id, *result)
        )
        return cursor.rowcount == 1

    def result(self, request_id: str) -> Result | None:
        """The result of a request; None before there is one."""
        row = self._database.execute("SELECT body, kind FROM results WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else Result(*row)

    def add_update(self, model: str, number: int, folder: Path, sha256: str) -> None:
        """A checkpoint of the model after its request of this number is there. `sha256`: of its weights."""
        self._database.execute("INSERT INTO updates VALUES (?, ?, ?, ?)", (model, number, str(folder), sha256))

    def hashes(self, model: str) -> dict[int, str]:
        """Hash of the model's weights after each update, by the number of its request, in their order."""
        rows = self._database.execute(
            "SELECT number, sha256 FROM updates WHERE model = ? ORDER BY number, rowid", (model,)
        )
        return dict(rows)

    def newest_update(self, model: str) -> tuple[int, Path] | None:
        """(number of the last request in it, folder) of the newest checkpoint that is still there."""
        rows = self._database.execute(
            "SELECT number, folder FROM updates WHERE model = ? ORDER BY number DESC", (model,)
        )
        return next(((number, Path(folder)) for number, folder in rows if Path(folder).is_dir()), None)

    def add_usage(self, project: str, day: int, device_s: float) -> None:
        """Count device-seconds that a project used on a day."""
        self._database.execute(
            "INSERT INTO usage VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET device_s = device_s + excluded.device_s",
            (project, day, device_s),
        )

    def usage(self, project: str, day: int) -> float:
        """Device-seconds that a project used on a day."""
        row = self._database.execute(
            "SELECT device_s FROM usage WHERE project = ? AND day = ?", (project, day)
        ).fetchone()
        return 0.0 if row is None else float(row[0])

    def charged_projects(self) -> list[str]:
        """Every project that ever used a device, by name."""
        return [row[0] for row in self._database.execute("SELECT DISTINCT project FROM usage ORDER BY project")]

    def set_budget(self, project: str, hours: float) -> None:
        """Have the project use at most so many device-hours a day from now on; infinity: as many as it likes."""
        self._database.execute("INSERT OR REPLACE INTO budgets VALUES (?, ?)", (project, hours))

    def budget(self, project: str) -> float | None:
        """Device-hours a day that were set last; None where only the file says."""
        row = self._database.execute("SELECT hours FROM budgets WHERE project = ?", (project,)).fetchone()
        return None if row is None else float(row[0])

    def close(self) -> None:
        self._database.close()
