"""What a run says while nothing else would be heard of it, and how it ends where nothing hears it any more."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.waiting import until

from rlmux.runtime.local import SharedMemoryFolder

LIMIT_S = 200


def until_step(folder: Path, process: subprocess.Popen[str], num_more: int = 1) -> None:
    """Wait for so many more steps of `a`."""
    path = folder / "one" / "a" / "metrics.jsonl"

    def num() -> int:
        return len(path.read_text().splitlines()) if path.exists() else 0

    wanted = num() + num_more
    until(lambda: num() >= wanted, f"step {wanted} of `a`", limit_s=LIMIT_S, seen=num, process=process)


def summary(folder: Path) -> dict:
    return json.loads((folder / "one" / "summary.json").read_text())


@pytest.mark.parametrize("how", ["hang-up", "stdout", "stderr"])
def test_a_closed_terminal_or_output_ends_a_run_like_ctrl_c(folder, start, how):
    process = start("run", "long.yaml", "--out", "one")
    until_step(folder, process)
    match how:
        case "hang-up":
            process.send_signal(signal.SIGHUP)
        case "stdout":
            process.stdout.close()
        case "stderr":
            process.stderr.close()
    assert process.wait(LIMIT_S) == 130
    assert summary(folder)["pipelines"]["a"]["status"] == "stopped"
    assert {"timeline.html", "trace.json"} <= {path.name for path in (folder / "one").iterdir()}
    if how != "stderr":
        err = process.stderr.read()
        assert "Traceback" not in err
        assert "SFT warm-up, update 0 of 2" in err.splitlines()[0]
    if how == "hang-up":
        assert err.strip().splitlines()[-1] == "rlmux: stopped; resume with: rlmux resume one"
        last = summary(folder)["pipelines"]["a"]["steps"]
        resumed = start("resume", "one")
        until_step(folder, resumed)
        resumed.send_signal(signal.SIGINT)
        _, err = resumed.communicate(timeout=LIMIT_S)
        assert err.splitlines()[0].startswith("a: goes on at step ")
        step, _, of = err.splitlines()[0].removeprefix("a: goes on at step ").partition(" of ")
        assert (abs(int(step) - last) <= 1, of) == (True, "100000")


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(folder, start):
    process = start("run", "long.yaml", "--out", "one", ignored=signal.SIGHUP)
    until_step(folder, process)
    process.send_signal(signal.SIGHUP)
    until_step(folder, process, 3)


def test_compare_says_which_policy_runs(start):
    process = start("compare", "long.yaml", "--policies", "solo,fifo", "--out", "both", "--set", "pipelines.*.steps=1")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    said = [line for line in err.splitlines() if line.startswith("rlmux: policy")]
    assert said == ["rlmux: policy solo (1 of 2)", "rlmux: policy fifo (2 of 2)"]


@pytest.mark.slow
def test_a_second_run_on_the_same_cores_is_warned_of(folder, start):
    process = start("run", "long.yaml", "--out", "one")
    until_step(folder, process)
    second = start("run", "long.yaml", "--out", "two", "--set", "pipelines.*.steps=1")
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, err
    warned = [line for line in err.splitlines() if f"pid {process.pid} computes there too" in line]
    assert len(warned) == 1
    assert warned[0].startswith("rlmux: core ")
    assert str(folder / "one") in warned[0]


def test_only_living_runs_on_the_same_devices_are_neighbours(tmp_path):
    here, there, ended = (SharedMemoryFolder(tmp_path / name) for name in ("here", "there", "ended"))
    here.sign(tmp_path / "here", {"core 900", "core 901"})
    there.sign(tmp_path / "there", {"core 902"})
    ended.sign(tmp_path / "ended", {"core 900"})
    ended.close()
    newcomer = SharedMemoryFolder(tmp_path / "newcomer")
    found = newcomer.neighbours_on({"core 901", "core 903"})
    assert [(each.folder, each.devices) for each in found] == [(str(tmp_path / "here"), ("core 901",))]
    for each in (here, there, newcomer):
        each.close()
