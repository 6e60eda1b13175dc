"""An address is told of each alert once when it begins, and once when it is over, whatever it answers in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.log_script import LogScript, append

from rlmux.core.errors import UserError
from rlmux.log.run_log import RunLog
from rlmux.service.dashboard import webhook as webhook_module
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.webhook import Webhook, body_of, check_webhook
from rlmux.service.index.indexer import LaneIndexer
from rlmux.service.index.lanes import Root


class Address:
    """A server that notes what it was sent, and answers with `status`."""

    def __init__(self) -> None:
        self.told: list[dict] = []
        self.status = 200
        self.takes: Callable[[dict], bool] = lambda message: True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                message = json.loads(data)
                status = outer.status if outer.takes(message) else 400
                if status == 200:
                    outer.told.append(message)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/alerts"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def address() -> Iterator[Address]:
    made = Address()
    yield made
    made.close()


class Growing:
    """A run whose pipeline's kl can be made to leap."""

    def __init__(self, folder: Path) -> None:
        script = LogScript()
        script.submit(0.0, "sort", num_steps=1000)
        self._log = RunLog.create(folder, script.header)
        append(self._log, script.rows)
        self._step = 0
        self.folder = folder

    def add(self, *kl: float) -> None:
        for value in kl:
            self._step += 1
            self._log.note("step", float(self._step), pipeline="sort", step=self._step, metrics={"kl": value})
        self._log.commit()
        indexer = LaneIndexer(self.folder, self.folder / "index.db")
        indexer.catch_up()
        indexer.close()

    def close(self) -> None:
        self._log.close()


@pytest.fixture
def growing(tmp_path) -> Iterator[Growing]:
    made = Growing(tmp_path / "demo")
    yield made
    made.close()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def look_again(webhook: Webhook, clock: Clock) -> None:
    clock.now_s += 100.0
    webhook.look()


def test_an_alert_is_told_when_it_begins_and_when_it_is_over(growing, address, capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # no proxy is asked for an address of this machine
    clock = Clock()
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), address.url, clock)
    growing.add(*[0.02] * 20)
    look_again(webhook, clock)
    assert address.told == []
    growing.add(2.0, 2.0, 2.0)
    address.status = 503
    look_again(webhook, clock)
    look_again(webhook, clock)
    assert capsys.readouterr().err.count("--webhook") == 1
    address.status = 200
    look_again(webhook, clock)
    growing.add(2.0)
    look_again(webhook, clock)
    (first,) = address.told
    assert (first["state"], first["lane"], first["pipeline"], first["rule"]) == ("firing", "demo", "sort", "kl_blowup")
    growing.add(0.02)
    look_again(webhook, clock)
    assert [one["state"] for one in address.told] == ["firing", "resolved"]


def test_an_alert_that_is_refused_holds_no_other_up_and_is_dropped_with_a_line(growing, address, capsys):
    clock = Clock()
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), address.url, clock)
    growing.add(*[0.02] * 20, 20.0, 20.0, 20.0)
    address.takes = lambda message: message["rule"] != "kl_blowup"
    look_again(webhook, clock)
    assert [one["rule"] for one in address.told] == ["kl_huge"]
    for _ in range(20):
        look_again(webhook, clock)
    told = capsys.readouterr().err.splitlines()
    (dropped,) = [line for line in told if "dropped" in line]
    assert dropped.endswith("kl_blowup of sort in demo (firing) is dropped after 10 tries")
    assert dropped.startswith("--webhook http://127.0.0.1:")
    assert "/alerts" not in dropped
    address.takes = lambda message: True
    growing.add(0.02)
    look_again(webhook, clock)
    assert [(one["rule"], one["state"]) for one in address.told] == [("kl_huge", "firing"), ("kl_huge", "resolved")]
    growing.add(20.0, 20.0, 20.0)
    look_again(webhook, clock)
    assert {one["rule"] for one in address.told[2:]} == {"kl_huge", "kl_blowup"}, "both are told of anew"


@pytest.mark.parametrize(("form", "key"), [("slack", "text"), ("discord", "content")])
def test_slack_and_discord_get_the_form_that_they_take(growing, address, form, key):
    address.takes = lambda message: list(message) == [key]
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), f"{form}+{address.url}")
    growing.add(*[0.02] * 20, 2.0, 2.0, 2.0)
    webhook.look()
    assert address.told[0][key].startswith("firing: kl_blowup (warning) of sort in demo: ")


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", ["text"]),
        ("https://discord.com/api/webhooks/1/x", ["content"]),
        ("https://example.com/api/webhooks/1", ["lane", "state", "pipeline", "rule", "level", "text", "advice"]),
    ],
)
def test_the_host_of_an_address_says_its_form(url, keys):
    message = dict.fromkeys(["lane", "state", "pipeline", "rule", "level", "text", "advice"], "a")
    assert list(body_of(url)(message)) == keys


def test_an_address_that_is_gone_ends_nothing(growing, capsys):
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), "http://127.0.0.1:9/")
    growing.add(*[0.02] * 20, 20.0, 20.0, 20.0)
    webhook.look()
    assert "--webhook http://127.0.0.1:9/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("somewhere", "--webhook somewhere: accepted: an address with http:// or https://"),
        ("tgram://123456789:secret/1", "--webhook tgram://.../: needs Apprise; accepted: pip install 'rlmux[notify]'"),
    ],
)
def test_an_address_that_nothing_can_send_to_is_one_line_without_its_secret(url, said, monkeypatch):
    monkeypatch.setattr(webhook_module, "find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        check_webhook(url)
    assert str(refused.value).startswith(said)
    assert "secret" not in str(refused.value)


@pytest.mark.skipif(find_spec("apprise") is None, reason="needs apprise")
def test_any_other_service_gets_a_line_by_apprise(growing, address):
    url = address.url.replace("http://", "json://")
    check_webhook(url)
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), url)
    growing.add(*[0.02] * 20, 2.0, 2.0, 2.0)
    webhook.look()
    assert address.told[0]["message"].startswith("firing: kl_blowup (warning) of sort in demo: ")


@pytest.mark.skipif(find_spec("apprise") is None, reason="needs apprise")
def test_a_scheme_that_apprise_does_not_know_is_refused():
    with pytest.raises(UserError, match=r"--webhook nope://.../: accepted: .*; or one of appriseit.com/services"):
        check_webhook("nope://x")
