"""Who may read what: every address with every wrong caller; hosts, methods and headers; malformed requests."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.log_script import AlternatingRun
from tests.service.pages_server import Pages

from rlmux.core.errors import UserError
from rlmux.service.addresses import Listening
from rlmux.service.dashboard.auth import audit, tokens
from rlmux.service.dashboard.auth.access import Access, Limits, token_of
from rlmux.service.dashboard.auth.host_middleware import HEADERS, Hosts
from rlmux.service.dashboard.dashboard import Dashboard
from rlmux.service.dashboard.router import PREFIX
from rlmux.service.http_server import Server

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    shown = Pages(AlternatingRun(num_steps=2).script.write(tmp_path_factory.mktemp("runs") / "demo"))
    yield shown
    shown.close()


def paths(pages: Pages) -> list[tuple[str, str, str | None]]:
    """(method, path, scope) of every address of the table."""
    return [
        (one.method, PREFIX + one.path.format(lane="demo", name="sort", step=1, prompt=0, sample=0), one.scope)
        for one in pages.dashboard.addresses
    ]


def ask(pages: Pages, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """Only the head of the answer: a stream has no end."""
    body = b"{}" if method not in ("GET", "HEAD") else None
    with (
        httpx.Client(base_url=pages.url, verify=False) as client,  # loading certificates costs more than a request
        client.stream(method, path, headers=headers, content=body) as answer,
    ):
        return answer


def test_every_address_refuses_every_wrong_caller(pages):
    access = pages.dashboard.access
    access.add_token("narrow" * 8, scopes=["another"])
    access.add_token("revoked" * 8, scopes=["admin"])
    now = time.time()
    ended = tokens.add(pages.dashboard.token_path.parent, "ann", ["admin"], days=1e-9, now=now - 60.0)
    kept = tokens.add(pages.dashboard.token_path.parent, "ann", ["admin"], days=1.0, now=now)
    kept_session = access.login(token=kept)
    tokens.revoke(pages.dashboard.token_path.parent, kept.split("_")[1])
    session = access.login(token="revoked" * 8)
    access.revoke("revoked" * 8)
    cookie = f"rlmux_{pages.server.port}"
    wrong = {
        401: [
            {},
            {"Authorization": "Bearer " + pages.token[:-1] + "~"},
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {pages.token}"},
            {"Authorization": f"Bearer {'revoked' * 8}"},
            {"Authorization": f"Bearer {ended}"},
            {"Authorization": f"Bearer {kept}"},
            {"Cookie": f"{cookie}={kept_session}", "Sec-Fetch-Site": "same-origin"},
            {"Cookie": f"{cookie}={session}", "Sec-Fetch-Site": "same-origin"},
            {"Cookie": f"{cookie}={pages.token}", "Sec-Fetch-Site": "same-origin"},
        ],
        403: [{"Authorization": f"Bearer {'narrow' * 8}"}],
    }
    for method, path, scope in paths(pages):
        for status, callers in wrong.items():
            for caller in callers if scope is not None else ():
                answer = ask(pages, method, path, {**JSON, **caller})
                is_unasked = method != "GET" and "Authorization" not in caller and "Sec-Fetch-Site" not in caller
                assert answer.status_code == (403 if is_unasked else status), (method, path, caller)


def test_every_address_that_is_read_answers_the_right_caller(pages):
    for method, path, _ in paths(pages):
        if method == "GET":
            answer = ask(pages, method, path, {"Authorization": f"Bearer {pages.token}"})
            rest = ("/samples", "/compare", "/search")
            on_their_own = ("/gap", "/logs", "/spec", "/why", "/queue", "/usage", "/file", ".json", ".html")
            needs_more = path.endswith(on_their_own) or any(each in path for each in rest)
            assert answer.status_code == 200 or needs_more, path


def test_a_session_changes_nothing_unless_a_page_of_this_server_asks(pages):
    """The methods come from the router: one that is added is covered."""
    with contextlib.closing(pages.browser()) as browser:
        cookie = "; ".join(f"{one.name}={one.value}" for one in browser.cookies.jar)
        others = [
            {},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Sec-Fetch-Site": "none"},
            {"Sec-Fetch-Site": "cross-site", "Origin": pages.url},
            {"Origin": "http://evil.test"},
            {"Origin": "null"},
            {"Origin": f"{pages.url}.evil.test"},
            {"Origin": pages.url.replace("http:", "https:")},
        ]
        changing = [
            (method, path)
            for path, route in pages.server.routes
            for method in route.methods - {"GET", "HEAD"}
            if "{path:path}" not in path
        ]
        assert changing, "there is something to protect"
        for method, path in changing:
            for headers in others:
                assert ask(pages, method, path, {**JSON, **headers, "Cookie": cookie}).status_code == 403
            simple = {"Content-Type": "text/plain", "Origin": pages.url, "Cookie": cookie}
            assert ask(pages, method, path, simple).status_code == 415, "a form needs no leave of a browser"
        assert browser.get("/whoami").status_code == 200
        assert browser.post("/logout", headers=JSON).status_code == 204
        assert browser.get("/whoami").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.test", "127.0.0.1.evil.test", "", "127.0.0.1:80:80", "[::1", "a@127.0.0.1", "10.0.0.1"]
)
def test_a_request_for_another_name_gets_nothing(pages, host):
    addresses = ["/", "/assets/app.js", "/login", f"{PREFIX}/nothing", *(path for _, path, _ in paths(pages))]
    for path in addresses:
        for method in ("GET", "POST", "DELETE"):
            connection = http.client.HTTPConnection("127.0.0.1", pages.server.port)
            connection.putrequest(method, path, skip_host=True)
            connection.putheader("Host", host)
            connection.putheader("Authorization", f"Bearer {pages.token}")
            connection.endheaders()
            assert connection.getresponse().status == 421, (method, path)
            connection.close()


def test_names_of_this_machine_are_known():
    hosts = Hosts("127.0.0.1", ["Lab.Example"])
    assert all(hosts.allows(host) for host in ("127.0.0.1:7460", "localhost", "[::1]:1", "lab.example", "LOCALHOST."))
    assert not Hosts("127.0.0.1").allows("lab.example")


def test_every_answer_has_the_headers_that_browsers_obey(pages):
    for path in ("/", "/login", "/assets/no.js", f"{PREFIX}/health", f"{PREFIX}/lanes", f"{PREFIX}/nothing"):
        for host in ("127.0.0.1", "evil.test"):
            answer = ask(pages, "GET", path, {"Host": host})
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
            assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_ticket_works_once_and_for_a_minute():
    now = [0.0]
    access = Access(clock=lambda: now[0])
    first, late = access.make_ticket(), access.make_ticket()
    assert access.login(ticket=first) is not None
    assert access.login(ticket=first) is None
    now[0] = 60.0
    assert access.login(ticket=late) is None


def test_a_session_ends_after_twelve_quiet_hours_and_after_seven_days():
    now, hour_s = [0.0], 3600.0
    access = Access(clock=lambda: now[0])
    quiet, busy = (access.login(ticket=access.make_ticket()) for _ in range(2))
    for hour in range(0, 7 * 24, 6):
        now[0] = hour * hour_s
        assert access.of_session(busy) is not None
        if hour == 12:
            assert access.of_session(quiet) is None
    now[0] = 7 * 24 * hour_s
    assert access.of_session(busy) is None


def test_a_session_outlives_its_server_but_not_its_logout_nor_its_token(tmp_path):
    now = [0.0]

    def server(*tokens: str) -> Access:
        access = Access(clock=lambda: now[0])
        for token in tokens:
            access.add_token(token, scopes=["admin"])
        access.watch(tmp_path)
        return access

    first = server("t1", "t2")
    stays, ended, of_other = (first.login(token=token) for token in ("t1", "t1", "t2"))
    first.logout(ended)
    assert (tmp_path / "sessions.json").stat().st_mode & 0o777 == 0o600
    second = server("t1")
    assert [second.of_session(cookie) is not None for cookie in (stays, ended, of_other)] == [True, False, False]
    now[0] = 11 * 3600.0
    assert second.of_session(stays) is not None
    now[0] = 22 * 3600.0
    assert server("t1").of_session(stays) is not None
    assert stays not in (tmp_path / "sessions.json").read_text()


def test_a_damaged_file_of_sessions_is_one_line(tmp_path):
    kept = tmp_path / "sessions.json"
    kept.touch(mode=0o600)
    for text in ("[1]", '{"a": 1}', '{"a": {"token": ""}}', "{"):
        kept.write_text(text)
        with pytest.raises(UserError, match=r"sessions\.json: is damaged; accepted: remove it"):
            Access().watch(tmp_path)


def test_logins_and_requests_are_counted(tmp_path, finished_run, dashboard):
    shown = dashboard(finished_run, limits=Limits(requests_per_s=0.001, burst=20), is_indexed=False)
    headers = {"Origin": shown.url}
    login = f"{shown.url}{PREFIX}/login"
    statuses = [shown.anyone.post(login, json={"token": "wrong"}, headers=headers).status_code for _ in range(7)]
    assert statuses == [401] * 5 + [429] * 2
    assert [shown.client.get("/version").status_code for _ in range(21)][-2:] == [200, 429]


def test_a_token_that_others_can_read_is_refused(tmp_path):
    token = token_of(tmp_path)
    path = tmp_path / "admin.token"
    assert (path.stat().st_mode & 0o777, token_of(tmp_path)) == (0o600, token)
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        token_of(tmp_path)


def test_a_refused_token_leaves_no_address_taken(tmp_path, finished_run):
    (tmp_path / "admin.token").write_text("short")
    (tmp_path / "admin.token").chmod(0o600)
    server = Server(Listening())
    with pytest.raises(UserError, match="holds no token"):
        Dashboard(tmp_path, server)
    server.close()


# ---------------------------------------------------------------------- malformed requests

PIECES = [
    b"GET ", b"POST ", b"\0", b"\r\n", b"\r\n\r\n", b"..", b"%00", b"%2e%2e%2f", b"?", b"&", b"=", b"[" * 400,
    b"Host: 127.0.0.1\r\n", b"Host: evil.test\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999\r\n",
    b"Content-Length: 3\r\nContent-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"Content-Type: application/json\r\n", b'{"ticket": 5}', b'{"token": "\\ud800"}', b"\xff\xfe", b"A" * 20000,
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Range: bytes=0-99999999999999\r\n", b"Cookie: a=b; ;=;\r\n",
    b"If-None-Match: ,,,\"\r\n", b"Last-Event-ID: %00=9,,=\r\n", b"limit=-1", b"t0=1e400", b"cursor=" + b"9" * 40,
]  # fmt: skip


def malformed(chance: random.Random, pages: Pages) -> bytes:
    method, path, _ = chance.choice(paths(pages))
    asks = [
        f"{name}={chance.choice(['', '1', '-1', 'x', '1e99', 'nan', '9' * 30])}"
        for name in ("t0", "t1", "level", "limit", "to")
    ]
    query = "?" + "&".join(chance.sample(asks, chance.randrange(3)))
    head = f"{method} {path}{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
    body = chance.choice([b"", b'{"ticket": "x"}', b"[" * 100000, b'{"a":' * 50 + b"1" + b"}" * 50])
    head += b"Connection: close\r\nContent-Type: application/json\r\nOrigin: %s\r\n" % pages.url.encode()
    if chance.random() < 0.7:
        head += b"Authorization: Bearer %s\r\n" % pages.token.encode()
    data = bytearray(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(min(len(data), 600))
        data[at : at + chance.randrange(8)] = chance.choice(PIECES)
    return bytes(data)


def send(port: int, data: bytes) -> bytes:
    """The first part of the answer, or nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(65536)
        except (ConnectionError, TimeoutError, OSError):
            return b""


