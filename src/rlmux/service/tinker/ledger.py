"""Requests and results on disk: a request is written before it is applied, a result before it is delivered.

    requests   number, id, path, body, what the front chose for it     in the order they were taken
    results    id, body or error
    updates    model, id of the optimizer step, folder, hash           checkpoints to begin again from
    usage      project, day, device-seconds
    budgets    project, device-hours a day     set while the server runs; before those of its file
    told       id of a protobuf result, when its client got it first

A front is a fold over the requests: after a restart they are applied again in their order, and what has a result is
not done again. A request that could not be applied is not kept.

A commit appends to SQLite's own log and waits for no disk. That log is brought into the file now and then, which does:
by the commit that finds it long, or by `fold`, which another thread may call beside all else.

The bulk are bodies of losses and protobuf results. `compact` keeps them within a bound: the oldest that nothing but
`rlmux verify` reads again are emptied, and their rows stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
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
CREATE TABLE IF NOT EXISTS told (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, at_s REAL NOT NULL);
"""
_SHA256 = "ALTER TABLE requests ADD COLUMN sha256 TEXT NOT NULL DEFAULT ''"
_WHOLE = "CREATE INDEX IF NOT EXISTS whole_losses ON requests (number) WHERE path = 'forward_backward' AND sha256 = ''"
_TAKEN = "id, path, body, chosen, project, at_s, sha256"
_BATCH = 50
"""Rows that one commit of `compact` empties: the front waits for it."""
_KEPT_SHARE = 0.8
"""Share of the bound that is in use after `compact`."""
_RETRY_S = 300.0
"""Seconds for which a client may retry an undelivered result."""


PROTOBUF, EMPTIED = "protobuf", "emptied"
ERROR, SERVER_ERROR = "error", "server_error"
"""Kinds of results: the request's own fault, and the server's."""


class LoggedRequest(NamedTuple):
    """One request as it was taken."""

    id: str
    path: str
    body: bytes
    chosen: str
    """What the front added, see `requests.choose`; empty for most, and for some that an older version took."""
    project: str
    at_s: float
    """Seconds since 1970."""
    sha256: str = ""
    """The whole body's, where only its head was kept."""

    def has_body(self, body: bytes) -> bool:
        """Whether the body is, or was, this one."""
        return self.body == body or (self.sha256 != "" and hashlib.sha256(body).hexdigest() == self.sha256)


class Result(NamedTuple):
    """What became of a request."""

    body: bytes
    kind: str
    """`json`, PROTOBUF, EMPTIED for one of those that was, or ERROR or SERVER_ERROR, whose body is the text."""

    @property
    def is_error(self) -> bool:
        return self.kind in (ERROR, SERVER_ERROR)


class _Bulk(NamedTuple):
    """A body or a result that may be emptied."""

    number: int
    id: str
    num_bytes: int


class Ledger:
    """An SQLite file; used by one thread at a time, `fold` left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        self._stuck_bytes = 0
        """Bytes in use when `compact` found nothing more to empty."""
        with self.together():
            if not any(name == "sha256" for _, name, *_ in self._database.execute("PRAGMA table_info(requests)")):
                self._database.execute(_SHA256)
            self._database.execute(_WHOLE)

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

    def compact(self, max_bytes: int, head: Callable[[bytes], bytes], now_s: float) -> int:
        """Where the file has more than so many bytes in use, empty the oldest that were delivered until 80 % are.

        Bodies of losses that a checkpoint has are replaced by their `head`, results that clients have by nothing. By a
        connection of its own, as `fold`. `now_s`: seconds since 1970. Returns the bytes in use.
        """
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as database:
            used = _used_bytes(database)
            if used <= max_bytes or used < self._stuck_bytes + max_bytes // 100:
                return used
            self._stuck_bytes, number, has_more = 0, 0, True
            while has_more and used > _KEPT_SHARE * max_bytes:
                half = (used - _KEPT_SHARE * max_bytes) / 2
                found = _losses(database, number)
                behind = [each for each in found if _is_behind(database, each.id)]
                losses = _up_to(behind, half)
                results = _up_to(_delivered_results(database, now_s - _RETRY_S), half)
                number = (losses if len(losses) < len(behind) else found)[-1].number if found else number
                has_more = bool(found or results)
                _empty(database, losses, results, head)
                used = _used_bytes(database)
            if used > max_bytes:
                self._stuck_bytes = used
            return used

    def take(self, request: LoggedRequest) -> None:
        """Keep a request, before anything is done about it."""
        self._database.execute(f"INSERT INTO requests ({_TAKEN}) VALUES (?, ?, ?, ?, ?, ?, ?)", request)

    def forget(self, request_id: str) -> None:
        """Drop a request that came to nothing: it was never taken."""
        self._database.execute("DELETE FROM requests WHERE id = ?", (request_id,))

    def request(self, request_id: str) -> LoggedRequest | None:
        """A request; None for one that was never taken."""
        row = self._database.execute(f"SELECT {_TAKEN} FROM requests WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else LoggedRequest(*row)

    def project(self, request_id: str) -> str | None:
        """Project of a request; None for one that was never taken."""
        row = self._database.execute("SELECT project FROM requests WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else str(row[0])

    def taken(self) -> Iterator[LoggedRequest]:
        """All requests, in the order they were taken."""
        rows = self._database.execute(f"SELECT {_TAKEN} FROM requests ORDER BY number")
        yield from (LoggedRequest(*row) for row in rows)

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

    def mark_delivered(self, request_id: str, at_s: float) -> None:
        """A client gets the protobuf result of a request. `at_s`: seconds since 1970."""
        self._database.execute("INSERT OR IGNORE INTO told (id, at_s) VALUES (?, ?)", (request_id, at_s))

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
        return _newest_update(self._database, model)

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
        """Device-hours a day set last; None for the file's value."""
        row = self._database.execute("SELECT hours FROM budgets WHERE project = ?", (project,)).fetchone()
        return None if row is None else float(row[0])

    def close(self) -> None:
        self._database.close()


