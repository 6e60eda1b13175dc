"""A provider's user is logged in as the user of the folder with that login; all others, and forged answers, are not."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from tests.service.pages_server import Pages

from rlmux.core.errors import UserError
from rlmux.service.addresses import Listening, provider_of
from rlmux.service.dashboard.auth import audit, users

pytest.importorskip("authlib", reason="needs the extra oidc")
pytest.importorskip("itsdangerous", reason="needs the extra oidc")
pytest.importorskip("httpx2", reason="needs the extra oidc")
CLIENT = "rlmux-test"
GONE = "http://127.0.0.1:9"


class FakeProvider:
    """An OpenID provider that logs everybody in at once as `claims`."""

    def __init__(self) -> None:
        from joserfc.jwk import RSAKey

        self.claims: dict[str, object] = {"email": "ann@lab.test", "email_verified": True}
        self.key = RSAKey.generate_key(2048, {"kid": "1"})
        self.signing_key = self.key
        self.asked: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
                if path == "/authorize":
                    outer.asked = {name: values[0] for name, values in query.items()}
                    back = urlencode({"code": "c0de", "state": outer.asked["state"]})
                    self.send_response(302)
                    self.send_header("Location", f"{outer.asked['redirect_uri']}?{back}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif path == "/keys":
                    self.answer({"keys": [outer.key.as_dict(private=False)]})
                else:
                    self.answer(outer.metadata())

            def do_POST(self) -> None:
                given = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                challenge = base64.urlsafe_b64encode(hashlib.sha256(given["code_verifier"][0].encode()).digest())
                is_own = challenge.decode().rstrip("=") == outer.asked["code_challenge"]
                self.answer(outer.tokens() if is_own else {"error": "invalid_grant"}, 200 if is_own else 400)

            def answer(self, value: object, status: int = 200) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def metadata(self) -> dict[str, object]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "id_token_signing_alg_values_supported": ["RS256"],
        }

    def tokens(self) -> dict[str, object]:
        from joserfc import jwt

        now = int(time.time())
        about = {"iss": self.url, "aud": CLIENT, "sub": "1", "iat": now, "exp": now + 60, "nonce": self.asked["nonce"]}
        id_token = jwt.encode({"alg": "RS256", "kid": "1"}, {**about, **self.claims}, self.signing_key)
        return {"access_token": "a", "token_type": "Bearer", "id_token": id_token}

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    made = FakeProvider()
    yield made
    made.close()


@pytest.fixture
def pages(finished_run: Path, provider: FakeProvider, tmp_path: Path) -> Iterator[Pages]:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(finished_run)
    users.set_user(tmp_path / "runs", "ann", role="member", login="ann@lab.test")
    listening = Listening(provider=provider_of(provider.url, CLIENT, None))
    served = Pages(tmp_path / "runs", is_indexed=False, listening=listening)
    yield served
    served.close()


def browser(pages: Pages) -> httpx.Client:
    return httpx.Client(base_url=pages.url, follow_redirects=True, timeout=30)


def test_a_providers_user_is_the_user_with_that_login_and_the_audit_has_it(pages):
    with browser(pages) as ann:
        assert ann.get("/api/v1/version").json()["oidc"] == "/oidc/login"
        assert ann.get("/oidc/login").url.path == "/fleet"
        me = ann.get("/api/v1/whoami").json()
        assert (me["user"], me["role"]) == ("ann", "member")
    rows, _ = audit.read(pages.dashboard.token_path.parent)
    assert [(row["user"], row["by"], row["status"]) for row in rows] == [("ann", "oidc", 303)]


def test_a_user_that_is_removed_is_out_at_the_next_request(pages):
    folder = pages.dashboard.token_path.parent
    users.set_user(folder, "bob", role="admin")
    with browser(pages) as ann:
        ann.get("/oidc/login")
        assert ann.get("/api/v1/whoami").status_code == 200
        users.remove_user(folder, "ann")
        assert ann.get("/api/v1/whoami").status_code == 401


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"email": "eve@lab.test"}, "eve@lab.test is no user of this server; its owner adds one with: rlmux user set"),
        ({"email": "ann@lab.test", "email_verified": False}, "the provider names no verified email"),
        ({"sub": "1"}, "the provider names no verified email"),
    ],
)
def test_who_is_no_user_here_is_not_logged_in(pages, provider, claims, said):
    provider.claims = claims
    with browser(pages) as eve:
        answer = eve.get("/oidc/login")
        assert answer.status_code == 403
        assert said in answer.text
        assert eve.get("/api/v1/whoami").status_code == 401


def test_an_id_token_of_another_key_and_an_answer_to_no_question_are_refused(pages, provider):
    from joserfc.jwk import RSAKey

    provider.signing_key = RSAKey.generate_key(2048, {"kid": "1"})
    with browser(pages) as forged:
        assert forged.get("/oidc/login").status_code == 401
        assert forged.get("/api/v1/whoami").status_code == 401
    with browser(pages) as sent:
        answer = sent.get("/oidc/callback?code=c0de&state=of-another-browser")
        assert (answer.status_code, answer.text.startswith("not logged in: ")) == (401, True)


def test_a_provider_that_answers_as_none_is_one_line(pages, provider, monkeypatch):
    monkeypatch.setattr(provider, "metadata", lambda: {"issuer": provider.url})
    with browser(pages) as ann:
        answer = ann.get("/oidc/login")
        assert answer.status_code == 502
        assert f"{provider.url} does not answer as a provider" in answer.text


def test_a_provider_that_is_gone_is_one_line(finished_run):
    served = Pages(finished_run, is_indexed=False, listening=Listening(provider=provider_of(GONE, CLIENT, None)))
    try:
        answer = httpx.get(f"{served.url}/oidc/login", timeout=30)
        assert (answer.status_code, answer.text.partition(":")[0]) == (502, "http")
        assert answer.text.startswith(f"{GONE} does not answer as a provider")
    finally:
        served.close()


@pytest.mark.parametrize(
    ("issuer", "client", "said"),
    [
        ("https://id.test", None, "--oidc: accepted with --oidc-client ID"),
        ("http://id.test", "c", "--oidc http://id.test: accepted: the provider's https:// address"),
    ],
)
def test_options_that_make_no_provider_are_one_line(issuer, client, said):
    with pytest.raises(UserError) as refused:
        provider_of(issuer, client, None)
    assert str(refused.value).startswith(said)
