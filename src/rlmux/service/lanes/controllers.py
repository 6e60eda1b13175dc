"""A lane's controller: a process of its own, which the service starts, finds again, and starts again where it ended.

    service ── tend, twice a second ──▶ its child lives          nothing to do
                                    ──▶ the folder is locked     a child of the server before: adopted
                                    ──▶ neither                  start: `rlmux run`, or `rlmux resume` of a run there

A controller has a session of its own, and the devices of its lane; it outlives the service. What it prints goes to
NAME.log. One that ends is started again after 1, 2, 4 ... 60 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from rlmux.config.load import Spec
from rlmux.core.errors import LogError, UserError
from rlmux.report.folder_lock import FolderInUseError, FolderLock, living_owner
from rlmux.runtime.control_socket import SOCKET_NAME
from rlmux.runtime.folders import RUN_HEADER
from rlmux.runtime.launch import spec_of
from rlmux.runtime.run_folder import empty_folder
from rlmux.service.lanes.devices import NOT_HELD, Part

_LONGEST_WAIT_S = 60.0
_STEADY_S = 600.0
"""Seconds of life after which an ended controller is started again at once."""
_SHOWN_BYTES = 2000


class LaneController:
    """See the module. All but `trouble` and `pid` is called by one thread."""

    def __init__(self, root: Path, name: str, spec: Spec, part: Part = NOT_HELD) -> None:
        """`spec`: the lane's file, without pipelines; `part`: the devices that it is held to.

        Raises UserError where its run began with another cluster.
        """
        self.name = name
        self.spec = spec
        self._part = part
        self.folder = root / name
        self._file = root / f"{name}.yaml"
        self._output = root / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._not_before_s = 0.0
        self._wait_s = 1.0
        self._ended = ""
        if self._has_begun():
            self._check_same()

    @property
    def pid(self) -> int | None:
        """Process id of the controller; None where none lives."""
        owner = living_owner(self.folder)
        return None if owner is None else owner[0]

    def trouble(self) -> str | None:
        """Why nothing runs in the lane, in one sentence; None where it runs."""
        if (self.folder / SOCKET_NAME).exists() and self.pid is not None:
            return None
        return f"the controller of {self.name} is being started{self._ended}"

    def tend(self) -> None:
        """Start the controller where none lives and its time has come."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._note_end(self._process.returncode)
            self._process = None
        if time.monotonic() >= self._not_before_s and not self._is_locked():
            self._start()

    def _note_end(self, code: int) -> None:
        """Wait before the next start, longer each time."""
        now_s = time.monotonic()
        self._wait_s = 1.0 if now_s - self._started_s > _STEADY_S else min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._not_before_s = now_s + self._wait_s
        self._ended = f"; the one before ended with code {code}: {self._last_line()}"

    def _is_locked(self) -> bool:
        """Whether a process writes in the folder."""
        if not self.folder.is_dir():
            return False
        try:
            FolderLock.take(self.folder).release()
        except FolderInUseError:
            return True
        return False

    def _start(self) -> None:
        folder = str(self.folder)
        words = ["resume", folder] if self._has_begun() else ["run", str(self._begin()), "--out", folder]
        self._started_s = time.monotonic()
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlmux", *words, "--keep-open", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(self._part.gpus)} if self._part.gpus else {})},
            )
        if self._part.cores:  # before it has threads: what they start inherits it
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, self._part.cores)

    def _begin(self) -> Path:
        """The lane's file, written; what a start that was killed left in the folder is removed."""
        self._file.write_text(self.spec.resolved, encoding="utf-8")
        if self.folder.is_dir():
            with suppress(FolderInUseError), FolderLock.take(self.folder):
                empty_folder(self.folder)
        return self._file

    def _has_begun(self) -> bool:
        """The header's copy is written right after the log is made, and before anything can be submitted."""
        return (self.folder / RUN_HEADER).is_file()

    def _check_same(self) -> None:
        try:
            before = spec_of(self.folder)
        except LogError:
            return  # its controller says what is wrong with the log
        if (before.cluster, before.policy) != (self.spec.cluster, self.spec.policy):
            raise UserError(
                f"{self.spec.source}: lanes.{self.name}: the run in {self.folder} began with another cluster or "
                "policy; accepted: the cluster and policy it had, or a lane of another name"
            )

    def _last_line(self) -> str:
        try:
            with self._output.open("rb") as file:
                file.seek(max(0, self._output.stat().st_size - _SHOWN_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "it printed nothing"
        return lines[-1].strip() if lines else "it printed nothing"
