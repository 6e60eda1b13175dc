"""A pipeline that failed goes on from its last checkpoint, once the user has mended the cause."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.command_line import command
from tests.waiting import until

from rlmux.core.errors import UserError
from rlmux.core.model import PipelineId
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.log.run_state import RunState
from rlmux.log.value_codec import dumps, loads
from rlmux.runtime.records.input_files import retried

FILE = """\
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults:
  steps: 4
  model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 32}
  algorithm: {prompts_per_step: 2, group_size: 4}
  rollout: {max_new_tokens: 6, slots: 8}
  task: {name: file, path: rows.jsonl, reward: "lengths:score"}
pipelines:
  - {name: a, seed: 1}
  - {name: b, seed: 2}
  - {name: c, seed: 3, task: sort}
"""
REWARD = """\
import wanted

def score(solution_str, ground_truth):
    return -abs(len(solution_str) - wanted.length(ground_truth))
"""
HELPER = "def length(answer): return int(answer)\n"
LIMIT_S = 200


def write_rows(folder: Path, sixth: str) -> None:
    """Ten rows; the sixth comes up in step 4, in the order that both seeds give."""
    answers = ["4", "5", "6", "4", "5", sixth, "4", "5", "6", "4"]
    rows = [json.dumps({"prompt": "12 34", "answer": answer}) for answer in answers]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def rlmux(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*words),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_pipelines_that_failed_go_on_from_their_checkpoints_once_a_row_is_mended(folder: Path):
    (folder / "file.yaml").write_text(FILE)
    (folder / "lengths.py").write_text(REWARD)
    (folder / "wanted.py").write_text(HELPER)
    write_rows(folder, "five")
    code, _, err = rlmux(folder, "run", "file.yaml", "--out", "one")
    assert code == 1, err
    assert err.strip().splitlines()[-1] == ("rlmux: once the cause is mended: rlmux resume one --retry a --retry b")
    for words, told in (
        (["--retry", "z"], "--retry z: no such pipeline in this run; accepted: a pipeline that failed: a, b"),
        (["--retry", "c"], "--retry c: it is finished; accepted: a pipeline that failed: a, b"),
    ):
        code, _, err = rlmux(folder, "resume", "one", *words)
        assert (code, err.strip()) == (2, f"rlmux: {told}")

    write_rows(folder, "5")
    (folder / "wanted.py").write_text(HELPER + "# mended\n")
    code, _, err = rlmux(folder, "resume", "one", "--retry", "a", "--retry", "b")
    assert code == 0, err
    said = err.splitlines()
    for name in ("a", "b"):
        (goes_on,) = [line for line in said if line.startswith(f"{name}: goes on at step ")]
        assert goes_on.removeprefix(f"{name}: goes on at step ") in ("3 of 4", "4 of 4"), "from its newest checkpoint"
        (changed,) = [line for line in said if line.startswith(f"{name}: its files are not what they were: ")]
        assert f"{folder / 'rows.jsonl'} has changed" in changed
        assert f"{folder / 'wanted.py'} has changed" in changed
        assert "lengths.py" not in changed
    with LogReader(folder / "one") as reader:
        notes = [entry.value for entry in reader.entries() if entry.type == "inputs"]
        assert [note["pipeline"] for note in notes if "changed" in note] == ["a", "b"]
    resumed = json.loads((folder / "one" / "summary.json").read_text())["pipelines"]
    assert {name: one["status"] for name, one in resumed.items()} == dict.fromkeys("abc", "finished")
    assert [one["steps"] for one in resumed.values()] == [4, 4, 4]

    code, out, err = rlmux(folder, "run", "file.yaml", "--out", "unbroken", "--json")
    assert code == 0, err
    unbroken = json.loads(out)["pipelines"]
    for name in ("a", "b", "c"):
        assert resumed[name]["weights_sha256"] == unbroken[name]["weights_sha256"]
    code, _, err = rlmux(folder, "resume", "one", "--retry", "a")
    assert (code, err.strip()) == (2, "rlmux: --retry a: it is finished; no pipeline of this run failed")


def test_pipelines_that_failed_are_named_in_the_order_of_the_file(tmp_path: Path):
    given = [PipelineId(name) for name in "abc"]
    with RunLog.create(tmp_path, run_header(policy="rollmux", backend="local")) as log:
        for name, status in (("c", "failed"), ("b", "finished"), ("a", "failed")):
            log.note("pipeline_end", 1.0, pipeline=name, status=status, reason="NaN", weights_sha256=None)
    with LogReader(tmp_path) as reader, pytest.raises(UserError, match=r"accepted: a pipeline that failed: a, c$"):
        retried(["b"], reader.state(), given)


def test_a_pipeline_whose_retry_was_interrupted_is_not_over(tmp_path: Path):
    with RunLog.create(tmp_path, run_header(policy="rollmux", backend="local")) as log:
        log.note("pipeline_end", 1.0, pipeline="a", status="failed", reason="NaN", weights_sha256=None)
        log.note("pipeline_end", 1.0, pipeline="b", status="failed", reason="NaN", weights_sha256=None)
        log.note("resumed", 2.0, pipelines=["a"], retried=["a"])
    with LogReader(tmp_path) as reader:
        state = reader.state()
    assert set(state.ended) == {"b"}
    assert RunState.from_json(loads(dumps(state))) == state


@pytest.mark.slow
def test_pipelines_that_failed_go_on_in_the_run_in_progress_with_the_same_weights(folder: Path):
    (folder / "file.yaml").write_text(FILE)
    (folder / "lengths.py").write_text(REWARD)
    (folder / "wanted.py").write_text(HELPER)
    write_rows(folder, "five")
    words = command("run", "file.yaml", "--out", "one", "--keep-open")
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until((folder / "one" / "control.sock").exists, "the run's socket", limit_s=LIMIT_S, process=process)

        def shown() -> dict[str, dict]:
            return json.loads(rlmux(folder, "status", "one", "--json")[1])["pipelines"]

        def until_all(status: dict[str, str]) -> None:
            until(
                lambda: {name: one["status"] for name, one in shown().items()} == status,
                f"{status}", limit_s=LIMIT_S, seen=shown, poll_s=0.2, process=process,
            )  # fmt: skip

        until_all({"a": "failed", "b": "failed", "c": "finished"})
        code, out, err = rlmux(folder, "retry", "one", "c", "z")
        assert (code, out) == (2, "")
        assert err.splitlines() == [
            "rlmux: pipeline 'c' is finished; accepted: a failed pipeline",
            "rlmux: no pipeline 'z'; accepted: a failed pipeline: a, b",
        ]
        write_rows(folder, "5")
        code, out, err = rlmux(folder, "retry", "one", "a", "b", "--json")
        assert (code, err) == (0, "")
        for row in json.loads(out)["pipelines"]:
            assert row["outcome"].startswith(("goes on at step 3 ", "goes on at step 4 ")), "from its newest checkpoint"
        until_all(dict.fromkeys("abc", "finished"))
        tries = shown()["a"]["tries"]
        assert (tries["number"], tries["of"]) == (2, None)
        assert [failure["cause"] for failure in tries["failures"]] == ["user_code"]
        assert "a: try 2, after: " in rlmux(folder, "status", "one", "--once")[1]
    finally:
        rlmux(folder, "stop", "one")
        process.wait(LIMIT_S)
    code, _, err = rlmux(folder, "retry", "one", "a")
    told = "one: nothing runs there now; once it has ended: rlmux resume one --retry a"
    assert (code, err.strip()) == (2, f"rlmux: {told}")
    ended = json.loads((folder / "one" / "summary.json").read_text())["pipelines"]
    unbroken = json.loads(rlmux(folder, "run", "file.yaml", "--out", "unbroken", "--json")[1])["pipelines"]
    assert [ended[name]["weights_sha256"] for name in "abc"] == [unbroken[name]["weights_sha256"] for name in "abc"]
    assert [one["steps"] for one in ended.values()] == [4, 4, 4]


ONCE = """\
import pathlib

