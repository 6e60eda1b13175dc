"""A worker process on this machine, which serves one call at a time.

    controller process                         worker process
    WorkerProcess.call(method, args, then) ──▶ serve(): method(*args)
                     sign of life     ◀─────── (None, None)            during a long call (heartbeat.py)
              poll() ──▶ then(result) ◀─────── (ok, value) | (failed, error)

Calls are bounded and answered in order; further ones queue here. Processes come from a fork server that has
imported torch once, so that a ready worker takes a tenth of a second.

No orphan outlives its controller, killed or not: a worker reads the end of its pipe and leaves; one that is stuck
in a call gets the system's death signal when the fork server, which ends with the controller, is gone. A worker has
a session of its own, so ending it ends what user code started in it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.errors import (
    DeviceMemoryError,
    HostMemoryError,
    PipelineError,
    RlmuxError,
    StorageError,
    WorkerLostError,
)
from rlmux.hidden_main import hidden_main, show_working_folder
from rlmux.reaper import marking, variable
from rlmux.rl.loading import tell_calls_to
from rlmux.runtime.workers.heartbeat import Activity, activity_of, beat_with

_FORKSERVER = get_context("forkserver")
_IMPORTS = "rlmux.runtime.workers.fork_server_imports"
_END_GRACE_S = 2.0
_LOOK_EVERY_S = 0.2
_CHECKPOINT_GRACE_S = 600.0
"""Longest wait for a trainer's checkpoint at the end of a run."""
_EXIT_REPORT_S = 5.0
"""Seconds that the exit code of a process which has closed its pipe may take to arrive. It comes through the fork
server, which may have to wait for a core on a busy machine."""
_TRANSFER_LIMIT_S = 10
"""Seconds within which an answer that has begun to arrive, or a call that has begun to leave, must continue: a worker
that was stopped in the middle of one must not hold its controller."""
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc")
"""Texts by which libraries in C report what Python calls MemoryError."""
_OUT_OF_DEVICE_MEMORY = "OutOfMemoryError"
"""Name of torch's error, which not every process imports."""
_EXIT_CODE = "exit code"
_MAX_WORDS = 1000
"""Bytes of the name of a call."""
_WARNINGS = "PYTHONWARNINGS"
_MAX_FILES = 1 << 16
"""Most files that the soft limit is raised to: some programs close every number below their limit at the start."""
_FILES_OF_A_START = 16
"""Files that the start of a worker opens, those of a fork server that may have to be started too included."""
_PR_SET_PDEATHSIG = 1
_CODE_WITHOUT_SERVER = 255
"""Exit code that multiprocessing reports if the fork server is gone."""
_ended_fork_servers: dict[int, str] = {}
"""How fork servers of this process ended, by process id."""
BUILD = "build"
"""The call that only creates a worker, as any first call does."""


class _Call(NamedTuple):
    method: str
    args: tuple[Any, ...]
    then: Callable[[Any], None]


def warm_up(*, imports: str | None = None) -> None:
    """Start the fork server, so that it imports torch while its caller reads its file; a borrowed one runs already.

    `imports`: module to import in place of the workers' own with torch, for processes that need none of it; a fork
    server that is there stays.
    """
    from multiprocessing import forkserver, resource_tracker

    if _is_borrowing() or (imports is not None and fork_server_pid() is not None):
        return
    server: Any = vars(forkserver)["_forkserver"]
    if imports is None and _IMPORTS not in server._preload_modules:
        server._stop()  # it was started without our imports: every worker would have to import torch itself
    _FORKSERVER.set_forkserver_preload([imports or _IMPORTS])
    with hidden_main():
        with _quiet_about_leaks():
            resource_tracker.ensure_running()  # it lets interrupts through again when it has started
        with marking(), _without_interrupts():
            forkserver.ensure_running()


