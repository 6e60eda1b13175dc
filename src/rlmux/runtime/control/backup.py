"""Backup of the folder of a run or of a service while it is written to, and its restore.

    service: its databases ─▶ its files, bundles ─▶ each lane's run
    run:     checkpoints of pipelines that are not over, opened ─▶ run.db ─▶ sealed segments ─▶ checkpoints ─▶ the rest
                                                                        ─▶ backup.json ─▶ OUT.partial-PID ─▶ OUT

The copy is what a kill at the moment of the log's copy leaves: a resume goes on from it as after a kill. Databases are
copied by SQLite's backup API. A checkpoint is opened before the log is copied, so that a prune in between does not take
it; the log lacks at most the note of its step. A submission's row is copied before its lane's log, which refuses the
same one twice.

Left out: locks, sockets, links, names that begin with a dot, what is derived from the log (index.db), what is half
written. The database files of a log of another schema are copied too; all of its checkpoints go with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from rlmux.core.errors import LogError, StorageError, UserError
from rlmux.engines.train.state.checkpoint import STATE_FILE
from rlmux.log.run_log import LOG_NAME, SCHEMA_VERSION, LogReader, OtherVersionError, utc_now
from rlmux.log.run_state import RunState
from rlmux.log.segments import connect_to_read, file_sha256, predecessor_of, query_only, sync
from rlmux.runtime.records.folders import ADDRESS, DRAINING, RUN_HEADER, TOKEN
from rlmux.runtime.weights.checkpoints import CheckpointStore

MANIFEST = "backup.json"
"""File of a backup: what is in it, with the hash of each file; written last."""
FORMAT = 1
"""Format of backup.json: raised when a key changes its meaning."""
_NOT_COPIED = re.compile(
    rf"index\.db|.*-(wal|shm|journal)|{ADDRESS}|{DRAINING}|spilled-.*|step_\d+\.(tmp|old)-\d+|latest"
)
_CHECKPOINT = re.compile(r"step_\d+")
_FILE_SYSTEMS_OWN = frozenset({"lost+found"})
"""Names that an empty disk has."""
_BLOCK_BYTES = 1 << 20
_MAX_TRIES = 100
_WAL_MODE = 2
"""Byte 18 of an SQLite file in WAL mode, as all of ours are."""

Progress = Callable[[int, int], None]
"""(files copied, files in all)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The outcome of a backup or of a restore."""

    folder: Path
    """Folder that was written."""
    num_files: int
    num_bytes: int
    logs: dict[str, dict[str, Any]]
    """`run_id`, `schema`, `rlmux_version` and `last_seq` of each log, by the path of its run in the folder."""
    left_out: tuple[str, ...] = ()
    """Damaged checkpoints that are not in it, in a sentence each."""


def back_up(folder: Path, out: Path, *, on_progress: Progress = lambda done, total: None) -> Copied:
    """Copy the folder of a run, or of a service, to a new folder.

    Raises UserError for another folder and for an `out` that is not empty, LogError for a damaged log.
    """
    runs = _runs_of(folder)
    _raise_file_limit()
    with _new_folder(out, inside=folder) as aside:
        copy = _Copy(folder, aside, on_progress)
        if runs != [folder]:
            _copy_service(copy, set(runs))
        logs: dict[str, dict[str, Any]] = {}
        for run in runs:
            logs |= _copy_run(copy, run)
        copy.check_not_empty()
        manifest = {
            "format": FORMAT,
            "utc": utc_now(),
            "rlmux_version": version("rlmux"),
            "log_schema": SCHEMA_VERSION,
            "source": str(folder.absolute()),
            "logs": logs,
            "folders": copy.empty_folders(),
            "files": {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(copy.files.items())},
        }
        _write(aside / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    num_bytes = sum(size for size, _ in copy.files.values())
    return Copied(folder=out, num_files=len(copy.files), num_bytes=num_bytes, logs=logs, left_out=tuple(copy.left_out))


def restore(backup: Path, folder: Path, *, on_progress: Progress = lambda done, total: None) -> Copied:
    """Copy a backup to a new folder, in which the run or the service goes on.

    Raises UserError for a folder that is not empty, and for a backup that is damaged, incomplete or newer.
    """
    manifest = read_manifest(backup)
    files = manifest["files"]
    with _new_folder(folder, inside=backup) as aside:
        for name in manifest["folders"]:
            (aside / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        for number, (name, expected) in enumerate(files.items(), 1):
            source = backup / name
            try:
                with source.open("rb") as file:
                    found = _copy_open(file, aside / name)
            except FileNotFoundError:
                raise UserError(f"{source}: missing; the backup is incomplete; accepted: a whole one") from None
            if found != (expected["bytes"], expected["sha256"]):
                raise UserError(f"{source}: damaged: its sha256 is not the one in {MANIFEST}; accepted: a whole backup")
            on_progress(number, len(files))
    num_bytes = sum(each["bytes"] for each in files.values())
    return Copied(folder=folder, num_files=len(files), num_bytes=num_bytes, logs=manifest["logs"])


def read_manifest(backup: Path) -> dict[str, Any]:
    """What a backup says of itself. Raises UserError for one that this version cannot restore."""
    path = backup / MANIFEST
    try:
        manifest = dict(json.loads(path.read_bytes()))
        found = int(manifest["format"]), max([0, *(int(each["schema"]) for each in manifest["logs"].values())])
        names = [*manifest["files"], *manifest["folders"]]
        is_within = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in names)
    except FileNotFoundError:
        raise UserError(f"{backup}: no backup (no {MANIFEST}); accepted: a folder that rlmux backup made") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: damaged; accepted: a whole backup") from None
    if not is_within:
        raise UserError(f"{path}: damaged: it names a file outside; accepted: a whole backup")
    if found[0] > FORMAT or found[1] > SCHEMA_VERSION:
        raise UserError(
            f"{backup}: written by rlmux {manifest.get('rlmux_version')}: its log schema is {found[1]}, this rlmux "
            f"{version('rlmux')} reads {SCHEMA_VERSION}; accepted: an rlmux as new as that"
        )
    return manifest


# ------------------------------------------------------------------ what is copied, in its order


def _runs_of(folder: Path) -> list[Path]:
    """The folder itself where it is a run's, else the runs in it. Raises UserError without any."""
    if _is_run(folder):
        return [folder]
    runs = sorted(path for path in folder.iterdir() if _is_run(path)) if folder.is_dir() else []
    if not runs and not (folder / TOKEN).is_file():
        problem = "holds no run and no service" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {problem}; accepted: the folder of a run or of a service")
    return runs


