"""The HTTP server in a thread: what `start` promises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
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
from rlmux.service import http_patience
from rlmux.service.addresses import Listening
from rlmux.service.http_patience import MAX_HEAD_BYTES
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


def test_a_head_behind_another_in_one_piece_is_held_to_the_same(echo):
    first = b"GET /no HTTP/1.1\r\nHost: a\r\n\r\n"
    for second in (HEAD + b"X: 1\r\n 2\r\n\r\n", HEAD + b"X: a\r\n" * 6000 + b"\r\n"):
        with socket.create_connection((echo.host, echo.port), timeout=30) as client:
            client.sendall(first + second)
            answers = b""
            while data := client.recv(1 << 16):
                answers += data
        assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"404", b"400"]


@pytest.mark.parametrize("chunk", [b"ZZ\r\n", b"1" * (MAX_HEAD_BYTES + 1)], ids=["no size", "a size without end"])
def test_a_malformed_body_whose_request_is_answered_ends_the_connection_without_a_traceback(echo, caplog, chunk):
    head = b"POST /no HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(echo, head, chunk)[0] == b"HTTP/1.1 404 Not Found"
    assert not [record for record in caplog.records if record.exc_info]


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


_OF_FEW_FILES = """\
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from rlmux.service.addresses import Listening
from rlmux.service.http_server import Server
server = Server(Listening())
server.start()
print(server.port, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
sys.stdin.read()
server.close()
"""


@contextlib.contextmanager
def server_of_few_files(soft: int, hard: int) -> Iterator[tuple[int, int, Callable[[], str]]]:
    """(port, soft limit after the start, its stderr once it has ended)."""
    words = [sys.executable, "-c", _OF_FEW_FILES, str(soft), str(hard)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        port, limit = map(int, process.stdout.readline().split())
        yield port, limit, lambda: process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("first_bytes", [b"", b"GET / HTTP/1.1\r\nX: "], ids=["silent", "half a head"])
def test_connections_without_a_request_silence_no_server(first_bytes):
    with server_of_few_files(100, 100) as (port, _, end), contextlib.ExitStack() as opened:
        for _ in range(150):
            silent = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            with contextlib.suppress(ConnectionError):
                silent.sendall(first_bytes)
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{port}/", timeout=5, trust_env=False).status_code == 404
        assert end().count("\n") <= 1


def test_a_process_without_a_free_file_says_so_in_one_line_and_serves_again():
    taken = _OF_FEW_FILES.replace(
        "print(server", "import os, threading, time\nheld = [os.open('/dev/null', 0) for _ in range(60)]\nprint(server"
    ).replace("sys.stdin.read()", "time.sleep(2.5)\n[os.close(one) for one in held]\nsys.stdin.read()")
    words = [sys.executable, "-c", taken, "100", "100"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[0])
        with contextlib.ExitStack() as opened:
            for _ in range(150):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            assert httpx.get(f"http://127.0.0.1:{port}/", timeout=10, trust_env=False).status_code == 404
        _, err = process.communicate(timeout=30)
        assert err.count("\n") == 1, err[:2000]
        assert "no connection is taken for a second: [Errno 24] Too many open files" in err
    finally:
        process.kill()
        process.communicate()


def test_the_soft_limit_of_files_is_raised_to_the_hard_one():
    with server_of_few_files(64, 512) as (_, limit, _end):
        assert limit == 512


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"GET / HTTP/1.1\r\n", *[b"X: 1\r\n"] * 100],
        [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n"],
        [b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", *[b"GET / "] * 100],
    ],
    ids=["nothing", "a head in drops", "an empty line after a request", "after another protocol"],
)
def test_a_connection_without_a_whole_head_is_closed_in_time(echo, monkeypatch, pieces):
    monkeypatch.setattr(http_patience, "HEAD_S", 0.5)
    with socket.create_connection((echo.host, echo.port), timeout=10) as client, contextlib.suppress(ConnectionError):
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.05)
        while client.recv(1 << 16):
            pass


def test_a_request_that_takes_long_is_not_silent(monkeypatch):
    monkeypatch.setattr(http_patience, "HEAD_S", 0.2)

    async def answer_late(request):
        await asyncio.sleep(0.8)
        return PlainTextResponse("late")

    server = Server(Listening())
    server.mount_app("/late", Router([Route("/", answer_late)]))
    server.start()
    try:
        assert httpx.get(f"{server.url}/late/").text == "late"
    finally:
        server.close()


def test_where_every_connection_is_answered_a_new_one_is_refused_with_503(monkeypatch):
    monkeypatch.setattr(http_patience, "_MAX_CONNECTIONS", 2)
    begun = threading.Event()

    async def answer_late(request):
        begun.set()
        await asyncio.sleep(2)
        return PlainTextResponse("late")

    server = Server(Listening())
    server.mount_app("/late", Router([Route("/", answer_late)]))
    server.start()
    try:
        with contextlib.ExitStack() as opened:
            for _ in range(2):
                begun.clear()
                one = opened.enter_context(socket.create_connection((server.host, server.port), timeout=5))
                one.sendall(b"GET /late/ HTTP/1.1\r\nHost: a\r\n\r\n")
                assert begun.wait(5)
            assert httpx.get(server.url).status_code == 503
    finally:
        server.close()
