"""`rlmux serve` without a file: a service of this machine, which this user's commands find by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.service.clients import ROOT
from tests.small_files import SORT, small_file
from tests.waiting import until

from rlmux.cli.main import run_command_line
from rlmux.client.own_service import own_file, own_root, own_token, own_url
from rlmux.config.service_file import file_of_machine, load_service_file
from rlmux.log.folder_lock import FolderLock
from rlmux.policies import POLICIES
from rlmux.runtime.control.run_status import StatusReader
from rlmux.runtime.records.folders import ADDRESS, TOKEN


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state directory, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RLMUX_TOKEN", raising=False)
    monkeypatch.delenv("RLMUX_TOKEN_FILE", raising=False)
    return tmp_path / "state"


@pytest.fixture
def serve(state: Path, tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Start `rlmux serve` with these options; its first two lines."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "rlmux", "serve", *words]
        running.append(subprocess.Popen(line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
        out = running[-1].stdout
        assert out is not None
        return [out.readline().strip() for _ in range(2)]

    yield start
    for each in running:
        each.kill()
        each.communicate()
    if (own_root() / "here").exists():
        run_command_line(["stop", str(own_root() / "here")])


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = run_command_line(words)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_the_address_is_the_servers_own_with_its_scheme(state):
    own_root().mkdir(parents=True)
    (own_root() / ADDRESS).write_text("https://127.0.0.1:7460")
    (own_root() / TOKEN).write_text("secret\n")
    with FolderLock.take(own_root()) as lock:
        lock.sign()
        assert own_url() == "https://127.0.0.1:7460"
        assert own_token(own_url()) == "secret"
        assert own_token("http://127.0.0.1:7460") is None


def test_a_service_without_a_file_takes_pipelines_at_once_and_is_there_once(serve, state, tmp_path, capsys):
    file = tmp_path / "one.yaml"
    file.write_text(small_file(SORT, steps=2))
    assert said(capsys, "submit", str(file)) == (
        2,
        "rlmux: no service of yours runs on this machine; accepted: --to DIR|URL, or start one: rlmux serve\n",
    )
    assert said(capsys, "status") == (
        2,
        "rlmux: no service of yours runs on this machine; accepted: DIR|URL, or start one: rlmux serve\n",
    )
    dashboard, submit = serve("--listen", "127.0.0.1:0")
    assert dashboard.startswith("dashboard: http://127.0.0.1:")
    assert submit == "submit: rlmux submit FILE"
    code, line = said(capsys, "submit", str(file))
    assert code == 0, "no address, no token"
    assert f"rlmux: page: {own_url()}/pipelines/here/a\n" in line
    code, line = said(capsys, "status")
    assert code == 0
    assert "train-0.0" in line
    code, line = said(capsys, "serve")
    assert code == 2
    assert line.startswith("rlmux: your service runs already, at http://127.0.0.1:")
    assert f"to end it: rlmux stop {own_root()}" in line
    url = dashboard.removeprefix("dashboard: ").partition("/login")[0]
    assert own_token(url) == (own_root() / "admin.token").read_text().strip()
    assert own_token("http://127.0.0.1:1") is None
    until(lambda: _statuses() == ["finished"], "the end of the pipeline", seen=_statuses, poll_s=0.2)


def _statuses() -> list[str]:
    if not (own_root() / "here" / "run.db").exists():
        return []
    reader = StatusReader(own_root() / "here")
    try:
        return [one["status"] for one in reader.read()["pipelines"].values()]
    finally:
        reader.close()


def test_a_users_own_lanes_are_kept_and_their_server_has_its_address_again(serve, state, capsys):
    (first, _) = serve("--listen", "127.0.0.1:0")
    text = own_file().read_text()
    url = first.removeprefix("dashboard: ").partition("/login")[0]
    code, line = said(capsys, "stop", str(own_root()))
    assert own_token(url) is None, "another user's program may listen there now"
    assert (code, line.rpartition("; ")[2]) == (0, "resume with: rlmux serve\n")
    own_file().write_text(f"# mine\n{text}")
    (second, _) = serve()
    assert second.partition("/login")[0] == first.partition("/login")[0]
    assert own_file().read_text().startswith("# mine")


def test_a_lane_of_another_version_is_told_before_anything_starts(state, capsys):
    import sqlite3

    from tests.log_script import AlternatingRun

    AlternatingRun(num_steps=1).script.write(own_root() / "here")
    (own_root() / "bundles" / "none").mkdir(parents=True)
    (own_root() / "here" / "header.json").write_text("{}")
    log = sqlite3.connect(own_root() / "here" / "run.db")
    log.execute("PRAGMA user_version = 99")
    log.close()
    code, line = said(capsys, "serve", "--listen", "127.0.0.1:0")
    assert code == 2
    assert "written by a newer rlmux" in line
    assert "(log schema 99)" in line
    assert (own_root() / "here" / "run.db").exists()


@pytest.mark.parametrize(("num", "devices"), [(1, [1]), (2, [1, 1]), (5, [2, 3])])
def test_the_file_of_a_machine_has_all_its_devices(tmp_path, num, devices):
    file = tmp_path / "service.yaml"
    file.write_text(file_of_machine(num))
    (lane,) = load_service_file(file, policies=list(POLICIES)).values()
    assert [pool.num_nodes for pool in lane.spec.cluster.pools.values()] == devices
