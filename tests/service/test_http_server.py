"""The HTTP server in a thread: what `start` promises."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection

import httpx
import pytest
from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route, Router
from tests.waiting import until

from rlmux.core.errors import ThreadDiedError
from rlmux.service.addresses import Listening
from rlmux.service.http_head import MAX_HEAD_BYTES
from rlmux.service.http_server import Server


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


@pytest.mark.slow
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


@pytest.fixture
def echo() -> Iterator[Server]:
    """A server that answers with the headers and the body that it was sent."""

    async def tell(request):
        return JSONResponse({"headers": request.headers.items(), "body": (await request.body()).decode()})

    server = Server(Listening())
    server.mount_app("/echo", Router([Route("/", tell, methods=["GET", "POST"])]))
    server.start()
    yield server
    server.close()


def exchange(server: Server, *pieces: bytes) -> tuple[bytes, bytes]:
    """(status line, body) of what is answered to a request that is sent in pieces."""
    with socket.create_connection((server.host, server.port), timeout=30) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.05)
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.splitlines()[0], body


HEAD = b"POST /echo/ HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"],
        [HEAD + b"X: a\r\n" * 6000 + b"\r\n"],
        [HEAD + b"X: ", *[b"a" * 6000] * 3],
        [b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n"],
    ],
    ids=["a long line", "many lines", "a line without end", "a long address"],
)
def test_a_head_beyond_its_bound_is_refused_and_the_connection_ends(echo, pieces):
    assert exchange(echo, *pieces)[0] == b"HTTP/1.1 400 Bad Request"


def test_long_bodies_and_heads_in_pieces_are_no_long_heads(echo):
    body = b"b" * 300_000
    wanted = HEAD + b"X: " + b"a" * 15_000 + b"\r\nContent-Length: 300000\r\n\r\n" + body
    for pieces in ([wanted], [wanted[:10], wanted[10:14_000], wanted[14_000:]]):
        status, told = exchange(echo, *pieces)
        assert (status, json.loads(told)["body"]) == (b"HTTP/1.1 200 OK", body.decode())
    one = HEAD.replace(b"Connection: close\r\n", b"") + b"Content-Length: 20000\r\n\r\n" + b"b" * 20_000
    with socket.create_connection((echo.host, echo.port), timeout=30) as client:
        client.sendall(one + HEAD[:30])  # the next one has begun in the same piece
        client.sendall(HEAD[30:] + b"\r\n")
        answers = b""
        while data := client.recv(1 << 16):
            answers += data
    assert answers.count(b"HTTP/1.1 200 OK") == 2


def test_a_body_does_not_wait_for_the_acknowledgement_of_its_head(echo):
    with contextlib.closing(HTTPConnection(echo.host, echo.port, timeout=30)) as client:
        client.request("POST", "/", body=b"a")
        client.getresponse().read()
        (connection,) = echo._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_follows_a_body_adds_no_header(echo):
    head = HEAD + b"Transfer-Encoding: chunked\r\nTrailer: X-User\r\n\r\n"
    status, told = exchange(echo, head + b"2\r\nhi\r\n0\r\nX-User: root\r\n\r\n")
    assert status == b"HTTP/1.1 200 OK"
    assert json.loads(told)["body"] == "hi"
    assert "x-user" not in dict(json.loads(told)["headers"])


def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(echo):
    head = HEAD.replace(b"close", b"Upgrade, HTTP2-Settings") + b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with socket.create_connection((echo.host, echo.port), timeout=30) as client:
        client.sendall(head + b"Content-Length: 2\r\n\r\nhi")
        answer = client.recv(1 << 16)
        while b"body" not in answer:
            answer += client.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b'"body":"hi"}')


@pytest.mark.parametrize(
    "head",
    [
        b"GET /echo/ HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /echo/ HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n",
        b"GET /echo/ HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n",
        b"GET /echo/ HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n",
        b"GET /echo/ HTTP/1.1\r\nHost: a\r\nX: \x001\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["two lengths", "two different lengths", "a space in a name", "a folded line", "a zero byte", "TLS"],
)
def test_what_two_readers_could_read_differently_is_refused(echo, head):
    assert exchange(echo, head)[0] == b"HTTP/1.1 400 Bad Request"


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


def test_a_task_beside_the_requests_that_an_error_ends_is_missed():
    async def fail() -> None:
        raise ValueError("an error of ours")

    server = Server(Listening())
    server.run_beside(fail)
    server.start()
    try:
        until(lambda: raises(server.thread.check), "the error of the task")
        with pytest.raises(ThreadDiedError, match="thread http ended: ValueError: an error of ours"):
            server.thread.check()
    finally:
        server.close()


def raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except ThreadDiedError:
        return True
    return False
