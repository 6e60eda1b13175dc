"""Ends what user code left behind, once its controller is gone, killed or not.

    controller ── a pipe that nobody else holds ──▶ undertaker: waits for its end, then kills whoever has the mark
        └── fork server, the mark in its environment ──▶ workers ──▶ what user code started: all inherit it

A worker that is ended takes its session along. The mark finds the rest: processes whose worker the system killed, and
those that made themselves a session of their own. One undertaker serves all runs of a process. Linux only: elsewhere
nobody can be found by a mark.

Run as a script, by its path: it imports the standard library alone and is ready before anything is marked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_MARK = "RLMUX_ENDS_WITH"
_GRACE_S = 1.0
"""In which workers leave by themselves, and finish the checkpoint that they are writing."""
_LOOK_EVERY_S = 0.2
_NUM_LOOKS = 50
_undertakers: list[Undertaker] = []
"""This process's, once it has one."""


class Undertaker:
    """A process that outlives this one for as long as it takes."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        theirs, self._ours = os.pipe()  # never closed: the end of this process is
        nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", __file__, self.mark],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, theirs, 0), *nowhere],
            setsid=True,
        )
        os.close(theirs)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """What is started within, and all that descends from it, ends with this process."""
    if sys.platform != "linux":
        yield
        return
    if not _undertakers:
        _undertakers.append(Undertaker())
    before = os.environ.get(_MARK)
    os.environ[_MARK] = _undertakers[0].mark
    try:
        yield
    finally:
        del os.environ[_MARK]
        if before is not None:
            os.environ[_MARK] = before


def bury(mark: str) -> None:
    """Kill every process with the mark, until there is none."""
    for _ in range(_NUM_LOOKS):
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        if sum(_kill_if_marked(pid, mark) for pid in pids) == 0:
            return
        time.sleep(_LOOK_EVERY_S)


def _kill_if_marked(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):  # it is gone, or somebody else's
        handle = os.pidfd_open(pid)  # before the look: the number may be another's afterwards
        try:
            is_marked = f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if is_marked:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            return is_marked
        finally:
            os.close(handle)
    return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    time.sleep(_GRACE_S)
    bury(sys.argv[1])
