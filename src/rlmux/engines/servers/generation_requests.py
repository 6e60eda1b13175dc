"""Active requests of a server: one thread reads each response, and all write to one queue.

    begin(sampling) ──▶ thread ──▶ (request id, Piece) ... (request id, Ended)   in the queue
    end(ids)        ──▶ their streams are closed; what they still bring is not passed on

The queue is read by one thread, the engine's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.errors import RlmuxError
from rlmux.engines.servers.dialect import Dialect
from rlmux.engines.servers.http_connection import EventStream, ServerConnection
from rlmux.engines.servers.settings import Piece, Sampling


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer's end."""

    error: RlmuxError | None
    """The error; None if the server ended the answer."""


class Requests:
    """All answers of one server that are being read."""

    def __init__(self, dialect: Dialect, server: ServerConnection, *, limit_s: float) -> None:
        """`limit_s`: longest wait for an answer's next event."""
        self._dialect = dialect
        self._server = server
        self._limit_s = limit_s
        self._queue: queue.SimpleQueue[tuple[str, Piece | Ended]] = queue.SimpleQueue()
        self._streams: dict[str, EventStream] = {}

    def begin(self, sampling: Sampling) -> None:
        stream = self._server.stream(
            self._dialect.generate_path(),
            self._dialect.generate_body(sampling),
            limit_s=self._limit_s,
            headers=self._dialect.generate_headers(sampling),
        )
        self._streams[sampling.request_id] = stream
        reader = threading.Thread(target=self._read, args=(sampling.request_id, stream), daemon=True)
        reader.start()

    def next(self, wait_s: float) -> tuple[str, Piece | Ended] | None:
        """The next event of an answer that was not ended here; None after the limit."""
        while True:
            try:
                request_id, found = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
            except queue.Empty:
                return None
            if request_id not in self._streams:
                continue
            if isinstance(found, Ended):
                del self._streams[request_id]
            return request_id, found

    def end(self, request_ids: Sequence[str]) -> None:
        """Drop answers, and abort their requests at the server."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.close()
        if request_ids:
            self._dialect.abort(self._server, request_ids)

    def _read(self, request_id: str, stream: EventStream) -> None:
        error: RlmuxError | None = None
        try:
            for piece in self._dialect.read_events(iter(stream)):
                self._queue.put((request_id, piece))
        except RlmuxError as caught:
            error = caught
        except Exception as caught:  # a silently dead reader would look like a slow server
            error = RlmuxError(f"reading an answer: {caught!r}")
        self._queue.put((request_id, Ended(error)))
