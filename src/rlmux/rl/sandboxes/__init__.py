"""Sandboxes for programs of the user's, one a trajectory, and suites of tasks in Harbor's layout.

    "process"   Linux namespaces: no network but the gateway, the machine's files read-only
    "docker"    a container of the task's own image
    "folder"    a fresh folder; no isolation

Reading order: sandbox, guard, folder, process, harbor_suite, dockerfile, docker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.rl.sandboxes import docker, process
from rlmux.rl.sandboxes.folder import FolderSandbox
from rlmux.rl.sandboxes.harbor_suite import HarborTask
from rlmux.rl.sandboxes.process import ProcessSandbox
from rlmux.rl.sandboxes.sandbox import Gateway, RunningProgram, Sandbox, SandboxLimits

__all__ = ["KINDS", "Gateway", "RunningProgram", "Sandbox", "SandboxLimits", "make_sandbox"]

KINDS = ("process", "docker", "folder")


def make_sandbox(
    kind: str,
    root: Path,
    *,
    limits: SandboxLimits,
    environment: HarborTask | None = None,
    shown: Sequence[Path] = (),
) -> FolderSandbox | docker.DockerSandbox:
    """A sandbox with its files in the folder `root`, which is made here and removed when it is closed.

    The parent of `root` is for sandboxes alone: programs of a process sandbox see it empty, so that none sees another
    one's files. `shown`: folders that they can read even where they lie in /tmp. A task's own memory limit counts where
    it is the smaller one. Raises UserError, with what is accepted, for an unknown kind and for one that this machine
    does not have.
    """
    if environment is not None and environment.memory_bytes is not None:
        most = limits.memory_bytes
        limits = replace(
            limits, memory_bytes=environment.memory_bytes if most is None else min(most, environment.memory_bytes)
        )
    match kind:
        case "folder":
            return FolderSandbox(root, limits)
        case "process":
            if (reason := process.unavailable_reason()) is not None:
                raise UserError(f"sandbox: process: not on this machine: {reason}; accepted: docker, or folder")
            return ProcessSandbox(
                root, limits, hidden=() if environment is None else (environment.folder,), shown=shown
            )
        case "docker":
            if environment is None:
                raise UserError("sandbox: docker: needs a task with an image; accepted: a Harbor suite, or process")
            if (reason := docker.unavailable_reason()) is not None:
                raise UserError(f"sandbox: docker: not on this machine: {reason}; accepted: process, or folder")
            return docker.DockerSandbox(root, limits, environment)
    raise UserError(f"sandbox: unknown kind {kind!r}; accepted: {', '.join(KINDS)}")