def _newest_update(database: sqlite3.Connection, model: str) -> tuple[int, Path] | None:
    rows = database.execute("SELECT number, folder FROM updates WHERE model = ? ORDER BY number DESC", (model,))
    return next(((number, Path(folder)) for number, folder in rows if Path(folder).is_dir()), None)


def _used_bytes(database: sqlite3.Connection) -> int:
    """Bytes of the file's pages that hold something; free ones are used again."""
    page_size, num_pages, num_free = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
    )
    return int(page_size * (num_pages - num_free))


def _losses(database: sqlite3.Connection, number: int) -> list[_Bulk]:
    """The oldest losses behind this number that have a result, and their whole body."""
    rows = database.execute(
        "SELECT number, id, length(body) FROM requests WHERE path = 'forward_backward' AND sha256 = '' AND number > ? "
        "AND EXISTS (SELECT 1 FROM results WHERE results.id = requests.id) ORDER BY number LIMIT ?",
        (number, _BATCH),
    )
    return [_Bulk(*row) for row in rows]


def _is_behind(database: sqlite3.Connection, request_id: str) -> bool:
    """Whether a checkpoint of its model has this request."""
    model, _, number = request_id.rpartition(":")
    newest = _newest_update(database, model)
    return newest is not None and int(number) <= newest[0]


def _delivered_results(database: sqlite3.Connection, before_s: float) -> list[_Bulk]:
    """The oldest results that clients got before this time."""
    rows = database.execute(
        "SELECT number, id, length(body) FROM told JOIN results USING (id) WHERE at_s <= ? ORDER BY number LIMIT ?",
        (before_s, _BATCH),
    )
    return [_Bulk(*row) for row in rows]


def _up_to(found: Sequence[_Bulk], num_bytes: float) -> list[_Bulk]:
    """The first of them, until they have so many bytes."""
    before = accumulate((each.num_bytes for each in found), initial=0)
    return [each for each, so_far in zip(found, before, strict=False) if so_far < num_bytes]


def _empty(
    database: sqlite3.Connection, losses: Sequence[_Bulk], results: Sequence[_Bulk], head: Callable[[bytes], bytes]
) -> None:
    """In one commit."""
    rows = []
    for each in losses:
        (body,) = database.execute("SELECT body FROM requests WHERE number = ?", (each.number,)).fetchone()
        rows.append((head(body), hashlib.sha256(body).hexdigest(), each.number))
    ids = [(each.id,) for each in results]
    database.execute("BEGIN IMMEDIATE")
    database.executemany("UPDATE requests SET body = ?, sha256 = ? WHERE number = ?", rows)
    database.executemany(f"UPDATE results SET body = x'', kind = '{EMPTIED}' WHERE id = ?", ids)
    database.executemany("DELETE FROM told WHERE id = ?", ids)
    database.execute("COMMIT")
