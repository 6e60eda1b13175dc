"""The append-only run log: every event, and the orders that answered it, before they take effect.

    RunLog.create(folder, header)                      LogReader(folder)
    event ──▶ append_event ─┐                             header, entries(after=seq)
    orders ─▶ append_actions ┴─▶ commit ──▶ run.db ──▶    at any time, by the folder's owner
                                (one transaction)

    seq  time_s  kind    type            json
    1    0.0     header  header          {"schema_version":5,"policy":"rollmux",...}
    2    0.0     event   PipelineSubmitted  ...
    3    0.0     action  Admit           ...          answers the event above it
    9    2.5     note    step            {"pipeline":"sort","step":1,"reward_mean":0.31,...}

Invariants: rows are only ever added (the database itself refuses anything else); an event and its orders are
visible together or not at all; a reader never sees a torn row. SQLite in WAL mode gives these after a SIGKILL
of the writer at any instant: a half-written tail fails its checksum and is ignored. After a power cut the newest
commits may be missing, the header never is; with `survives_power_cut` each commit waits for the disk, and none is.

Rows do not stay loose for long: two thousand of them are packed into a block (`block_codec.py`), a long run's blocks
into sealed segments (`segments.py`). Every reader gets the same rows. Now and then the state that a resumed run needs
(`run_state.py`) is kept beside them, so that nothing before it has to be read.

Notes (`notes.py`) are facts that the scheduler does not need.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, product, starmap
from pathlib import Path
from typing import Any, cast

from rlmux.core.actions import Action
from rlmux.core.errors import LogError, UserError
from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.events import Event
from rlmux.core.model import Cluster
from rlmux.log import notes, value_codec
from rlmux.log.block_codec import Entry as Entry
from rlmux.log.block_codec import Kind, entry_of, pack, parts_of, unpack
from rlmux.log.folder_lock import FolderLock
from rlmux.log.progress_rows import Progress
from rlmux.log.run_state import RunState
from rlmux.log.segments import (
    APPLICATION_ID,
    Sealed,
    block_end,
    connect_to_read,
    connect_to_write,
    predecessor_of,
    row_checksum,
    rows_of,
    seal,
    sync,
    tables,
)

SCHEMA_VERSION = 5
"""Version of the files: raised when a table changes, or an event, an action or a field its name or its meaning.

A reader takes logs of its own version only. New fields with a default, new notes, and
the end of a field that decided nothing leave the version as it is.
"""

LOG_NAME = "run.db"
NOT_SHOWN = ("rollout", "checkpoint")
"""Notes of which no report and no status shows anything: their lists would fill the memory of a long run's readers."""
_INSERT = "INSERT INTO log (seq, time_s, kind, type, json, crc32) VALUES (?, ?, ?, ?, ?, ?)"