def _quiet_about_leaks() -> contextlib.AbstractContextManager[None]:
    """Let the resource tracker, when it is started in the body, remove what a killed worker leaves without a warning.

    User code's pools have semaphores, and their workers are ended by SIGKILL where they fail.
    """
    return variable(
        _WARNINGS, ",".join(filter(None, (os.environ.get(_WARNINGS), "ignore:resource_tracker:UserWarning")))
    )


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard one, 65,536 at most: each worker takes five."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it: the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """Warm up for the body. If it raises, the fork server ends with it where this has started it: imports go on for
    seconds after the end of the process, with its stdout and stderr open."""
    before = fork_server_pid()
    warm_up()
    try:
        yield
    except BaseException:
        started = fork_server_pid()
        if started is not None and started != before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started, signal.SIGKILL)
        raise


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block Ctrl-C in processes started in the body: a terminal sends it to all its processes.

    A fork server ignores it from its first import on (`fork_server_imports`).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork_server_address() -> str:
    """Address of this process's fork server, for others on this machine; restarts a killed server."""
    from multiprocessing import forkserver

    warm_up()
    address: str = vars(forkserver)["_forkserver"]._forkserver_address
    return address


def fork_server_pid() -> int | None:
    """Process id of this process's fork server; None before its start."""
    from multiprocessing import forkserver

    pid: int | None = vars(forkserver)["_forkserver"]._forkserver_pid
    return pid


def borrow_fork_server(address: str) -> None:
    """Fork this process's workers from another process's fork server, which ends with that process."""
    from multiprocessing import forkserver

    server: Any = vars(forkserver)["_forkserver"]
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR)
    server.ensure_running = _borrowed


def _borrowed() -> None:
    """Replaces the start of a fork server: a borrowed one is started by its owner."""