def _is_run(folder: Path) -> bool:
    is_hidden = folder.name.startswith(".")  # one that is being removed
    return not is_hidden and ((folder / LOG_NAME).is_file() or (folder / RUN_HEADER).is_file())


def _copy_service(copy: _Copy, runs: set[Path]) -> None:
    """The service's own: its databases before the bundles that their rows name."""
    entries = [path for path in _entries(copy.source) if path not in runs]
    for path in sorted(entries, key=lambda path: (path.suffix != ".db", path.name)):
        copy.tree(path) if path.is_dir() else copy.file(path)


def _copy_run(copy: _Copy, run: Path) -> dict[str, dict[str, Any]]:
    """A run's folder; returns what the manifest says of its log."""
    place = str(run.relative_to(copy.source))
    with ExitStack() as opened:
        before = _state_of(run)
        over = set() if before is None else set(before.ended)
        folders = [path for path in _entries(run) if path.is_dir()]
        taken = {path: _open_checkpoints(path, opened) for path in folders if path.name not in over}
        about, state = _copy_log(copy, run)
        for path in [path for path in _entries(run) if path.is_dir()]:
            first = taken.get(path, {})
            last = None if state is None or path.name in state.ended else state.steps.get(path.name, 0)
            with ExitStack() as later:
                every = first | _open_checkpoints(path, later, but=set(first), last=last)
                steps = [step for step, files in every.items() if copy.checkpoint(path / f"step_{step}", files)]
            if steps:
                copy.content(path / "latest", f"step_{max(steps)}\n".encode())
    for path in _entries(run):
        if path.is_dir():
            copy.tree(path, depth=1, last_step=None if state is None else state.steps.get(path.name, 0))
        elif path.name not in copy.log_names(run):
            copy.file(path)
    return {} if about is None else {place: about}


def _state_of(run: Path) -> RunState | None:
    """The state that a log has; None without one that this version reads."""
    if not (run / LOG_NAME).is_file():
        return None
    with contextlib.suppress(OtherVersionError), LogReader(run) as log:
        return log.state()
    return None


