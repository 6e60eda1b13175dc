"""Commands that act on a run while it goes on in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.command_line import command
from tests.small_files import REVERSE, SORT, small_file
from tests.waiting import until

from rlmux.cli import remote
from rlmux.log.run_log import RunLog, run_header
from rlmux.runtime.control.control_socket import ControlServer
from rlmux.runtime.control.run_status import StatusReader

ONE = small_file(SORT, steps=6)
MORE = small_file(REVERSE, steps=6).partition("\n")[2]
"""Without a cluster of its own."""
LIMIT_S = 200


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def going(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of `a` in the folder `one`, kept open."""
    (folder / "one.yaml").write_text(ONE)
    (folder / "more.yaml").write_text(MORE)
    process = start(folder, "run", "one.yaml", "--out", "one", "--keep-open", "--json")
    until((folder / "one" / "control.sock").exists, "the run's socket", limit_s=LIMIT_S, process=process)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def state(rlmux) -> Callable[[], dict]:
    return lambda: json.loads(rlmux("status", "one", "--json").out)


@pytest.fixture
def until_shown(going, state) -> Callable[..., None]:
    """Wait for what `rlmux status` shows of the run's pipelines."""

    def wait(is_so: Callable[[dict], object], what: str) -> None:
        until(lambda: is_so(state()["pipelines"]), what, limit_s=LIMIT_S, seen=state, poll_s=0.1, process=going)

    return wait


@pytest.mark.slow
def test_pipelines_come_go_and_are_known_to_a_resume(folder, going, rlmux, state, until_shown):
    said = rlmux("submit", "more.yaml", "--to", "one")
    assert said.code == 0, said.err
    assert said.out.startswith("b: placed (")
    assert said.out.endswith(" on rollout-0 train-0\n")
    long = rlmux(
        "submit", "more.yaml", "--to", "one", "--set", "pipelines.b.steps=100000", "--set", "pipelines.b.name=c"
    )
    assert long.code == 0, long.err
    until_shown(lambda shown: shown.get("c", {}).get("step", 0) >= 2, "step 2 of c")

    shown = state()
    assert shown["is_going_on"]
    assert shown["pid"] == going.pid
    assert {"a", "b", "c"} == set(shown["pipelines"])
    assert shown["pipelines"]["c"]["rollout_nodes"] == ["rollout-0"]
    table = rlmux("status", "one").out
    assert "kept open" in table
    assert "rollout-0.0" in table

    assert rlmux("cancel", "one", "c").out == "c: ends at its next safe point\n"
    over = ("finished", "cancelled")
    until_shown(lambda shown: all(one["status"] in over for one in shown.values()), "the end of all")
    again = rlmux("cancel", "one", "c")
    assert (again.code, again.err) == (
        2,
        "rlmux: pipeline 'c' is cancelled; accepted: one that waits or runs\n",
    )
    logs = rlmux("logs", "one", "b", "-f")
    assert logs.code == 0, "following ends with the pipeline"
    assert rlmux("logs", "one", "nobody").err == "rlmux: one: no pipeline 'nobody'; accepted: a, b, c\n"

    late = rlmux("submit", "more.yaml", "--to", "one", "--set", "pipelines.b.name=d", "--set", "pipelines.d.steps=60")
    assert late.code == 0, late.err
    until_shown(lambda shown: shown["d"]["step"] >= 1, "a step of d")
    os.kill(going.pid, signal.SIGKILL)
    going.wait()
    stopped = state()
    assert not stopped["is_going_on"]
    assert stopped["pipelines"]["d"]["status"] == "stopped"
    refused = rlmux("submit", "more.yaml", "--to", "one")
    assert refused.code == 2
    assert refused.err.startswith("rlmux: one: nothing runs there now; accepted: ")

    resumed = start(folder, "resume", "one", "--json")
    out, err = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, err
    summary = json.loads(out)
    assert summary["pipelines"]["d"]["steps"] == 60
    assert summary["pipelines"]["c"]["status"] == "cancelled"

    text = ONE.replace("{name: a, seed: 1, task: sort}", "{name: b, seed: 2, task: reverse}")
    (folder / "alone.yaml").write_text(text)
    alone = start(folder, "run", "alone.yaml", "--out", "alone", "--json", "--set", "pipelines.b.steps=60")
    out, err = alone.communicate(timeout=LIMIT_S)
    assert alone.returncode == 0, err
    weights = json.loads(out)["pipelines"]["b"]["weights_sha256"]
    assert summary["pipelines"]["d"]["weights_sha256"] == weights, "submitted, killed, resumed: the same weights"