class _LastWords:
    """A text in memory that a process leaves behind: read after its death, however that came."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = os.memfd_create("last words") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:  # on its way to a process that is being started
        return _received_words, (DupFd(self._descriptor),)

    def write(self, text: str) -> None:
        os.pwrite(self._descriptor, text.encode(errors="replace").replace(b"\n", b" ")[:_MAX_WORDS] + b"\n", 0)

    def read(self) -> str:
        return os.pread(self._descriptor, _MAX_WORDS + 1, 0).partition(b"\n")[0].decode(errors="replace")

    def close(self) -> None:
        os.close(self._descriptor)


def _received_words(descriptor: Any) -> _LastWords:
    return _LastWords(descriptor.detach())


class WorkerProcess:
    """One process, its pipe, and the calls that wait for it."""

    def __init__(
        self,
        name: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        cores: Sequence[int],
        gpu: str = "",
        environment: Mapping[str, str] = {},
        log_path: Path,
        call_limit_s: float,
    ) -> None:
        """`environment`: variables that it has besides those of this process."""
        self.name = name
        self.address = "127.0.0.1"
        self.pid: int | None = None
        self.call_limit_s = call_limit_s
        self.num_beats = 0
        """Signs of life of its calls so far."""
        self.called_s: float | None = None
        """Time at which the present call was sent; None between calls."""
        self._calls: deque[_Call] = deque()
        self._last_beat_s: float | None = None
        """Time at which the present call was sent, or last showed life; None between calls."""
        self._is_read = threading.Lock()
        _check_free_files(name)
        self.connection, theirs = _FORKSERVER.Pipe()
        self._last_words = _LastWords()
        """The call of the user's code that is under way; empty between two."""
        variables = {**environment, "CUDA_VISIBLE_DEVICES": gpu}  # no more GPUs are seen than were given
        work = (theirs, self._last_words, make_worker, args, tuple(cores), variables, str(log_path))
        try:
            self.process = _started(name, work)
        except (EOFError, OSError):  # the fork server was killed: once it has ended, the next attempt finds a new one
            _ending_of_fork_server(fork_server_pid())
            self.process = _started(name, work)
        self.pid = self.process.pid
        self._fork_server_pid = None if _is_borrowing() else fork_server_pid()
        self._handle = _open_handle(self.pid)
        theirs.close()
        _limit_transfers(self.connection)

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Call a method of the worker; `then` gets the result. Raises WorkerLostError if the process is gone."""
        self._calls.append(_Call(method, args, then))
        if len(self._calls) == 1:
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        call = self._calls[0]
        self.called_s = self._last_beat_s = now_s
        try:
            self.connection.send((call.method, call.args))
        except OSError as error:
            raise WorkerLostError(f"{self.name} is gone: {error}") from error

    def receive(self, now_s: float) -> None:
        """Handle the available answer and send the next call, or handle a sign of life.

        Raises PipelineError (or what the method raised) for a failed call, and for user code that ends the process;
        WorkerLostError if the process is gone for another reason.
        """
        try:
            is_ok, value = self.connection.recv()
        except BlockingIOError as error:  # out of time
            raise WorkerLostError(f"{self.name} is gone (stopped in the middle of an answer)") from error
        except (EOFError, OSError) as error:
            raise self._loss() from error
        if is_ok is None:
            self.num_beats += 1
            self._last_beat_s = now_s if self._calls else None
            return
        self.called_s = self._last_beat_s = None
        if not is_ok:
            raise value
        call = self._calls.popleft()
        if self._calls:
            self._send(now_s)
        call.then(value)

    def _loss(self) -> RlmuxError:
        ending, call = self.how_it_ended(), self._last_words.read()
        is_own_exit = ending.startswith(_EXIT_CODE) and ending != _exit_reason(_CODE_WITHOUT_SERVER)
        if call and is_own_exit:
            return PipelineError(f"{call} ended its process (os._exit, {ending})")
        return WorkerLostError(f"{self.name} is gone ({ending}{f', in {call}' if call else ''})")

    def is_overdue(self, now_s: float) -> bool:
        """Whether the present call exceeded its limit without an answer or sign of life."""
        return self._last_beat_s is not None and now_s > self._last_beat_s + self.call_limit_s

    def activity(self) -> Activity | None:
        """Activity of the process; None if unknown."""
        return activity_of(self.pid)

    def ending(self) -> str | None:
        """How it ended, if it has: `exit code 1`, `killed by SIGKILL`."""
        code = self._exit_code(0.0)
        return None if code is None else _exit_reason(code)

    def end(self, *, finishes_checkpoint: bool = False) -> None:
        """End the process by closing its pipe; kill it if it stays. It leaves once its checkpoint is on disk."""
        self.connection.close()
        if finishes_checkpoint:
            self._wait_for_checkpoint()
        self._exit_code(_END_GRACE_S)
        self.kill()

    def _wait_for_checkpoint(self) -> None:
        """Wait until the process has left, or was stopped by a signal and finishes nothing."""
        until_s = time.monotonic() + _CHECKPOINT_GRACE_S
        while self._exit_code(_LOOK_EVERY_S) is None and time.monotonic() < until_s:
            activity = self.activity()
            if activity is not None and activity.is_stopped:
                return

    def kill(self) -> None:
        """End the process, and everything in its session."""
        with contextlib.suppress(OSError):
            self.connection.close()
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._last_words.close()
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
        elif self._exit_code(0.0) is None:
            self.process.kill()
        self._exit_code(_END_GRACE_S)
        with contextlib.suppress(ValueError):  # dead, not yet reaped by the kernel
            self.process.close()
        self.pid = None

    def how_it_ended(self) -> str:
        """How it ended, after a wait of some seconds for its exit code; `its pipe is closed` without one.

        The fork server reports the code, and ends its workers with itself.
        """
        code = self._exit_code(_EXIT_REPORT_S)
        is_untold = code in (None, _CODE_WITHOUT_SERVER)
        server_ending = _ending_of_fork_server(self._fork_server_pid) if is_untold else None
        if server_ending is not None:
            return f"its fork server, process {self._fork_server_pid}, was {server_ending}; a new one is started"
        return "its pipe is closed" if code is None else _exit_reason(code)

    def _exit_code(self, wait_s: float) -> int | None:
        """The exit code, read by one thread at a time: the fork server sends it once."""
        with self._is_read:
            self.process.join(wait_s)
            return self.process.exitcode


def _exit_reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"{_EXIT_CODE} {code}"


def _ending_of_fork_server(pid: int | None) -> str | None:
    """How a fork server of this process ended; None while it lives, and for a borrowed one.

    Waits for the end of a server whose pipes are closed.
    """
    if pid is None:
        return None
    until_s = time.monotonic() + _EXIT_REPORT_S
    with contextlib.suppress(ChildProcessError):
        while pid not in _ended_fork_servers:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it is multiprocessing's to reap
            if ended is not None:
                is_exit = ended.si_code == os.CLD_EXITED
                _ended_fork_servers[pid] = _exit_reason(ended.si_status if is_exit else -ended.si_status)
                break
            server = activity_of(pid)
            if server is None or not server.is_ending or time.monotonic() >= until_s:
                break
            time.sleep(0.005)
    return _ended_fork_servers.get(pid)


def _check_free_files(name: str) -> None:
    """Raises StorageError where a start would run out of files half way: the fork server does not survive that."""
    free: list[int] = []
    try:
        for _ in range(_FILES_OF_A_START):
            free.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise StorageError(
            f"{name}: no file is left for another worker: {limit} may be open; accepted: a higher limit (ulimit -n)"
        ) from error
    finally:
        for descriptor in free:
            os.close(descriptor)


def _started(name: str, work: tuple[Any, ...]) -> BaseProcess:
    if not _is_borrowing():
        _ending_of_fork_server(fork_server_pid())  # one that has ended is reaped, and forgotten, below
    process = _FORKSERVER.Process(target=_serve, args=work, name=name, daemon=True)
    with hidden_main(), contextlib.nullcontext() if _is_borrowing() else marking():
        process.start()  # a fork server that was killed is started again here
    return process


def _is_borrowing() -> bool:
    from multiprocessing import forkserver

    return vars(forkserver)["_forkserver"].ensure_running is _borrowed


def _serve(
    connection: Connection,
    last_words: _LastWords,
    make_worker: Callable[..., Any],
    args: tuple[Any, ...],
    cores: Sequence[int],
    environment: Mapping[str, str],
    log_path: str,
) -> None:
    """The life of a worker process: build the worker, answer calls until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
    current_process().daemon = False  # to the controller alone: user code may start processes, which its own end ends
    os.register_at_fork(after_in_child=connection.close)  # held there too, the pipe would outlive this process
    show_working_folder()
    os.umask(0o077)
    os.setsid()
    _release_fork_server()
    _die_with_parent()
    write_output_to(log_path)
    faulthandler.enable()  # a crash in C leaves the Python stack in the log
    os.environ.update(environment)  # before the first call to CUDA
    if cores:
        os.sched_setaffinity(0, cores)
    worker: Any = None
    sending = threading.Lock()

    def send(answer: tuple[bool | None, Any]) -> None:
        with sending:
            connection.send(answer)

    beat_with(lambda: send((None, None)))
    tell_calls_to(last_words.write)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, call_args = connection.recv()
            try:
                if worker is None:
                    worker = make_worker(*args)
                answer = (True, None if method == BUILD else getattr(worker, method)(*call_args))
            except (Exception, SystemExit) as error:  # what user code raises is one pipeline's fault
                traceback.print_exc()
                answer = (False, portable_error(error))
            send(answer)


