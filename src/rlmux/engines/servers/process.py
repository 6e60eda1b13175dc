"""A server's process: its folder, its start, its memory and its end.

    ServerProcess(...) ── reaper.py ──▶ server, in a session of its own; it ends with the worker, killed or not

The folder holds the model that the server is started with, and its output. The reaper removes it.

A module of its own: it has processes and what they write, and nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable

import psutil

from rlmux.engines.servers.dialect import Dialect
from rlmux.engines.servers.http_connection import ServerConnection, ServerGoneError
from rlmux.engines.servers.settings import ServerSettings
from rlmux.reaper import server_command

_LOOK_EVERY_S = 0.2
_END_LIMIT_S = 15.0
_NUM_SHOWN_LINES = 40


class ServerProcess:
    """One server that this process started. `wait_until_ready` comes first."""

    def __init__(self, dialect: Dialect, python: str, settings: ServerSettings) -> None:
        self._log = (settings.folder / "server.log").open("a+b")
        """Kept open: the folder goes with a server that ends by itself, and what it said last does not."""
        weakref.finalize(self, self._log.close)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        ours = {"OMP_NUM_THREADS": str(settings.num_threads), **dialect.environment(settings)}
        environment = {name: value for name, value in {**os.environ, **ours}.items() if value is not None}
        self._reaper = subprocess.Popen(
            server_command(settings.folder, dialect.command(python, port, settings)),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )

    def wait_until_ready(self, server: ServerConnection, limit_s: float, on_wait: Callable[[], None]) -> None:
        """Wait until it answers, calling `on_wait` now and then. Raises ServerGoneError with its last words."""
        until_s = time.monotonic() + limit_s
        while not server.is_there("/health"):
            if not self.is_alive:
                raise ServerGoneError(f"the server ended before it answered: {self.last_words()}")
            if time.monotonic() >= until_s:
                raise ServerGoneError(f"the server gave no answer within {limit_s:.0f} s: {self.last_words()}")
            on_wait()
            time.sleep(_LOOK_EVERY_S)

    @property
    def is_alive(self) -> bool:
        return self._reaper.poll() is None

    def last_words(self) -> str:
        """Its last line with an error, or its last line; the last lines also go to this process's output."""
        text = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        print("\n".join(lines[-_NUM_SHOWN_LINES:]), file=sys.stderr, flush=True)
        errors = [line for line in lines if "Error" in line]
        return (errors or lines)[-1].strip() if lines else "it wrote nothing"

    def memory_bytes(self) -> float:
        """Host memory of the server and all its descendants, shared pages counted once a process."""
        total = 0.0
        for process in self._descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def pids(self) -> set[int]:
        """Processes of the server: its own and all its descendants'."""
        return {process.pid for process in self._descendants()}

    def _descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._reaper.pid).children(recursive=True)
        return []

    def end(self) -> None:
        """End it, its descendants and its folder."""
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        try:
            self._reaper.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()


def _free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
