"""What a run says while nothing else would be heard of it, and how it ends where nothing hears it any more."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.waiting import until

from rlmux.cli.main import main
from rlmux.client.in_folder import stop
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Phase, Pool
from rlmux.log.folder_lock import FolderLock
from rlmux.log.run_log import RunLog, run_header
from rlmux.runtime.local import SharedMemoryFolder
from rlmux.runtime.run import _stop_on_interrupt

LIMIT_S = 200
EXAMPLES = Path(__file__).parents[2] / "examples"


def until_step(folder: Path, process: subprocess.Popen[str], num_more: int = 1) -> None:
    """Wait for so many more steps of `a`."""
    path = folder / "one" / "a" / "metrics.jsonl"

    def num() -> int:
        return len(path.read_text().splitlines()) if path.exists() else 0

    wanted = num() + num_more
    until(lambda: num() >= wanted, f"step {wanted} of `a`", limit_s=LIMIT_S, seen=num, process=process)


def summary(folder: Path) -> dict:
    return json.loads((folder / "one" / "summary.json").read_text())


@pytest.mark.parametrize("how", ["hang-up", pytest.param("stdout", marks=pytest.mark.slow), "stderr"])
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
        until_step(folder, resumed, num_more=2)  # a step without its row is filled in before the first
        resumed.send_signal(signal.SIGINT)
        _, err = resumed.communicate(timeout=LIMIT_S)
        assert err.splitlines()[0].startswith("a: goes on at step ")
        step, _, of = err.splitlines()[0].removeprefix("a: goes on at step ").partition(" of ")
        # One more than is counted where it stopped between a step's checkpoint and its row in the log.
        assert (int(step) - last in (0, 1, 2), of) == (True, "100000")


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
    assert "idle now" in str(found[0]), "it has no worker there"
    here.mark(is_computing=True)
    assert "computes there too" in str(newcomer.neighbours_on({"core 901"})[0])
    here.mark(is_computing=False)
    assert "computes there too" not in str(newcomer.neighbours_on({"core 901"})[0])
    for each in (here, there, newcomer):
        each.close()


def test_an_interrupt_that_a_script_had_ignored_stops_a_run():
    before, stopped = signal.signal(signal.SIGINT, signal.SIG_IGN), []
    try:
        with _stop_on_interrupt(lambda: stopped.append(True)):
            signal.raise_signal(signal.SIGINT)
        assert stopped == [True]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_a_script_began_in_the_background_can_be_interrupted(monkeypatch):
    module = sys.modules["rlmux.cli.main"]
    monkeypatch.setattr(module, "run_command_line", lambda words: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            main([])
    finally:
        signal.signal(signal.SIGINT, before)


OWNER = """
import signal, sys, threading
from pathlib import Path
from rlmux.log.folder_lock import FolderLock
over = threading.Event()
signal.signal(signal.SIGINT, lambda *_: over.set())
with FolderLock.take(Path(sys.argv[1])) as lock:
    lock.sign()
    print("ready", flush=True)
    over.wait()
"""


@pytest.fixture
def owned(tmp_path):
    """Makes a folder, that of a run where it has a header, that a process has until it is interrupted."""
    processes = []

    def make(name: str, header=None) -> tuple[Path, subprocess.Popen[str]]:
        folder = tmp_path / name
        if header is None:
            folder.mkdir(exist_ok=True)
        else:
            RunLog.create(folder, header).close()
        process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return folder, process

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def header_of(backend: str):
    cluster = Cluster(pools={"all": Pool(name="all", phase=Phase.TRAIN, num_nodes=1, gpus_per_node=1)})
    return run_header(policy="solo", backend=backend, cluster=cluster, spec={"source": "demo.yaml"})


@pytest.mark.parametrize(
    ("backend", "resume"), [("local", "rlmux resume {folder}"), ("permits", "rlmux broker demo.yaml --out {folder}")]
)
def test_stop_ends_what_runs_in_a_folder_and_says_how_it_goes_on(owned, rlmux, backend, resume):
    folder, process = owned("demo", header_of(backend))
    said = rlmux("stop", str(folder), "--json")
    expected = {"folder": str(folder), "pid": process.pid, "resume": resume.format(folder=folder)}
    assert (said.code, json.loads(said.out)) == (0, expected)
    assert process.wait(LIMIT_S) == 0
    FolderLock.take(folder).release()
    said = rlmux("stop", str(folder))
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert f"{folder}: nothing runs there now; " in said.err


def test_a_lane_is_stopped_after_its_server_which_would_start_it_again(owned, rlmux):
    root, server = owned("service")
    lane, controller = owned("service/cpu", header_of("local"))
    with pytest.raises(UserError, match=f"would start it again; accepted: rlmux stop {root} first"):
        stop(lane)
    said = rlmux("stop", str(root))
    assert said.out == f"{root}: stopped (pid {server.pid}); resume with: rlmux serve FILE --out {root}\n"
    assert rlmux("stop", str(lane)).code == 0
    assert (server.wait(LIMIT_S), controller.wait(LIMIT_S)) == (0, 0)


def test_stop_takes_a_folder_of_this_machine(tmp_path, rlmux):
    assert "accepted: the folder of a run" in rlmux("stop", str(tmp_path / "none")).err
    assert "accepted: its folder, on the machine where it runs" in rlmux("stop", "http://127.0.0.1:7460").err


@pytest.mark.parametrize("words", [["version"], ["schema"]])
def test_an_output_that_cannot_be_written_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "rlmux", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "rlmux: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_command_without_streams_does_its_work_and_prints_into_no_file(folder, closed):
    words = f"exec {shlex.quote(sys.executable)} -m rlmux demo --copy here {closed}"
    done = subprocess.run(["sh", "-c", words], cwd=folder, stdout=subprocess.DEVNULL)
    assert done.returncode == 0
    copied = {path.name: path.read_bytes() for path in (folder / "here").glob("*.yaml")}
    assert len(copied) > 10
    assert copied == {name: (EXAMPLES / name).read_bytes() for name in copied}