def _copy_log(copy: _Copy, run: Path) -> tuple[dict[str, Any] | None, RunState | None]:
    """The log's files, checked once they are copied. Returns what the manifest says of it, and its state."""
    if not (run / LOG_NAME).is_file():
        return None, None
    copy.database(run / LOG_NAME)
    target = copy.target(run / LOG_NAME)
    with closing(connect_to_read(target)) as connection:
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        before = None
        with contextlib.suppress(sqlite3.Error):  # an older schema has no segments
            before = predecessor_of(connection)
    while before is not None:
        copy.file(run / before.name, is_final=True)
        with closing(query_only(copy.target(run / before.name), "immutable=1")) as connection:
            before = predecessor_of(connection)
    try:
        with LogReader(target.parent) as log:
            log.sha256()
            state, header = log.state(), log.header
    except OtherVersionError:
        return {"run_id": None, "schema": schema, "rlmux_version": None, "last_seq": None}, None
    finally:
        copy.record(run / LOG_NAME)
    about = {"run_id": header.get("run_id"), "schema": schema, "rlmux_version": header.get("rlmux_version")}
    return {**about, "last_seq": state.seq}, state


def _entries(folder: Path) -> list[Path]:
    """Files and folders that a backup has, by name."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                is_kept = not path.name.startswith(".") and not _NOT_COPIED.fullmatch(path.name)
                if is_kept and path.name != MANIFEST and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    found.append(path)
    return sorted(found)


def _open_checkpoints(
    folder: Path, stack: ExitStack, *, but: set[int] | None = None, last: int | None = None
) -> dict[int, dict[str, IO[bytes]]]:
    """The files of a pipeline's checkpoints by step, all there at one moment. `last`: the newest step to be taken."""
    for _ in range(_MAX_TRIES):
        with ExitStack() as opened:
            found: dict[int, dict[str, IO[bytes]]] = {}
            try:
                for step in CheckpointStore(folder).steps():
                    if step not in (but or ()) and (last is None or step <= last):
                        names = sorted(os.listdir(folder / f"step_{step}"))
                        found[step] = {
                            name: opened.enter_context((folder / f"step_{step}" / name).open("rb")) for name in names
                        }
            except FileNotFoundError:  # pruned meanwhile
                continue
            stack.push(opened.pop_all())
            return found
    raise StorageError(f"{folder}: its checkpoints are removed faster than they can be opened; try again")


# ------------------------------------------------------------------ one copy


