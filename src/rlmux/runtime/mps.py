"""NVIDIA's MPS daemon for one run: while it listens, processes of several pipelines compute on a GPU at the same time.

    start ─▶ a daemon that is there already is used, and left alone      its folder: CUDA_MPS_PIPE_DIRECTORY
          ─▶ else one of our own, in a private folder ─▶ end

Workers have the folder in their environment. Where there can be no daemon, kernels of different processes take
turns, and one line says why. https://docs.nvidia.com/deploy/mps/

A module of its own: the daemon lives apart from any worker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PIPES = "/tmp/nvidia-mps"
_CONTROL = "nvidia-cuda-mps-control"
_START_LIMIT_S = 10.0
_POLL_S = 0.05


class MpsDaemon:
    """The daemon that this process's workers compute under."""

    def __init__(self) -> None:
        self.missing = ""
        """Why there is none, in one line; empty if there is one."""
        self.environment: dict[str, str] = {}
        """What a process needs to compute under a daemon of our own."""

    @classmethod
    def start(cls) -> MpsDaemon:
        """Use the daemon that listens, or start one. Nothing is raised: the run goes on without."""
        daemon = cls()
        pipes = Path(os.environ.get(PIPES, _USUAL_PIPES))
        if (pipes / "control").exists():
            owner = (pipes / "control").stat().st_uid
            if owner not in (os.getuid(), 0):
                daemon.missing = f"the daemon in {pipes} is user {owner}'s; accepted: one of your own, in {PIPES}"
        elif shutil.which(_CONTROL) is None:
            daemon.missing = f"{_CONTROL} is not installed here"
        else:
            daemon._start_own()
        return daemon

    def _start_own(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="rlmux-mps-"))  # short: sockets' paths have 108 characters
        environment = {PIPES: str(folder), _LOGS: str(folder)}
        problem = _run(["-d"], environment)
        until_s = time.monotonic() + _START_LIMIT_S
        while not problem and not (folder / "control").exists():
            if time.monotonic() > until_s:
                problem = f"it did not listen within {_START_LIMIT_S:.0f} s"
            time.sleep(_POLL_S)
        if problem:
            self.missing = f"{_CONTROL} -d: {problem}"
            shutil.rmtree(folder, ignore_errors=True)
            return
        self.environment = environment

    def end(self) -> None:
        """End a daemon of our own, after the processes that compute under it."""
        if self.environment:
            _run([], self.environment, "quit\n")
            shutil.rmtree(self.environment[PIPES], ignore_errors=True)
            self.environment = {}


def _run(words: list[str], environment: dict[str, str], text: str = "") -> str:
    """Why the control program failed; empty if it did not."""
    try:
        done = subprocess.run(
            [_CONTROL, *words], input=text, capture_output=True, text=True, timeout=_START_LIMIT_S, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())[:160] or "it failed"
