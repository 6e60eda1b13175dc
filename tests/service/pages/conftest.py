"""A real browser on a real server. Left out, with the reason, where there is no browser or the pages are not built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.pages_server import Pages

from rlmux.service.dashboard.pages import DIST

HOSTILE_HOST = "evil.test"
"""A name that leads to this machine, as a page of a stranger can make one do."""


def chromium() -> str | None:
    """Program of a browser; None leaves it to playwright's own."""
    return os.environ.get("RLMUX_CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed with each module: while it is open, an event loop runs in this thread, and no test may begin another."""
    if not (DIST / "index.html").exists():
        pytest.skip("the pages are not built: make pages says why")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    flags = ["--no-sandbox", f"--host-resolver-rules=MAP {HOSTILE_HOST} 127.0.0.1"]
    with playwright.sync_playwright() as driver:
        try:
            launched = driver.chromium.launch(executable_path=chromium(), args=flags)
        except playwright.Error as error:
            pytest.skip(f"no browser: install chromium or set RLMUX_CHROMIUM ({str(error).splitlines()[0]})")
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def shown(finished_run: Path) -> Iterator[Pages]:
    """The pages of a finished run."""
    log = finished_run / "sort" / "workers.log"
    log.parent.mkdir()
    log.write_text("step 1\n\x1b[31mred\x1b[0m and \x07 a bell\n")
    served = Pages(finished_run)
    yield served
    served.close()


@pytest.fixture
def context(browser: Any) -> Iterator[Callable[..., Any]]:
    """Make a browser of its own, with nothing stored."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(browser.new_context(viewport={"width": 1280, "height": 800}, **settings))
        made[-1].set_default_timeout(20_000)
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def enter(context: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Log in and open a path. At the end: no error on any console, and not one request to another server."""
    wrong: list[str] = []

    def watch(page: Any, url: str) -> None:
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((url, "data:")) else None)

    def open_path(served: Pages, path: str, inside: Any = None, **settings: Any) -> Any:
        around = inside or context(**settings)
        if inside is None:
            session = {"Origin": served.url, "Content-Type": "application/json"}
            assert around.request.post(
                f"{served.url}/api/v1/login", data={"ticket": served.ticket()}, headers=session
            ).ok
        page = around.new_page()
        watch(page, served.url)
        page.goto(f"{served.url}{path}")
        page.wait_for_selector("main h1")
        return page

    yield open_path
    assert wrong == []
