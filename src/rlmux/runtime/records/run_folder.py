"""The folder of a run: prepared or refused before anything starts, locked and watched during the run.

prepare_folder(folder) ──▶ FolderLock ──▶ the run's log, which releases it at its end
FolderWatch            ──▶ StorageError as soon as the folder is moved or removed
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlmux.core.actions import Action
from rlmux.core.errors import StorageError, UserError
from rlmux.core.events import Event
from rlmux.log.folder_lock import OWNER_NAME, FolderLock
from rlmux.log.notes import Note
from rlmux.log.run_log import LOG_NAME


def prepare_folder(folder: Path, *, is_overwriting: bool) -> FolderLock:
    """Make the run's folder, private to the user, and lock it. Only a folder that holds a run is ever overwritten.

    Raises UserError for an unusable folder, with the process that writes there, if any.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: this is a file; give a folder that does not exist or is empty")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.R_OK):
        raise UserError(f"--out {folder}: not writable")
    lock = FolderLock.take(folder)
    try:
        if any(not path.name.startswith(OWNER_NAME) for path in folder.iterdir()):  # a killed start leaves its name
            _check_may_empty(folder, is_overwriting=is_overwriting)
            lock.sign()
            empty_folder(folder)
    except UserError:
        lock.release()
        raise
    return lock


def _check_may_empty(folder: Path, *, is_overwriting: bool) -> None:
    if not is_overwriting:
        raise UserError(f"--out {folder}: not empty; give another folder, or --overwrite to replace the run in it")
    if not (folder / LOG_NAME).exists():
        raise UserError(f"--out {folder}: not empty and holds no run ({LOG_NAME}), so --overwrite leaves it alone")


def empty_folder(folder: Path) -> None:
    """Remove all that is in a folder. The folder itself stays, and with it its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class FolderWatch:
    """A listener that ends a run whose folder was removed or moved: later writes would be lost."""

    def __init__(self, lock: FolderLock) -> None:
        self._lock = lock

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        """Raises StorageError."""
        self.check()

    def check(self) -> None:
        """Raises StorageError unless the folder and the log in it are where they were."""
        folder = self._lock.folder
        if self._lock.is_in_place() and (folder / LOG_NAME).exists():
            return
        moved_to = self._lock.moved_to()
        if moved_to is None or not (moved_to / LOG_NAME).exists():
            raise StorageError(
                f"{folder}: it, or the log in it, was removed while the run went on; stopped: what the run had written "
                "is gone, and it cannot be resumed; start it again: rlmux run"
            )
        raise StorageError(
            f"{folder}: it was moved to {moved_to} while the run went on; stopped; "
            f"resume the run there: rlmux resume {moved_to}"
        )
