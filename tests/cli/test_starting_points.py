"""`rlmux init`: a file for this machine that the other commands take as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlmux.cli.starting_points import STARTING_POINTS
from rlmux.runtime import local

WITHOUT_MODEL = [start for start in STARTING_POINTS if start != "checkpoint"]


@pytest.mark.parametrize("start", WITHOUT_MODEL)
def test_every_file_is_without_mistakes_and_its_scripts_compile(rlmux, folder, start):
    code, out, err = rlmux("init", start)
    assert code == 0
    written = [name.rstrip(";") for name in err.removeprefix("rlmux: wrote ").removesuffix("; next:\n").split(", ")]
    assert {path.name for path in folder.iterdir()} == {*written, "small.yaml"}
    for script in folder.glob("*.py"):
        compile(script.read_text(encoding="utf-8"), script, "exec")
    assert "$" not in (folder / "rlmux.yaml").read_text(encoding="utf-8")
    assert rlmux("check", "rlmux.yaml").code == 0
    assert "rlmux.yaml" in out.splitlines()[0]


@pytest.mark.parametrize("start", WITHOUT_MODEL)
@pytest.mark.parametrize(
    ("gpus", "cores", "devices", "line"),
    [
        ([], {0}, {"all": 1}, "This machine has 1 CPU core and no GPU."),
        ([], {0, 1, 2, 3}, {"rollout": 1, "train": 1}, "This machine has 4 CPU cores and no GPU."),
        (["0"], {0, 1}, {"all": 1}, "A device is a GPU. This machine has 1."),
        (["0", "1", "2"], {0}, {"rollout": 1, "train": 1}, "A device is a GPU. This machine has 3."),
    ],
)
def test_the_pools_are_devices_of_this_machine_two_at_most(
    rlmux, folder, monkeypatch, start, gpus, cores, devices, line
):
    with monkeypatch.context() as machine:
        machine.setattr(local, "visible_gpus", lambda: gpus)
        machine.setattr(os, "sched_getaffinity", lambda _: cores)
        assert rlmux("init", start).code == 0
    assert line in (folder / "rlmux.yaml").read_text(encoding="utf-8")
    checked = json.loads(rlmux("check", "rlmux.yaml", "--json").out)
    assert checked["clusters"][0]["devices"] == ({"gpu0": 1} if start == "trl" else devices)


def test_rows_and_then_a_checkpoint_train_by_the_printed_command(rlmux, folder):
    pytest.importorskip("torch")
    few = [f"--set=defaults.{key}" for key in ("steps=1", "sft_warmup.updates=1", "algorithm.prompts_per_step=2")]
    command = rlmux("init", "rows").out.split()[1:]
    assert rlmux(*command, *few, "--out", "runs/rows").code == 0
    said = rlmux("init", "checkpoint", "--model", "runs/rows/mine/step_1", "--out", "own/trained.yaml")
    assert said.out == "rlmux run own/trained.yaml\n"
    assert 'path: "../runs/rows/mine/step_1"' in (folder / "own" / "trained.yaml").read_text(encoding="utf-8")
    assert rlmux(*said.out.split()[1:], *few, "--out", "runs/checkpoint").code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["row"], "START 'row': nearest: rows; accepted: tasks, rows, checkpoint, trl, tinker"),
        (["checkpoint"], "--model is missing; accepted: rlmux init checkpoint --model DIR, "),
        (["checkpoint", "--model", "none"], "--model none: no such folder (none); accepted: a Hugging Face checkpoint"),
        (["checkpoint", "--model", "."], "--model .: the folder has no config.json (.); accepted: "),
        (["rows", "--model", "."], "--model .: does not go with rows; accepted: rlmux init checkpoint --model DIR"),
        (["--out", "small.yaml"], "small.yaml: exists; accepted: --out FILE in a folder without small.yaml"),
        (["--out", "."], ".: exists; accepted: "),
        (
            ["--out", "small.yaml/x.yaml"],
            "small.yaml/x.yaml: File exists; accepted: --out FILE that can be written",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(rlmux, folder, words, line):
    before = (folder / "small.yaml").read_bytes()
    code, out, err = rlmux("init", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rlmux: {line}")
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]
    assert (folder / "small.yaml").read_bytes() == before


def test_nothing_is_written_where_a_companion_exists(rlmux, folder):
    (folder / "rewards.py").write_text("mine", encoding="utf-8")
    code, out, err = rlmux("init", "rows")
    line = "rewards.py: exists; accepted: --out FILE in a folder without rlmux.yaml, rows.jsonl or rewards.py"
    assert (code, out, err) == (2, "", f"rlmux: {line}\n")
    assert {path.name for path in folder.iterdir()} == {"small.yaml", "rewards.py"}
    assert (folder / "rewards.py").read_text(encoding="utf-8") == "mine"


def test_json_has_the_files_and_the_commands_also_for_names_with_spaces(rlmux, folder):
    code, out, err = rlmux("init", "tinker", "--out", "my files/a b.yaml", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["files"] == ["my files/a b.yaml", "my files/train_tinker.py"]
    assert all(Path(each).is_file() for each in result["files"])
    assert result["next"][0] == "rlmux serve 'my files/a b.yaml' --out runs/served"
    assert result["next"][2] == "python 'my files/'train_tinker.py"
