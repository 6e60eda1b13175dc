"""A server that other machines reach: its own TLS, or a proxy before it; real processes and certificates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from tests.certificates import make_certificate, needs_openssl
from tests.command_line import command
from tests.service.pages_server import Pages
from tests.waiting import until

from rlmux.broker.certificate import Tls
from rlmux.cli.main import run_command_line
from rlmux.service.addresses import Listening, Proxied, listening_of
from rlmux.service.dashboard.auth.access import Limits

ROOT = Path(__file__).parents[2]
ANYWHERE = "0.0.0.0"
FEW = Limits()


@contextlib.contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    """A server process that shows the folder; gives its URL."""
    given = command("serve", str(folder), "--listen", "127.0.0.1:0", *words)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().partition(": ")[2].partition("/login")[0]
        finally:
            process.terminate()


def rlmux(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line in this process."""
    code = run_command_line(words)
    said = capsys.readouterr()
    return code, said.out, said.err


@needs_openssl
def test_under_tls_the_cookie_is_secure_and_clients_say_which_certificate_they_trust(
    finished_run, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "demo"
    shutil.copytree(finished_run, folder)
    cert, key = make_certificate(tmp_path)
    with served(folder, "--tls-cert", str(cert), "--tls-key", str(key)) as url:
        assert url.startswith("https://127.0.0.1:")
        token = (folder / "admin.token").read_text().strip()
        port = int(url.rpartition(":")[2])
        with httpx.Client(base_url=f"{url}/api/v1", verify=ssl.create_default_context(cafile=cert)) as client:
            login = client.post("/login", json={"token": token}, headers={"Sec-Fetch-Site": "same-origin"})
            name, _, rest = login.headers["set-cookie"].partition("=")
            assert name == f"__Host-rlmux_{port}"
            attributes = {part.strip().lower() for part in rest.split(";")}
            assert {"secure", "httponly", "samesite=strict", "path=/"} <= attributes
            assert client.get("/whoami").json()["scopes"] == ["admin"]
            assert client.post("/logout", json={}, headers={"Origin": url}).status_code == 204
            plain = {"Cookie": f"rlmux_{port}={rest.partition(';')[0]}"}
            assert client.get("/whoami", headers=plain).status_code == 401, "a cookie that any page could set"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/api/v1/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/api/v1/health", verify=ssl.create_default_context())
        monkeypatch.setenv("RLMUX_TOKEN", token)
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        code, out, err = rlmux(["status", url, "--json"], capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "accepted: SSL_CERT_FILE=FILE" in err
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        until_indexed(url, token, cert)
        code, out, err = rlmux(["status", url, "--json"], capsys)
        assert (code, err) == (0, "")
        assert '"sort"' in out
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no.pem"))
        code, _, err = rlmux(["status", url, "--json"], capsys)
        assert (code, err.count("\n"), "no.pem" in err) == (2, 1, True)


def until_indexed(url: str, token: str, cert: Path) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(verify=ssl.create_default_context(cafile=cert), headers=headers) as client:
        until(lambda: not client.get(f"{url}/api/v1/lanes").json()["items"][0]["is_indexing"], "an index of the run")


@needs_openssl
def test_a_certificate_that_is_none_is_refused_in_a_line_before_anything_is_made(finished_run, tmp_path, capsys):
    cert, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", "-passout", "pass:secret")
    text = tmp_path / "text.pem"
    text.write_text("none")
    missing = tmp_path / "missing.pem"
    mistakes = [
        (["--tls-cert", cert], "--tls-cert: needs --tls-key FILE too"),
        (["--tls-key", key], "--tls-key: needs --tls-cert FILE too"),
        (["--tls-cert", missing, "--tls-key", key], f"--tls-cert {missing}: No such file or directory"),
        (["--tls-cert", cert, "--tls-key", tmp_path], f"--tls-key {tmp_path}: Is a directory"),
        (["--tls-cert", cert, "--tls-key", other], "key values mismatch"),
        (["--tls-cert", text, "--tls-key", key], f"--tls-cert {text}"),
        (["--tls-cert", cert, "--tls-key", locked], "without a password"),
    ]
    before = sorted(tmp_path.iterdir())
    for words, told in mistakes:
        code, out, err = rlmux(["serve", str(finished_run), *map(str, words)], capsys)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert told in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--listen", f"{ANYWHERE}:0"], "other machines would read the pages in the clear"),
        (["--behind-proxy", "10.0.0.1/8"], "--behind-proxy 10.0.0.1/8: accepted"),
        (["--behind-proxy", "proxy.lab"], "--behind-proxy proxy.lab: accepted"),
        (["--user-header", "X-Forwarded-Email"], "any program could send it"),
        (["--behind-proxy", "10.0.0.1", "--user-header", "a b"], "accepted: a header's name"),
    ],
)
def test_an_address_that_others_read_in_the_clear_is_refused(finished_run, capsys, words, told):
    code, out, err = rlmux(["serve", str(finished_run), *words], capsys)
    assert (code, out, err.count("\n"), told in err) == (2, "", 1, True), err


