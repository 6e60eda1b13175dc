"""The HTTP server in a thread: what `start` promises."""

from __future__ import annotations

import socket

from rlmux.service.listening import Listening
from rlmux.service.server import Server


def test_a_client_that_connects_as_soon_as_the_server_has_started_is_not_refused():
    for _ in range(20):
        server = Server(Listening())
        server.start()
        try:
            with socket.create_connection((server.host, server.port), timeout=30) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert client.recv(64).startswith(b"HTTP/1.1 404")
        finally:
            server.close()
