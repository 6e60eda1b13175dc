"""A socket in the run's folder through which commands reach a controller that is running.

    rlmux submit ── {"request": "submit", ...}\\n ──▶ DIR/control.sock ──▶ ControlServer.requests()
                 ◀── {"ok": true, ...}\\n ───────────────────────────────── Request.answer(...)

One JSON object a line, one request a connection at a time. The server never waits: the controller asks it between
two ticks of its loop. Only the owner of the folder gets to the socket (folder 0700, socket 0600), and nothing that
comes through it is executed: `run_control.py` serves the requests of `control_requests.py` and checks each.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlmux.core.errors import OverQuotaError, RlmuxError, UserError
from rlmux.runtime.control.control_requests import ControlRequest, words_of

SOCKET_NAME = "control.sock"
_MAX_REQUEST_BYTES = 4 << 20
_MAX_CLIENTS = 32
_MAX_ADDRESS_BYTES = 100


class Request:
    """What one client asks. Answer it once, now or later.

    `words`: the JSON object of the request.
    """

    def __init__(self, words: Mapping[str, Any], client: _Client) -> None:
        self.words = words
        self._client = client

    def answer(self, **fields: Any) -> None:
        self._client.send({"ok": True, **fields})

    def refuse(self, error: UserError) -> None:
        self._client.send({"ok": False, "reason": str(error), "is_over_quota": isinstance(error, OverQuotaError)})


class _Client:
    """A connection. One that does not take its answer is dropped."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        self.is_gone = False

    def lines(self) -> list[bytes]:
        """Whole lines that have come since the last call."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data or len(self._received) + len(data) > _MAX_REQUEST_BYTES:
            self.is_gone = True
            return []
        *whole, self._received = (self._received + data).split(b"\n")
        return whole

    def send(self, answer: Mapping[str, Any]) -> None:
        try:
            self.connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self.is_gone = True


class ControlServer:
    """The controller's end. Make it only while holding the run's log: a socket that lies there is then left over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clients: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        (folder / SOCKET_NAME).unlink(missing_ok=True)
        with _address(folder) as address:
            self._socket.bind(address)
        (folder / SOCKET_NAME).chmod(0o600)
        self._inode = (folder / SOCKET_NAME).stat().st_ino
        self._socket.listen(_MAX_CLIENTS)
        self._selector.register(self._socket, selectors.EVENT_READ, None)

    def requests(self) -> list[Request]:
        """What has been asked since the last call; never waits."""
        asked: list[Request] = []
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                asked += self._read(key.data)
        for client in [client for client in self._clients if client.is_gone]:
            self._drop(client)
        return asked

    def close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._socket.close()
        path = self._folder / SOCKET_NAME
        if path.exists() and path.stat().st_ino == self._inode:  # else the folder is another run's by now
            path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            client = _Client(connection)
            self._clients.append(client)
            self._selector.register(connection, selectors.EVENT_READ, client)
            if len(self._clients) > _MAX_CLIENTS:
                self._clients[0].is_gone = True

    @staticmethod
    def _read(client: _Client) -> list[Request]:
        asked = []
        for line in client.lines():
            try:
                words = json.loads(line)
            except (ValueError, RecursionError):  # the latter for text that is nested too deeply
                words = None
            if isinstance(words, dict):
                asked.append(Request(words, client))
            else:
                client.send({"ok": False, "reason": "not a JSON object; accepted: one JSON object a line"})
        return asked

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()


def ask(folder: Path, request: ControlRequest, *, limit_s: float = 120.0) -> dict[str, Any]:
    """Ask the controller that runs in this folder; errors as `ask_words` raises them."""
    return ask_words(folder, words_of(request), limit_s=limit_s)


def ask_words(folder: Path, words: Mapping[str, Any], *, limit_s: float = 120.0) -> dict[str, Any]:
    """Send one JSON object to the controller that runs in this folder; returns its answer.

    Raises UserError if it refuses, OverQuotaError if it does for a quota of what may wait, NotRunningError if none runs
    there, NoAnswerError if it is busy for so long.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(limit_s)
        try:
            with _address(folder) as address:
                connection.connect(address)
        except BlockingIOError:
            raise NoAnswerError(f"{folder}: its controller has too many clients") from None
        except OSError:
            raise NotRunningError(
                f"{folder}: nothing runs there now; accepted: the folder of a run that goes on, "
                f"or resume it: rlmux resume {folder}"
            ) from None
        try:
            connection.sendall(json.dumps(words).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        except TimeoutError:
            raise NoAnswerError(f"{folder}: its controller gave no answer in {limit_s:g} s") from None
        except OSError:
            line = b""
    if not line.endswith(b"\n"):
        raise RlmuxError(f"{folder}: the run ended before it answered")
    answer: dict[str, Any] = json.loads(line)
    if not answer.get("ok"):
        kind = OverQuotaError if answer.get("is_over_quota") else UserError
        raise kind(str(answer.get("reason")))
    return answer


class NotRunningError(UserError):
    """No controller runs in the folder."""


class NoAnswerError(RlmuxError):
    """A controller runs in the folder, and is busy."""


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """The socket's path in few enough bytes: the system takes about a hundred, folders may be deeper."""
    path = str(folder / SOCKET_NAME)
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
