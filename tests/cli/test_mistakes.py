"""What a person gets for a wrong command line: one line, exit code 2, and nothing started or made."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import typer

from rlmux.cli.commands import app, example_of


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?; try: rlmux --help"),
        (["run"], "Missing argument 'FILE'; try: rlmux run --help"),
        (["run", "small.yaml", "--foo"], "No such option: --foo"),
        (["run", "smal.yaml"], "smal.yaml: no such file; accepted: a YAML file; there: small.yaml"),
        (["run", "small.yaml", "--policy", "rolmux"], "--policy 'rolmux': nearest: rollmux; accepted: solo, "),
        (["run", "small.yaml", "--resume"], "--resume: accepted with --out DIR, and without --overwrite"),
        (["run", "small.yaml", "--backend", "slurm"], "--backend 'slurm': accepted: local"),
        (["run", "small.yaml", "--set", "pipelines.a.steps=0"], "--set pipelines.a.steps=0: pipelines.a.steps is 0"),
        (["run", "small.yaml", "--set", "pipelines.a.task=srt"], "--set pipelines.a.task=srt: pipelines.a.task.name"),
        (["run", "small.yaml", "--set", "pipelines.a.task.digit=3"], "--set pipelines.a.task.digit=3: pipelines.a"),
        (
            ["run", "small.yaml", "--set", "pipelines.a.task={name: 'reasoning-gym:chain_sum', min_termz: 2}"],
            "--set pipelines.a.task={name: 'reasoning-gym:chain_sum', min_termz: 2}: pipelines.a.task.min_termz: ",
        ),
        (["compare", "small.yaml", "--policies", "solo,nope"], "--policies 'nope': accepted: solo, "),
        (["compare", "small.yaml", "--policies", ","], "--policies '': accepted: solo, "),
        (
            ["compare", "small.yaml", "--policies", "rollmux", "--ablate", "tails,fractions"],
            "--ablate fractions: policy 'rollmux' has no such mechanism; accepted: tails\n",
        ),
        (
            ["simulate", "weave", "--policies", "solo,rlmux", "--ablate", "fils"],
            "--ablate fils: policies 'solo', 'rlmux' have no such mechanism; accepted: tails, fractions, fill\n",
        ),
        (
            ["simulate", "weave", "--policies", "solo", "--ablate", "all"],
            "--ablate all: policy 'solo' has no such mechanism; accepted: none\n",
        ),
        (
            ["run", "small.yaml", "--policy", "rollmux-no-fill"],
            "policy 'rollmux' has no mechanism 'fill'; accepted: tails\n",
        ),
        (["simulate", "nowhere"], "workload 'nowhere' is neither"),
        (["simulate", "weave", "--seeds", "0"], "--seeds '0': accepted: how many, from 1 to 10,000"),
        (["simulate", "weave", "--seeds", "24-20"], "--seeds '24-20': accepted: "),
        (["simulate", "weave", "--set", "a=1"], "--set a=1: only a YAML file takes overrides, and 'weave' is none"),
        (
            ["plan", "small.yaml", "--set", "pipelines.a.task=null", "--set", "pipelines.a.estimate=null"],
            "--set pipelines.a.estimate=null: pipelines.a.estimate is missing",
        ),
        (["plan", "small.yaml", "--gpu", "v100"], "GPU 'v100' has no row in the table of GPUs; known: A100-80GB-SXM, "),
        (["report", "nowhere"], "nowhere: no such folder; accepted: the folder of a run"),
        (["resume", "."], ".: holds no run (no run.db); accepted: the folder of a run"),
        (["reproduce", "rolmux"], "PAPER 'rolmux': nearest: rollmux; accepted: rollmux, jigsawrl, rivals"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(rlmux, folder, words, line):
    said = rlmux(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"rlmux: {line}"), said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["small.yaml"], "something was made"


def test_a_folder_that_holds_something_else_is_left_alone(rlmux, folder):
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.txt").write_text("years of work")
    for command in ("run", "compare"):
        said = rlmux(command, "small.yaml", "--out", "precious", "--overwrite")
        assert said.code == 2
        assert "precious: not empty" in said.err
    assert (folder / "precious" / "thesis.txt").read_text() == "years of work"


def test_the_current_folder_is_not_written_over(rlmux, folder):
    for out in (".", ".."):
        said = rlmux("run", "small.yaml", "--out", out, "--overwrite")
        assert said.code == 2
        assert f"--out {out}: you are in it" in said.err


def test_an_out_that_is_a_file_is_refused(rlmux, folder):
    assert rlmux("run", "small.yaml", "--out", "small.yaml").code == 2
    assert rlmux("compare", "small.yaml", "--out", "small.yaml/x").code == 2


def test_without_a_command_the_help_is_shown(rlmux):
    assert rlmux() == rlmux("--help")


@pytest.mark.parametrize("columns", [80, 100])
def test_help_lists_commands_in_five_groups_with_whole_sentences_and_an_example(rlmux, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, _, *groups = rlmux("--help").out.strip().split("\n\n")[1:]
    assert [group.splitlines()[0] for group in groups] == [
        "Train:",
        "Watch and steer:",
        "Predict:",
        "Serve and share:",
        "Machine:",
    ]
    lines = [line for group in groups for line in group.splitlines()[1:]]
    assert max(map(len, lines)) <= columns
    commands = re.findall(
        r"^  (\w+) +[A-Z].*\.\n +\$ rlmux (\w+)", re.sub(r"\n {13}(?!\$)", " ", "\n".join(lines)), re.M
    )
    assert [name for name, _ in commands] == [example for _, example in commands]
    assert {name for name, _ in commands} == {command.callback.__name__ for command in app.registered_commands}


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_the_example_of_each_command_is_a_command_line_that_it_takes(command):
    name, *words = shlex.split(example_of(command.callback).removeprefix("rlmux "))
    assert name == command.callback.__name__
    assert typer.main.get_command(app).commands[name].make_context(name, words)


def test_plan_prints_a_row_for_each_pipeline_and_the_cost(rlmux):
    said = rlmux("plan", "small.yaml", "--set", "cluster.pools.train.usd_per_gpu_hour=3")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()[1:3]] == ["a", "b"]
    assert "$3.00/h" in said.out
    assert "$6.00/h if each pipeline had nodes of its own" in said.out


def test_json_is_json_and_nothing_else(rlmux):
    plan = json.loads(rlmux("plan", "small.yaml", "--json").out)
    assert [one["pipeline"] for one in plan["pipelines"]] == ["a", "b"]
    assert plan["pipelines"][0]["slo_slowdown"] is None, "infinity has no word in JSON"
    result = json.loads(rlmux("simulate", "small.yaml", "--policies", "solo,rollmux", "--json").out)
    assert list(result["policies"]) == ["solo", "rollmux"]
    assert result["policies"]["rollmux"]["slo_attainment"] == 1


def test_simulate_prints_a_row_for_each_policy(rlmux):
    said = rlmux("simulate", "small.yaml", "--policies", "solo,rollmux", "--seeds", "2")
    assert said.code == 0
    assert "2 seeds" in said.out
    rows = [line.split()[0] for line in said.out.splitlines() if line]
    assert rows.index("solo") < rows.index("rollmux")


def test_version_is_the_installed_one(rlmux):
    assert rlmux("version").out.startswith("rlmux 0.")
    assert rlmux("--version") == rlmux("version")


REWARDS = """
import os, sys, time
def good(solution_str, ground_truth): print("good"); return 1.0
def short(solution_str): return "x"
def hangs(solution_str): time.sleep(3600)
def holds(solution_str):
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(3600)
def ends(solution_str): os._exit(3)
"""


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("short", "task.reward: reward my_rewards:short on a sample returned str 'x'; accepted: a finite number"),
        (
            "hangs",
            "task.reward: reward my_rewards:hangs on a sample did not return within 2 s (task.reward_timeout_s)",
        ),
        (
            "holds",
            "task.reward: reward my_rewards:holds on a sample did not return within 2 s (task.reward_timeout_s)",
        ),
        ("ends", "task.reward: reward my_rewards:ends on a sample ended its process (os._exit, exit code 3)"),
    ],
)
def test_a_reward_that_cannot_score_a_sample_is_told_before_anything_starts(rlmux, folder, function, line):
    (folder / "my_rewards.py").write_text(REWARDS)
    limit_s = 2 if "within 2 s" in line else 60  # short only for what never returns
    task = f"{{name: reverse, reward: 'my_rewards:{function}', reward_timeout_s: {limit_s}}}"
    good = "pipelines.a.task={name: sort, reward: 'my_rewards:good'}"
    said = rlmux("run", "small.yaml", "--set", good, "--set", f"pipelines.b.task={task}")
    assert (said.code, said.out) == (2, "")
    # A long wait is told as well.
    told = [each for each in said.err.splitlines() if not each.startswith("rlmux: waiting for reward my_rewards:")]
    assert told == [f"rlmux: --set pipelines.b.task={task}: pipelines.b.{line}"]
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"small.yaml", "my_rewards.py"}


def test_a_row_that_cannot_be_trained_on_is_named_before_anything_starts(rlmux, folder):
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "caf\u00e9", "answer": "b"}\n', encoding="utf-8")
    said = rlmux("run", "small.yaml", "--set", "pipelines.b.task={name: file, path: rows.jsonl}")
    assert (said.code, said.out) == (2, "")
    assert f"pipelines.b: {rows} row 2: the character '\u00e9' in 'caf\u00e9' is not in the built-in" in said.err
    assert said.err.count("\n") == 1
