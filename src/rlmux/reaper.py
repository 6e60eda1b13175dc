"""Ends processes that outlive their owner, killed or not. The only such module; it lies below the rooms that use it.

    owner ── a pipe that no other process holds ──▶ reaper: waits for its end, then kills until none is left

    controller   workers, and what user code started   found by the mark in their environment, which they inherit;
                 multiprocessing's temporary folder    sent through the pipe
    worker       its inference server                  started by the reaper; found as its children, adopted orphans too

Both ways are needed. A controller's workers descend from its fork server, not from the reaper. The children of vLLM and
SGLang set their title, which overwrites their environment. No reaper kills another one: each has processes to end
first. Linux only: elsewhere no process is found.

Run as a script, by its path, as `reaper.py MARK` or `reaper.py FOLDER COMMAND...`. It imports the standard library
alone: it starts at once, and on any search path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_MARK = "RLMUX_ENDS_WITH"
_LEAVE_S = 1.0
"""Seconds in which workers leave by themselves, and finish the checkpoint that they are writing."""
_TERM_S = 2.0
"""Seconds in which a server leaves after SIGTERM, and then its children, each after its own."""
_POLL_EVERY_S = 0.1
_NUM_POLLS = 100
_PR_SET_CHILD_SUBREAPER = 36


def server_command(folder: Path, command: list[str]) -> list[str]:
    """The command that runs a server until its input ends, then ends the server with its children and its folder.

    Its exit code is the server's, 0 where the input ended first.
    """
    return _script(str(folder), *command)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Mark what is started within, and all that descends from it, to end with this process."""
    if sys.platform != "linux":
        yield
        return
    with variable(_MARK, _mark_of_this_process()):
        yield


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for what is started within."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@cache
def _mark_of_this_process() -> str:
    """The mark of this process's one reaper."""
    import multiprocessing  # here: the script itself starts at once
    from multiprocessing.util import get_temp_dir

    mark = secrets.token_hex(16)
    theirs, ours = os.pipe()  # ours is never closed: the end of this process closes it
    if multiprocessing.parent_process() is None:  # a child of its own has that process's
        os.write(ours, os.fsencode(get_temp_dir()))
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    files = [(os.POSIX_SPAWN_DUP2, theirs, 0), *nowhere]
    os.posix_spawn(sys.executable, _script(mark), os.environ, file_actions=files, setsid=True)
    os.close(theirs)
    return mark


def _script(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, *words]


def _end_marked(mark: str) -> None:
    temporary = os.fsdecode(sys.stdin.buffer.read())
    time.sleep(_LEAVE_S)

    def is_marked(process: Path) -> bool:
        is_reaper = __file__.encode() in (process / "cmdline").read_bytes().split(b"\0")
        return not is_reaper and f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")

    _end_all(is_marked)
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_server(folder: str, *command: str) -> int | None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while server.poll() is None:
        if select.select([0], [], [], _POLL_EVERY_S)[0] and not os.read(0, 1):
            break
    me = str(os.getpid())
    _end_all(lambda process: (process / "stat").read_text().rpartition(")")[2].split()[1] == me, term_s=_TERM_S)
    shutil.rmtree(folder, ignore_errors=True)
    return server.returncode


def _end_all(is_theirs: Callable[[Path], bool], *, term_s: float = 0.0) -> None:
    """Send SIGTERM to each matching process of `/proc`, SIGKILL after `term_s` seconds, until none is left."""
    terminated: set[Path] = set()
    for poll in range(_NUM_POLLS):
        is_late = poll * _POLL_EVERY_S >= term_s
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        num_left = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError), _handle_of(process) as handle:  # it is gone, or another user's
                if is_theirs(process):
                    num_left += 1
                    if is_late or process not in terminated:
                        terminated.add(process)
                        signal.pidfd_send_signal(handle, signal.SIGKILL if is_late else signal.SIGTERM)
        if num_left == 0:
            return
        time.sleep(_POLL_EVERY_S)


@contextlib.contextmanager
def _handle_of(process: Path) -> Iterator[int]:
    """A pidfd, opened before the process is looked at: its number may be another one's afterwards."""
    handle = os.pidfd_open(int(process.name))
    try:
        yield handle
    finally:
        os.close(handle)


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(_run_server(*sys.argv[1:]))
    _end_marked(sys.argv[1])
