"""Threads that serve as long as their program runs: the death of one must stop the program.

    serve() raises ──▶ traceback on stderr, and kept ──▶ check() raises, in the program's own loop: it stops

Threads that end with a call of their own, such as one that reads one answer, are none of these.
"""

from __future__ import annotations

import sqlite3
import threading
import traceback
from collections.abc import Callable

from rlmux.core.errors import LogError, StorageError, ThreadDiedError


class SupervisedThread(threading.Thread):
    """Serves until `serve` returns; see the module."""

    def __init__(self, serve: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._serve = serve
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record an error that ended the thread's service; from any thread."""
        self._failure = error
        traceback.print_exception(error)

    def check(self) -> None:
        """Raises StorageError if a disk error ended the thread, ThreadDiedError for any other error."""
        if self._failure is None:
            return
        is_of_disk = isinstance(self._failure, OSError | sqlite3.OperationalError | LogError | StorageError)
        kind = StorageError if is_of_disk else ThreadDiedError
        first_line = str(self._failure).partition("\n")[0]
        raise kind(f"thread {self.name} ended: {type(self._failure).__name__}: {first_line}") from self._failure
