"""A worker process on this machine and the one call at a time that it serves.

    controller process                         worker process
    WorkerProcess.call(method, args, then) ──▶ serve(): method(*args)
              poll() ──▶ then(result) ◀─────── (ok, value) | (failed, error)

Calls are bounded and answered in order; further ones queue here. Processes come from a fork server that has
imported torch once, so that a ready worker takes a tenth of a second. A worker whose controller is gone reads the
end of its pipe and leaves: no orphan outlives a killed controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.errors import PipelineError, RlmuxError, WorkerLostError

_FORKSERVER = get_context("forkserver")
_PRELOAD = "rlmux.runtime.preload"
_END_GRACE_S = 2.0


class _Call(NamedTuple):
    method: str
    args: tuple[Any, ...]
    then: Callable[[Any], None]


def warm_up() -> None:
    """Start the fork server, so that it imports torch while the caller reads its file."""
    from multiprocessing import forkserver

    _FORKSERVER.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


class WorkerProcess:
    """One process, its pipe, and the calls that wait for it."""

    def __init__(
        self,
        name: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        cores: Sequence[int],
        log_path: Path,
        call_limit_s: float,
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self._call_limit_s = call_limit_s
        self._calls: deque[_Call] = deque()
        self._deadline_s: float | None = None
        self.connection, theirs = _FORKSERVER.Pipe()
        self._process: BaseProcess = _FORKSERVER.Process(
            target=_serve, args=(theirs, make_worker, args, tuple(cores), str(log_path)), name=name, daemon=True
        )
        self._process.start()
        self.pid = self._process.pid
        theirs.close()

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Have the worker run a method; `then` gets its result. Raises WorkerLostError if the process is gone."""
        self._calls.append(_Call(method, args, then))
        if len(self._calls) == 1:
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        call = self._calls[0]
        self._deadline_s = now_s + self._call_limit_s
        try:
            self.connection.send((call.method, call.args))
        except OSError as error:
            raise WorkerLostError(f"{self.name} is gone: {error}") from error

    def receive(self, now_s: float) -> None:
        """Take the answer that is there and go on with the next call.

        Raises PipelineError (or what the method raised) for a failed call, WorkerLostError if the process is gone.
        """
        try:
            is_ok, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerLostError(f"{self.name} is gone (exit code {self._process.exitcode})") from error
        self._deadline_s = None
        if not is_ok:
            raise value
        call = self._calls.popleft()
        if self._calls:
            self._send(now_s)
        call.then(value)

    def abandoned(self, method: str) -> list[Callable[[Any], None]]:
        """Who still waits for a call of this kind: the process is given up and will not answer."""
        return [call.then for call in self._calls if call.method == method]

    def is_overdue(self, now_s: float) -> bool:
        """It has not answered within its limit."""
        return self._deadline_s is not None and now_s > self._deadline_s

    def end(self) -> None:
        """Ask it to leave by closing its pipe; make it leave if it does not."""
        self.connection.close()
        self._process.join(_END_GRACE_S)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


def _serve(
    connection: Connection, make_worker: Callable[..., Any], args: tuple[Any, ...], cores: Sequence[int], log_path: str
) -> None:
    """The life of a worker process: build the worker, answer calls until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
    _write_output_to(log_path)
    if cores:
        os.sched_setaffinity(0, cores)
    worker: Any = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, call_args = connection.recv()
            try:
                if worker is None:
                    worker = make_worker(*args)
                answer = (True, getattr(worker, method)(*call_args))
            except Exception as error:  # whatever user code raises is one pipeline's fault, not the process's
                traceback.print_exc()
                answer = (False, _portable(error))
            connection.send(answer)


def _portable(error: Exception) -> RlmuxError:
    """The error as one of ours, which pickles; the traceback is in the worker's log."""
    if isinstance(error, RlmuxError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()
    detail = f": {text[0]}" if text else ""
    return PipelineError(f"{type(error).__name__}{detail} ({Path(frame.filename).name}:{frame.lineno})")


def _write_output_to(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
