"""`rlmux demo` runs, lists and copies the examples from any folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.yaml"))


def test_each_example_is_listed_with_its_idea_in_one_line(rlmux):
    code, out, _ = rlmux("demo", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == NAMES
    assert out.splitlines()[0].endswith("Two pipelines share two devices. While one trains, the other rolls out")
    assert all(len(line.split()) > 5 for line in out.splitlines())


@pytest.mark.parametrize("name", [name for name in NAMES if name.partition("_")[0] in ("07", "09") or "/" in name])
def test_an_example_of_another_command_prints_its_commands_with_the_path_of_the_file(rlmux, name):
    code, out, err = rlmux("demo", name)
    assert (code, "is not a file of `rlmux run`" in err) == (0, True)
    command, verb, file = out.splitlines()[0].split()[:3]
    assert (command, verb in ("plan", "broker", "serve")) == ("rlmux", True)
    assert Path(file).samefile(EXAMPLES / f"{name}.yaml")
    assert rlmux("check" if verb != "plan" else verb, file).code == 0


def test_the_demo_runs_and_replaces_the_last_demo_but_no_folder_of_the_user(rlmux, folder):
    pytest.importorskip("torch")
    few = ("--set=defaults.steps=1", "--set=defaults.sft_warmup.updates=1", "--json")
    for _ in range(2):
        code, out, _ = rlmux("demo", *few)
        assert (code, json.loads(out)["pipelines"]["sort"]["steps"]) == (0, 1)
        assert (folder / "runs" / "demo" / "timeline.html").is_file()
    assert rlmux("demo", "--out", "runs/demo", *few).code == 2


def test_copied_examples_are_those_of_the_checkout_and_replace_nothing(rlmux, folder):
    code, out, err = rlmux("demo", "--copy", "mine")
    assert (code, out) == (0, "rlmux run mine/01_two_pipelines.yaml\n")
    assert f"{len(NAMES)} examples in mine" in err
    for file in EXAMPLES.rglob("*.*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert (folder / "mine" / file.relative_to(EXAMPLES)).read_bytes() == file.read_bytes()
    code, _, err = rlmux("demo", "--copy", "mine")
    assert (code, err) == (2, "rlmux: --copy mine: File exists; accepted: a folder that does not exist\n")


@pytest.mark.parametrize("name", ["serve", "99"])
def test_a_name_of_no_example_or_of_several_is_refused_with_the_names(rlmux, name):
    code, _, err = rlmux("demo", name)
    assert code == 2
    assert f"NAME '{name}': accepted: 01_two_pipelines, " in err
