"""The pages say what the program does: their commands parse, the files, modules and options they name exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from rlmux.cli.commands import app
from rlmux.config import schema_docs
from rlmux.policies import POLICIES
from rlmux.rl.tasks import TASKS
from rlmux.sim.workloads import catalog

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMMANDS = {command.callback.__name__: command for command in app.registered_commands}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"))
}
USAGE_ERROR = typer.BadParameter.__bases__[0]
"""What a wrong command line raises; typer exports its children only."""
EXAMPLE_POLICIES = tomllib.loads((ROOT / "examples" / "plugin" / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["entry-points"]["rlmux.policies"]
"""Names of policies that the example package adds."""
HISTORY = {"CHANGELOG.md"}
"""Pages that name what was, too."""

COMMAND_LINE = re.compile(rf"^.*?(?<![\w/.-])(?:\.venv/bin/)?rlmux ((?:{'|'.join(COMMANDS)})\b.*)$")
BENCHMARK = re.compile(r"(?:python )?(benchmarks/\w+\.py)([^`\n]*)")
NAMED_FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|yaml|md))`")


def code_lines(page: str) -> list[str]:
    """Lines of fenced and indented code blocks."""
    fenced = re.findall(r"^ *```\w*\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    indented = re.findall(
        r"^    (\S.*)$", re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return [line.strip() for block in fenced for line in block.splitlines()] + indented


def code_blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block with a language."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def command_lines() -> list[tuple[str, str]]:
    """(page, words after `rlmux`) of every complete command on the pages."""
    found = []
    for name, page in PAGES.items():
        for line in code_lines(page):
            match = COMMAND_LINE.match(line)
            if match:
                found.append((name, match[1].replace("[", "").replace("]", "").removesuffix(" &")))
    return found


@pytest.fixture(scope="module")
def cli_page() -> str:
    return PAGES["docs/reference/cli.md"]


@pytest.fixture(scope="module")
def spec_page() -> str:
    return PAGES["docs/reference/file.md"]


def wrong_in(group, line: str) -> list[str]:
    """What the program does not take of a command line."""
    in_quotes = line.count('"') % 2  # the whole command is an argument of another
    words = shlex.split(line.removesuffix('"') if in_quotes else line, comments=True)
    try:
        context = group.commands[words[0]].make_context(words[0], words[1:])
    except USAGE_ERROR as error:
        return [error.format_message()]
    values = [value for value in map(str, context.params.values()) if value.startswith("examples/")]
    policies = str(context.params.get("policies") or context.params.get("policy") or "solo").split(",")
    return [
        *(f"{value} is no example" for value in values if not (ROOT / value).is_file()),
        *(f"{name} is no policy" for name in policies if name not in {*POLICIES, *EXAMPLE_POLICIES}),
    ]


def test_every_command_on_the_pages_is_one_that_the_program_takes():
    group, lines = typer.main.get_command(app), command_lines()
    assert len(lines) > 50
    wrong = [f"{page}: rlmux {line}: {what}" for page, line in lines for what in wrong_in(group, line)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_option_beside_a_command_in_running_text_exists():
    group = typer.main.get_command(app)
    for name, page in PAGES.items():
        for line in re.findall(r"`rlmux (\w+ [^`]*)`", page):
            words = line.split()
            if words[0] not in group.commands:
                continue
            known = {option for param in group.commands[words[0]].params for option in param.opts}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, f"{name}: {line}"


def test_every_benchmark_on_a_page_exists_with_its_options():
    for name, page in PAGES.items():
        for path, words in BENCHMARK.findall(page) if name not in HISTORY else ():
            source = (ROOT / path).read_text(encoding="utf-8")
            for option in re.findall(r"--[a-z0-9]+(?:-[a-z]+)*", words.partition("#")[0]):
                assert f'"{option}"' in source, f"{name}: {path} takes no {option}"


def test_every_file_that_a_page_names_exists():
    roots = (ROOT, ROOT / "src" / "rlmux", DOCS)
    named = [(name, path) for name, page in PAGES.items() if name not in HISTORY for path in NAMED_FILE.findall(page)]
    assert [(name, path) for name, path in named if not any((root / path).exists() for root in roots)] == []


def test_every_test_that_the_peer_cases_name_exists():
    source = (ROOT / "tests" / "policies" / "test_peer_cases.py").read_text(encoding="utf-8")
    named = re.findall(r"`(rb[0-9a-z_]+)(\.\.\.)?`", PAGES["docs/how-it-works/papers.md"])
    assert [name for name, cut in named if f"def test_{name}{'' if cut else '('}" not in source] == []


def test_every_link_between_the_pages_leads_somewhere():
    made_by_the_site = {"index.md", "changelog.md"}
    links = [(name, to) for name, page in PAGES.items() for to in re.findall(r"\]\((?!https?://|#)([^)#]+)", page)]
    missing = [
        (name, to) for name, to in links if to not in made_by_the_site and not ((ROOT / name).parent / to).exists()
    ]
    assert missing == []


def test_the_site_shows_every_page_and_only_modules_that_exist():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shown = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    written = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    assert shown == written | {"index.md", "changelog.md"}
    modules = {module for name in PAGES for module in re.findall(r"^::: ([\w.]+)", PAGES[name], re.MULTILINE)}
    assert [module for module in sorted(modules) if importlib.util.find_spec(module) is None] == []


def test_the_workflow_runs_the_commands_of_the_readme_on_the_pythons_that_are_promised():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == ["make demo", "make test", "make docs"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)
    assert {"make demo", "make test"} <= {line.partition("#")[0].strip() for line in code_lines(PAGES["README.md"])}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert workflow["jobs"]["demo-and-test"]["strategy"]["matrix"]["python"] == promised == ["3.11", "3.12", "3.13"]


def test_the_weekly_workflow_runs_what_no_change_is_judged_by():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8"))
    jobs = [job for name, job in workflow["jobs"].items() if name != "manifests"]  # other people's images
    commands = {step["run"] for job in jobs for step in job["steps"] if "run" in step} - {"make ${{ matrix.target }}"}
    commands |= {
        f"make {target}" for job in jobs for target in job.get("strategy", {}).get("matrix", {"target": []})["target"]
    }
    assert commands == {
        "make test CONSTRAINTS=",
        "make prove",
        "make test-tinker",
        "make test-trl",
        "make test-areal",
        "make test-skyrl",
        "make test-openrlhf",
        "make test-verl",
        "make newest-clients",
        *(f"make newest-{trainer}" for trainer in ("trl", "verl", "areal", "skyrl", "openrlhf")),
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for line in re.findall(r"^([\w -]+):", makefile, re.MULTILINE) for name in line.split()}
    assert {command.split()[1] for command in commands} <= targets


def test_the_citation_names_this_version_and_both_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{citation["version"]}"' in project
    assert {one["url"].rpartition("/")[2] for one in citation["references"]} == {"2512.11306", "2604.23838"}


def test_every_command_is_documented_with_its_own_example(cli_page):
    for name, command in COMMANDS.items():
        section = re.search(rf"^## rlmux {name}\b.*?(?=^## |\Z)", cli_page, re.MULTILINE | re.DOTALL)
        assert section is not None, f"docs/reference/cli.md has no section for {name}"
        example = re.search(r"Example: (.*)", command.callback.__doc__)
        assert example is not None, f"rlmux {name} --help has no example"
        assert example[1] in section[0]


def test_only_commands_that_exist_are_documented(cli_page):
    assert set(re.findall(r"^## rlmux (\w+)", cli_page, re.MULTILINE)) == set(COMMANDS)


def test_every_option_that_the_page_names_exists(cli_page):
    group = typer.main.get_command(app)
    known = {option for one in (group, *group.commands.values()) for each in one.params for option in each.opts}
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", cli_page)) - {"--help"} <= known


def test_every_policy_is_documented(cli_page):
    assert {policy for policy in POLICIES if f"`{policy}`" not in cli_page} == set()


def test_every_task_is_documented(spec_page):
    assert {task for task in TASKS if f"`{task}`" not in spec_page} == set()


def test_the_spec_page_has_the_tables_of_the_models_that_check_the_file(spec_page):
    told = "run: python -m rlmux.config.schema_docs, and put it below the comment in docs/reference/file.md"
    assert spec_page.endswith(schema_docs.markdown() + "\n"), told


def test_the_parameters_of_each_workload_are_documented_and_no_others():
    table = PAGES["docs/how-it-works/simulator.md"].partition("## Workloads")[2].partition("\n\nA CSV")[0]
    rows = [
        [re.findall(r"`([\w-]+)`", re.sub(r"\(.*?\)", "", cell)) for cell in row.split("|")]
        for row in table.splitlines()
        if row.startswith("|")
    ]
    parameters_by_name = {name: row[3] for row in rows[2:] for name in row[1]}
    assert set(parameters_by_name) <= set(catalog.names())
    for name, parameters in parameters_by_name.items():
        is_drift = name.startswith("drift-")
        assert set(parameters) == (set() if is_drift else set(catalog.params_of(name))), name


def test_the_files_of_the_cluster_page_can_be_read():
    """Their syntax, that is: none of them was run."""
    blocks = code_blocks("docs/how-to/many-machines.md")
    up, kuberay = [yaml.safe_load(text) for language, text in blocks if language == "yaml"]
    assert up["head_node_type"] in up["available_node_types"]
    for group in kuberay["spec"]["workerGroupSpecs"]:
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {f"rlmux_{group['groupName']}": 1}
        assert group["template"]["spec"]["containers"]
    (slurm,) = [text for language, text in blocks if language == "bash"]
    subprocess.run(["bash", "-n"], input=slurm, text=True, check=True)


def test_the_files_of_the_pages_about_clusters_jobs_and_the_image_agree():
    ((_, manifest),) = code_blocks("docs/how-to/kubernetes.md")
    claim, deployment = yaml.safe_load_all(manifest)
    pod = deployment["spec"]["template"]["spec"]
    names = {volume["name"]: volume for volume in pod["volumes"]}
    assert names["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert (mounts["/state"], names.keys()) == ("state", set(mounts.values()))
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert {"ENV XDG_STATE_HOME=/state", "VOLUME /state", "USER 1000"} <= set(image.splitlines())
    assert re.search(r"torch==\S+", image)[0] in (ROOT / "Makefile").read_text(encoding="utf-8")
    command = json.loads(re.search(r"^CMD (.*)$", image, re.MULTILINE)[1])
    assert wrong_in(typer.main.get_command(app), shlex.join(command[1:])) == []
    (port,) = pod["containers"][0]["ports"]
    assert command[command.index("--health") + 1] == f"0.0.0.0:{port['containerPort']}"
    assert pod["securityContext"]["runAsUser"] == 1000

    (_, script), (_, job) = code_blocks("docs/how-to/slurm-skypilot.md")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert yaml.safe_load(job)["run"].startswith("rlmux run two.yaml --out /runs/")
