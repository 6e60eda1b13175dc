"""How requests are read: by httptools, with a bound on what stands before a body.

    bytes ─▶ head (request line, headers), at most MAX_HEAD_BYTES ─▶ uvicorn ─▶ doors
               ├── longer ─▶ 400, and the connection ends
               └── requests another protocol ─▶ h11 reads on
    body, in chunks ─▶ trailers ─▶ dropped

A small request costs httptools a fraction of the CPU time of h11, uvicorn's other reader. What h11 does better is made
good here. httptools sets no bound. It hands trailers over as further headers: a request that came in one piece could
add some that a proxy has not seen. And for a client that requests another protocol (Java's requests HTTP/2) it hands
the body to that protocol, although none is supported here.

A module of its own: it depends on uvicorn's and httptools' internals, and nothing else does.
"""

from __future__ import annotations

import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlmux.service.http_patience import PatientProtocol

MAX_HEAD_BYTES = 16384
_LINE_BYTES = 4
"""What a header's line has beside its name and value."""
_REFUSAL = "Invalid HTTP request received."


class _TooLongError(Exception):
    """Ends the reading of a head; httptools passes it on as an error of its own, which uvicorn answers with 400."""


class _BoundedH11(PatientProtocol, H11Protocol):
    """The reader of a connection that requested another protocol."""


class BoundedHttp(PatientProtocol, HttpToolsProtocol):
    """uvicorn's protocol of one connection; see the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_read_bytes = 0
        """Bytes in whole lines of the head that is being read."""
        self._num_further_bytes = 0
        """Bytes received of that head after the piece in which it began: a line may be without end, too."""
        self._is_in_head = False
        self._piece = b""
        """What is being read."""

    def data_received(self, data: bytes) -> None:
        had_begun, self._piece = self._is_in_head, data
        super().data_received(data)
        self._piece = b""
        if not (had_begun and self._is_in_head):
            return
        self._num_further_bytes += len(data)
        if self._num_further_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_REFUSAL)

    def on_message_begin(self) -> None:
        self._num_read_bytes, self._num_further_bytes, self._is_in_head = 0, 0, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            self._count(len(name) + len(value) + _LINE_BYTES)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        """Whether to upgrade: uvicorn calls the method below instead of starting a request."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """Called in the handler of the error that marks the end of the head."""
        error = sys.exc_info()[1]
        if error is None or (self.cycle is not None and not self.cycle.response_complete):
            self.send_400_response(_REFUSAL)
            return
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers]
        self.connections.discard(self)
        self._stop_timer()
        reader = _BoundedH11(config=self.config, server_state=self.server_state, app_state=self.app_state)
        reader.connection_made(self.transport)
        self.transport.set_protocol(reader)
        reader.data_received(b"\r\n".join([*lines, b"", b""]) + self._piece[error.args[0] :])

    def _count(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        if self._num_read_bytes > MAX_HEAD_BYTES:
            raise _TooLongError
