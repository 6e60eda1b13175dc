"""A lane's controller: a process of its own, which the service starts, finds again, and starts again where it ended.

    service ── poll, twice a second ──▶ its child lives          nothing to do
                                    ──▶ the folder is locked     a child of the server before: adopted
                                    ──▶ neither                  start: `rlmux run`, or `rlmux resume` of a run there

                                    ──▶ every 5 s: does it answer on its control socket?

A controller has its own session and its lane's devices; it outlives the service. Its output goes to NAME.log. It is
restarted after 1, 2, 4 ... 60 s; after `MAX_DEATHS` ends within an hour, not before the service's next start. A live
controller without an answer is left alone: it may recover.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlmux.config.service_file import Lane
from rlmux.core.errors import LogError, RlmuxError, UserError
from rlmux.log.folder_lock import FolderInUseError, FolderLock, living_owner
from rlmux.log.run_log import other_version
from rlmux.runtime.control.control_requests import GetStatus
from rlmux.runtime.control.control_socket import SOCKET_NAME, NoAnswerError, send_request
from rlmux.runtime.control.removals import write_rule
from rlmux.runtime.launch import spec_of
from rlmux.runtime.records.folders import DRAINING, RUN_HEADER, SERVED
from rlmux.runtime.records.run_folder import empty_folder
from rlmux.service.lanes.devices import NOT_HELD, LaneDevices

_LONGEST_WAIT_S = 60.0
_STEADY_S = 600.0
"""Seconds of life after which an ended controller is started again at once."""
_SHOWN_BYTES = 2000
MAX_DEATHS = 5
_DEATHS_WITHIN_S = 3600.0
CHECK_EVERY_S = 5.0
ANSWER_LIMIT_S = 5.0
_MAX_SILENT = 2
"""Consecutive unanswered polls after which a controller counts as not answering."""


DRAINS = "the service drains: its pipelines stop, and go on with its next start; no submission is taken"


def is_draining(root: Path) -> bool:
    """Whether a service is being ended, for an upgrade for one."""
    return (root / DRAINING).is_file()


class LaneController:
    """See the module. All but `trouble`, `down` and `pid` is called by one thread."""

    def __init__(
        self,
        root: Path,
        name: str,
        lane: Lane,
        part: LaneDevices = NOT_HELD,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`part`: the devices that it is held to.

        Raises UserError where its run began with another cluster, or served models and the lane does not.
        """
        self.name = name
        self.spec = lane.spec
        self._part = part
        self.folder = root / name
        self._file = root / f"{name}.yaml"
        self._output = root / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._not_before_s = 0.0
        self._wait_s = 1.0
        self._ended = ""
        self._ended_pid: int | None = None
        """The controller that was asked to end, as the service drains."""
        self._now_s = now_s
        self._deaths_s: list[float] = []
        """Times of the last ends of controllers that were started here."""
        self._checked_s = -math.inf
        self._num_silent = 0
        """Consecutive unanswered polls."""
        self.other_version = other_version(self.folder)
        """Which version wrote the lane's log, where it cannot be resumed: nothing runs in the lane."""
        if self._has_begun() and self.other_version is None:
            self._check_same()
            write_rule(self.folder, self.spec.keep)
        if lane.serve is None and (self.folder / SERVED).is_file():
            raise UserError(
                f"{lane.spec.source}: lanes.{name}: {self.folder} has clients' models; accepted: the lane with serve, "
                "or a lane of another name"
            )

    @property
    def pid(self) -> int | None:
        """Process id of the controller; None where none lives."""
        owner = living_owner(self.folder)
        return None if owner is None else owner[0]

    def trouble(self) -> str | None:
        """Why nothing runs in the lane, in one sentence; None where it runs."""
        if is_draining(self.folder.parent):
            return DRAINS
        if (self.folder / SOCKET_NAME).exists() and self.pid is not None:
            return self.down()
        return self.down() or f"the controller of {self.name} is being started{self._ended}"

    def down(self) -> str | None:
        """A problem that needs an operator, in one sentence; None without one."""
        if self.other_version is not None:
            return f"lane {self.name}: {self.other_version}"
        pid = self.pid
        if self._num_silent >= _MAX_SILENT and pid is not None:
            return f"the controller of {self.name} (process {pid}) lives, and does not answer: it is stopped or hangs"
        if len(self._deaths_s) >= MAX_DEATHS and pid is None:
            ends = f"the controller of {self.name} has ended {len(self._deaths_s)} times within an hour"
            return f"{ends}, and is started no more{self._ended}; to try again, start the service again"
        return None

    def poll(self) -> None:
        """Start the controller if none lives and its delay is over; end it where the service drains."""
        if self.other_version is not None:
            return
        if is_draining(self.folder.parent):
            self._end()
            return
        if self._process is not None:
            if self._process.poll() is None:
                self._check_answering()
                return
            self._note_end(self._process.returncode)
            self._process = None
        if self._is_locked():
            self._check_answering()
        elif self._now_s() >= self._not_before_s and len(self._deaths_s) < MAX_DEATHS:
            self._start()

    def _end(self) -> None:
        """Ask the controller to end, once, as Ctrl-C would."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        pid = self.pid
        if pid is not None and pid != self._ended_pid and self._is_locked():
            self._ended_pid = pid
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _check_answering(self) -> None:
        """Whether a controller that has begun to listen still answers."""
        if self._now_s() < self._checked_s + CHECK_EVERY_S or not (self.folder / SOCKET_NAME).exists():
            return
        num_silent = 0
        try:
            send_request(self.folder, GetStatus(), limit_s=ANSWER_LIMIT_S)
        except NoAnswerError:
            num_silent = self._num_silent + 1
        except RlmuxError:
            pass  # it is about to end: the next poll sees that
        self._num_silent = num_silent
        self._checked_s = self._now_s()

    def _note_end(self, code: int) -> None:
        """Wait before the next start, longer each time."""
        now_s = self._now_s()
        self._num_silent = 0
        self._deaths_s = [each for each in self._deaths_s if each > now_s - _DEATHS_WITHIN_S] + [now_s]
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
        self._started_s = self._now_s()
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
            return  # its controller reports the damaged log
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