def send_malformed(pages: Pages, num: int) -> None:
    chance, statuses = random.Random(0), set()
    threads = threading.active_count()
    for number in range(num):
        data = malformed(chance, pages)
        answer = send(pages.server.port, data)
        assert b"Traceback" not in answer, (number, data)
        if answer:
            status = int(answer.split(b" ", 2)[1])
            statuses.add(status)
            assert status < 500, (number, data[:400], answer[:400])
    assert {200, 400} <= statuses
    assert pages.get("/health")["ok"]
    assert threading.active_count() <= threads + 40, "threads of the pool, and no more"


def test_malformed_requests_get_no_answer_that_is_the_servers_fault(pages):
    send_malformed(pages, 400)


@pytest.mark.slow
def test_ten_thousand_malformed_requests_do_nothing(pages):
    send_malformed(pages, 10_000)


def test_each_scope_opens_its_own_addresses_alone(pages):
    """And every request that may have an effect is in the audit, with its user and answer."""
    for scope in ("read", "submit", "control", "metrics"):
        token = tokens.add(pages.dashboard.token_path.parent, f"user-{scope}", [scope], days=1.0, now=time.time())
        for method, path, needs in paths(pages):
            if needs is None or path.endswith(("/stream", "/logout")):
                continue
            answer = ask(pages, method, path, {**JSON, "Authorization": f"Bearer {token}"})
            is_others = path.endswith("/sort/remove") and scope == "control"  # refused, as it is another user's
            assert (answer.status_code == 403) == (needs != scope or is_others), (method, path, scope)
    rows, _ = audit.read(pages.dashboard.token_path.parent, limit=10_000)
    parked = [row for row in rows if row["path"].endswith("/sort/park") and row["user"] == "user-read"]
    assert [(row["method"], row["status"], len(row["token"])) for row in parked] == [("POST", 403, 8)]
    assert not [row for row in rows if row["method"] == "GET" and row["status"] not in (401, 403)]
    assert (pages.dashboard.token_path.parent / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_a_file_of_tokens_holds_no_token_and_is_read_by_its_writer_alone(tmp_path):
    token = tokens.add(tmp_path, "ann", ["read"], days=1.0, now=0.0)
    text = (tmp_path / tokens.NAME).read_text()
    assert token not in text
    assert token.rpartition("_")[2] not in text
    (tmp_path / tokens.NAME).chmod(0o644)
    with pytest.raises(UserError, match="other users can read it"):
        tokens.read(tmp_path)


@pytest.mark.parametrize(("scopes", "days"), [(["reed"], 1.0), ([], 1.0), (["read"], 0.0)])
def test_a_token_that_makes_no_sense_is_not_made(tmp_path, scopes, days):
    with pytest.raises(UserError, match="accepted"):
        tokens.add(tmp_path, "ann", scopes, days=days, now=0.0)
    assert not (tmp_path / tokens.NAME).exists()


def test_tokens_that_are_added_and_revoked_at_once_are_all_taken_over(tmp_path):
    old = [tokens.add(tmp_path, "old", ["read"], days=1.0, now=0.0) for _ in range(4)]

    def add(number: int) -> None:
        for each in range(4):
            tokens.add(tmp_path, f"user{number}-{each}", ["read"], days=1.0, now=0.0)

    changes = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    changes += [threading.Thread(target=tokens.revoke, args=(tmp_path, token.split("_")[1])) for token in old]
    for each in changes:
        each.start()
    for each in changes:
        each.join()
    assert sorted(one.user for one in tokens.read(tmp_path)) == [f"user{a}-{b}" for a in range(4) for b in range(4)]


# ---------------------------------------------------------------------- another admin token


def test_a_new_admin_token_is_taken_and_the_old_one_and_its_sessions_end(dashboard, finished_run, tmp_path):
    shown = dashboard(finished_run, is_started=False)
    path, old = shown.dashboard.token_path, shown.token
    session = shown.browser()
    assert session.post("/login", json={"token": old}).status_code == 200

    def status_of(token: str) -> int:
        return shown.anyone.get(f"{shown.url}{PREFIX}/lanes", headers={"Authorization": f"Bearer {token}"}).status_code

    assert status_of(old) == session.get("/lanes").status_code == 200
    path.rename(tmp_path / "aside")
    assert status_of(old) == session.get("/lanes").status_code == 401, "the file was removed: another is made"
    made = path.read_text().strip()
    assert made != old
    assert (path.stat().st_mode & 0o777, status_of(made)) == (0o600, 200)
    path.chmod(0o644)
    assert status_of(made) == 401, "others can read it"
    path.chmod(0o600)
    assert status_of(made) == 200
    own = "x" * 40
    path.write_text(own)
    assert (status_of(made), status_of(own)) == (401, 200)
    (tmp_path / "aside").rename(path)
    assert (status_of(own), status_of(old)) == (401, 200)
    session.close()


def test_a_refused_token_is_answered_in_words_that_fit_every_user(dashboard, finished_run):
    shown = dashboard(finished_run, is_started=False)
    refused = shown.anyone.post(f"{shown.url}{PREFIX}/login", json={"token": "wrong"}, headers={"Origin": shown.url})
    assert refused.json()["accepted"].startswith("the token that you were given")
    assert "the token that you were given" in shown.anyone.get(f"{shown.url}{PREFIX}/lanes").json()["accepted"]
