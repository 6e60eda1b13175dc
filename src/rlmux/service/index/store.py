"""The index's file: SQLite beside the log, one transaction a look, read by request.

    fact        what the lane is: its row, its names, times, the rows of the log that are in it      one each
    device  pipeline  step  instant  pin       rows of the pages, each with the row of the log that last changed it
    chunk       settled intervals, thousands to a row, with the time that they lie in
    open        the intervals that are not settled
    kept        the fold of the log as of one of its rows, from which a restarted indexer resumes     (kept_fold.py)
    tile        settled buckets, sixteen to a row, of the levels from `FIRST_LEVEL` on; others are computed on demand

`rev` rises when settled intervals change. A damaged file, or one of another run or version, is rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rlmux.core.errors import LogError
from rlmux.log.segments import query_only
from rlmux.service.index.columns import INTERVAL, Array, Places
from rlmux.service.index.tiles import LEVELS, Planes, planes, without_overlaps

INDEX_VERSION = 16
FIRST_LEVEL = 2
"""Lowest level that is kept; a bucket below it is narrow enough to be made from its intervals."""
TILE_BUCKETS = 16
_CHUNK_INTERVALS = 4096
_SLAB_BUCKETS = 4096
_TABLES = """
CREATE TABLE fact (name TEXT PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE device (place INTEGER PRIMARY KEY, name TEXT NOT NULL, json TEXT NOT NULL, seq INTEGER NOT NULL);
CREATE TABLE pipeline (place INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, json TEXT NOT NULL, detail TEXT NOT NULL,
                       seq INTEGER NOT NULL);
CREATE TABLE step (pipeline TEXT NOT NULL, step INTEGER NOT NULL, json TEXT, seq INTEGER NOT NULL,
                   PRIMARY KEY (pipeline, step)) WITHOUT ROWID;
CREATE INDEX step_by_seq ON step (seq);
CREATE TABLE instant (number INTEGER PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE pin (number INTEGER PRIMARY KEY, pipeline TEXT NOT NULL, nodes TEXT NOT NULL, start_s REAL NOT NULL,
                  end_s REAL NOT NULL);
CREATE TABLE chunk (number INTEGER PRIMARY KEY, first_s REAL NOT NULL, last_s REAL NOT NULL, data BLOB NOT NULL);
CREATE TABLE open (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE kept (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE tile (level INTEGER NOT NULL, number INTEGER NOT NULL, num_devices INTEGER NOT NULL, data BLOB NOT NULL,
                   PRIMARY KEY (level, number)) WITHOUT ROWID;
"""


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dumps(value: Any) -> str:
    """JSON without the numbers that it has not: they are null."""
    try:
        return _encode(value)
    except (TypeError, ValueError):  # a number that is none, or a mapping that is no dict
        return _encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


class IndexReader:
    """One look at an index: all answers are of one moment. Use it for one request, then close it."""

    def __init__(self, path: Path) -> None:
        """Raises LogError where there is no index that can be read."""
        self.path = path
        try:
            self._connection = query_only(path, "mode=ro")
        except sqlite3.Error as error:
            raise LogError(f"{path}: no index that can be read: {error}") from None
        try:
            self._connection.execute("BEGIN")
            self.facts: dict[str, Any] = {
                name: json.loads(text) for name, text in self._connection.execute("SELECT * FROM fact")
            }
        except sqlite3.Error as error:
            self._connection.close()
            raise LogError(f"{path}: no index that can be read: {error}") from None

        self.is_whole = True
        """Whether nothing is hidden from its reader."""

    def shadow(self, views: Mapping[str, str], functions: Mapping[str, Callable[[Any], Any]]) -> None:
        """Have tables answer as these queries of them do, which may call functions of one value."""
        self.is_whole = False
        for name, function in functions.items():
            self._connection.create_function(name, 1, function, deterministic=True)
        self._connection.execute("PRAGMA query_only = 0")  # the file itself is open for reading alone
        for name, query in views.items():
            self._connection.execute(f"CREATE TEMP VIEW {name} AS {query}")
        self._connection.execute("PRAGMA query_only = 1")

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @property
    def seq(self) -> int:
        """The last row of the log that is in it; 0 before the first."""
        return int(self.facts.get("seq", 0))

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def intervals(self, start_s: float, end_s: float) -> Array:
        """Records of all that touch a stretch of time, by device, start and lane."""
        chunks = self.rows("SELECT data FROM chunk WHERE first_s < ? AND last_s > ?", end_s, start_s)
        parts = [np.frombuffer(data, INTERVAL) for (data,) in chunks + self.rows("SELECT data FROM open")]
        every = np.concatenate([np.zeros(0, INTERVAL), *parts])
        every = every[(every["start_s"] < end_s) & (every["end_s"] > start_s)]
        return every[np.lexsort((every["lane"], every["start_s"], every["device"]))]

    def count_intervals(self, start_s: float, end_s: float) -> int:
        """Upper bound on how many intervals touch a stretch of time."""
        (num,) = self.rows(
            f"SELECT coalesce(sum(length(data)), 0) / {INTERVAL.itemsize} FROM chunk WHERE first_s < ? AND last_s > ?",
            end_s,
            start_s,
        )[0]
        return int(num)

    def planes(self, level: int, first_bucket: int, num_buckets: int) -> Planes:
        """What each device did in these buckets: settled tiles as they are kept, the rest from its intervals."""
        num_devices = len(self.facts.get("devices", ()))
        kept = self._kept(level, first_bucket, num_buckets, num_devices)
        parts: list[Planes] = []
        at, end = first_bucket, first_bucket + num_buckets
        while at < end:
            number = at // TILE_BUCKETS
            if number in kept:
                last = min(end, (number + 1) * TILE_BUCKETS)
                offset = at - number * TILE_BUCKETS
                parts.append(Planes(*(plane[:, offset : offset + last - at] for plane in kept[number])))
            else:
                last = at + 1
                while last < end and last // TILE_BUCKETS not in kept:
                    last += 1
                width_s = LEVELS[level]
                intervals = without_overlaps(self.intervals(at * width_s, last * width_s))
                parts.append(planes(intervals, level, at, last - at, num_devices))
            at = last
        return Planes(*(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)))

    def _kept(self, level: int, first_bucket: int, num_buckets: int, num_devices: int) -> dict[int, Planes]:
        first, last = first_bucket // TILE_BUCKETS, (first_bucket + num_buckets - 1) // TILE_BUCKETS
        found = self.rows(
            "SELECT number, data FROM tile WHERE level = ? AND number BETWEEN ? AND ? AND num_devices = ?",
            level,
            first,
            last,
            num_devices,
        )
        return {number: Planes.from_bytes(zlib.decompress(data), num_devices, TILE_BUCKETS) for number, data in found}


class IndexWriter:
    """The one writer of an index."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Open the file, or rebuild one of another run."""
        self.path = path
        self._stamp = self.stamp_of(run_id)
        if not self._is_own():
            remove_index(path)
        self._connection = sqlite3.connect(path, isolation_level=None)
        path.chmod(0o600)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if not self._facts():
            self._connection.executescript("BEGIN;" + _TABLES)
            # above that of any file before it: a browser may have kept what an earlier number was given
            self.set_facts(stamp=self._stamp, rev=time.time_ns() // 10**6, seq=0)
            self._connection.execute("COMMIT")

    @staticmethod
    def stamp_of(run_id: str) -> str:
        """Stamp of a file that this version made for a run."""
        return f"{INDEX_VERSION} {version('rlmux')} {run_id}"

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:  # an interrupt rolls back too, and propagates
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def fact(self, name: str) -> Any:
        return self._facts().get(name)

    def set_facts(self, **facts: Any) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO fact VALUES (?, ?)", [(name, dumps(value)) for name, value in facts.items()]
        )

    def set_rows(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._connection.executemany(sql, rows)

    def restart(self, *, with_rows: bool) -> None:
        """Clear the settled intervals, and the fold that goes with them, before a rebuild. `with_rows`: the rows of
        the pages too."""
        rows = ("device", "pipeline", "step") if with_rows else ()
        for table in ("chunk", "open", "tile", "instant", "pin", "kept", *rows):
            self._connection.execute(f"DELETE FROM {table}")
        self.set_facts(rev=self.fact("rev") + 1)

    @property
    def num_chunks(self) -> int:
        """Number of the last chunk; 0 without one."""
        (last,) = self._connection.execute("SELECT coalesce(max(number), 0) FROM chunk").fetchone()
        return int(last)

    def drop_chunks_after(self, number: int) -> None:
        """Drop the settled intervals of rows that are read again."""
        self._connection.execute("DELETE FROM chunk WHERE number > ?", (number,))

    def keep_fold(self, data: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO kept VALUES (1, ?)", (data,))

    def kept_fold(self) -> bytes | None:
        row = self._connection.execute("SELECT data FROM kept").fetchone()
        return None if row is None else bytes(row[0])

    def drop_fold(self) -> None:
        self._connection.execute("DELETE FROM kept")

    def add_settled(self, intervals: Array) -> None:
        """`intervals`: by start, so that a chunk lies in a short stretch of time."""
        for at in range(0, len(intervals), _CHUNK_INTERVALS):
            chunk = intervals[at : at + _CHUNK_INTERVALS]
            self._connection.execute(
                "INSERT INTO chunk (first_s, last_s, data) VALUES (?, ?, ?)",
                (float(chunk["start_s"].min()), float(chunk["end_s"].max()), chunk.tobytes()),
            )

    def set_open(self, intervals: Array) -> None:
        self._connection.execute("INSERT OR REPLACE INTO open VALUES (1, ?)", (intervals.tobytes(),))

    def keep_tiles(self, start_s: float, settled_s: float, places: Places) -> None:
        """Keep the buckets that nothing changes any more: those between the run's start and a time."""
        reader = _Inside(self)
        reader.facts = {"devices": places.devices}
        for level in range(FIRST_LEVEL, len(LEVELS)):
            tile_s = LEVELS[level] * TILE_BUCKETS
            (last,) = self._connection.execute("SELECT max(number) FROM tile WHERE level = ?", (level,)).fetchone()
            at = last + 1 if last is not None else int(start_s // tile_s)
            end = int(settled_s // tile_s)
            while at < end:
                upto = min(end, at + _SLAB_BUCKETS // TILE_BUCKETS)
                self._keep(reader, level, at, upto, len(places.devices))
                at = upto

    def _keep(self, reader: IndexReader, level: int, first: int, end: int, num_devices: int) -> None:
        width_s = LEVELS[level] * TILE_BUCKETS
        intervals = without_overlaps(reader.intervals(first * width_s, end * width_s))
        whole = planes(intervals, level, first * TILE_BUCKETS, (end - first) * TILE_BUCKETS, num_devices)
        rows = []
        for number in range(first, end):
            at = (number - first) * TILE_BUCKETS
            tile = Planes(*(plane[:, at : at + TILE_BUCKETS] for plane in whole))
            rows.append((level, number, num_devices, zlib.compress(tile.to_bytes(), 1)))
        self._connection.executemany("INSERT OR REPLACE INTO tile VALUES (?, ?, ?, ?)", rows)

    def _facts(self) -> dict[str, Any]:
        try:
            return {name: json.loads(text) for name, text in self._connection.execute("SELECT * FROM fact")}
        except sqlite3.OperationalError:
            return {}

    def _is_own(self) -> bool:
        try:
            with IndexReader(self.path) as reader:
                return bool(reader.facts.get("stamp") == self._stamp)
        except (LogError, ValueError):
            return False


class _Inside(IndexReader):
    """Reads what its writer has not committed yet."""

    def __init__(self, writer: IndexWriter) -> None:
        self._connection = writer._connection


def remove_index(path: Path) -> None:
    """Delete an index and the files that SQLite keeps beside it."""
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
