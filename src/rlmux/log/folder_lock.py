"""The lock of a run's folder: one process at a time writes there, from its start to its end.

    take(folder)    flock on the folder itself; the system releases it when the process ends, killed or not
    sign()          OWNER_NAME: {"pid": 4711, "host": "node-3"}, read only where another process is refused
    release()

Whatever lies in the folder may be removed and made again under the lock: the folder itself stays the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from rlmux.core.errors import LogError, UserError

OWNER_NAME = ".owner.json"
_SIGNATURE_S = 1.0
"""Longest wait for the signature of a process that has just taken the lock."""
_LOOK_EVERY_S = 0.02


class FolderInUseError(LogError, UserError):
    """Another process writes in the folder."""


class FolderLock:
    """A folder that this process alone writes to."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Lock a folder that exists. Raises FolderInUseError, with the process that has it."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise LogError(f"{folder}: cannot be locked: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise FolderInUseError(_in_use(folder)) from None
        return cls(folder, descriptor)

    def sign(self) -> None:
        """Say which process has the folder. Where the disk is full, the lock holds without."""
        aside = self.folder / f"{OWNER_NAME}.{os.getpid()}"
        with contextlib.suppress(OSError):
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            aside.replace(self.folder / OWNER_NAME)

    def is_in_place(self) -> bool:
        """The folder lies where it lay, and no other has taken its name."""
        assert self._descriptor is not None
        try:
            there = self.folder.stat()
        except OSError:
            return False
        mine = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def moved_to(self) -> Path | None:
        """The place that the folder was moved to; None if it was removed, or if the system does not report it."""
        assert self._descriptor is not None
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            there, mine = place.stat(), os.fstat(self._descriptor)
        except OSError:
            return None
        return place if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino) else None

    def release(self) -> None:
        """Safe to call twice."""
        if self._descriptor is None:
            return
        if self.is_in_place():
            with contextlib.suppress(OSError):
                (self.folder / OWNER_NAME).unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _in_use(folder: Path) -> str:
    """One line that names the process."""
    until_s = time.monotonic() + _SIGNATURE_S
    while (owner := living_owner(folder)) is None and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
    if owner is None:
        return f"{folder}: another process is writing here; accepted: another folder, or wait until that one has ended"
    pid, host = owner
    where = "" if host == socket.gethostname() else f" on {host}"
    return (
        f"{folder}: another process is writing here: pid {pid}{where}; accepted: another folder, or wait until that "
        f"one has ended, or stop it{where}: rlmux stop {folder}"
    )


def living_owner(folder: Path) -> tuple[int, str] | None:
    """(process id, host) of the signature; None if it is missing or its process was killed."""
    try:
        owner = json.loads((folder / OWNER_NAME).read_text(encoding="utf-8"))
        pid, host = int(owner["pid"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host == socket.gethostname():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
    return pid, host
