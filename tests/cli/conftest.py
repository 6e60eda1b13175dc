"""A command line as people type it: in a process of its own, or in this one where nothing is started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.command_line import command
from tests.small_files import SORT, small_file

from rlmux.cli.main import run_command_line

SMALL = small_file(
    "{name: a, seed: 1, task: sort, estimate: {rollout_s: 2, train_s: 1}}",
    "{name: b, seed: 2, task: reverse, estimate: {rollout_s: 1, train_s: 2}}",
    steps=2,
)
LONG = small_file(SORT, steps=100_000)


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with small.yaml in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    return tmp_path


@pytest.fixture
def rlmux(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """`rlmux("run", "small.yaml")` in this process, whose search path is then as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> Said:
        code = run_command_line(words)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in the folder, which has long.yaml too; what still runs at the end is killed."""
    (folder / "long.yaml").write_text(LONG, encoding="utf-8")
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, ignored: signal.Signals | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*words),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if ignored is None else lambda: signal.signal(ignored, signal.SIG_IGN) and None,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
