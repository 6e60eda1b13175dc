"""The audit log: one line before a request takes effect, and one with its outcome.

    Door ── may have an effect? ─▶ begin ─ on disk, or 507 and nothing is done ─▶ effect ─▶ end, with the status
         ── refused? ───────────▶ refused: one line                               └─ killed: there is no second line

    audit.jsonl (0600), appended, never rewritten; at 16 MiB it becomes audit.1.jsonl, audit.2.jsonl ...

Refused reads are written at most ten times a second, with a count of the omitted ones: any program that reaches the
server can cause them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError

NAME = "audit.jsonl"
_MAX_PATH = 512
"""Longest kept address, in characters."""
_MAX_BYTES = 16 << 20
_REFUSED_READS_PER_S = 10


class Audit:
    """Writes the file. Thread-safe."""

    def __init__(self, folder: Path, max_bytes: int = _MAX_BYTES) -> None:
        self._folder = folder
        self._path = folder / NAME
        self._max_bytes = max_bytes
        self._is_written = threading.Lock()
        self._second = 0
        self._num_in_second = 0
        self._num_left_out = 0

    def begin(self, **caller: str) -> str:
        """Record an admitted request; returns the id of its line. Raises OSError on a failed write."""
        id = secrets.token_hex(6)
        self._append({"id": id, **_row(**caller), "status": None})
        return id

    def end(self, id: str, status: int, *, user: str = "") -> None:
        """Record the outcome, and the user of a login.

        A failed write is ignored: the effect and its first line exist already.
        """
        with contextlib.suppress(OSError):
            self._append({"id": id, "ended": _now(), "status": status, **({"user": user} if user else {})})

    def refused(self, status: int, **caller: str) -> None:
        """Record a refused request that could have had an effect. Raises OSError on a failed write."""
        self._append({**_row(**caller), "status": status})

    def refused_read(self, status: int, **caller: str) -> None:
        """Record a refused read, unless there are too many or the disk is full."""
        with self._is_written:
            second = int(time.monotonic())  # the wall clock may be set back
            if second != self._second:
                self._second, self._num_in_second = second, 0
            self._num_in_second += 1
            if self._num_in_second > _REFUSED_READS_PER_S:
                self._num_left_out += 1
                return
            num_left_out, self._num_left_out = self._num_left_out, 0
        more = {"left_out": num_left_out} if num_left_out else {}
        with contextlib.suppress(OSError):
            self._append({**_row(**caller), "status": status, **more})

    def _append(self, row: dict[str, Any]) -> None:
        data = (json.dumps(row) + "\n").encode()
        with self._is_written:
            self._rotate()
            descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            try:
                written = os.write(descriptor, data)
                if written < len(data):  # the disk is full: half a line would spoil the next
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)

    def _rotate(self) -> None:
        with contextlib.suppress(OSError):
            if self._path.stat().st_size >= self._max_bytes:
                number = 1 + max((_number(path) for path in _sealed(self._folder)), default=0)
                self._path.rename(self._folder / f"audit.{number}.jsonl")


def read(
    folder: Path, *, skip: int = 0, limit: int = 100, user: str | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """(requests, newest first; whether there are more). `status` is null if the server ended first.

    Raises UserError for an unreadable file.
    """
    found: list[dict[str, Any]] = []
    for number, row in enumerate(entry for entry in _rows(folder) if user is None or entry["user"] == user):
        if number >= skip + limit:
            return found, True
        if number >= skip:
            found.append(row)
    return found, False


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every request with its outcome, newest first."""
    end_by_id: dict[str, dict[str, Any]] = {}
    for path in [folder / NAME, *sorted(_sealed(folder), key=_number, reverse=True)]:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        for line in reversed(lines):
            try:
                row = json.loads(line)
            except ValueError:  # a line cut off by a crash
                continue
            id = row.pop("id", None)
            if "path" not in row:
                end_by_id[id] = row
                continue
            row |= {key: value for key, value in end_by_id.pop(id, {}).items() if key in ("status", "user")}
            yield {
                "at": row["at"],
                "user": row["user"],
                "by": "token" if row.get("token") else "",  # an older line without the key
                **row,
                "left_out": row.get("left_out", 0),
            }


def _sealed(folder: Path) -> list[Path]:
    return [path for path in folder.glob("audit.*.jsonl") if path.name.split(".")[1].isdecimal()]


def _number(path: Path) -> int:
    return int(path.name.split(".")[1])


def _row(*, user: str, by: str, token: str, address: str, method: str, path: str) -> dict[str, Any]:
    """`by`: the user's credential: `token`, `session`, `proxy` or empty. `token`: the token's id, if any."""
    return {
        "at": _now(),
        "user": user,
        "by": by,
        "token": token,
        "address": address,
        "method": method,
        "path": path[:_MAX_PATH],
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
