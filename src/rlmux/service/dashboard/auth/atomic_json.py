"""Atomic changes of a private JSON file that commands write and a server reads.

command ── changing(folder, name) ── read ─▶ write_whole ─▶ NAME (0600) ── stamp has changed? ─▶ server reads it again
                  └─ a lock of the file system: a second command waits
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json


@contextlib.contextmanager
def changing(folder: Path, name: str) -> Iterator[None]:
    """Hold the file's lock for a read and the write that follows."""
    try:
        descriptor = os.open(folder / f".{name}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise UserError(f"{folder / name}: cannot be changed: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(folder: Path, name: str) -> Any:
    """The file's JSON; None without a file. Raises UserError for a damaged file, or one that others can read."""
    path = folder / name
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(f"{path}: other users can read it; accepted: chmod 600 {path}")
    try:
        return parse_json(text)
    except ValueError:
        raise damaged(folder, name) from None


def damaged(folder: Path, name: str) -> UserError:
    return UserError(f"{folder / name}: is damaged; accepted: remove it, and make its entries again")


def stamp(folder: Path, name: str) -> tuple[int, int, int] | None:
    """A stamp that changes with the file; None without a file."""
    try:
        found = (folder / name).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def write_whole(folder: Path, name: str, value: Any) -> None:
    """Replace the file atomically; the caller holds its lock."""
    aside = folder / f".{name}.new"
    try:
        descriptor = os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(folder / name)
    except OSError as error:
        raise UserError(f"{folder / name}: cannot be written: {error.strerror}") from None
