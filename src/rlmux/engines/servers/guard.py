"""Runs a server, and ends it and all its descendants when the worker that asked for it is gone, killed or not.

    worker ── a pipe that no other process holds ──▶ guard ── starts ──▶ server ──▶ its own children
              its end, or the server's: the guard kills every descendant, removes the folder, and leaves

The guard has a session of its own and is the reaper of orphans beneath it (prctl PR_SET_CHILD_SUBREAPER, Linux 3.4), so
a descendant that its parent left behind is found too. The last line of defence is runtime/reaper.py: the mark in the
environment is inherited.

Run as a script, by its path, as `guard.py FOLDER COMMAND...`: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.1
_MAX_LOOKS = 100
_TERM_LOOKS = 20
"""Looks within which descendants may leave by themselves, after SIGTERM."""


def descendants(pid: int) -> list[int]:
    """Process ids beneath this one, nearest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def end_descendants() -> None:
    """SIGTERM to every descendant, then SIGKILL until there is none."""
    for look in range(_MAX_LOOKS):
        left = descendants(os.getpid())
        for pid in left:
            if look == 0 or look >= _TERM_LOOKS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if look == 0 else signal.SIGKILL)
        _reap()
        if not left:
            return
        time.sleep(_LOOK_EVERY_S)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(folder: str, command: list[str]) -> int:
    """Returns the server's exit code, 0 where the worker ended first."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while server.poll() is None:
        if select.select([0], [], [], _LOOK_EVERY_S)[0] and not os.read(0, 1):
            break
    end_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    return server.returncode or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
