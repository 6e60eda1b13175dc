"""Servers as a user starts them, and their clients; all are ended with the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import AlternatingRun
from tests.service.clients import CLIENT_PYTHON, Client, Program, Served
from tests.service.pages_server import Pages

FILE = """
lanes:
  models:
    cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
    serve:
      models:
        rlmux/tiny:
          model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 16}
          max_prompt_tokens: 128
          max_new_tokens: 64
          slots: 8
"""
LANE = "models"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start a server in a new folder, or on one that another left behind, at the address it had."""
    running: list[Served] = []

    def start(resume: Served | None = None, *, text: str = FILE, has_own_fork_server: bool = False) -> Served:
        root = tmp_path / f"root{len(running)}" if resume is None else resume.folder.parent
        file = root.with_suffix(".yaml")
        words = ["serve", str(file), "--out", str(root)]
        if resume is None:
            file.write_text(text, encoding="utf-8")
            words += ["--listen", "127.0.0.1:0"]
        running.append(Served(words, root / LANE, has_own_fork_server=has_own_fork_server))
        assert resume is None or running[-1].address == resume.address
        return running[-1]

    yield start
    for each in running:
        with contextlib.suppress(ProcessLookupError):
            if each.process.poll() is None:
                each.kill()


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Start a program with the SDK. Left out where there is none."""
    if not CLIENT_PYTHON:
        pytest.skip("needs the tinker extra, or RLMUX_TINKER_PYTHON")
    running: list[Program] = []

    def start(served: Served, *words: object) -> Program:
        running.append(Program(served, list(words)))
        return running[-1]

    yield start
    for each in running:
        each.end()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(served: Served, key: str = "tml-test") -> Client:
        clients.append(Client(served.url, key))
        return clients[-1]

    yield make
    for client in clients:
        client.http.close()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two pipelines, with its log alone."""
    return AlternatingRun(num_steps=12).script.write(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def dashboard() -> Iterator[Callable[..., Pages]]:
    """Show a folder on a server of this process; `limits` may be given."""
    shown: list[Pages] = []

    def show(folder: Path, **settings: Any) -> Pages:
        shown.append(Pages(folder, **settings))
        return shown[-1]

    yield show
    for each in shown:
        each.close()
