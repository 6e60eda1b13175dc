"""What was asked is on disk before it is done; read again by people, pages and commands."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tests.service.lane_here import Endless, Lane
from tests.service.pages_server import Pages

from rlmux.cli.main import run_command_line
from rlmux.core.events import SharesSet
from rlmux.log.run_log import LogReader
from rlmux.service.dashboard.auth import audit, tokens
from rlmux.service.dashboard.router import PREFIX

CALLER = {"user": "ann", "by": "session", "token": "", "address": "127.0.0.1", "method": "POST", "path": "/x"}


@pytest.fixture
def pages(finished_run: Path, tmp_path: Path) -> Iterator[Pages]:
    folder = tmp_path / "demo"
    shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns("audit*", "*.json", "*.token"))
    shown = Pages(folder, is_indexed=False)
    yield shown
    shown.close()


def fill_disk(folder: Path) -> None:
    """Whatever is written to the file from now on finds no room."""
    (folder / audit.NAME).unlink(missing_ok=True)
    (folder / audit.NAME).symlink_to("/dev/full")


def test_what_cannot_be_written_down_is_not_done(tmp_path):
    lane = Lane(tmp_path, "solo", Endless())
    shown = Pages(tmp_path, lanes=["cpu"], is_indexed=False)
    with contextlib.closing(lane), contextlib.closing(shown), contextlib.closing(shown.browser()) as browser:
        lane_url = f"{shown.url}{PREFIX}/lanes/cpu"
        shown.until(lambda: shown.client.get("/lanes/cpu/usage").status_code == 200)
        fill_disk(tmp_path)
        body = {"text": "shares: {users: {ann: {weight: 7}}}", "source": "s.yaml"}
        answer = shown.client.post(f"{lane_url}/shares", json=body)
        assert (answer.status_code, "audit" in answer.text) == (507, True)
        assert num_set(lane.folder) == 0
        assert browser.post("/logout", json={}).status_code == 507
        assert browser.get("/whoami").status_code == 200, "the session goes on"
        login = browser.post("/login", json={"ticket": shown.ticket()})
        assert (login.status_code, "set-cookie" in login.headers) == (507, False)
        assert shown.client.get("/lanes").status_code == 200, "reading goes on"
        assert shown.anyone.get(lane_url).status_code == 401
        (tmp_path / audit.NAME).unlink()
        assert shown.client.post(f"{lane_url}/shares", json=body).status_code == 200
        assert num_set(lane.folder) == 1


def num_set(folder: Path) -> int:
    """How often shares were set in a run."""
    with LogReader(folder) as log:
        return sum(isinstance(entry.value, SharesSet) for entry in log.entries())


def test_a_request_is_written_before_its_effect_and_again_with_what_came_of_it(pages, monkeypatch):
    folder = pages.dashboard.token_path.parent
    seen = []
    logout = pages.dashboard.access.logout
    monkeypatch.setattr(
        pages.dashboard.access, "logout", lambda cookie: (seen.append(audit.read(folder)[0][0]), logout(cookie))
    )
    with contextlib.closing(pages.browser()) as browser:
        assert browser.post("/logout", json={}).status_code == 204
    ((before),) = seen
    assert (before["path"], before["method"], before["status"]) == (f"{PREFIX}/logout", "POST", None)
    newest, is_more = audit.read(folder)
    assert [(row["path"].removeprefix(PREFIX), row["status"]) for row in newest] == [("/logout", 204), ("/login", 200)]
    assert {row["user"] for row in newest} == {getpass.getuser()}, "who logs in is known then"
    assert not is_more
    assert pages.get("/audit")["items"] == newest


def test_what_is_refused_is_written_and_ten_reads_of_a_second(pages, monkeypatch):
    folder = pages.dashboard.token_path.parent
    narrow = tokens.add(folder, "eve", ["read"], days=1.0, now=time.time())
    headers = {"Authorization": f"Bearer {narrow}"}
    assert pages.anyone.post(f"{pages.url}{PREFIX}/logout", json={}, headers=headers).status_code == 204
    assert pages.anyone.post(f"{pages.url}{PREFIX}/lanes/demo/alerts", json={}, headers=headers).status_code == 403
    assert pages.anyone.get(f"{pages.url}{PREFIX}/audit", headers=headers).status_code == 403
    assert pages.anyone.get(f"{pages.url}{PREFIX}/lanes", headers=headers).status_code == 200
    wanted = [
        ("GET", "/audit", 403, "eve"),
        ("POST", "/lanes/demo/alerts", 403, "eve"),
        ("POST", "/logout", 204, "eve"),
    ]
    rows = pages.get("/audit")["items"]
    assert [(row["method"], row["path"].removeprefix(PREFIX), row["status"], row["user"]) for row in rows] == wanted
    now_s = [time.monotonic() + 10.0]
    monkeypatch.setattr(audit, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now_s[0]}))
    for _ in range(60):
        assert pages.anyone.get(f"{pages.url}{PREFIX}/lanes").status_code == 401
    now_s[0] += 1.0
    pages.anyone.get(f"{pages.url}{PREFIX}/lanes")
    found = [row for row in pages.get("/audit?limit=500")["items"] if row["status"] == 401]
    assert [row["left_out"] for row in found] == [50, *[0] * 10], "those that were left out are counted"


def test_pages_of_the_audit_follow_each_other_and_one_users_can_be_chosen(pages):
    folder = pages.dashboard.token_path.parent
    book = audit.Audit(folder)
    for number in range(7):
        book.end(book.begin(**{**CALLER, "user": "ann" if number % 2 else "bob", "path": f"/{number}"}), 200)
    first = pages.get("/audit", limit=3)
    second = pages.get("/audit", limit=3, cursor=first["next"])
    third = pages.get("/audit", limit=3, cursor=second["next"])
    paths = [row["path"] for page in (first, second, third) for row in page["items"]]
    assert (paths, third["next"]) == ([f"/{number}" for number in (6, 5, 4, 3, 2, 1, 0)], None)
    assert [row["path"] for row in pages.get("/audit", user="ann")["items"]] == ["/5", "/3", "/1"]
    assert pages.client.get("/audit?user=%00").status_code == 200
    assert pages.client.get("/audit?limit=0").status_code == 400


def test_a_full_file_is_sealed_and_nothing_is_lost_though_many_write(tmp_path):
    book = audit.Audit(tmp_path, max_bytes=2000)

    def write(number: int) -> None:
        for each in range(25):
            book.end(book.begin(**{**CALLER, "path": f"/{number}/{each}"}), 200 + number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    rows, is_more = audit.read(tmp_path, limit=1000)
    assert not is_more
    assert sorted((row["path"], row["status"]) for row in rows) == sorted(
        (f"/{number}/{each}", 200 + number) for number in range(4) for each in range(25)
    )
    files = sorted(tmp_path.glob("audit*.jsonl"))
    assert len(files) > 5
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_files_of_an_earlier_version_and_half_a_line_are_read(tmp_path):
    old = {"at": "2026-11-01T00:00:00Z", **CALLER, "status": 200}
    (tmp_path / audit.NAME).write_text(json.dumps(old) + "\n" + '{"id": "half')
    assert audit.read(tmp_path)[0] == [{"left_out": 0, **old}]


def test_a_request_says_whether_a_token_a_session_or_a_proxy_named_its_user(pages):
    folder = pages.dashboard.token_path.parent
    pages.dashboard.access.add_token("a-token-of-an-earlier-form" * 2, scopes=["read"])
    bearer = {"Authorization": f"Bearer {'a-token-of-an-earlier-form' * 2}"}
    pages.anyone.post(f"{pages.url}{PREFIX}/logout", json={}, headers=bearer)
    with contextlib.closing(pages.browser()) as browser:
        browser.post("/logout", json={})
    pages.anyone.post(f"{pages.url}{PREFIX}/logout", json={}, headers={"Authorization": "Bearer none"})
    rows = audit.read(folder)[0]
    told = [(row["path"].removeprefix(PREFIX), row["by"], row["token"], row["status"]) for row in rows]
    assert told == [
        ("/logout", "", "", 401),
        ("/logout", "session", "", 204),
        ("/login", "", "", 200),
        ("/logout", "token", "", 204),
    ]


def test_the_command_reads_a_folder_and_a_server_alike(pages, monkeypatch, capsys):
    folder = pages.dashboard.token_path.parent
    with httpx.Client(base_url=f"{pages.url}{PREFIX}", headers={"Authorization": f"Bearer {pages.token}"}) as client:
        client.post("/lanes/demo/alerts", json={"rule": "none"})
    monkeypatch.setenv("RLMUX_TOKEN", pages.token)
    said = []
    for place in (str(folder), pages.url):
        for words in (["--json"], [], ["--limit", "1", "--json"], ["--user", "nobody", "--json"]):
            assert run_command_line(["audit", place, *words]) == 0
            said.append(capsys.readouterr().out)
    assert said[:4] == said[4:]
    (row,) = json.loads(said[0])["items"]
    assert (row["path"], row["method"]) == (f"{PREFIX}/lanes/demo/alerts", "POST")
    assert "/lanes/demo/alerts" in said[1]
    assert json.loads(said[3]) == {"items": []}
    for place in (str(folder / "none"), "http://127.0.0.1:1"):
        assert run_command_line(["audit", place]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    narrow = tokens.add(folder, "eve", ["read"], days=1.0, now=time.time())
    monkeypatch.setenv("RLMUX_TOKEN", narrow)
    assert run_command_line(["audit", pages.url]) == 2
    assert "needs the scope admin" in capsys.readouterr().err
    assert os.stat(folder / audit.NAME).st_mode & 0o777 == 0o600
