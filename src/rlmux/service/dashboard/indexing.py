"""Supervisor of the indexer's process: starts and restarts it, and reads its reports.

start ─▶ process ─▶ lines of JSON: what is wrong with which folder ─▶ trouble(folder)
it ended: restart after 1, 2, 4 ... 60 s; meanwhile every lane reports it
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

from rlmux.runtime.control.supervised_thread import SupervisedThread

_LONGEST_WAIT_S = 60.0


class Indexing:
    """See the module."""

    def __init__(self, folder: Path, spare: Path) -> None:
        self._words = [sys.executable, "-P", "-m", "rlmux.service.index.indexer", str(folder), str(spare)]
        self._trouble: dict[str, str] = {}
        self._is_down = False
        self._is_closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.thread = SupervisedThread(self._run, "indexing")

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        self._process = self._begin()
        self.thread.start()

    def trouble(self, folder: Path) -> str | None:
        """Problem of a run folder's index, in one sentence; None without one."""
        if self._is_down:
            return "the indexer has ended and is being started again; what is shown may be old"
        return self._trouble.get(str(folder))

    def kill(self) -> None:
        """Kill the process; it is restarted."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """The process ends at the end of its input."""
        self._is_closed.set()
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.thread.is_alive():
            self.thread.join()

    def _begin(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def _run(self) -> None:
        wait_s = 1.0
        while True:
            with contextlib.suppress(OSError), self._process or self._begin() as process:  # no room: retried later
                self._process, self._is_down = process, False
                assert process.stdout is not None
                for line in process.stdout:
                    wait_s = 1.0
                    self._handle_line(line)
            self._process = None
            self._is_down = not self._is_closed.is_set()
            if self._is_closed.wait(wait_s):
                return
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _handle_line(self, line: str) -> None:
        report = json.loads(line)
        if report["trouble"] is None:
            self._trouble.pop(report["folder"], None)
        else:
            self._trouble[report["folder"]] = report["trouble"]
