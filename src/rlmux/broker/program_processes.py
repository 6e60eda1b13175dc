"""Identity of processes: number and start time in /proc.

Numbers are reused; a process with another start time is another process. A zombie counts as gone: it has no memory.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One process of this machine."""

    pid: int
    start: int
    """Start of the process, in clock ticks since boot."""


def process_of(pid: int) -> Process | None:
    """The process of that number; None where there is none that lives."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else Process(pid, int(fields[19]))


def is_alive(process: Process) -> bool:
    """Whether that very process lives."""
    return process_of(process.pid) == process


def end_process(process: Process) -> None:
    """End that very process at once. Another that has its number since is left alone, and so is one of another user."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if is_alive(process):  # the handle was opened before this check, so it is that very process's
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(handle)
