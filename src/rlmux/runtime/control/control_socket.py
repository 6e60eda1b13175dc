"""The socket in a run's folder that accepts commands for its controller.

    rlmux submit ── {"request": "submit", ...}\\n ──▶ DIR/control.sock ──▶ ControlServer.requests()
                 ◀── {"ok": true, ...}\\n ───────────────────────────────── Request.answer(...)

One JSON object a line, one request per connection at a time. The controller reads the socket between two ticks of its
loop and never waits for it; a thread ends the controller's own wait when something has come. Only the owner of the
folder can connect (folder 0700, socket 0600), and no input is executed: `run_control.py` checks and serves the requests
of `control_requests.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlmux.core.errors import OverQuotaError, RlmuxError, UserError
from rlmux.core.json_text import parse_json
from rlmux.runtime.control.control_requests import ControlRequest, words_of

SOCKET_NAME = "control.sock"
_MAX_REQUEST_BYTES = 4 << 20
_MAX_CLIENTS = 32
_MAX_ADDRESS_BYTES = 100


class Request:
    """One client's request, to be answered once, now or later.

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
    """A connection; dropped if the client does not read its answer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""
        self.is_closed = False

    def lines(self) -> list[bytes]:
        """Whole lines that have come since the last call."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data or len(self._received) + len(data) > _MAX_REQUEST_BYTES:
            self.is_closed = True
            return []
        *whole, self._received = (self._received + data).split(b"\n")
        return whole

    def send(self, answer: Mapping[str, Any]) -> None:
        try:
            self.connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self.is_closed = True


class ControlServer:
    """The controller's end. Create it only while holding the run's log: any existing socket is then a leftover."""

    def __init__(self, folder: Path, wake: Callable[[], None] = lambda: None) -> None:
        """`wake`: called from another thread when `requests` has something to read."""
        self._folder = folder
        self._wake = wake
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
        self._has_read = threading.Event()
        self._is_closed = False
        self._ending = os.eventfd(0, os.EFD_CLOEXEC)
        self._watcher = threading.Thread(target=self._watch, name="control-socket", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """Wake the controller once for what has come; watch again once it has read."""
        with selectors.DefaultSelector() as arrivals:
            arrivals.register(self._selector, selectors.EVENT_READ)
            arrivals.register(self._ending, selectors.EVENT_READ)
            while True:
                arrivals.select()
                self._has_read.clear()
                if self._is_closed:
                    return
                self._wake()
                self._has_read.wait()

    def requests(self) -> list[Request]:
        """Requests since the last call; never waits."""
        requests: list[Request] = []
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            else:
                requests += self._read(key.data)
        for client in [client for client in self._clients if client.is_closed]:
            self._drop(client)
        self._has_read.set()
        return requests

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.eventfd_write(self._ending, 1)
            self._has_read.set()
            self._watcher.join()
            os.close(self._ending)
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
                self._clients[0].is_closed = True

    @staticmethod
    def _read(client: _Client) -> list[Request]:
        requests = []
        for line in client.lines():
            try:
                words = parse_json(line)
            except ValueError:
                words = None
            if isinstance(words, dict):
                requests.append(Request(words, client))
            else:
                client.send({"ok": False, "reason": "not a JSON object; accepted: one JSON object a line"})
        return requests

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()


def send_request(folder: Path, request: ControlRequest, *, limit_s: float = 120.0) -> dict[str, Any]:
    """Send a request to the folder's controller and return its answer. Raises as `send_words` does."""
    return send_words(folder, words_of(request), limit_s=limit_s)


def send_words(folder: Path, words: Mapping[str, Any], *, limit_s: float = 120.0) -> dict[str, Any]:
    """Send a JSON object to the folder's controller and return its answer.

    Raises UserError for a refusal, OverQuotaError for a refusal by a quota on waiting pipelines, NotRunningError
    without a controller, NoAnswerError after `limit_s` seconds.
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
    """The socket's path within the system's limit of about a hundred bytes, for deep folders too."""
    path = str(folder / SOCKET_NAME)
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
