"""The commands that make the figures of the pages run to their end, in a short form.

    pages ── command_lines ─▶ Command ── missing ─▶ skipped, with the reason
                                      ── short_form ─▶ a process in a folder of its own ─▶ exit code 0

Commands are found, never listed: what is written on a page tomorrow is run tomorrow. What a short form is, follows from
the names of options and parameters alone.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.test_docs_commands import HISTORY, PAGES, ROOT, code_lines
from tests.test_plugins import installed  # noqa: F401  the package that the pages install

from rlmux.sim.workloads import catalog

LIMIT_S = 1500
BUILT_PAGES = ROOT / "src" / "rlmux" / "service" / "pages" / "dist" / "index.html"
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )?(?:rlmux (?:simulate|reproduce|plan) .*|python benchmarks/\w+\.py.*)")
PLACEHOLDER = re.compile(r"[A-Z|]{1,}(?::key=value.*)?|\.\.\.|<.*")
"""A word that stands for another: such a line explains a command, and is none."""
TRACE = """\
pipeline,submit_s,duration_s,profile,slo_slowdown
a,0,36000,7B_8k,1.5
b,60,36000,14B_8k,2
"""
SMALLEST_PARAMETERS = {"num_pipelines": "6", "num_steps": "2"}
SMALLEST = {
    "--quick": None,
    "--rounds": "1",
    "--repeats": "1",
    "--steps": "12",
    "--ask-after": "2",
    "--filler-steps": "20",
    "--rows": "20000",
    "--record-s": "10",
    "--graphs": "4",
    "--limit": "2",
    "--groups": "5",
    "--pipelines": "20",
    "--arrivals": "5",
    "--requests": "64",
    "--trajectories": "8",
    "--kills": "1",
    "--payload-mb": "1",
    "--minutes": "0.1",
    "--watch-s": "5",
}
"""Values of a benchmark's options with which it ends soon; None: an option without a value."""
LISTS = ("--cases", "--parts", "--policies", "--sizes", "--shapes", "--slots", "--tenants", "--tokens", "--workers")
"""Options of a benchmark of whose lists the first entry is enough."""
NEEDS: tuple[tuple[str, str, Callable[[], bool]], ...] = (
    (r"RLMUX_DATA=", "the recorded runs in RLMUX_DATA", lambda: "RLMUX_DATA" in os.environ),
    (r"--device cuda|benchmarks/gpu\.py", "a GPU", lambda: shutil.which("nvidia-smi") is not None),
    (r"--vllm-python", "an environment with vLLM", lambda: (ROOT / ".venv-vllm").is_dir()),
    (r"against_trl\.py", "TRL", lambda: importlib.util.find_spec("trl") is not None),
    (r"benchmarks/pages\.py", "a browser", lambda: shutil.which("chromium") is not None),
    (r"benchmarks/pages\.py", "the built pages (make pages)", lambda: BUILT_PAGES.is_file()),
    (r"--recorded", "the runs of an earlier command", lambda: False),
)
"""(pattern of a command, what it needs, whether that is here)."""


class Command(NamedTuple):
    """A command line of a page."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """Without its comment, the parts that may be left out, and sources of other commits."""
        line = re.sub(r" \[.*?\]", "", self.line).replace("OLD/src ", "")
        words = shlex.split(line, comments=True)
        return words[1:] if "=" in words[0] else words

    @property
    def is_complete(self) -> bool:
        words = self.words
        if words[0] == "python":
            return not any(re.fullmatch("<.*|FILE", word) for word in words)
        is_given = bool(words[2:]) and (not words[2].startswith("-") or (words[2] == "--from-run" and bool(words[3:])))
        return is_given and not any(PLACEHOLDER.fullmatch(word) for word in words[2:])


def found() -> Iterator[Command]:
    """Every complete command of the pages, once."""
    seen: dict[str, None] = {}
    for page, text in PAGES.items():
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
        for line in [*code_lines(text), *inline] if page not in HISTORY else ():
            command = Command(page, line)
            if COMMAND.fullmatch(line) and command.is_complete and shlex.join(command.words) not in seen:
                seen[shlex.join(command.words)] = None
                yield command


COMMANDS = tuple(found())


def missing(command: Command) -> str:
    """What the command needs and this machine lacks; "" where nothing is."""
    return ", ".join(need for pattern, need, is_here in NEEDS if re.search(pattern, command.line) and not is_here())


def short_form(words: list[str]) -> list[str]:
    if words[0] == "python":
        return [sys.executable, *short_benchmark(words[1:])]
    if words[1] == "simulate":
        words = [*words[:2], *map(short_workload, words[2:])]
    if "--seeds" in words:
        at = words.index("--seeds") + 1
        first = words[at].partition("-")
        words = [*words[:at], f"{first[0]}-{first[0]}" if first[1] else "1", *words[at + 1 :]]
    elif words[1] == "reproduce":
        words = [*words, "--seeds", "1"]
    return [sys.executable, "-m", *words]


def short_workload(word: str) -> str:
    """A workload by name with few pipelines and steps; any other word as it is."""
    name, _, given = word.partition(":")
    if name not in catalog.names():
        return word
    fewer = [
        f"{key}={SMALLEST_PARAMETERS[key]}"
        for key in catalog.params_of(name)
        if key in SMALLEST_PARAMETERS and f"{key}=" not in given
    ]
    return name + (":" + ",".join(filter(None, [given, *fewer])) if given or fewer else "")


def short_benchmark(words: list[str]) -> list[str]:
    taken = options_of(ROOT / words[0])
    for option in sorted(taken.keys() & SMALLEST.keys()):
        words = with_option(words, option, SMALLEST[option])
    for option in sorted(taken.keys() & set(LISTS)):
        given = words[words.index(option) + 1].partition(",")[0] if option in words else taken[option]
        words = with_option(words, option, given) if given else words
    return words


def with_option(words: list[str], option: str, value: str | None) -> list[str]:
    """The words with this value of the option, instead of one that they have."""
    if value is None:
        return words if option in words else [*words, option]
    if option not in words:
        return [*words, option, value]
    at = words.index(option) + 1
    return [*words[:at], value, *words[at + 1 :]]


def options_of(script: Path) -> dict[str, str]:
    """The options that the script's parser is told of, each with the first entry of its default."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    made = [call for call in calls if call.func.attr == "add_argument" and call.args]
    return {
        arg.value: first_entry({key.arg: key.value for key in call.keywords}.get("default"), constants)
        for call in made
        for arg in call.args
        if isinstance(arg, ast.Constant) and str(arg.value).startswith("--")
    }


