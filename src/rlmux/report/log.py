"""The append-only run log: every event, and the orders that answered it, before they take effect.

    RunLog.create(folder, header)                      LogReader(folder)
    event ──▶ append_event ─┐                             header, entries(after=seq)
    orders ─▶ append_actions ┴─▶ commit ──▶ run.db ──▶    at any time, by the folder's owner
                                (one transaction)

    seq  time_s  kind    type            json
    1    0.0     header  header          {"schema_version":2,"policy":"rollmux",...}
    2    0.0     event   PipelineSubmitted  ...
    3    0.0     action  Admit           ...          answers the event above it
    9    2.5     note    step            {"pipeline":"sort","step":1,"reward_mean":0.31,...}

Invariants: rows are only ever added (the database itself refuses anything else); an event and its orders are
visible together or not at all; a reader never sees a torn row. SQLite in WAL mode gives these after a SIGKILL
of the writer at any instant: a half-written tail fails its checksum and is ignored. After a power cut the newest
commits may be missing, the header never is; with `survives_power_cut` each commit waits for the disk, and none is.

Notes are free-form facts the scheduler does not need. The reports read these, and show what they find:

    step      pipeline, step, metrics: reward_mean, reward_std, tokens, trajectories, loss, kl, ...
    worker, failure, loss       pipeline, pid, reason, ...
    pipeline_end                pipeline, status, reason, weights_sha256
    resumed   orders of the process before it are over; time since the last row is down time
    end       control_s: the process that ran it ended on purpose
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from rlmux.core.actions import Action
from rlmux.core.errors import LogError, UserError
from rlmux.core.events import Event
from rlmux.core.model import Cluster, NodeId
from rlmux.report import codec
from rlmux.report.folder_lock import FolderLock

SCHEMA_VERSION = 2
"""Version of the rows' names: raised when an event, an action or a field is renamed or changes its meaning.

A reader takes logs of its own version only. New fields with a default and new notes leave the version as it is.
"""

LOG_NAME = "run.db"
_APPLICATION_ID = 0x726C6D78
"""The letters 'rlmx' in the file's header, which no other SQLite file has."""

