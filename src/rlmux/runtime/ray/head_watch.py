"""Watches the head of the Ray cluster, without which Ray ends this process with a line of its own.

    t=0            t=1 .. 44                     t=45                          t=60
    head is gone   orders go on, no node is      the run stops in one line     Ray's end of the process,
                   polled: Ray would block       and can be resumed            which no code survives

A head that comes back in time (Ray's fault-tolerant heads do) changes nothing. A thread looks, since a call of Ray may
block until the head is back. If the controller is inside such a call at 45 s, it gets some seconds; then the thread
prints the line and ends the process. The log is committed at each decision, so nothing that was finished is lost.

A module of its own: it has a thread of its own, and no Ray.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlmux.core.errors import ClusterLostError

_LOOK_EVERY_S = 1.0
_GONE_LIMIT_S = 45.0
"""Seconds without an answer after which the head is lost; Ray's own limit is 60."""
_GRACE_S = 8.0
"""Seconds that the controller has to stop in order."""
_EXIT_CODE = 1


class HeadWatch:
    """A thread that connects to the head once a second, from creation to `close`."""

    def __init__(
        self,
        address: str,
        folder: Path,
        *,
        answers: Callable[[], bool],
        end_process: Callable[[str], None] = lambda line: _end_process(line),
        gone_limit_s: float = _GONE_LIMIT_S,
        grace_s: float = _GRACE_S,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        """`answers`: whether the head accepts a connection."""
        self._address = address
        self._folder = folder
        self._answers = answers
        self._end_process = end_process
        self._limits_s = gone_limit_s, grace_s, look_every_s
        self._gone_since_s: float | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-head", daemon=True)
        self._thread.start()

    def is_away(self) -> bool:
        """Whether the head does not answer now; a call that needs it would block."""
        return self._gone_since_s is not None or not self._answers()

    def check(self) -> None:
        """Raises ClusterLostError once the head has been away for too long."""
        gone_limit_s, _, _ = self._limits_s
        if self._gone_since_s is not None and time.monotonic() - self._gone_since_s >= gone_limit_s:
            raise ClusterLostError(self.line())

    def line(self) -> str:
        """What is gone, what was kept, and the command that continues."""
        return (
            f"the head of the Ray cluster {self._address} is gone; stopped, nothing that was finished is lost; start a "
            f"cluster with `ray start --head` and resume with: rlmux resume {self._folder} --address HOST:PORT"
        )

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        gone_limit_s, grace_s, look_every_s = self._limits_s
        while not self._is_closed.wait(look_every_s):
            if self._answers():
                self._gone_since_s = None
                continue
            self._gone_since_s = self._gone_since_s or time.monotonic()
            if time.monotonic() - self._gone_since_s >= gone_limit_s + grace_s:
                self._end_process(self.line())
                return


def _end_process(line: str) -> None:
    print(f"rlmux: {line}", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)
