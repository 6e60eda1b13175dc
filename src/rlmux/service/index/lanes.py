"""The lanes of a folder: itself where it is a run's, else every run's folder in it.

    runs/            lanes "demo" and "friday"
      demo/run.db
      friday/run.db

The index of a lane lies beside its log; where that folder cannot be written to, in the server's own folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from rlmux.log.run_log import LOG_NAME

INDEX_NAME = "index.db"


class Root:
    """The folder that is served."""

    def __init__(self, folder: Path, spare: Path, known: Collection[str] = ()) -> None:
        """`spare`: a folder of the server's own, made when it is needed.

        `known`: names of lanes that are there before they have a log.
        """
        self.folder = folder
        self._known = {folder / name for name in known}
        self._spare = spare

    def takes_submissions(self, folder: Path) -> bool:
        """Whether it is a lane of a service."""
        return folder in self._known

    def files_beside(self, folder: Path) -> list[Path]:
        """Of a service: the file of a lane, and what its controller printed."""
        return [folder.parent / f"{folder.name}{suffix}" for suffix in (".yaml", ".log")] if self._known else []

    def lanes(self) -> dict[str, tuple[Path, Path]]:
        """(run folder, index) of every lane by its name, in the order of the names."""
        if (self.folder / LOG_NAME).is_file():
            folders = [self.folder]
        else:
            folders = sorted({path.parent for path in self.folder.glob(f"*/{LOG_NAME}")} | self._known)
        return {folder.absolute().name: (folder, self._index_of(folder)) for folder in folders}

    def _index_of(self, folder: Path) -> Path:
        if os.access(folder, os.W_OK):
            return folder / INDEX_NAME
        self._spare.mkdir(mode=0o700, exist_ok=True)
        name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
        return self._spare / f"{name}-{INDEX_NAME}"


def log_signature(folder: Path) -> str:
    """Sizes and times of a log's files: it is the same while the log is."""
    parts = []
    for name in (LOG_NAME, f"{LOG_NAME}-wal"):
        try:
            found = (folder / name).stat()
        except OSError:
            continue
        if found.st_size:
            parts.append(f"{name} {found.st_size} {found.st_mtime_ns}")
    return ", ".join(parts)
