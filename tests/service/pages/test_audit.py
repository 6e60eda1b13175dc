"""The audit in a browser: for administrators, each request with what came of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.service.pages_server import Pages

from rlmux.service.dashboard.auth import tokens, users

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def served(finished_run: Path, tmp_path: Path) -> Iterator[Pages]:
    folder = tmp_path / "demo"
    shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns("audit*", "*.json", "*.token"))
    users.set_user(folder, "eve", role="viewer")
    pages = Pages(folder)
    yield pages
    pages.close()


def ask_as_eve(served: Pages, num: int) -> str:
    """Refused requests, one of them with markup in its address; returns her token."""
    token = tokens.add(served.dashboard.token_path.parent, "eve", ["read"], days=1.0, now=time.time())
    with httpx.Client(base_url=f"{served.url}/api/v1", headers={"Authorization": f"Bearer {token}"}) as client:
        for number in range(num):
            assert client.post(f"/pipelines/demo/run-{number}/cancel", json={}).status_code == 403
        assert client.post("/pipelines/demo/<img src=x onerror=pwned=1>/cancel", json={}).status_code == 403
    return token


@pytest.mark.slow
def test_the_page_has_every_request_newest_first_and_those_of_one_user(served, enter):
    ask_as_eve(served, 120)
    page = enter(served, "/fleet")
    page.keyboard.press("g")
    page.keyboard.press("a")
    page.wait_for_selector("table.audit tbody tr")
    assert page.inner_text("tbody tr:nth-child(1) td:nth-child(5)") == "POST /login"
    page.fill("input[aria-label=user]", "eve")
    page.wait_for_selector("tbody tr:nth-child(1):has-text('img src')")
    cells = page.locator("tbody tr:nth-child(2) td").all_inner_texts()
    assert (cells[1], cells[4:]) == ("eve", ["POST /pipelines/demo/run-119/cancel", "403"])
    assert page.locator("tbody tr").count() == 100
    page.click("button:text-is('More')")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 121")
    assert page.evaluate("() => 'pwned' in window") is False


@pytest.mark.slow
def test_a_user_who_is_no_administrator_has_no_link_to_it(served, enter, context):
    token, around = ask_as_eve(served, 1), context()
    login = {"Origin": served.url, "Content-Type": "application/json"}
    assert around.request.post(f"{served.url}/api/v1/login", data={"token": token}, headers=login).ok
    page = enter(served, "/fleet", inside=around)
    page.wait_for_selector("a:text-is('What if')")
    page.wait_for_load_state("networkidle")
    assert page.locator("a:text-is('Audit')").count() == 0
