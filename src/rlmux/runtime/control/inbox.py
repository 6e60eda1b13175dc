"""Commands from other threads for the controller's thread, and the pipeline names that are taken.

HTTP server, permits (any thread) ── call_soon(command) ──▶ Inbox ── take() ──▶ WorkerBackend.poll runs them
                                  ── claim(name) ──▶ raises at once for a name that is taken
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from rlmux.core.errors import UserError
from rlmux.core.model import PipelineId
from rlmux.log.notes import Note
from rlmux.runtime.orders.external_programs import ExternalPrograms
from rlmux.runtime.orders.on_demand import OnDemandPipelines


class ClientSide(Protocol):
    """The parts of the backend that a command may use."""

    on_demand: OnDemandPipelines
    external: ExternalPrograms

    def add_note(self, note: Note) -> None:
        """Add a note to the log."""


Command = Callable[[ClientSide], None]
"""A call made in the controller's thread. It must not wait."""


class Inbox:
    """See the module. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: list[Command] = []
        self._names: set[PipelineId] = set()
        """Names of pipelines, and those reserved for programs that are not submitted yet (membership tests only)."""
        self._wake: Callable[[], None] = lambda: None

    def call_soon(self, command: Command) -> None:
        """Run a command in the controller's thread at its next poll, in call order."""
        with self._lock:
            self._commands.append(command)
            wake = self._wake
        wake()

    def claim(self, name: PipelineId) -> None:
        """Reserve a name for a new pipeline. Raises UserError if a pipeline of the run has it."""
        with self._lock:
            if name in self._names:
                raise UserError(f"pipeline {name!r} is in this run already; accepted: a name of its own")
            self._names.add(name)

    @contextlib.contextmanager
    def claiming(self, name: PipelineId) -> Iterator[None]:
        """`claim`; the name is free again if the body fails."""
        self.claim(name)
        try:
            yield
        except BaseException:
            with self._lock:
                self._names.discard(name)
            raise

    def connect(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which ends a waiting poll. Called by the backend that runs the commands."""
        self._wake = wake

    def take(self) -> list[Command]:
        """Commands since the last call, oldest first."""
        with self._lock:
            commands, self._commands = self._commands, []
        return commands

    def has_commands(self) -> bool:
        with self._lock:
            return bool(self._commands)
