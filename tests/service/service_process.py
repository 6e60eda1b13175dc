"""A service: a server process with a lane, whose controller outlives it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests import waiting

from rlmux.cli.main import run_command_line
from rlmux.core.errors import RlmuxError
from rlmux.log.folder_lock import living_owner
from rlmux.runtime.control.control_requests import GetStatus
from rlmux.runtime.control.control_socket import send_request

ROOT = Path(__file__).parents[2]
FILE = """
lanes:
  cpu:
    cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
"""


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Service:
    """A service in its folder, and the server process of now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.lane = self.root / "cpu"
        (folder / "service.yaml").write_text(FILE, encoding="utf-8")
        self.process: subprocess.Popen[str] | None = None
        self.address = "127.0.0.1:0"

    def start(self) -> None:
        """A server, at the address that the one before had, once it answers."""
        words = ["serve", str(self.folder / "service.yaml"), "--out", str(self.root), "--listen", self.address]
        self.process = self.command(*words)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(2)]
        assert "dashboard: " in lines[1], lines
        self.url = lines[1].partition(": ")[2].partition("/login")[0]
        self.address = self.url.removeprefix("http://")
        self.token = (self.root / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {self.token}"}
        self.client = httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=120)

    def command(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rlmux", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        answer = self.client.get("/lanes/cpu/status")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    def upcoming(self) -> list[str]:
        """Pipelines that are still to come, in the order of their names."""
        return sorted(one["pipeline"] for one in self.status()["upcoming"])

    @contextlib.contextmanager
    def environment(self, token: str | None = None) -> Iterator[None]:
        """The environment of a client, by default with the server's token."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLMUX_TOKEN", self.token if token is None else token)
            patch.delenv("RLMUX_TOKEN_FILE", raising=False)
            yield

    def rlmux(self, *words: str, token: str | None = None) -> Said:
        """A command line in this process."""
        out, err = io.StringIO(), io.StringIO()
        with self.environment(token), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command_line(words)
        return Said(code, out.getvalue(), err.getvalue())

    def kill(self) -> None:
        """SIGKILL to the server."""
        assert self.process is not None
        self.client.close()
        self.process.kill()
        self.process.communicate()

    @property
    def controller(self) -> int | None:
        owner = living_owner(self.lane)
        return owner and owner[0]

    def kill_controller(self) -> None:
        pid = self.controller
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def until(self, is_so: Callable[[], object], what: str) -> None:
        waiting.until(is_so, what, limit_s=300.0, seen=(self.root / "cpu.log").read_text, poll_s=0.05)

    def until_up(self) -> None:
        """Until the lane's controller answers."""
        self.until(self._answers, "an answer of the lane's controller")

    def _answers(self) -> bool:
        try:
            return bool(send_request(self.lane, GetStatus())["pid"])
        except RlmuxError:
            return False