_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE log (
    seq    INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    kind   TEXT NOT NULL CHECK (kind IN ('header', 'event', 'action', 'note')),
    type   TEXT NOT NULL,
    json   TEXT NOT NULL
);
CREATE TRIGGER log_keeps_rows BEFORE DELETE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
CREATE TRIGGER log_keeps_facts BEFORE UPDATE ON log BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;
"""
_INSERT = "INSERT INTO log (time_s, kind, type, json) VALUES (?, ?, ?, ?)"

Kind = Literal["header", "event", "action", "note"]


class Entry(NamedTuple):
    """One row of the log, read back."""

    seq: int
    time_s: float
    kind: Kind
    type: str
    value: Event | Action | dict[str, Any]
    """The event or action, or the fields of a note or header."""


def run_header(
    *,
    policy: str,
    backend: str,
    cluster: Cluster | None = None,
    spec: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The header of a run: what the reports need to know that no event says."""
    pools = cluster.pools.values() if cluster else ()
    return {
        "run_id": uuid.uuid4().hex,
        "policy": policy,
        "backend": backend,
        "rlmux_version": version("rlmux"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "pools": {
            pool.name: {
                "phase": "both" if pool.serves_both_phases else pool.phase,
                "devices": [
                    list(device)
                    for index in range(pool.num_nodes or 0)
                    for device in pool.devices(NodeId(pool.name, index))
                ],
            }
            for pool in pools
        },
        "spec": dict(spec or {}),
        **more,
    }


class RunLog:
    """The one writer of a run's log. A second one on the same folder is refused while the first lives.

    Use it from one thread at a time. Nothing that was appended is durable, or visible to readers, before
    `commit`.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: FolderLock) -> None:
        self.folder = folder
        self.path = folder / LOG_NAME
        self._connection = connection
        self.lock = lock
        """Lock of the folder, held until the log is closed."""
        self._last_time_s = 0.0

    @classmethod
    def create(
        cls,
        folder: str | Path,
        header: Mapping[str, Any],
        *,
        survives_power_cut: bool = False,
        lock: FolderLock | None = None,
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
        connection = _connect(path, survives_power_cut)
        log = cls(folder, connection, lock)
        try:
            connection.executescript("BEGIN;" + _SCHEMA)
            text = codec.dumps({"schema_version": SCHEMA_VERSION, **header})
            connection.execute(_INSERT, (0.0, "header", "header", text))
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # on disk from now on: it cannot be resumed without
        except sqlite3.Error as error:
            raise log._failure(error) from error
        for path in (folder, folder.absolute().parent):
            _sync_names(path)
        return log

    @classmethod
    def open(cls, folder: str | Path, *, survives_power_cut: bool = False, lock: FolderLock | None = None) -> RunLog:
        """Continue the log of an earlier run, however that run ended. Raises LogError for a log of another schema.

        `lock`: the folder's, where the caller holds it; the log releases it.
        """
        folder = Path(folder)
        LogReader(folder).close()
        lock = lock or FolderLock.take(folder)
        lock.sign()
        log = cls(folder, _connect(folder / LOG_NAME, survives_power_cut), lock)
        log._last_time_s = log._connection.execute("SELECT time_s FROM log ORDER BY seq DESC LIMIT 1").fetchone()[0]
        return log

    @property
    def last_time_s(self) -> float:
        """Time of the newest row, at which a resumed run's clock continues, in seconds since the run began."""
        return self._last_time_s

    def append_event(self, event: Event) -> None:
        self._append(event.time_s, "event", type(event).__name__, codec.encode(event))

    def append_actions(self, actions: Iterable[Action]) -> None:
        """The orders that answer the event just appended; they take its time."""
        for action in actions:
            self._append(self._last_time_s, "action", type(action).__name__, codec.encode(action))

    def note(self, type: str, time_s: float, **fields: Any) -> None:
        """A fact for people and reports. Not a number: written as text ("nan"), read back with `float`."""
        self._append(time_s, "note", type, codec.dumps(fields))

    def commit(self) -> None:
        """Make what was appended since the last commit durable and visible, all of it together."""
        if self._connection.in_transaction:
            try:
                self._connection.execute("COMMIT")
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
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(_INSERT, (time_s, kind, type, text))
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._last_time_s = time_s

    def _failure(self, error: sqlite3.Error) -> LogError:
        """Drop the transaction that failed: what was committed before it stays whole and readable."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        return LogError(f"{self.path}: cannot append to the run log: {error}; what was committed stays readable")


class OtherVersionError(LogError, UserError):
    """The run log was written by a version whose logs this one does not read."""


class LogReader:
    """Reads a run's log: while it is written, after it ended, after a crash."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LOG_NAME
        if not self.path.is_file():
            raise LogError(f"{folder}: there is no run log ({LOG_NAME}) here")
        self._connection = _connect_to_read(self.path)
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
        try:
            rows = self._connection.execute(
                "SELECT seq, time_s, kind, type, json FROM log WHERE seq > ? ORDER BY seq", (after,)
            )
            for seq, time_s, kind, type, text in rows:
                yield Entry(seq, time_s, kind, type, _value(seq, kind, text))
        except sqlite3.Error as error:
            raise LogError(f"{self.path}: the run log is damaged: {error}") from error

    def events(self) -> Iterator[Event]:
        """The events alone: what a scheduler is fed to get back to where it was."""
        return (cast("Event", entry.value) for entry in self.entries() if entry.kind == "event")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> dict[str, Any]:
        (application_id,) = self._connection.execute("PRAGMA application_id").fetchone()
        (schema_version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if application_id != _APPLICATION_ID:
            raise LogError(f"{self.path}: not a run log, or one whose creation was cut short")
        if schema_version > SCHEMA_VERSION:
            raise OtherVersionError(
                f"{self.path}: written by a newer rlmux: its log schema is {schema_version}, "
                f"this rlmux reads up to {SCHEMA_VERSION}"
            )
        row = self._connection.execute("SELECT json FROM log WHERE kind = 'header' ORDER BY seq LIMIT 1").fetchone()
        if row is None:
            raise LogError(f"{self.path}: the run log has no header")
        header = cast("dict[str, Any]", codec.loads(row[0]))
        if schema_version < SCHEMA_VERSION:
            writer = header.get("rlmux_version", "of unknown version")
            raise OtherVersionError(
                f"{self.path}: written by rlmux {writer}: its log schema is {schema_version}, "
                f"this rlmux {version('rlmux')} reads {SCHEMA_VERSION}; "
                f"finish it and read it with rlmux {writer}, or start a new run"
            )
        return header


def _value(seq: int, kind: str, text: str) -> Any:
    try:
        return codec.decode(text) if kind in ("event", "action") else codec.loads(text)
    except LogError as error:
        raise LogError(f"row {seq}: {error}") from None


def _sync_names(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _connect(path: Path, survives_power_cut: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if survives_power_cut else 'NORMAL'}")
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Without a way to add rows. SQLite needs its side files to follow a live log, and folds them back in
    when the last one leaves; where the folder does not let it (another owner, a read-only disk) the log is
    not being written either, and is read as it stands."""
    try:
        return _query_only(path, "mode=rw")
    except sqlite3.OperationalError:
        return _query_only(path, "immutable=1")
    except sqlite3.DatabaseError as error:
        raise LogError(f"{path}: not a run log: {error}") from error


def _query_only(path: Path, options: str) -> sqlite3.Connection:
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
