"""Reads what is readable of a log whose files are damaged, cut short or missing. Nothing is inferred.

    run.0001.db, run.0002.db, run.db ──copy──▶ every row that a lookup still finds ──▶ Readable
                                      a first page that is not SQLite's is taken from an empty log: it holds no row

A row counts where its checksum holds: its own, or that of the block that it is packed in. Files are read from copies:
nothing in the folder changes.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmux.core.errors import LogError
from rlmux.log import value_codec
from rlmux.log.block_codec import unpack
from rlmux.log.run_log import LOG_NAME, SCHEMA_VERSION, Entry, LogReader
from rlmux.log.segments import Sealed, connect_to_write, file_sha256, predecessor_of, row_checksum, tables

_SEGMENTS = "run.[0-9][0-9][0-9][0-9].db"
_MAX_BLOCKS = 4000
"""Lookups for blocks behind the last that was found, of half a block's rows each: two million rows."""
_MAX_LOOSE_ROWS = 3000
_HALF_BLOCK_ROWS = 500
_SCHEMA = "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
"""What no version of ours has otherwise; triggers matter to writers alone."""
_PAGE_COUNT = slice(28, 32)
"""Bytes of SQLite's file header that hold the number of pages."""
_PAGE_BYTES = 4096
"""Size of a page of our files, SQLite's own default."""


@dataclass(slots=True)
class Readable:
    """What was found in the files of a log."""

    header: dict[str, Any] | None = None
    """Header of the run; None where no file has it."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Rows by number."""
    damage: list[str] = field(default_factory=list)
    """A few words about each file that is not whole."""

    def missing(self) -> list[tuple[int, int]]:
        """(first, last) number of each stretch of rows that is not there, up to the last row that is."""
        gaps, expected = [], 1
        for seq in sorted(self.entries):
            if seq > expected:
                gaps.append((expected, seq - 1))
            expected = seq + 1
        return gaps


def is_whole(folder: Path) -> bool:
    """Every row of the log can be read."""
    try:
        with LogReader(folder) as reader:
            reader.state()
            for _ in reader.entries():
                pass
    except LogError:
        return False
    return True


def log_files(folder: Path) -> list[Path]:
    """The files of a log that are there, oldest first."""
    return [*sorted(folder.glob(_SEGMENTS)), *([folder / LOG_NAME] if (folder / LOG_NAME).is_file() else [])]


def read_damaged(folder: Path) -> Readable:
    """Everything that is readable."""
    found = Readable()
    files = log_files(folder)
    with contextlib.ExitStack() as opened:
        connections = {path: opened.enter_context(_opened_copy(path, found)) for path in files}
        named = {
            sealed.name: sealed.sha256
            for connection in connections.values()
            if (sealed := _predecessor(connection)) is not None
        }
        for path, connection in connections.items():
            if path.name != LOG_NAME and named.get(path.name) != file_sha256(path):
                found.damage.append(f"{path.name} is not the segment that its successor names")
            _read_file(connection, found)
    for name in sorted(set(named) - {path.name for path in files}):
        found.damage.append(f"{name} is missing")
    if not (folder / LOG_NAME).is_file():
        found.damage.append(f"{LOG_NAME} is missing")
    return found


# ------------------------------------------------------------------ one file


@contextlib.contextmanager
def _opened_copy(path: Path, found: Readable) -> Iterator[sqlite3.Connection]:
    """A connection to a copy of the file, and of its write-ahead log, that answers wherever its pages are whole."""
    with tempfile.TemporaryDirectory(prefix="rlmux-") as folder:
        copy = Path(folder) / path.name
        for suffix in ("", "-wal"):
            source = path.with_name(path.name + suffix)
            if source.is_file():
                shutil.copyfile(source, copy.with_name(copy.name + suffix))
        _mend_first_page(copy, found)
        connection = sqlite3.connect(copy, isolation_level=None)
        try:
            connection.execute("PRAGMA writable_schema = ON")  # SQLite else refuses a file that is cut short as a whole
            yield connection
        finally:
            connection.close()