# ---------------------------------------------------------------------- proxies

FORWARDED = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https", "X-Forwarded-Email": "ann@lab"}
BEHIND = listening_of("127.0.0.1", 0, behind_proxy=["127.0.0.0/8"], user_header="X-Forwarded-Email")


def test_forwarded_headers_count_for_nothing_unless_a_proxy_is_named(finished_run):
    """Else any program of this machine would log in from a new address each time, as often as it likes."""
    shown = Pages(finished_run, limits=FEW, is_indexed=False)
    with contextlib.closing(shown):
        statuses = [
            shown.anyone.post(
                f"{shown.url}/api/v1/login",
                json={"token": "wrong"},
                headers={**FORWARDED, "X-Forwarded-For": f"203.0.113.{number}", "Origin": shown.url},
            ).status_code
            for number in range(7)
        ]
        assert statuses == [401] * 5 + [429] * 2
        assert shown.anyone.get(f"{shown.url}/api/v1/whoami", headers=FORWARDED).status_code == 401


def test_behind_a_proxy_its_header_says_who_asks_and_from_where(finished_run, tmp_path):
    folder = tmp_path / "demo"
    shutil.copytree(finished_run, folder)
    shown = Pages(folder, is_indexed=False, listening=BEHIND, allowed_hosts=["rlmux.lab"])
    with contextlib.closing(shown):
        headers = {**FORWARDED, "Host": "rlmux.lab"}
        with httpx.Client(base_url=f"{shown.url}/api/v1", headers=headers) as client:
            who = client.get("/whoami").json()
            assert (who["user"], "admin" in who["scopes"], "submit" in who["scopes"]) == ("ann@lab", False, True)
            park = "/pipelines/demo/sort/park"
            assert client.post(park, json={}).status_code == 403, "the header is no token: a page of ours must ask"
            assert client.post(park, json={}, headers={"Origin": "http://rlmux.lab"}).status_code == 403
            assert client.post(park, json={}, headers={"Origin": "https://rlmux.lab"}).status_code == 409, "it is over"
            bad = {"Authorization": "Bearer wrong"}
            assert client.get("/whoami", headers=bad).status_code == 401, "a wrong token is not helped by the proxy"
            token = {"Authorization": f"Bearer {shown.token}"}
            assert client.get("/whoami", headers=token).json()["scopes"] == ["admin"]
            for name, status in (("", 401), ("x" * 300, 401), ("a\tb", 401), ("a\x01b", 400)):
                odd = httpx.Headers({**headers, "X-Forwarded-Email": name})
                assert client.get("/whoami", headers=odd).status_code == status, name
            twice = httpx.Headers([*headers.items(), ("X-Forwarded-Email", "bob@lab")])
            assert httpx.get(f"{shown.url}/api/v1/whoami", headers=twice).status_code == 401
            login = client.post("/login", json={"token": shown.token}, headers={"Origin": "https://rlmux.lab"})
            assert login.headers["set-cookie"].startswith("__Host-rlmux_")
            assert client.get("/whoami").json()["user"] == "ann@lab", "the proxy's word is before a session's"
        rows = (folder / "audit.jsonl").read_text()
        assert '"user": "ann@lab"' in rows
        assert '"address": "203.0.113.9"' in rows


def test_whoever_goes_around_the_proxy_is_believed_nothing_and_from_elsewhere_refused():
    """The peers are those that a socket would name: this machine has one address alone."""
    behind = Listening(
        proxies=listening_of("h", 1, behind_proxy=["10.0.0.0/24"]).proxies, user_header="x-forwarded-email"
    )
    with_tls = Listening(
        proxies=behind.proxies, user_header="x-forwarded-email", tls=Tls(cert=Path("cert"), key=Path("key"))
    )
    email = "ann@lab"
    for listening, peer, expected in [
        (behind, "10.0.0.7", (200, email, "https", "203.0.113.9")),
        (behind, "::ffff:10.0.0.7", (200, email, "https", "203.0.113.9")),
        (behind, "127.0.0.1", (200, None, "http", "127.0.0.1")),
        (behind, "10.0.1.7", (403, None, None, None)),
        (behind, "", (403, None, None, None)),
        (with_tls, "10.0.1.7", (200, None, "http", "10.0.1.7")),
    ]:
        assert told_of(listening, peer) == expected, peer


def told_of(listening: Listening, peer: str) -> tuple[object, ...]:
    """(status, user, scheme, address) as the first door sees a request of this peer."""

    async def app(scope, receive, send):
        request = Request(scope)
        seen = [getattr(request.state, "proxy_user", None), request.url.scheme, request.client.host]
        await JSONResponse(seen)(scope, receive, send)

    transport = httpx.ASGITransport(Proxied(app, listening), client=(peer, 5))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            return await client.get("/", headers=FORWARDED)

    answer = asyncio.run(ask())
    return (answer.status_code, *(answer.json() if answer.status_code == 200 else (None, None, None)))