def utc_now() -> str:
    """Time of day in ISO form, for readers; no decision depends on it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_header(
    *,
    policy: str,
    backend: str,
    cluster: Cluster | None = None,
    sharing: SharingTable | None = None,
    spec: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The header of a run: facts for reports that no event holds. `sharing`: the policy's."""
    pools = tuple(cluster.pools.values()) if cluster else ()
    return {
        "run_id": uuid.uuid4().hex,
        "policy": policy,
        "backend": backend,
        "rlmux_version": version("rlmux"),
        "created": utc_now(),
        "pools": {
            pool.name: {
                "phase": "both" if pool.serves_both_phases else pool.phase,
                "usd_per_node_hour": pool.usd_per_node_hour,
                **({"gpus_per_device": pool.gpus_per_device} if pool.gpus_per_device > 1 else {}),
                "devices": [
                    [pool.name, *at] for at in product(range(pool.num_nodes or 0), range(pool.devices_per_node))
                ],
            }
            for pool in pools
        },
        "cluster": pools,
        "sharing": sharing and {"entries": sharing.entries, "triples": sharing.triples},
        "spec": dict(spec or {}),
        **more,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """When rows are packed and files are sealed."""

    block_rows: int = 2000
    """Rows that are packed into a block."""
    snapshot_blocks: int = 5
    """Blocks after which the run's state is kept again."""
    segment_rows: int = 1_000_000
    """Rows after which the file is sealed."""
    segment_s: float = 7 * 86400.0
    """Seconds of the run after which the file is sealed."""


class RunLog:
    """The one writer of a run's log. A second one on the same folder is refused while the first lives.

    Use it from one thread at a time. Nothing that was appended is durable, or visible to readers, before
    `commit`.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: FolderLock, limits: LogLimits) -> None:
        self.folder = folder
        self.path = folder / LOG_NAME
        self._connection = connection
        self.lock = lock
        """Lock of the folder, held until the log is closed."""
        self._limits = limits
        self._state = RunState()
        """The run's state as of the last row, committed or not."""
        self._num_loose = 0
        """Committed rows that are not packed."""
        self._num_blocks = 0
        """Blocks since the state was kept."""
        self._predecessor: Sealed | None = None
        self._first_time_s = 0.0
        """Time of the open file's header."""
        self._is_state_ahead = False
        """Whether the state holds rows of a transaction that failed."""

    @classmethod
    def create(
        cls,
        folder: str | Path,
        header: Mapping[str, Any],
        *,
        survives_power_cut: bool = False,
        lock: FolderLock | None = None,
        limits: LogLimits | None = None,
    ) -> RunLog:
        """Start the log of a new run. The folder may exist; a log in it may not.

        `lock`: the folder's, where the caller holds it; the log releases it.
        """
        folder = Path(folder)
        path = folder / LOG_NAME
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = lock or FolderLock.take(folder)
        lock.sign()
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            lock.release()
            raise LogError(f"{path}: there is a run log already; resume it, or choose another folder") from None
        connection = connect_to_write(path, survives_power_cut=survives_power_cut)
        log = cls(folder, connection, lock, limits or LogLimits())
        try:
            connection.executescript("BEGIN;" + tables(SCHEMA_VERSION))
            log._append(0.0, "header", "header", value_codec.dumps({"schema_version": SCHEMA_VERSION, **header}))
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # on disk from now on: it cannot be resumed without
        except sqlite3.Error as error:
            raise log._failure(error) from error
        for path in (folder, folder.absolute().parent):
            sync(path)
        return log

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        survives_power_cut: bool = False,
        lock: FolderLock | None = None,
        limits: LogLimits | None = None,
    ) -> RunLog:
        """Continue the log of an earlier run, however that run ended. Raises LogError for a log of another schema.

        `lock`: the folder's, where the caller holds it; the log releases it.
        """
        folder = Path(folder)
        LogReader(folder).close()
        lock = lock or FolderLock.take(folder)
        lock.sign()
        connection = connect_to_write(folder / LOG_NAME, survives_power_cut=survives_power_cut)
        log = cls(folder, connection, lock, limits or LogLimits())
        log._take_up()
        return log

    def _take_up(self) -> None:
        """Find out what the log holds, and how full the open file is."""
        with LogReader(self.folder) as reader:
            self._state, self._is_state_ahead = reader.state(), False
        self._predecessor = predecessor_of(self._connection)
        execute = self._connection.execute
        (self._num_loose,) = execute("SELECT count(*) FROM log WHERE kind != 'header'").fetchone()
        (self._first_time_s,) = execute("SELECT time_s FROM log WHERE kind = 'header'").fetchone()
        kept = "SELECT count(*) FROM block WHERE last_seq > (SELECT coalesce(max(seq), 0) FROM snapshot)"
        (self._num_blocks,) = execute(kept).fetchone()

    @property
    def last_time_s(self) -> float:
        """Time of the newest row, at which a resumed run's clock continues, in seconds since the run began."""
        return self._state.last_time_s

    @property
    def last_seq(self) -> int:
        """Number of the newest row."""
        return self._state.seq

    @property
    def state(self) -> RunState:
        """The run's state as of that row; to be read only."""
        return self._state

    def append_event(self, event: Event) -> None:
        self._append(event.time_s, "event", type(event).__name__, value_codec.encode(event))

    def append_actions(self, actions: Iterable[Action]) -> None:
        """The orders that answer the event just appended; they take its time."""
        for action in actions:
            self._append(self.last_time_s, "action", type(action).__name__, value_codec.encode(action))

    def append_note(self, time_s: float, note: notes.Note) -> None:
        self.note(note.type, time_s, **notes.encode(note))

    def note(self, type: str, time_s: float, **fields: Any) -> None:
        """Append a note's row, of any type and with any fields, as another log has it."""
        self._append(time_s, "note", type, value_codec.dumps(fields))

    def commit(self) -> None:
        """Make what was appended since the last commit durable and visible, all of it together."""
        if not self._connection.in_transaction:
            return
        try:
            self._connection.execute("COMMIT")
            if self._num_loose >= self._limits.block_rows:
                self._pack()
            if self._is_segment_full():
                self._seal()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Commit. One plain file is left where no reader has the log open."""
        try:
            self.commit()
        finally:
            self._connection.close()
            self.lock.release()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, time_s: float, kind: Kind, type: str, text: str) -> None:
        if self._is_state_ahead:
            self._take_up()
        row = (self._state.seq + 1, time_s, kind, type, text)
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(_INSERT, (*row, row_checksum(*row)))
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._num_loose += kind != "header"
        entry = entry_of(*row[:4], value_codec.loads(text)) if RunState.reads(type) else Entry(*row[:4], {})
        self._state.add(entry)

    # ------------------------------------------------------------------ packing and sealing

    def _pack(self) -> None:
        """Put the loose rows into a block, and keep the run's state now and then: one transaction."""
        execute = self._connection.execute
        loose = "SELECT seq, time_s, kind, type, json FROM log WHERE kind != 'header' ORDER BY seq"
        rows = execute(loose).fetchall()
        if not rows:
            return
        self._num_blocks += 1
        execute("BEGIN IMMEDIATE")
        execute("INSERT INTO block VALUES (?, ?, ?)", (rows[-1][0], rows[0][0], pack(rows)))
        execute("DELETE FROM log WHERE kind != 'header'")
        if self._num_blocks >= self._limits.snapshot_blocks:
            self._keep_state()
        execute("COMMIT")
        self._num_loose = 0

    def _keep_state(self) -> None:
        self._connection.execute("DELETE FROM snapshot")
        kept = value_codec.dumps(self._state)
        self._connection.execute("INSERT INTO snapshot VALUES (?, ?)", (self._state.seq, kept))
        self._num_blocks = 0

    def _is_segment_full(self) -> bool:
        first_seq = self._predecessor.last_seq if self._predecessor else 0
        num_rows = self._state.seq - first_seq
        return num_rows > 1 and (
            num_rows >= self._limits.segment_rows or self.last_time_s - self._first_time_s >= self._limits.segment_s
        )

    def _seal(self) -> None:
        """Move the open file's rows into a segment that stays, and go on in an empty one that names it."""
        self._pack()
        number = self._predecessor.number + 1 if self._predecessor else 1
        sealed = seal(self._connection, self.folder, number=number, last_seq=self._state.seq)
        execute = self._connection.execute
        (text,) = execute("SELECT json FROM log WHERE kind = 'header'").fetchone()
        header = {
            **value_codec.loads(text),
            "segment": number + 1,
            "predecessor": {"name": sealed.name, "sha256": sealed.sha256},
        }
        execute("BEGIN IMMEDIATE")
        execute("DELETE FROM predecessor")
        execute("INSERT INTO predecessor VALUES (?, ?, ?, ?)", sealed)
        execute("DELETE FROM block")
        execute("DELETE FROM log")
        self._keep_state()
        self._append(self.last_time_s, "header", "segment", value_codec.dumps(header))
        execute("COMMIT")
        self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` would give one page back, not all
        self._predecessor, self._first_time_s = sealed, self.last_time_s

    def _failure(self, error: sqlite3.Error) -> LogError:
        """Drop the transaction that failed: what was committed before it stays whole and readable."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._is_state_ahead = True
        return LogError(f"{self.path}: cannot append to the run log: {error}; what was committed stays readable")


class OtherVersionError(LogError, UserError):
    """The run log was written by a version whose logs this one does not read."""

    def __init__(self, path: Path, words: str) -> None:
        super().__init__(path, words)
        self.path = path
        self.words = words
        """Which version wrote it, and which one resumes it."""

    def __str__(self) -> str:
        return f"{self.path}: {self.words}"


def other_version(folder: Path) -> str | None:
    """Which version wrote a log of another schema, and which one resumes it; None for a log of this schema, or none.

    Through SQLite: to open and close the file by itself would drop the locks that this process has on it.
    """
    try:
        with contextlib.closing(connect_to_read(folder / LOG_NAME)) as connection:
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
        if schema != SCHEMA_VERSION:
            LogReader(folder).close()  # says who wrote it
    except OtherVersionError as error:
        return error.words
    except (LogError, sqlite3.Error):
        pass  # there is none, or its reader says what is damaged
    return None


class LogReader:
    """Reads a run's log: while it is written, after it ended, after a crash."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LOG_NAME
        if not self.path.is_file():
            raise LogError(f"{folder}: there is no run log ({LOG_NAME}) here")
        self._connection = connect_to_read(self.path)
        try:
            self.header = self._read_header()
        except sqlite3.Error as error:
            self._connection.close()
            raise LogError(f"{self.path}: not a readable run log: {error}") from error
        except LogError:
            self._connection.close()
            raise

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Every committed row with a larger seq, in order; all of one moment."""
        return starmap(entry_of, chain.from_iterable(self._read(after)))

    def parts(
        self, after: int = 0, *, until: int | None = None, bare: Collection[str] = ()
    ) -> Iterator[Entry | Progress]:
        """The same rows, for folds that take an order's progress reports together: these come where the first of them
        is, up to two thousand rows before the last.

        `until`: the last row of the last block to be read. `bare`: types of notes that may come without their fields,
        where these cost time to read.
        """
        for rows in self._read(after, until, bare):
            yield from parts_of(rows)

    def block_end(self, last_seq: int = 0) -> tuple[int, int] | None:
        """(last row, CRC-32) of the newest block, or of the block with this last row: it stays as it is."""
        return block_end(self._connection, self.path.parent, self.path.name, last_seq)

    def row_checksum(self, seq: int) -> int | None:
        """CRC-32 of one row's values, loose or in a block; None where the log has no such row."""
        entry = next(self.entries(after=seq - 1), None)
        return zlib.crc32(repr(entry).encode()) if entry is not None and entry.seq == seq else None

    def state(self) -> RunState:
        """The past of a run to resume: the last snapshot, and the rows after it."""
        try:
            kept = self._connection.execute("SELECT json FROM snapshot").fetchone()
        except sqlite3.Error as error:
            raise LogError(f"{self.path}: the run log is damaged: {error}") from error
        state = RunState.from_json(value_codec.loads(kept[0])) if kept else RunState()
        for entry in self.entries(after=state.seq):
            state.add(entry)
        return state

    def sha256(self) -> str:
        """Hash of every row and block as it lies there. Raises LogError where a segment or a loose row is damaged."""
        digest = hashlib.sha256()
        for seq, time_s, kind, type, data in self._rows(0):
            content = data if isinstance(data, bytes) else data.encode()
            digest.update(f"{seq} {time_s!r} {kind} {type} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def events(self) -> Iterator[Event]:
        """The events alone: what a scheduler is fed to get back to where it was."""
        return (cast("Event", entry.value) for entry in self.entries() if entry.kind == "event")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, after: int) -> Iterator[tuple[Any, ...]]:
        try:
            yield from rows_of(self._connection, self.path.parent, self.path.name, after)
        except sqlite3.Error as error:
            raise LogError(f"{self.path}: the run log is damaged: {error}") from error

    def _read(self, after: int, until: int | None = None, bare: Collection[str] = ()) -> Iterator[list[list[Any]]]:
        """Rows [seq, time_s, kind, type, fields], those of a block together."""
        for seq, time_s, kind, type, data in self._rows(after):
            if until is not None and seq > until:
                return
            if kind != "block":
                yield [[seq, time_s, kind, type, value_codec.loads(data)]]
                continue
            try:
                rows = unpack(data, bare)
            except LogError as error:
                raise LogError(f"{self.path}: the rows up to {seq} are damaged: {error}") from error
            yield [row for row in rows if row[0] > after]

    def _read_header(self) -> dict[str, Any]:
        (application_id,) = self._connection.execute("PRAGMA application_id").fetchone()
        (schema_version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if application_id != APPLICATION_ID:
            raise LogError(f"{self.path}: not a run log, or one whose creation was cut short")
        try:
            row = self._connection.execute("SELECT json FROM log WHERE kind = 'header' ORDER BY seq LIMIT 1").fetchone()
            if row is None and schema_version == SCHEMA_VERSION:
                raise LogError(f"{self.path}: the run log has no header")
            header = cast("dict[str, Any]", value_codec.loads(row[0]) if row else {})
        except (sqlite3.Error, LogError):
            if schema_version == SCHEMA_VERSION:
                raise
            header = {}  # of a schema that may have other tables
        if schema_version != SCHEMA_VERSION:
            raise OtherVersionError(self.path, _other_version(schema_version, header.get("rlmux_version")))
        return header


def _other_version(schema: int, writer: str | None) -> str:
    newer = "a newer " if schema > SCHEMA_VERSION else ""
    resumes = f"; to resume it: pip install rlmux=={writer}" if writer else ""
    return (
        f"written by {newer}rlmux{f' {writer}' if writer else ''} (log schema {schema}){resumes}; "
        f"this rlmux {version('rlmux')} reads schema {SCHEMA_VERSION}"
    )
