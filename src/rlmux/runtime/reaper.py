"""Ends what user code left behind, once its controller is gone, killed or not.

    controller ── a pipe that no other process holds ──▶ reaper: waits for its end, then kills every marked process
        └── fork server, the mark in its environment ──▶ workers ──▶ what user code started: all inherit the mark

A worker that is ended takes its session along. The mark finds the rest: processes whose worker the system killed, and
those that made themselves a session of their own. One reaper serves all runs of a process. Linux only: elsewhere no
process can be found by a mark.

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
"""Seconds in which workers leave by themselves, and finish the checkpoint that they are writing."""
_LOOK_EVERY_S = 0.2
_NUM_LOOKS = 50
_reapers: list[Reaper] = []
"""The reaper of this process, once it has one."""


class Reaper:
    """A process that outlives this one for as long as it takes to kill what is marked."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        theirs, self._ours = os.pipe()  # never closed here: the end of this process closes it
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
    """Mark what is started within, and all that descends from it, to end with this process."""
    if sys.platform != "linux":
        yield
        return
    if not _reapers:
        _reapers.append(Reaper())
    before = os.environ.get(_MARK)
    os.environ[_MARK] = _reapers[0].mark
    try:
        yield
    finally:
        del os.environ[_MARK]
        if before is not None:
            os.environ[_MARK] = before


def kill_marked(mark: str) -> None:
    """Kill every process with the mark, until there is none."""
    for _ in range(_NUM_LOOKS):
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        if sum(_kill_if_marked(pid, mark) for pid in pids) == 0:
            return
        time.sleep(_LOOK_EVERY_S)


def _kill_if_marked(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):  # the process is gone, or another user's
        handle = os.pidfd_open(pid)  # before the look: the number may be another process's afterwards
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
    kill_marked(sys.argv[1])
