"""Permits as a backend: an order is granted to a program over its socket, and the program's `done` ends it.

    controller ── execute(RunStage) ──▶ Desk.begin ── granted ──▶ a program
    controller ◀── poll ── events ───── Desk ◀── messages ─────── programs

A poll hands over what happened, or, where nothing did and all is in the log, says what was held back until then, and
listens. So nothing reaches a program before the rows that it rests on are committed.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence

from rlmux.broker.desk import Desk
from rlmux.broker.programs import NO_MORE
from rlmux.broker.server import Connection, Server
from rlmux.broker.wire import WireError, read_message, write_message
from rlmux.core.actions import Action, Refuse, Release, RunStage
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.runtime.backend import Note, Submission
from rlmux.share import prove

_LOOK_EVERY_S = 0.1
_MAX_ERRORS = 100
"""Lines that are no messages, after which a connection is dropped."""


class PermitBackend:
    """A backend whose workers are other programs."""

    def __init__(self, server: Server, clock: Clock) -> None:
        """`desk` is set before the first poll."""
        self._server = server
        self._clock = clock
        self._looked_s = 0.0
        self.desk: Desk

    def now_s(self) -> float:
        return self._clock.now_s()

    def add_pipeline(self, submission: Submission) -> None:
        raise TypeError(f"a broker takes no pipeline ({submission.pipeline.id}): programs join it by themselves")

    def execute(self, action: Action) -> None:
        match action:
            case RunStage():
                self.desk.begin(action)
            case Release():
                self.desk.release(action.pipeline, NO_MORE)
            case Refuse():
                self.desk.release(action.pipeline, action.reason)
            case _:
                pass  # a phase ends by itself, and where a program's state lies the desk's ledger knows

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        if not self._has_news():
            self.desk.settle()
            self._send()
            for connection, line in self._server.receive(min(timeout_s, _LOOK_EVERY_S)):
                take_line(self.desk, self._server, connection, line)
            if self.now_s() - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = self.now_s()
                self.desk.look_around()
        self._send()
        return self.desk.take_news()

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return None

    def close(self) -> None:
        self._server.close()

    def _has_news(self) -> bool:
        return bool(self.desk.events or self.desk.notes)

    def _send(self) -> None:
        outgoing, self.desk.outgoing = self.desk.outgoing, []
        for connection, line in outgoing:
            self._server.send(connection, line)


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


class Clock:
    """Seconds since the first broker of the folder began; those in which none ran are left out."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._zero_s = time.monotonic() - start_s

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s


def token_check(token: str) -> Callable[[Connection, str | None], bool]:
    """Whether a connection may say hello: on a unix socket any that got there, over TCP one that knows the token."""

    def is_allowed(connection: Connection, proof: str | None) -> bool:
        return not connection.nonce or hmac.compare_digest(prove(token, connection.nonce), proof or "")

    return is_allowed
