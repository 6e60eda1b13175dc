"""docs/cli.md and docs/spec.md say what the program does."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from rlmux.cli.commands import app
from rlmux.config import reference
from rlmux.policies import POLICIES
from rlmux.rl.tasks import TASKS

DOCS = Path(__file__).parent.parent / "docs"
COMMANDS = {command.callback.__name__: command for command in app.registered_commands}


@pytest.fixture(scope="module")
def cli_page() -> str:
    return (DOCS / "cli.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def spec_page() -> str:
    return (DOCS / "spec.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_with_its_own_example(name, cli_page):
    section = re.search(rf"^## rlmux {name}\b.*?(?=^## |\Z)", cli_page, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/cli.md has no section for {name}"
    example = re.search(r"Example: (.*)", COMMANDS[name].callback.__doc__)
    assert example is not None, f"rlmux {name} --help has no example"
    assert example[1] in section[0]


def test_only_commands_that_exist_are_documented(cli_page):
    assert set(re.findall(r"^## rlmux (\w+)", cli_page, re.MULTILINE)) == set(COMMANDS)


def test_every_option_that_the_page_names_exists(cli_page):
    group = typer.main.get_command(app)
    known = {option for command in group.commands.values() for each in command.params for option in each.opts}
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", cli_page)) - {"--help"} <= known


def test_every_policy_is_documented(cli_page):
    assert {policy for policy in POLICIES if f"`{policy}`" not in cli_page} == set()


def test_every_task_is_documented(spec_page):
    assert {task for task in TASKS if f"`{task}`" not in spec_page} == set()


def test_the_spec_page_has_the_tables_of_the_models_that_check_the_file(spec_page):
    told = "run: python -m rlmux.config.reference, and put it below the comment in docs/spec.md"
    assert spec_page.endswith(reference.markdown() + "\n"), told


def test_the_files_of_the_cluster_page_can_be_read():
    """Their syntax, that is: none of them was run."""
    page = (DOCS / "cluster.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    up, kuberay = [yaml.safe_load(text) for language, text in blocks if language == "yaml"]
    assert up["head_node_type"] in up["available_node_types"]
    for group in kuberay["spec"]["workerGroupSpecs"]:
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {f"rlmux_{group['groupName']}": 1}
        assert group["template"]["spec"]["containers"]
    (slurm,) = [text for language, text in blocks if language == "bash"]
    subprocess.run(["bash", "-n"], input=slurm, text=True, check=True)