def first_entry(default: ast.expr | None, constants: Mapping[str, ast.expr]) -> str:
    """The first entry of a default such as "a,b", [1, 2] or ",".join(NAMES); "" where there is none."""
    nodes = [] if default is None else list(ast.walk(default))
    named = [constants[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in constants]
    nodes = [node for value in named for node in ast.walk(value)] or nodes
    first = next((node.value for node in nodes if isinstance(node, ast.Constant)), None)
    return "" if first is None else str(first).partition(",")[0]


@pytest.fixture(scope="module")
def environment(installed: Path) -> Mapping[str, str]:  # noqa: F811
    path = [str(installed), str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: Mapping[str, str]) -> Path:
    """A folder like the repository's, with a trace, a run and a profile of the reader's; commands may write there."""
    made = tmp_path_factory.mktemp("reader")
    for name in ("examples", "benchmarks", "src", "tests", "data"):
        if (ROOT / name).exists():
            (made / name).symlink_to(ROOT / name)
    (made / "my_trace.csv").write_text(TRACE, encoding="utf-8")
    (made / "docs" / "how-it-works").mkdir(parents=True)
    file, short = (
        "examples/01_two_pipelines.yaml",
        ("--set", "defaults.steps=4", "--set", "defaults.sft_warmup.updates=1"),
    )
    for words in (("run", file, "--out", "runs/demo", *short), ("profile", file, "--quick", "--device", "cpu")):
        end(["-m", "rlmux", *words], made, environment)
    return made


def end(words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run Python with these words to its end."""
    words = [sys.executable, *words]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{shlex.join(words[1:])} ended with {done.returncode}:\n{done.stderr[-3000:]}"


def test_commands_of_every_kind_are_found():
    kinds = {" ".join(command.words[:2]) for command in COMMANDS}
    assert {"rlmux simulate", "rlmux reproduce", "rlmux plan"} <= kinds
    assert len([kind for kind in kinds if kind.startswith("python benchmarks/")]) > 15


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("rlmux simulate mixed --seeds 20-24", "-m rlmux simulate mixed:num_pipelines=6 --seeds 20-20"),
        ("rlmux simulate weave:tails=copied --seeds 5  # all", "-m rlmux simulate weave:tails=copied --seeds 1"),
        ("rlmux reproduce rivals", "-m rlmux reproduce rivals --seeds 1"),
        ("rlmux plan examples/07.yaml --split 4", "-m rlmux plan examples/07.yaml --split 4"),
        ("python benchmarks/fillers.py --repeats 2", "benchmarks/fillers.py --repeats 1 --filler-steps 20 --steps 12"),
        ("python benchmarks/start.py OLD/src src", "benchmarks/start.py src --rounds 1"),
    ],
)
def test_a_short_form_follows_from_the_names_of_options(line, short):
    assert shlex.join(short_form(Command("page", line).words)[1:]) == short


@pytest.mark.parametrize(
    "line", ["rlmux plan --split", "rlmux simulate WORKLOAD --policies all", "rlmux simulate --json"]
)
def test_what_names_a_command_is_none(line):
    assert not Command("page", line).is_complete


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line[:80]}")
def test_every_command_that_makes_a_figure_runs_to_its_end(command, request):
    if lacks := missing(command):
        pytest.skip(f"needs {lacks}")
    folder, environment = (request.getfixturevalue(name) for name in ("folder", "environment"))
    words = [str(folder / "kept") if word == "DIR" else word for word in short_form(command.words)]
    end(words[1:], folder, environment)