def _mend_first_page(copy: Path, found: Readable) -> None:
    """The first page holds the schema, the same in every log: one that is not whole is taken from an empty log."""
    content = bytearray(copy.read_bytes())
    num_bytes = len(content)
    del content[num_bytes - num_bytes % _PAGE_BYTES :]  # a torn page may hold halves of rows
    copy.write_bytes(content)
    with tempfile.TemporaryDirectory(prefix="rlmux-") as folder:
        empty = connect_to_write(Path(folder) / LOG_NAME, survives_power_cut=False)
        empty.executescript(tables(SCHEMA_VERSION))
        schema = empty.execute(_SCHEMA).fetchall()
        empty.close()
        first_page = (Path(folder) / LOG_NAME).read_bytes()[:_PAGE_BYTES]
    num_expected = int.from_bytes(content[_PAGE_COUNT], "big") * _PAGE_BYTES
    if _schema_of(copy) == schema:
        if not copy.with_name(f"{copy.name}-wal").is_file() and num_bytes < num_expected:
            found.damage.append(f"{copy.name} is cut short: {num_bytes} of {num_expected} bytes are there")
        return
    found.damage.append(f"{copy.name}: its first page is damaged")
    content[: len(first_page)] = first_page
    content[_PAGE_COUNT] = (len(content) // _PAGE_BYTES).to_bytes(4, "big")
    copy.write_bytes(content)


def _schema_of(path: Path) -> list[Any] | None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        try:
            connection.execute("PRAGMA writable_schema = ON")
            return connection.execute(_SCHEMA).fetchall()
        except sqlite3.Error:
            return None


def _predecessor(connection: sqlite3.Connection) -> Sealed | None:
    try:
        return predecessor_of(connection)
    except sqlite3.Error:
        return None


def _read_file(connection: sqlite3.Connection, found: Readable) -> None:
    for data in _rows(connection, "block", "last_seq", "rows", step=_HALF_BLOCK_ROWS, num_tries=_MAX_BLOCKS).values():
        with contextlib.suppress(LogError, TypeError):
            for row in unpack(data[1]):
                _add(found, *row)
    loose = _rows(connection, "log", "seq", "time_s, kind, type, json, crc32", step=1, num_tries=_MAX_LOOSE_ROWS)
    for seq, time_s, kind, type, text, crc32 in loose.values():
        with contextlib.suppress(LogError, TypeError, ValueError):
            if row_checksum(seq, time_s, kind, type, text) == crc32:
                _add(found, seq, time_s, kind, type, value_codec.loads(text))


def _add(found: Readable, seq: int, time_s: float, kind: Any, type: str, fields: Any) -> None:
    """Add a row if its content fits its kind."""
    with contextlib.suppress(LogError, KeyError, TypeError, ValueError):
        if kind == "header" and found.header is None:
            found.header = {name: each for name, each in fields.items() if name not in ("segment", "predecessor")}
        value = value_codec.from_fields(fields) if kind in ("event", "action") else dict(fields)
        found.entries[seq] = Entry(seq, float(time_s), kind, type, value)


def _rows(
    connection: sqlite3.Connection, table: str, key: str, columns: str, *, step: int, num_tries: int
) -> dict[int, Any]:
    """Every row of a table that can be reached from its beginning, from its end, or by its key."""
    rows: dict[int, Any] = {}

    def fetch(order: str) -> bool:
        """Take rows as long as they come; False where a page on the way is damaged."""
        try:
            for row in connection.execute(f"SELECT {key}, {columns} FROM {table} ORDER BY {key} {order}"):
                rows[row[0]] = row
        except (sqlite3.Error, OverflowError):
            return False
        return True

    if fetch("ASC"):
        return rows
    begin = max(rows, default=0) + 1
    fetch("DESC")
    end = min((each for each in rows if each >= begin), default=begin + step * num_tries)
    while begin < end:
        try:
            lookup = f"SELECT {key}, {columns} FROM {table} WHERE {key} >= ? ORDER BY {key} LIMIT 1"
            row = connection.execute(lookup, (begin,)).fetchone()
        except (sqlite3.Error, OverflowError):
            begin += step
            continue
        if row is None:
            break
        rows[row[0]] = row
        begin = row[0] + 1
    return {seq: rows[seq] for seq in sorted(rows)}
