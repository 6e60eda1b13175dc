"""What tests start ends with them, however they end: a process that waits for pytest's end and then ends what is left.

pytest ── RLMUX_TESTS_OF=MARK ──▶ everything that it starts, in sessions of its own too
  │ ends, or is killed
  ▼
python tests/guardian.py PID MARK ──▶ SIGKILL to each process whose environment has the mark
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

VARIABLE = "RLMUX_TESTS_OF"
_ROUNDS = 3
"""Looks in a row that must find no process: one that is being started has its environment a moment later."""
_ROUND_S = 0.2


def start() -> None:
    """Guard what this process starts from now on. Where the system has no handles of processes, nothing is guarded."""
    if not hasattr(os, "pidfd_open"):
        return
    mark = f"{os.getpid()}-{time.time_ns()}"
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    words = [sys.executable, "-S", __file__, str(os.getpid()), mark]
    os.posix_spawn(sys.executable, words, os.environ, file_actions=nowhere, setsid=True)
    os.environ[VARIABLE] = mark


def guard(pid: int, mark: str) -> None:
    """Wait for the end of a process, then end all that have its mark."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])
    num_quiet = 0
    while num_quiet < _ROUNDS:
        found = _marked(mark)
        num_quiet = 0 if found else num_quiet + 1
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_ROUND_S)


def _marked(mark: str) -> list[int]:
    wanted, found = f"{VARIABLE}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
