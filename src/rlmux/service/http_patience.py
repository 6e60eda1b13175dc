"""How long, and how many, connections may be silent, and which heads are read: uvicorn bounds the first two not at all.

    accepted ─▶ waits for a whole head ── HEAD_S ──▶ closed
                        │ ▲
                        ▼ │ the first bytes of the next head, after uvicorn's wait between requests (30 s)
                  a request is answered

Beyond `max_connections` the one that has waited longest for a head is closed; where none waits, the new one is refused.
Half of the files that the process may open are for connections: logs, indexes and processes need theirs.

h11 reads leniently: a head that came whole may be as long as one read of the socket (256 KiB), and folded lines and
control characters are taken. Another reader before this one could read such a head differently, so it is refused.

A module of its own: it wraps uvicorn's protocol of a connection, and the accept loop of asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import time
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 16384
"""Bytes of a request's head (request line and headers) beyond which it is refused."""
_AMBIGUOUS = re.compile(rb"\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""A folded line, or a control character."""
HEAD_S = 15.0
"""Seconds in which a head is to arrive, from the connection or its first byte on; a TLS handshake, likewise."""
_MAX_CONNECTIONS = 4096
_BACKLOG = 2048
"""Connections that may wait to be taken."""
_TAKEN_AT_ONCE = 16
"""asyncio takes so many before it looks at any, and reports each failure to take one."""
_REPORT_EVERY_S = 60.0
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 21\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\nToo many connections."
)


def max_connections() -> int:
    """Most connections at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_MAX_CONNECTIONS, soft // 2))


class PatientHttp(H11Protocol):
    """uvicorn's protocol of one connection; see the module."""

    connections: set[Any]
    _head_timer: asyncio.TimerHandle | None = None
    _waits_since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waits_since_s = time.monotonic()
        if len(self.connections) > max_connections():
            waiting = [
                connection for connection in self.connections if connection is not self and connection.is_waiting
            ]
            if not waiting:
                transport.write(_BUSY)
                transport.close()
                return
            min(waiting, key=lambda connection: connection._waits_since_s).drop()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Refuse a head that is too long or ambiguous before h11 reads it, whether it came alone or behind another."""
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]
            names = {line.partition(b":")[0].lower() for line in head.split(b"\r\n")}
            has_two_lengths = {b"content-length", b"transfer-encoding"} <= names
            if len(head) > MAX_HEAD_BYTES or has_two_lengths or _AMBIGUOUS.search(head):
                self.send_400_response("Invalid HTTP request received.")
                return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request; one whose response has begun has no room for a second, and its connection ends."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being read or answered, but for a part of a head."""
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        """Close the connection, and count it no more."""
        self._stop_timer()
        self.connections.discard(self)
        self.transport.abort()

    def _watch(self) -> None:
        if not self.is_waiting or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._waits_since_s = time.monotonic()
            self._head_timer = self.loop.call_later(HEAD_S, self._end_wait)

    def _end_wait(self) -> None:
        self._head_timer = None
        if self.is_waiting and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class PatientServer(uvicorn.Server):
    """uvicorn's server; a process without a free file takes no connection for a second, and says so once a minute."""

    _reported_s = -_REPORT_EVERY_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._report)
        if self.config.ssl is not None:  # uvicorn does not pass this on
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=HEAD_S)  # type: ignore[method-assign]
        self.config.backlog = _TAKEN_AT_ONCE
        await super().startup(sockets=sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            text = "no connection is taken for a second: %s (limit of open files: %s)"
            logging.getLogger("uvicorn.error").error(text, context.get("exception"), soft)


def listen(listening: socket.socket) -> None:
    """A client that connects before the server's loop runs waits, and is not refused."""
    listening.listen(_BACKLOG)
