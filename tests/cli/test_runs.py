"""Real runs through the command line: what is written, what is printed, how they stop and go on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import command
from tests.small_files import RAISING_POLICY, REVERSE, SORT, small_file
from tests.waiting import until

from rlmux.api.run_handle import open_run

pytest.importorskip("torch")

NUM_STEPS = 30
SMALL = small_file(SORT, REVERSE, steps=2)


def start(folder: Path, *words: str, has_own_fork_server: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlmux", *words] if has_own_fork_server else command(*words),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def weights(summary: dict) -> dict[str, str]:
    return {name: pipeline["weights_sha256"] for name, pipeline in summary["pipelines"].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A folder with a finished run in `one`, and what that run printed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.yaml").write_text(SMALL.replace("steps: 2", f"steps: {NUM_STEPS}"), encoding="utf-8")
    code, out, err = finish(start(folder, "run", "small.yaml", "--out", "one", "--json"))
    assert code == 0, err
    assert err == ""
    return folder, json.loads(out)


def test_a_run_prints_json_and_fills_its_folder(whole):
    folder, summary = whole
    assert [pipeline["steps"] for pipeline in summary["pipelines"].values()] == [NUM_STEPS, NUM_STEPS]
    assert all(weights(summary).values())
    assert json.loads((folder / "one" / "summary.json").read_text()) == summary
    assert {"run.db", "summary.json", "trace.json", "timeline.html", "a", "b"} <= {
        path.name for path in (folder / "one").iterdir()
    }
    for name in ("a", "b"):
        lines = (folder / "one" / name / "metrics.jsonl").read_text().splitlines()
        gaps = [json.loads(line)["logprob_gap"] for line in lines]
        assert max(gaps) < 1e-4, "a step trained on what other weights had sampled"


def test_a_folder_with_a_run_is_taken_only_when_told_so(whole, rlmux, monkeypatch):
    monkeypatch.chdir(whole[0])
    code, out, err = rlmux("run", "small.yaml", "--out", "one")
    assert (code, out) == (2, "")
    assert "--out one: not empty" in err


def test_report_needs_the_log_alone(whole, rlmux, monkeypatch):
    folder, _ = whole
    monkeypatch.chdir(folder)
    (folder / "one" / "timeline.html").unlink()
    code, out, err = rlmux("report", "one")
    assert code == 0, err
    assert "timeline: one/timeline.html" in out
    assert (folder / "one" / "timeline.html").is_file()


def test_a_run_that_ended_well_names_its_receipt_and_the_command_gives_it(whole):
    folder, _ = whole
    code, out, err = finish(start(folder, "resume", "one"))
    assert code == 0, err
    assert re.search(r"as `plan` has them and as measured:\n.*\na +rollout_s .* roofline .* [+-]\d+%\n", out), out
    assert "rlmux: receipt: rlmux verify one (about " in err
    code, out, err = finish(start(folder, "verify", "one", "--seed", "1"))
    assert code == 0, err
    line = rf"equal at \d+ of {NUM_STEPS} steps \(sample of 1 in 20 from the 6 steps near .*, seed 1; --all .*\)"
    assert re.fullmatch(f"a: {line}\nb: {line}\n", out), out


@pytest.mark.slow
def test_ctrl_c_stops_with_130_and_resume_reaches_the_weights_of_an_unbroken_run(whole):
    folder, unbroken = whole
    process = start(folder, "run", "small.yaml", "--out", "broken", has_own_fork_server=True)
    first = folder / "broken" / "a" / "metrics.jsonl"
    until(first.exists, "a step of `a`", limit_s=300.0, poll_s=0.005, process=process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "rlmux: stopped; resume with: rlmux resume broken" in err
    assert "Traceback" not in err

    code, out, err = finish(start(folder, "resume", "broken", "--json"))
    assert code == 0, err
    assert weights(json.loads(out)) == weights(unbroken)


@pytest.mark.parametrize(
    "left", [pytest.param([], marks=pytest.mark.slow), [".owner.json", "run.db", "run.db-journal"]], ids=len
)
def test_run_with_resume_starts_where_a_start_was_killed_before_its_log_was_written(folder: Path, left):
    (folder / "job").mkdir()
    for name in left:
        (folder / "job" / name).touch()
    code, out, err = finish(start(folder, "run", "small.yaml", "--out", "job", "--resume", "--json"))
    assert code == 0, err
    assert {one["status"] for one in json.loads(out)["pipelines"].values()} == {"finished"}


def test_run_with_resume_starts_and_after_sigterm_goes_on_to_the_same_weights(whole):
    folder, unbroken = whole
    line = ("run", "small.yaml", "--out", "job", "--resume", "--json")
    process = start(folder, *line)
    first = folder / "job" / "a" / "metrics.jsonl"
    until(first.exists, "a step of `a`", limit_s=300.0, poll_s=0.005, process=process)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 130

    code, out, err = finish(start(folder, *line))
    assert code == 0, err
    assert weights(json.loads(out)) == weights(unbroken)
    code, out, err = finish(start(folder, *line, "--set", "pipelines.*.steps=1"))
    accepted = "holds a run of another file or policy; accepted: rlmux resume job"
    assert (code, out, err) == (2, "", f"rlmux: --out job: {accepted}\n")


@pytest.mark.slow
def test_compare_trains_under_each_policy_to_the_same_weights(folder: Path):
    code, out, err = finish(
        start(
            folder, "compare", "small.yaml", "--policies", "solo,rollmux", "--ablate", "all", "--out", "both", "--json"
        )
    )
    assert code == 0, err
    table = json.loads(out)
    assert list(table) == ["solo", "rollmux", "rollmux-no-tails", "ablations"]
    assert table["rollmux"]["same_weights"] is table["rollmux-no-tails"]["same_weights"] is True
    assert table["ablations"]["rollmux"]["tails"]["without"] == table["rollmux-no-tails"]["makespan_s"]
    assert (folder / "both" / "rollmux" / "timeline.html").is_file()
    assert open_run(folder / "both" / "rollmux-no-tails").summary["policy"] == "rollmux-no-tails"
    assert finish(start(folder, "compare", "small.yaml", "--out", "both"))[0] == 2


def test_a_reward_module_beside_the_file_is_found_and_its_failure_is_its_pipelines_own(folder: Path):
    (folder / "my_rewards.py").write_text(
        "def good(solution_str, ground_truth): return float(len(solution_str))\n"
        "def bad(solution_str, ground_truth): return {ground_truth: 1.0}[solution_str]\n"
    )
    sets = [
        "--set",
        "pipelines.a.task.reward='my_rewards:bad'",
        "--set",
        "pipelines.b.task.reward='my_rewards:good'",
    ]
    code, out, err = finish(start(folder, "run", "small.yaml", "--out", "runs/x", "--json", *sets))
    assert code == 1, err
    summary = json.loads(out)
    assert summary["pipelines"]["a"]["status"] == "failed"
    assert summary["pipelines"]["b"]["status"] == "finished"
    assert summary["pipelines"]["b"]["reward_last"] > 1


def test_a_run_under_a_policy_that_raises_trains_every_step_and_says_so(tmp_path):
    (tmp_path / "raising.py").write_text(RAISING_POLICY, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(f"policy: raising:Raising\n{SMALL}", encoding="utf-8")
    code, _, err = finish(start(tmp_path, "run", "small.yaml", "--out", "one"))
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "plain order" in line]
    assert line.startswith("rlmux: policy raising:Raising failed in dispatch, and the plain order of work stands in: ")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert [(one["status"], one["steps"]) for one in summary["pipelines"].values()] == [("finished", 2)] * 2
    code, out, err = finish(start(tmp_path, "status", "one", "--json"))
    assert code == 0, err
    (alert,) = [one for one in json.loads(out)["alerts"] if one["rule"] == "policy_fault"]
    assert "AttributeError" in alert["text"]
