"""What a server of permits needs besides its desk: the lines that come, the token, and a backend without workers."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Sequence

from rlmux.broker.desk import Desk
from rlmux.broker.server import Connection, Server
from rlmux.broker.wire import WireError, read_message, write_message
from rlmux.core.actions import Action, RunStage
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.runtime.backend import Note, Submission
from rlmux.share import prove

_MAX_ERRORS = 100
"""Lines that are no messages, after which a connection is dropped."""


class NoWorkers:
    """A backend for a run whose pipelines are all other programs'."""

    def __init__(self, start_s: float) -> None:
        """`start_s`: seconds since the first broker of the folder began; those in which none ran are left out."""
        self._zero_s = time.monotonic() - start_s
        self._has_news = threading.Event()

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def add_pipeline(self, submission: Submission) -> None:
        raise TypeError(f"a broker takes no pipeline ({submission.pipeline.id}): programs join it by themselves")

    def execute(self, action: Action) -> None:
        """Nothing here carries anything out."""

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        self._has_news.wait(timeout_s)
        self._has_news.clear()
        return (), ()

    def make_room(self, action: RunStage, then: Callable[[float], None]) -> None:
        then(0.0)

    def wake(self) -> None:
        self._has_news.set()

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return None

    def close(self) -> None:
        """There is nothing to end."""


def take_line(desk: Desk, server: Server, connection: Connection, line: bytes | None) -> None:
    """Act on a line that has come; None: the connection has ended."""
    if line is None:
        desk.lose_connection(connection)
        return
    message = None
    try:
        message = read_message(line)
        desk.take_message(connection, message)
    except WireError as error:
        about = {key: message[key] for key in ("id", "fence") if message and key in message}
        server.send(connection, write_message("error", code=error.code, text=str(error), **about))
        connection.num_errors += 1
        if connection.num_errors >= _MAX_ERRORS:
            connection.is_gone = True


def token_check(token: str) -> Callable[[Connection, str | None], bool]:
    """Whether a connection may say hello: on a unix socket any that got there, over TCP one that knows the token."""

    def is_allowed(connection: Connection, proof: str | None) -> bool:
        return not connection.nonce or hmac.compare_digest(prove(token, connection.nonce), proof or "")

    return is_allowed
