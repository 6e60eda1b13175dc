"""The files of a log: the open one, and the sealed segments before it, each naming its predecessor's hash.

    run.0001.db ◀── run.0002.db ◀── run.db         predecessor: name, last row, sha256
      sealed          sealed          open

Every file has the same tables: `log` (a header, and rows that are not packed yet), `block` (packed rows), `snapshot`
(the run's state as of a row) and `predecessor` (one row, or none in the first file). Numbers of rows go on from file
to file. Every row, packed or not, has a checksum: of a loose row it is a column, in a block it is zlib's Adler-32.

Sealing copies the open file, makes the copy durable under its name, and then, in one transaction, takes the copied rows
out of the open file and names the copy there. After a kill between the two, the open file still holds every row, and
the next sealing replaces the copy. The database lets a row go only where a block, or a sealed segment, has it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.errors import LogError

APPLICATION_ID = 0x726C6D78
"""The letters 'rlmx' in the file's header, which no other SQLite file has."""

_TABLES = """
PRAGMA application_id = {application_id};
PRAGMA user_version = {version};
CREATE TABLE log (
    seq    INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    kind   TEXT NOT NULL CHECK (kind IN ('header', 'event', 'action', 'note')),
    type   TEXT NOT NULL,
    json   TEXT NOT NULL,
    crc32  INTEGER NOT NULL
);
CREATE TABLE block (
    last_seq  INTEGER PRIMARY KEY,
    first_seq INTEGER NOT NULL,
    rows      BLOB NOT NULL
);
CREATE TABLE snapshot (seq INTEGER PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE predecessor (
    last_seq INTEGER PRIMARY KEY,
    number   INTEGER NOT NULL,
    name     TEXT NOT NULL,
    sha256   TEXT NOT NULL
);
CREATE TRIGGER log_keeps_rows BEFORE DELETE ON log
WHEN OLD.seq > (SELECT coalesce(max(last_seq), 0) FROM predecessor)
AND NOT EXISTS (SELECT 1 FROM block WHERE last_seq >= OLD.seq AND first_seq <= OLD.seq)
BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER log_keeps_facts BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER log_keeps_bytes BEFORE UPDATE ON block BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER log_keeps_blocks BEFORE DELETE ON block
WHEN OLD.last_seq > (SELECT coalesce(max(last_seq), 0) FROM predecessor)
BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
"""
_ROWS = """
SELECT seq, time_s, kind, type, json, crc32 FROM log WHERE seq > :after
UNION ALL SELECT last_seq, 0.0, 'block', '', rows, 0 FROM block WHERE last_seq > :after
UNION ALL SELECT last_seq, 0.0, 'predecessor', name, sha256, 0 FROM predecessor WHERE last_seq > :after
ORDER BY 1
"""
"""All of one moment: packing and sealing move rows between these tables."""
_LAST_SEQ = """
SELECT max(last) FROM (SELECT coalesce(max(seq), 0) AS last FROM log
UNION ALL SELECT coalesce(max(last_seq), 0) FROM block UNION ALL SELECT coalesce(max(last_seq), 0) FROM predecessor)
"""


class Sealed(NamedTuple):
    """A sealed segment, as its successor names it."""

    last_seq: int
    number: int
    name: str
    sha256: str


def row_checksum(seq: int, time_s: float, kind: str, type: str, text: str) -> int:
    """CRC-32 of a row that is not packed."""
    return zlib.crc32(f"{seq} {float(time_s)!r} {kind} {type} {text}".encode())


def tables(version: int) -> str:
    """The statements that make an empty file of a schema version."""
    return _TABLES.format(application_id=APPLICATION_ID, version=version)


def predecessor_of(connection: sqlite3.Connection) -> Sealed | None:
    """The sealed segment before this file; None for the first."""
    row = connection.execute("SELECT last_seq, number, name, sha256 FROM predecessor").fetchone()
    return Sealed(*row) if row else None


def seal(connection: sqlite3.Connection, folder: Path, *, number: int, last_seq: int) -> Sealed:
    """Copy the open file into a segment that stays: durable, read-only, hashed. Nothing of the open file changes."""
    name = f"run.{number:04d}.db"
    path, aside = folder / name, folder / f".{name}.new"
    aside.unlink(missing_ok=True)
    try:
        connection.execute("VACUUM INTO ?", (str(aside),))
        aside.chmod(0o400)
        sha256 = file_sha256(aside)
        sync(aside)
        aside.replace(path)
    except BaseException:  # an interrupt, too, leaves no half file; it goes on up
        aside.unlink(missing_ok=True)
        raise
    sync(folder)
    return Sealed(last_seq, number, name, sha256)