def portable_error(error: BaseException) -> RlmuxError:
    """The error as one of ours, which pickles; the traceback is in the worker's log."""
    if isinstance(error, RlmuxError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()
    detail = f": {text[0]}" if text else ""
    line = f"{type(error).__name__}{detail} ({Path(frame.filename).name}:{frame.lineno})"
    # The worker's successor may find enough memory: handle it as a kill by the system.
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return HostMemoryError(f"out of memory: {line}")
    return DeviceMemoryError(line) if type(error).__name__ == _OUT_OF_DEVICE_MEMORY else PipelineError(line)


def _open_handle(pid: int | None) -> int | None:
    """A handle of the process, safe against reuse of its id; None on systems without such handles."""
    try:
        return os.pidfd_open(pid) if pid is not None else None
    except (AttributeError, OSError):
        return None


def _limit_transfers(connection: Connection) -> None:
    end = socket.socket(fileno=os.dup(connection.fileno()))
    limit = struct.pack("ll", _TRANSFER_LIMIT_S, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, limit)
    end.close()


def _release_fork_server() -> None:
    """Close the pipe by which this worker would keep its fork server alive.

    The fork server ends when its controller's end of that pipe is closed. Every child inherits this end, for children
    of its own: a stuck worker would keep the fork server alive, and thereby itself.
    """
    from multiprocessing import forkserver

    handed_down = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if isinstance(handed_down, int):
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, handed_down)
        os.close(nowhere)


def _die_with_parent() -> None:
    """Request SIGKILL at the end of the fork server.

    Called before the first call is read: after that, a worker reads the end of the pipe instead.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_output_to(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
