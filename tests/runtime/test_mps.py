"""NVIDIA's MPS daemon: found, started and ended, or one line says why not. The control program here is a script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmux.runtime import mps
from rlmux.runtime.mps import PIPES, MpsDaemon

CONTROL = """#!/bin/sh
echo "$@ $(cat)" >> "$CALLS"
if [ "$1" = "-d" ]; then {on_start}; fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control program writes what it was called with."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(mps, "_USUAL_PIPES", str(tmp_path / "usual"))
    monkeypatch.delenv(PIPES, raising=False)
    return tmp_path / "calls"


def install(calls: Path, on_start: str) -> None:
    program = calls.parent / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(on_start=on_start))
    program.chmod(0o755)


def test_a_daemon_of_our_own_is_in_the_workers_environment_until_it_ends(calls: Path) -> None:
    install(calls, 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"')
    daemon = MpsDaemon.start()
    assert not daemon.missing
    folder = Path(daemon.environment[PIPES])
    assert (folder / "control").exists()
    assert PIPES not in os.environ
    daemon.end()
    daemon.end()
    assert not folder.exists()
    assert [line.split() for line in calls.read_text().splitlines()] == [["-d"], ["quit"]]


def test_a_daemon_that_listens_is_used_and_left_alone(calls: Path) -> None:
    install(calls, "exit 1")
    (calls.parent / "usual").mkdir()
    (calls.parent / "usual/control").touch()
    daemon = MpsDaemon.start()
    assert not daemon.missing
    assert not daemon.environment
    daemon.end()
    assert not calls.exists()


@pytest.mark.parametrize(
    ("on_start", "line"),
    [
        ("echo 'An instance is already running' >&2; exit 1", "-d: An instance is already running"),
        ("exit 3", "-d: it failed"),
        ("true", "-d: it did not listen within 0 s"),
        (None, "nvidia-cuda-mps-control is not installed here"),
    ],
)
def test_without_a_daemon_one_line_says_why_and_nothing_is_left(
    calls: Path, monkeypatch: pytest.MonkeyPatch, on_start: str | None, line: str
) -> None:
    if on_start is None:
        monkeypatch.setenv("PATH", str(calls.parent))
    else:
        install(calls, on_start)
    monkeypatch.setattr(mps, "_START_LIMIT_S", 0.4)
    daemon = MpsDaemon.start()
    assert line in daemon.missing
    assert not daemon.environment
    assert not list(calls.parent.glob("rlmux-mps-*"))


def test_another_users_daemon_is_not_used(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (calls.parent / "usual").mkdir()
    (calls.parent / "usual/control").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    monkeypatch.setattr(Path, "stat", lambda path, **more: os.stat_result((0o600, 0, 0, 1, 777, 0, 0, 0, 0, 0)))
    assert MpsDaemon.start().missing.startswith("the daemon in")
    assert "user 777's" in MpsDaemon.start().missing
