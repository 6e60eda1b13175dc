"""A call that is long by nature shows that it lives: the worker's side.

    with beating():   a thread looks once a second whether this process computes, or waits for the disk ─┐
    beat()            a piece of a long call is done ────────────────────────────────────────────────────┴─▶ controller

The controller ends a worker whose present call has neither been answered nor shown life for its limit. That time passes
is no sign of life: a call that waits for something which never comes sends nothing.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BEAT_EVERY_S = 1.0
LEAST_APART_S = 0.1
"""Seconds between two beats, at least: each wakes the controller, which has devices to hand on."""
_LEAST_SHARE = 0.02
"""Part of a second that the process must have computed to be alive; looking takes less."""
_hearts: list[Heart] = []
"""The one of this process, once it serves calls."""


class Heart:
    """Sends this process's signs of life. Its thread is made with it: none can be made where memory is short."""

    def __init__(self, send: Callable[[], None]) -> None:
        self.send = send
        self.is_on = threading.Event()
        """Set while a call is under way that is long by nature."""
        self._beat_s = -math.inf
        """Time of the last beat."""
        threading.Thread(target=self._look, name="heart", daemon=True).start()

    def beat(self) -> None:
        """Send a sign of life, unless one went out a moment ago."""
        now_s = time.monotonic()
        if now_s - self._beat_s >= LEAST_APART_S:
            self._beat_s = now_s
            self.send()

    def _look(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # alarms are for the main thread
        while True:
            self.is_on.wait()
            before_s = time.process_time()
            time.sleep(BEAT_EVERY_S)
            is_computing = time.process_time() - before_s > _LEAST_SHARE * BEAT_EVERY_S
            if self.is_on.is_set() and (is_computing or _waits_for_disk()):
                self.send()


def beat_with(send: Callable[[], None]) -> None:
    """Let this process's beats go out this way."""
    _hearts[:] = [Heart(send)]


def beat() -> None:
    """Show that the present call has come a piece further. Nothing happens where no calls are served."""
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
    """A thread of this process is in the system's hands, where no signal reaches it either."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if task.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False