def rows_of(connection: sqlite3.Connection, folder: Path, name: str, after: int) -> Iterator[tuple[Any, ...]]:
    """Rows and blocks (kind 'block') of a file and of all before it, from the first that has a row after `after`.

    Raises LogError where a sealed segment is missing or is not what its successor names, and for a row that is not what
    was written.
    """
    for row in _rows_here(connection, folder / name, after):
        if row[2] == "predecessor":
            for segment in _chain(folder, Sealed(row[0], 0, row[3], row[4]), name, after):
                yield from (found for found in _rows_here(segment, folder / row[3], after) if found[2] != "predecessor")
        else:
            yield row


def block_end(connection: sqlite3.Connection, folder: Path, name: str, last_seq: int = 0) -> tuple[int, int] | None:
    """(last row, CRC-32) of the newest block, or of the one with this last row; None where none is.

    Of files before the open one hashes are not compared: what is found there is to be compared with what is known.
    """
    query = "SELECT last_seq, rows FROM block WHERE :wanted IN (0, last_seq) ORDER BY last_seq DESC LIMIT 1"
    try:
        found = connection.execute(query, {"wanted": last_seq}).fetchone()
        before = predecessor_of(connection)
        if found is not None:
            return found[0], zlib.crc32(found[1])
        if before is None or before.last_seq < last_seq:
            return None
        with _opened(folder / before.name) as segment:
            return block_end(segment, folder, before.name, last_seq)
    except sqlite3.Error as error:
        raise LogError(f"{folder / name}: the run log is damaged: {error}") from error


def last_seq_of(path: Path) -> int:
    """Number of the last row of an open file and of all before it, packed or not; 0 without one."""
    with contextlib.closing(connect_to_read(path)) as connection:
        try:
            (last,) = connection.execute(_LAST_SEQ).fetchone()
        except sqlite3.Error as error:
            raise LogError(f"{path}: the run log is damaged: {error}") from error
    return int(last)


def _rows_here(connection: sqlite3.Connection, path: Path, after: int) -> Iterator[tuple[Any, ...]]:
    """Rows, blocks and the predecessor of one file, with the checksums of rows compared."""
    for seq, time_s, kind, type, data, crc32 in connection.execute(_ROWS, {"after": after}):
        if kind not in ("block", "predecessor") and crc32 != row_checksum(seq, time_s, kind, type, data):
            raise LogError(f"{path}: row {seq} is damaged: its checksum is not that of its content")
        yield seq, time_s, kind, type, data


def _chain(folder: Path, newest: Sealed, successor: str, after: int) -> Iterator[sqlite3.Connection]:
    """The segments that hold rows after `after`, oldest first; every one is checked before the first is read."""
    paths: list[Path] = []
    wanted: Sealed | None = newest
    while wanted is not None and wanted.last_seq > after:
        path = folder / wanted.name
        _check(path, wanted, successor)
        paths.append(path)
        with _opened(path) as connection:
            successor, wanted = wanted.name, predecessor_of(connection)
    for path in reversed(paths):
        with _opened(path) as connection:
            yield connection


def _check(path: Path, wanted: Sealed, successor: str) -> None:
    try:
        found = file_sha256(path)
    except FileNotFoundError:
        raise LogError(f"{path}: missing; {successor} goes on from it: bring this sealed segment back") from None
    if found != wanted.sha256:
        raise LogError(
            f"{path}: its sha256 is {found[:12]}…, {successor} goes on from {wanted.sha256[:12]}…: "
            "this sealed segment was changed or exchanged"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    connection = query_only(path, "immutable=1")
    try:
        yield connection
    finally:
        connection.close()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def connect_to_write(path: Path, *, survives_power_cut: bool) -> sqlite3.Connection:
    """Raises LogError where the file cannot be written: a full disk shows here first."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; without effect on one that is there
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if survives_power_cut else 'NORMAL'}")
        connection.execute("PRAGMA busy_timeout = 5000")
    except sqlite3.OperationalError as error:
        is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
        reason = os.strerror(errno.ENOSPC) if is_full else error
        raise LogError(f"{path}: the run log cannot be written: {reason}") from error
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Without a way to add rows. SQLite needs its side files to follow a live log, and folds them back in
    when the last one leaves; where the folder does not let it (another owner, a read-only disk) the log is
    not being written either, and is read as it stands."""
    try:
        return query_only(path, "mode=rw")
    except sqlite3.OperationalError:
        return query_only(path, "immutable=1")
    except sqlite3.DatabaseError as error:
        raise LogError(f"{path}: not a run log: {error}") from error


def query_only(path: Path, options: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{options}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("PRAGMA query_only = 1")
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