def test_a_file_that_does_not_fit_the_runs_cluster_is_refused_here_with_the_numbers(folder, going, rlmux, until_shown):
    said = rlmux("submit", "more.yaml", "--to", "one", "--set", "pipelines.b.rollout.workers=3")
    assert said.code == 2
    assert "pipelines.b.rollout.workers is 3; accepted: up to 1, the size of pool 'rollout'" in said.err
    until_shown(lambda shown: shown.get("a", {}).get("status") == "finished", "the end of a")
    os.kill(going.pid, signal.SIGINT)
    out, _ = going.communicate(timeout=LIMIT_S)
    assert going.returncode == 0, "an idle run that was kept open ends well"
    assert set(json.loads(out)["pipelines"]) == {"a"}


def test_a_run_that_is_too_busy_to_answer_is_shown_as_going_on(folder, rlmux):
    header = run_header(policy="rollmux", backend="local")
    run = folder / "one"
    with (
        RunLog.create(run, header),
        closing(ControlServer(run)),
        closing(StatusReader(run, answer_limit_s=0.05)) as reader,
    ):
        assert "goes on (no answer: it is busy, stopped or hangs)" in remote.heading(reader.read())
    assert "nothing runs here now" in rlmux("status", "one").out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["submit", "more.yaml"], "no service of yours runs on this machine; accepted: --to DIR|URL"),
        (["submit", "more.yaml", "--to", "nowhere"], "nowhere: no such folder; accepted: the folder of a run"),
        (["status", "nowhere"], "nowhere: no such folder; accepted: the folder of a run"),
        (["cancel", "nowhere", "a"], "nowhere: no such folder; accepted: the folder of a run"),
        (["status", "http://127.0.0.1:1/x"], "http://127.0.0.1:1/x: accepted: http://HOST:PORT/lanes/NAME"),
        (["status", "http://127.0.0.1:1"], "http://127.0.0.1:1: no token; accepted: RLMUX_TOKEN=..."),
        (["rank", "nowhere", "a", "-5"], "nowhere: no such folder; accepted: the folder of a run"),
        (["rank", "nowhere", "a", "--front"], "Invalid value for 'RANK'"),
        (["logs", "nowhere", "a"], "nowhere: no such folder; accepted: the folder of a run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, rlmux, words, line):
    said = rlmux(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"rlmux: {line}"), said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("command", "reason"), [("unpark", "its user parked it"), ("release", "its user holds it")])
def test_why_of_a_held_pipeline_names_the_command_that_lets_it_start(monkeypatch, capsys, command, reason):
    class Target:
        def send_command(self, request: str, name: str) -> dict:
            change = {"key": "hold", "was": "held", "to": "released"}
            standing = {"position": 0, "num_waiting": 0, "waited_s": 3.0, "is_over_share": False}
            return {
                "token": "held",
                "reason": reason,
                "released_by": command,
                "would_start_now_if": [change],
                **standing,
            }

        def close(self) -> None: ...

    monkeypatch.setattr(remote, "target_of", lambda place: Target())
    remote.show_why("runs/two", "b", as_json=False)
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  {reason}",
        f"  starts at once after: rlmux {command} runs/two b",
    ]


def test_status_shows_what_a_server_answers(monkeypatch):
    """A server's answer passes through its schema, which drops what it does not name."""
    from rlmux.service.dashboard.schemas.run_schemas import DeviceStatus

    device = {
        "pool": "train",
        "pipeline": None,
        "stage": None,
        "step": None,
        "adapters": {"train": {"here": 2, "more": 1}},
    }
    served = DeviceStatus.model_validate(device).model_dump()
    (row,) = remote._device_rows({"devices": {"train-0.0": served}})
    assert row["adapters"] == "train 2, room for 1 more"
