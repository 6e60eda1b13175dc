"""Kind "folder": no isolation. A fresh folder is the working directory, with HOME and TMPDIR in it.

    root/app, root/tests, root/logs, ...        what /app, /tests, /logs, ... are in a sandbox with a root of its own

A program can read and write whatever its user can; what it leaves running is ended with it, unless it kills its guard.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from rlmux.core.errors import PipelineError
from rlmux.rl.sandboxes.sandbox import Gateway, RunningProgram, SandboxLimits, start_guarded

OWN_FOLDERS = ("app", "tests", "logs", "solution", "tmp", "sandbox")
"""Made in every sandbox; /sandbox is HOME."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
"""Of the environment of this process. The rest may hold secrets."""


class FolderSandbox:
    """Files in the folder `root`, which is made here."""

    has_own_root = False

    def __init__(self, root: Path, limits: SandboxLimits) -> None:
        self._root = root.absolute()
        self._limits = limits
        self._programs: list[RunningProgram] = []
        self.workdir = "/app"
        """Where programs start, inside; `prepare` takes it from the Dockerfile."""
        self.environment: dict[str, str] = {}
        """For every program, below what `start` is given."""
        for name in OWN_FOLDERS:
            (self._root / name).mkdir(parents=True)
        (self._root / "tmp").chmod(0o1777)

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
        cwd: str | None = None,
        gateway: Gateway | None = None,
    ) -> RunningProgram:
        """As `Sandbox.start`. The gateway's port is that of the machine, so there is nothing to do for it."""
        program = start_guarded(
            argv,
            env=self._environment(env),
            output=output,
            cwd=str(self.path(cwd or self.workdir)),
            limits=self._limits,
        )
        self._programs.append(program)
        return program

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        folders = {"HOME": str(self._seen("/sandbox")), "TMPDIR": str(self._seen("/tmp"))}
        return {**passed_on, **folders, **self.environment, **env}

    def _seen(self, inside: str) -> Path:
        """A path as programs see it."""
        return self.path(inside)

    def path(self, inside: str) -> Path:
        """The path outside of an absolute path inside.

        Raises PipelineError where a link is on the way: a program made it, and it may lead to any file of the machine.
        """
        found = self._place(inside)
        if found.is_symlink():
            raise PipelineError(f"sandbox: {inside}: a link; accepted: a folder or file")
        return found

    def _place(self, inside: str) -> Path:
        """As `path`, but the last part may be a link, which is then in the way and not on it."""
        parts = PurePosixPath(inside).parts
        if parts[:1] != ("/",) or ".." in parts:
            raise PipelineError(f"sandbox: {inside!r} is no absolute path")
        folder = self._root
        for part in parts[1:-1]:
            folder /= part
            if folder.is_symlink():
                raise PipelineError(f"sandbox: {inside}: {part!r} is a link; accepted: a folder")
        return folder.joinpath(*parts[1:][-1:])

    def put(self, source: Path, inside: str) -> None:
        """As `Sandbox.put`. What is in the way of a file is replaced."""
        if source.is_dir() and not source.is_symlink():
            self.path(inside).mkdir(parents=True, exist_ok=True)
            for each in sorted(source.iterdir()):
                self.put(each, f"{inside.rstrip('/')}/{each.name}")
            return
        target = self._place(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            remove(target)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)

    def clear(self, inside: str) -> None:
        """As `Sandbox.clear`. A link or file in its place is replaced."""
        target = self._place(inside)
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.exists():
            remove(target)
        target.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """As `Sandbox.close`."""
        for program in self._programs:
            program.kill()
        self._programs.clear()
        if self._root.exists():
            remove(self._root)


def remove(folder: Path) -> None:
    """Remove a folder that a program may have made unreadable, in parts or whole. Links are not followed."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not stat.S_ISLNK(os.lstat(inner).st_mode):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
