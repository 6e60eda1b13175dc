"""HTTP to a server on this machine: short requests with a time limit, and responses in events.

    request(method, path, body)  ──▶ JSON           503 is retried for a while: a server pauses or wakes
    events(path, body)       ──▶ JSON, JSON ... one connection an answer; `close` from another thread ends it

Errors are ServerGoneError (no answer: the worker's successor may succeed) and ServerAnswerError (an unexpected answer).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode, urlsplit

from rlmux.core.errors import PipelineError, RlmuxError, WorkerLostError
from rlmux.core.json_text import parse_json

_RETRY_S = 0.05
_SHOWN_CHARS = 200


class ServerGoneError(WorkerLostError):
    """The server does not answer."""


class ServerAnswerError(PipelineError):
    """The server's answer is not of its kind of server."""


class ServerConnection:
    """The address of one server. Thread-safe: every request has a connection of its own."""

    def __init__(self, url: str, *, busy_limit_s: float = 60.0) -> None:
        """`busy_limit_s`: seconds for which a 503 is retried."""
        parts = urlsplit(url)
        self.url = url
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._busy_limit_s = busy_limit_s

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        limit_s: float = 60.0,
        is_json: bool = True,
    ) -> Any:
        """The response's JSON, None for an empty one; its text where it is none (`is_json`).

        Raises ServerGoneError, ServerAnswerError.
        """
        target = f"{path}?{urlencode(query)}" if query else path
        until_s = time.monotonic() + self._busy_limit_s
        while True:
            status, content = self._exchange(method, target, body, limit_s)
            if status != 503 or time.monotonic() >= until_s:
                break
            time.sleep(_RETRY_S)
        if status >= 400:
            raise ServerAnswerError(f"{method} {self.url}{target} was answered {status}: {_shown(content)}")
        if not is_json:
            return content.decode(errors="replace")
        try:
            return parse_json(content) if content.strip() else None
        except ValueError as error:
            raise ServerAnswerError(
                f"{method} {self.url}{target} was not answered in JSON: {_shown(content)}"
            ) from error

    def is_there(self, path: str, *, limit_s: float = 5.0) -> bool:
        """Whether a request of this path succeeds."""
        try:
            return self._exchange("GET", path, None, limit_s)[0] < 400
        except ServerGoneError:
            return False

    def stream(self, path: str, body: Any, *, limit_s: float, headers: Mapping[str, str] | None = None) -> EventStream:
        """A new answer that comes in events (text/event-stream); `limit_s`: longest wait for the next one."""
        return EventStream(self._open(limit_s), f"{self.url}{path}", path, body, headers or {})

    def _open(self, limit_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=limit_s)

    def _exchange(self, method: str, target: str, body: Any, limit_s: float) -> tuple[int, bytes]:
        connection = self._open(limit_s)
        try:
            _send(connection, method, target, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerGoneError(f"{method} {self.url}{target}: {error or type(error).__name__}") from error
        finally:
            connection.close()


class EventStream:
    """One answer under way."""

    def __init__(
        self, connection: http.client.HTTPConnection, url: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> None:
        self._connection = connection
        self._url = url
        self._path = path
        self._body = body
        self._headers = headers
        self._socket: socket.socket | None = None
        self.is_closed = False

    def close(self) -> None:
        """End the answer, from any thread: its reader sees the end."""
        self.is_closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Any]:
        """The JSON of each event, until the server ends the answer, complete or not, or `close` does.

        Raises ServerGoneError without an answer, BusyError for a 503, ServerAnswerError for another refusal.
        """
        try:
            _send(self._connection, "POST", self._path, self._body, self._headers)
            self._socket = self._connection.sock
            answer = self._connection.getresponse()
            if answer.status == 503:
                raise BusyError(self._url)
            if answer.status >= 400:
                raise ServerAnswerError(f"POST {self._url} was answered {answer.status}: {_shown(answer.read())}")
            for line in answer:
                text = line.strip()
                if text.startswith(b"data:") and text != b"data: [DONE]":
                    yield parse_json(text[5:])
        except RlmuxError:
            raise  # some of them are errors of connections, too
        except ValueError as error:
            raise ServerAnswerError(f"POST {self._url} was answered with an event that is not JSON: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            if not self.is_closed:
                raise ServerGoneError(f"POST {self._url}: {error or type(error).__name__}") from error
        finally:
            self._connection.close()


class BusyError(ServerGoneError):
    """The server takes no requests at the moment (503)."""


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: Any,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    content = None if body is None else json.dumps(body)
    of_body = {"Content-Type": "application/json"} if content else {}
    connection.request(method, target, content, {**of_body, **headers})


def _shown(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
