"""Trackers that get a run's steps while it goes on: a process each beside the run, started again where one ends early.

    run ── start ──────────────────▶ rlmux export FOLDER --to wandb --follow ──▶ W&B
        ── its end is in the log ──▶ it writes what is left, and ends

Nothing that a tracker does reaches the run: it reads the log, and prints into `trackers.log`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlmux.core.actions import Action
from rlmux.core.events import Event
from rlmux.log.notes import Note

OUTPUT_NAME = "trackers.log"
_LOOK_EVERY_S = 5.0
_LONGEST_WAIT_S = 300.0
_FINISH_S = 60.0
"""Seconds that the end of a run waits for what its trackers still write."""


@dataclass(slots=True)
class _Feed:
    """One tracker's process."""

    to: str
    process: subprocess.Popen[bytes]
    wait_s: float = field(default=_LOOK_EVERY_S)
    """Seconds before it is started again: twice as many each time."""
    not_before_s: float | None = None
    """Time of its next start; None while it lives."""


class LiveTrackers:
    """A listener, which starts and watches the processes."""

    def __init__(
        self, folder: Path, names: Sequence[str], program: Sequence[str] = (sys.executable, "-P", "-m", "rlmux")
    ):
        """`names`: trackers of `rlmux export --to`. `program`: starts the command line."""
        self._folder = folder
        self._program = program
        self._feeds = [_Feed(to, self._start(to)) for to in names]
        self._looked_s = 0.0

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        if not self._feeds or now_s < self._looked_s + _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        for feed in self._feeds:
            if feed.not_before_s is None and feed.process.poll() is not None:
                feed.not_before_s, feed.wait_s = now_s + feed.wait_s, min(2 * feed.wait_s, _LONGEST_WAIT_S)
            elif feed.not_before_s is not None and now_s >= feed.not_before_s:
                feed.process, feed.not_before_s = self._start(feed.to), None

    def finish(self) -> Mapping[str, str]:
        """Wait for what is still written, once the end is in the log. Returns what went wrong, by tracker."""
        problems = {}
        for feed in self._feeds:
            if feed.not_before_s is not None:  # it ended early: once more, with all that there is
                feed.process = self._start(feed.to)
            try:
                code = feed.process.wait(_FINISH_S)
            except subprocess.TimeoutExpired:
                problems[feed.to] = f"still writes after {_FINISH_S:g} s; process {feed.process.pid} goes on with it"
            else:
                if code:
                    problems[feed.to] = f"has not got every step; {self._folder / OUTPUT_NAME} has the reason"
        return problems

    def _start(self, to: str) -> subprocess.Popen[bytes]:
        with contextlib.closing((self._folder / OUTPUT_NAME).open("ab")) as output:
            return subprocess.Popen(
                [*self._program, "export", str(self._folder), "--to", to, "--follow"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C ends the run, and then its trackers
            )