def score(solution_str, ground_truth):
    seen = pathlib.Path(__file__).with_name("seen")
    if ground_truth == "7" and not seen.exists():
        seen.touch()
        raise ValueError("the first time")
    return -abs(len(solution_str) - int(ground_truth))
"""


@pytest.mark.slow
def test_a_rule_of_the_file_tries_again_what_user_code_made_fail(folder: Path):
    (folder / "file.yaml").write_text(FILE.replace("{name: a, seed: 1}", "{name: a, seed: 1, retries: {user_code: 1}}"))
    (folder / "lengths.py").write_text(ONCE)
    write_rows(folder, "7")
    code, out, err = rlmux(folder, "run", "file.yaml", "--out", "one", "--json", "--set", "pipelines.b.task=sort")
    assert code == 0, err
    ended = json.loads(out)["pipelines"]
    assert {name: one["status"] for name, one in ended.items()} == dict.fromkeys("abc", "finished")
    assert (ended["a"]["tries"]["number"], ended["a"]["tries"]["of"]) == (2, 2)
    assert "tries" not in ended["b"]
    with LogReader(folder / "one") as reader:
        (note,) = [entry.value for entry in reader.entries() if entry.type == "retried"]
    assert (note["cause"], note["by_rule"]) == ("user_code", True)
