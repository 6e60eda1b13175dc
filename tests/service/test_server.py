"""The HTTP server in a thread: what `start` promises."""

from __future__ import annotations

import contextlib
import socket
import time
from http.client import HTTPConnection

import httpx
import pytest
from fastapi import APIRouter
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

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


def test_a_client_that_shows_life_every_ten_seconds_keeps_its_connection():
    """Waits as long: what is tested is that the server does not close meanwhile."""
    server = Server(Listening())
    server.start()
    try:
        with contextlib.closing(HTTPConnection(server.host, server.port, timeout=30)) as client:
            for pause_s in (10.0, 0.0):
                client.request("GET", "/")
                answer = client.getresponse()
                assert (answer.status, bool(answer.read())) == (404, True)
                assert not answer.will_close
                time.sleep(pause_s)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/door/api/7", "the door's 7 at /door/api/7"),
        ("/door/no", None),
        ("/doors", "the router's"),
        ("/door", "the router's"),
    ],
)
def test_an_application_has_what_is_asked_under_its_path_and_routers_have_the_rest(path, told):
    async def own(request):
        return PlainTextResponse(f"the door's {request.path_params['number']} at {request.url.path}")

    router = APIRouter()
    router.add_api_route("/{rest:path}", lambda: PlainTextResponse("the router's"))
    server = Server(Listening())
    server.mount("", router)
    server.mount_app("/door", Router([Route("/api/{number}", own)]))
    server.start()
    try:
        answer = httpx.get(server.url + path)
        assert (answer.text if answer.status_code == 200 else None) == told
    finally:
        server.close()