class _Copy:
    """Copies files of a folder, and keeps the size and hash of each."""

    def __init__(self, source: Path, out: Path, on_progress: Progress) -> None:
        self.source = source
        self._out = out
        self._on_progress = on_progress
        self._num_expected = sum(len(names) for _, _, names in os.walk(source))
        self.files: dict[str, tuple[int, str]] = {}
        """(bytes, sha256) by path."""
        self.left_out: list[str] = []

    def target(self, path: Path) -> Path:
        return self._out / path.relative_to(self.source)

    def record(self, path: Path, found: tuple[int, str] | None = None) -> None:
        """Keep the size and hash of a file whose copy is complete."""
        target = self.target(path)
        self.files[str(path.relative_to(self.source))] = found or (target.stat().st_size, file_sha256(target))
        self._on_progress(len(self.files), max(self._num_expected, len(self.files)))

    def log_names(self, run: Path) -> set[str]:
        """Names of the log's files that are copied, and of those that its next sealing writes again."""
        return {path.name for path in run.glob("run*.db")}

    def tree(self, folder: Path, depth: int = 0, last_step: int | None = None) -> None:
        """A folder's files. `depth`: 0 in a service's folder, whose bundles are copied with hidden names.

        `last_step`: of a pipeline, after which its metrics are left out: a resume writes them.
        """
        self.target(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in _entries(folder):
            if path.is_dir():
                if depth == 0:
                    self._whole(path)
                elif not (depth == 1 and _CHECKPOINT.fullmatch(path.name)):
                    self.tree(path, depth + 1)
            elif path.name == "metrics.jsonl" and last_step is not None:
                self._metrics(path, last_step)
            else:
                self.file(path)

    def _whole(self, folder: Path) -> None:
        """Every plain file of a folder that stays as it is."""
        self.target(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.rglob("*")):
            if path.is_symlink():
                continue
            if path.is_dir():
                self.target(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            elif path.is_file():
                self.file(path, is_final=True)

    def file(self, path: Path, *, is_final: bool = False) -> None:
        """A file, or a database as of one moment. One that was removed meanwhile is left out.

        `is_final`: nothing writes to it, and it is copied as it is.
        """
        try:
            with path.open("rb") as file:
                head = file.read(20)
                is_written = not is_final and path.stat().st_mode & 0o200
                if is_written and head.startswith(b"SQLite format 3\0") and head[18] == _WAL_MODE:
                    self.database(path)
                    self.record(path)
                    return
                file.seek(0)
                found = _copy_open(file, self.target(path))
        except FileNotFoundError:
            return
        if path.suffix == ".jsonl" and not is_final:
            _cut_last_line(self.target(path))
            self.record(path)
        else:
            self.record(path, found)

    def database(self, path: Path) -> None:
        """A database as of one moment, by SQLite's backup API: its writers go on."""
        target = self.target(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            with closing(connect_to_read(path)) as source, closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
        except sqlite3.Error as error:
            raise LogError(f"{path}: cannot be backed up: {error}") from error
        sync(target)

    def checkpoint(self, folder: Path, files: dict[str, IO[bytes]]) -> bool:
        """A checkpoint from its open files; returns whether it is whole."""
        target, complaint = self.target(folder), None
        found: dict[str, tuple[int, str]] = {}
        for name, file in files.items():
            found[name] = _copy_open(file, target / name)
        try:
            expected = json.loads((target / STATE_FILE).read_bytes())["files"]
            damaged = [name for name, sha256 in expected.items() if found.get(name, (0, ""))[1] != sha256]
            complaint = f"{damaged[0]} is damaged" if damaged else None
        except (OSError, ValueError, KeyError, TypeError):
            complaint = f"its {STATE_FILE} is damaged"
        if complaint is not None:
            shutil.rmtree(target)
            self.left_out.append(f"{folder.relative_to(self.source)}: left out: {complaint}")
            return False
        for name, each in found.items():
            self.record(folder / name, each)
        return True

    def content(self, path: Path, data: bytes) -> None:
        self.target(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self.target(path), data)
        self.record(path)

    def _metrics(self, path: Path, last_step: int) -> None:
        kept = []
        with contextlib.suppress(FileNotFoundError):
            for line in path.read_bytes().splitlines(keepends=True):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that is being written
                    if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:
                        kept.append(line)
            self.content(path, b"".join(kept))

    def empty_folders(self) -> list[str]:
        found = [Path(at) for at, folders, names in os.walk(self._out) if not folders and not names]
        return sorted(str(path.relative_to(self._out)) for path in found if path != self._out)

    def check_not_empty(self) -> None:
        """Raises StorageError where the source was removed meanwhile."""
        if not self.files:
            raise StorageError(f"{self.source}: was removed while it was copied")


def _copy_open(file: IO[bytes], target: Path) -> tuple[int, str]:
    """Copy what an open file has, with its time of change, and wait for the disk; (bytes, sha256)."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about, digest, num_bytes = os.fstat(file.fileno()), hashlib.sha256(), 0
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, about.st_mode & 0o700 | 0o400)
    with os.fdopen(handle, "wb") as copy:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
        os.utime(copy.fileno(), ns=(about.st_atime_ns, about.st_mtime_ns))
    return num_bytes, digest.hexdigest()


def _cut_last_line(path: Path) -> None:
    """Drop a last line that was being written."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        last = file.read().rfind(b"\n")
        if last >= 0 or start == 0:
            file.truncate(start + last + 1)


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _new_folder(out: Path, *, inside: Path) -> Iterator[Path]:
    """A private folder aside, whose content is at `out` once the block has ended; nothing is there after an error.

    `out` may be an empty disk. `inside`: a folder that `out` may not be in. Raises UserError.
    """
    there = out.absolute()
    if there.resolve().is_relative_to(inside.resolve()):
        raise UserError(f"--to {out}: lies in {inside}; accepted: a folder elsewhere")
    try:
        if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - _FILE_SYSTEMS_OWN):
            raise UserError(f"--to {out}: not empty; accepted: a folder that does not exist or is empty")
        is_disk = out.is_dir() and (os.path.ismount(out) or any(out.iterdir()))
        aside = there / f".partial-{os.getpid()}" if is_disk else there.with_name(f"{there.name}.partial-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UserError(f"--to {out}: cannot be made: {error.strerror}; accepted: another folder") from None
    try:
        yield aside
        if is_disk:
            for path in sorted(aside.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
                path.rename(there / path.name)
            aside.rmdir()
        else:
            aside.rename(there)
    except BaseException:  # an interrupt, too, leaves nothing half made; it goes on up
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(there)
    sync(there.parent)


def _raise_file_limit() -> None:
    """Checkpoints of every pipeline are open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
