"""Signs of life: beats that a process sends during long calls, and its activity as the system reports it.

    with beating():   a thread looks once a second whether this process computes, or waits for the disk ─┐
    beat()            a piece of a long call is done ────────────────────────────────────────────────────┴─▶ controller
    activity_of(pid)  what a process of this machine does; `standstill.py` compares two of them

The controller ends a worker whose present call has neither been answered nor shown life for its limit. That time passes
is no sign of life: a call that waits for something which never comes sends nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BEAT_EVERY_S = 1.0
LEAST_APART_S = 0.1
"""Least seconds between two beats, since each wakes the controller."""
_LEAST_SHARE = 0.02
"""Least computed part of a second for a sign of life; the check itself takes less."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_EXITING = 0x4
"""The kernel's flag of an ending process (PF_EXITING, linux/sched.h); psutil lacks it."""
_hearts: list[Heart] = []
"""The heart of this process, once it serves calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A process at one moment."""

    state: str
    """State of its main thread, a letter as in `ps`: R runs or could, S waits, D waits for the disk, T is stopped."""
    cpu_s: float
    """Seconds of processor time of all its threads so far."""
    is_ending: bool = False
    """Whether the kernel is ending it."""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


def activity_of(pid: int | None) -> Activity | None:
    """Activity of a process or thread by id; None if it is gone, or the system is not Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return Activity(state=fields[0], cpu_s=cpu_s, is_ending=bool(int(fields[6]) & _EXITING))


class Heart:
    """Sends this process's signs of life. Its thread is made with it: none can be made where memory is short."""

    def __init__(self, send: Callable[[], None]) -> None:
        self.send = send
        self.is_on = threading.Event()
        """Set while a call is under way that is long by nature."""
        self._beat_s = -math.inf
        """Time of the last beat."""
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def beat(self) -> None:
        """Send a sign of life, unless one was sent a moment ago."""
        now_s = time.monotonic()
        if now_s - self._beat_s >= LEAST_APART_S:
            self._beat_s = now_s
            self.send()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # alarms are for the main thread
        while True:
            self.is_on.wait()
            before_s = time.process_time()
            time.sleep(BEAT_EVERY_S)
            is_computing = time.process_time() - before_s > _LEAST_SHARE * BEAT_EVERY_S
            if self.is_on.is_set() and (is_computing or _waits_for_disk()):
                self.send()


def beat_with(send: Callable[[], None]) -> None:
    """Set the sender of this process's beats."""
    _hearts[:] = [Heart(send)]


def beat() -> None:
    """Report progress of the present call; does nothing in a process that serves no calls."""
    for heart in _hearts:
        heart.beat()


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Show life while the body computes or waits for the disk."""
    for heart in _hearts:
        heart.is_on.set()
    try:
        yield
    finally:
        for heart in _hearts:
            heart.is_on.clear()


def _waits_for_disk() -> bool:
    """Whether a thread of this process is in an uninterruptible wait."""
    threads = [activity_of(int(task.name)) for task in Path("/proc/self/task").glob("*")]
    return any(thread is not None and thread.state == "D" for thread in threads)
