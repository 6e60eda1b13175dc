"""What a sandbox is, and the one way in which a program is started in it.

    starter ── a pipe: the order, then nothing ──▶ guard ── fork ──▶ program and all that descends from it
            ◀── "ready", or what failed ──────────  (guard.py)

The guard ends with the exit code of the program, after every descendant. When the pipe closes it kills them all: `kill`
closes it, or the system does because the starter was killed. A child that the starter forks without an exec holds the
pipe open; the guard then waits for its end as well.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.errors import PipelineError

_GUARD = Path(__file__).with_name("guard.py")
_LEAVE_S = 10.0
"""Seconds in which a guard kills what it guards. One that takes longer hangs in the kernel, and is killed itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of each program in a sandbox. None: not limited. Time is the caller's to limit."""

    memory_bytes: int | None = None
    """Of private writable memory, one process each (RLIMIT_DATA); with docker, of the whole container."""
    file_bytes: int | None = None
    """Size of any one file (RLIMIT_FSIZE), the program's output included."""
    num_processes: int | None = None
    """At a time. A folder does not hold it: there the system counts all processes of the user. Nor does a process
    sandbox of root's, which the system exempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Where a program finds its model."""

    port: int
    """On 127.0.0.1, outside and inside."""
    socket: Path
    """The same server on a unix socket, outside."""


class Sandbox(Protocol):
    """Files and limits for programs that run one after another."""

    has_own_root: bool
    """Whether a program sees `/app` and `/tests` under these names."""

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
        cwd: str | None = None,
        gateway: Gateway | None = None,
    ) -> RunningProgram:
        """Start a program; stdout and stderr go to the file `output`. `cwd`: absolute, inside; by default where the
        task works. A program that cannot be executed ends with 127. Raises PipelineError if the sandbox fails."""

    def put(self, source: Path, inside: str) -> None:
        """Copy a file to an absolute path inside, or the contents of a folder into it. Not while a program runs."""

    def clear(self, inside: str) -> None:
        """Make a folder inside, or empty it. Not while a program runs."""

    def path(self, inside: str) -> Path:
        """The path outside of an absolute path inside; with docker, of a copy. Raises PipelineError for links."""

    def close(self) -> None:
        """End all that runs in it and remove its files. May be called again."""


class RunningProgram:
    """A program in a sandbox. It ends with the last reference to its starter's end of the pipe."""

    def __init__(self, guard: subprocess.Popen[bytes], also_kill: Callable[[], None] | None = None) -> None:
        self._guard = guard
        self._also_kill = also_kill

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._guard.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. Nothing of it runs once there is one."""
        return self._guard.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait up to `timeout` seconds; returns as `poll` does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._guard.wait(timeout)
        return None

    def kill(self) -> None:
        """End it and every descendant, by SIGKILL. Returns when they are gone."""
        if self._also_kill is not None and self.poll() is None:
            self._also_kill()
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        if self.wait(_LEAVE_S) is None:
            self._guard.kill()
            self._guard.wait()


def start_guarded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    output: Path,
    cwd: str,
    limits: SandboxLimits,
    namespaces: Mapping[str, Any] | None = None,
    also_kill: Callable[[], None] | None = None,
) -> RunningProgram:
    """Start a program under a guard. `namespaces`: what guard.py needs to give it a root of its own.

    Raises PipelineError, with the system's word, if the guard fails before the program starts.
    """
    order = {
        "argv": list(argv),
        "env": dict(env),
        "cwd": cwd,
        "limits": asdict(limits),
        "namespaces": namespaces,
    }
    with open(output, "ab") as into:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=into,
            cwd="/",
            start_new_session=True,
        )
    assert guard.stdin is not None
    assert guard.stdout is not None
    with guard.stdout:
        try:
            guard.stdin.write(json.dumps(order).encode() + b"\n")
            guard.stdin.flush()
            answer = guard.stdout.readline().decode().strip()
        except OSError as error:
            answer = str(error)
    if answer != "ready":
        program = RunningProgram(guard)
        program.kill()
        raise PipelineError(f"sandbox: {answer or f'its guard ended with {guard.returncode}'}")
    return RunningProgram(guard, also_kill)
