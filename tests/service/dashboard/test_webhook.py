"""An address is told of each alert once when it begins, and once when it is over, whatever it answers in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.log_script import LogScript, append

from rlmux.report.log import RunLog
from rlmux.service.dashboard.reads import Reads
from rlmux.service.dashboard.webhook import Webhook
from rlmux.service.index.indexer import LaneIndexer
from rlmux.service.index.lanes import Root


class Address:
    """A server that notes what it was sent, and answers with `status`."""

    def __init__(self) -> None:
        self.told: list[dict] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.status == 200:
                    outer.told.append(json.loads(data))
                self.send_response(outer.status)
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


def test_an_alert_is_told_when_it_begins_and_when_it_is_over(growing, address, capsys):
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), address.url)
    growing.add(*[0.02] * 20)
    webhook.look()
    assert address.told == []
    growing.add(2.0, 2.0, 2.0)
    address.status = 503
    webhook.look()
    webhook.look()
    assert capsys.readouterr().err.count("--webhook") == 1
    address.status = 200
    webhook.look()
    growing.add(2.0)
    webhook.look()
    (first,) = address.told
    assert (first["state"], first["lane"], first["pipeline"], first["rule"]) == ("firing", "demo", "sort", "kl_blowup")
    growing.add(0.02)
    webhook.look()
    assert [one["state"] for one in address.told] == ["firing", "resolved"]


def test_an_address_that_is_gone_ends_nothing(growing, capsys):
    webhook = Webhook(Reads(Root(growing.folder, growing.folder), lambda folder: None), "http://127.0.0.1:9/")
    growing.add(*[0.02] * 20, 20.0, 20.0, 20.0)
    webhook.look()
    assert "--webhook http://127.0.0.1:9/" in capsys.readouterr().err
