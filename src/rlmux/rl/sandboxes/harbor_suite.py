"""Suites of tasks in Harbor's layout, read and run without Harbor.

    SUITE/NAME/task.toml                limits, in seconds and mebibytes; keys that are not used here are accepted
               instruction.md           what the program is asked to do
               environment/Dockerfile   what it finds, with the files beside it
               tests/test.sh            says how well it was done; not in the sandbox while the program runs
               solution/solve.sh        does it; optional

    prepare ──▶ the program runs ──▶ verify: /tests is put there, test.sh runs, /logs/verifier/reward.* is read

A program may have left anything in its sandbox: what is in the way of the tests or of their reward is removed, and no
link is followed.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.sandboxes.dockerfile import apply_dockerfile
from rlmux.rl.sandboxes.folder import OWN_FOLDERS, FolderSandbox
from rlmux.rl.sandboxes.sandbox import Sandbox

_VERIFIER = "/logs/verifier"
_MOST_BYTES = 65536
"""Of a file with a reward. The rest of a longer one is not read."""
_VERIFIER_TIMEOUT_S = _BUILD_TIMEOUT_S = 600.0
"""Harbor's defaults."""
_NUMBER = (int, float)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task of a suite."""

    name: str
    folder: Path
    instruction: str
    agent_timeout_s: float | None
    """None: the task sets none."""
    verifier_timeout_s: float
    build_timeout_s: float
    cpus: float | None
    memory_bytes: int | None
    allow_internet: bool
    """Only docker has it to give."""
    docker_image: str | None
    """An image that is ready, instead of the Dockerfile."""
    workdir: str | None
    """Instead of the Dockerfile's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every program in the sandbox."""
    verifier_environment: Mapping[str, str] = field(default_factory=dict)
    solution_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_solution(self) -> bool:
        """Whether there is a solution/solve.sh."""
        return (self.folder / "solution" / "solve.sh").is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborVerdict:
    """What the tests say of a sandbox."""

    reward: float | None
    problem: str | None
    """Why there is no reward, in one line; None where there is one."""


def read_suite(path: Path) -> list[HarborTask]:
    """The tasks of a folder, sorted by name; a folder that is a task itself is a suite of one.

    Raises UserError, with file and key, for a folder without tasks and for a task that is not complete.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; accepted: a suite in Harbor's layout, or one task of it")
    if (path / "task.toml").is_file():
        return [read_task(path)]
    folders = sorted(each for each in path.iterdir() if (each / "task.toml").is_file())
    if not folders:
        raise UserError(f"{path}: no tasks; accepted: a folder whose sub-folders have a task.toml")
    return [read_task(each) for each in folders]


def read_task(folder: Path) -> HarborTask:
    """One task. Raises as `read_suite` does."""
    folder = folder.absolute()
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name}: no such file; accepted: a task with task.toml, instruction.md, tests/test.sh"
            )
    file = folder / "task.toml"
    try:
        keys = _TaskKeys(file, tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {error}; accepted: TOML") from error
    if keys.has("steps"):
        raise UserError(f"{file}: steps: a task of several steps; accepted: tasks of one")
    memory_mb = keys.get("environment.memory_mb", _NUMBER, "a number of MiB")
    older = keys.get("environment.memory", (str,), "a size such as '2G'")
    mode = keys.get("environment.network_mode", (str,), "public, no-network, or allowlist")
    is_allowed = keys.get("environment.allow_internet", (bool,), "true or false", True)
    return HarborTask(
        name=folder.name,
        folder=folder,
        instruction=(folder / "instruction.md").read_text(encoding="utf-8").strip(),
        agent_timeout_s=keys.get("agent.timeout_sec", _NUMBER, "a number of seconds"),
        verifier_timeout_s=keys.get("verifier.timeout_sec", _NUMBER, "a number of seconds", _VERIFIER_TIMEOUT_S),
        build_timeout_s=keys.get("environment.build_timeout_sec", _NUMBER, "a number of seconds", _BUILD_TIMEOUT_S),
        cpus=keys.get("environment.cpus", _NUMBER, "a number"),
        memory_bytes=_bytes_of(older, file) if memory_mb is None else int(memory_mb * 2**20),
        allow_internet=is_allowed if mode is None else mode == "public",
        docker_image=keys.get("environment.docker_image", (str,), "the name of an image"),
        workdir=keys.get("environment.workdir", (str,), "an absolute path"),
        environment=keys.variables("environment.env"),
        verifier_environment=keys.variables("verifier.env"),
        solution_environment=keys.variables("solution.env"),
    )


class _TaskKeys:
    """The keys of a task.toml by their dotted names."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self._file = file
        self._values = values

    def has(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, types: tuple[type, ...], accepted: str, default: Any = None) -> Any:
        """The value, or `default` where there is none. Raises UserError for another type, and for numbers below 0."""
        section, key = name.split(".")
        table = self._values.get(section, {})
        if not isinstance(table, dict):
            raise UserError(f"{self._file}: {section}: {table!r}; accepted: a table, [{section}]")
        if key not in table:
            return default
        value = table[key]
        is_right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not is_right or (isinstance(value, _NUMBER) and not 0 <= value < math.inf):
            raise UserError(f"{self._file}: {name}: {value!r}; accepted: {accepted}")
        return value

    def variables(self, name: str) -> dict[str, str]:
        """Variables of an environment. `${NAME}` and `${NAME:-default}` are taken from this process's, as in Harbor."""

        def found(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                raise UserError(
                    f"{self._file}: {name}: {match[0]}: not set; accepted: a variable that is, or a default"
                )
            return value

        table = self.get(name, (dict,), "a table of texts", {})
        if bad := next((key for key, value in table.items() if not isinstance(value, str)), None):
            raise UserError(f"{self._file}: {name}.{bad}: {table[bad]!r}; accepted: a text")
        return {key: re.sub(r"\$\{(\w+)(?::-(.*?))?\}", found, value) for key, value in table.items()}


def _bytes_of(size: str | None, file: Path) -> int | None:
    """Bytes of "512M" or "2G", the form that Harbor had before `memory_mb`."""
    if size is None:
        return None
    match = re.fullmatch(r"\s*([\d.]+)([KMG])B?\s*", size.upper())
    try:
        return int(float(match[1]) * _UNITS[match[2]]) if match else int(size)
    except ValueError as error:
        raise UserError(f"{file}: environment.memory: {size!r}; accepted: a size such as '2G'") from error


def prepare(task: HarborTask, sandbox: Sandbox) -> None:
    """Put the task's files in a sandbox, as its Dockerfile has them; an image has them already.

    Raises UserError, with file and line, for a Dockerfile that needs an image.
    """
    if not isinstance(sandbox, FolderSandbox):
        return
    file = task.folder / "environment" / "Dockerfile"
    if file.is_file():
        apply_dockerfile(file, sandbox)
    elif task.docker_image is not None:
        raise UserError(f"{file}: no such file, and an image needs Docker; accepted: sandbox: docker")
    if task.workdir is not None:
        sandbox.path(task.workdir).mkdir(parents=True, exist_ok=True)
        sandbox.workdir = task.workdir
    sandbox.environment.update(task.environment)


def verify(task: HarborTask, sandbox: Sandbox, output: Path) -> HarborVerdict:
    """Run the task's tests in a sandbox in which nothing else runs; what they print goes to the file `output`.

    Returns within `task.verifier_timeout_s` seconds and the little that it takes to copy and to kill.
    """
    try:
        for name in ("/tests", _VERIFIER):
            sandbox.clear(name)
        code = _run(task, sandbox, "tests", "test.sh", task.verifier_environment, output, task.verifier_timeout_s)
        if code is None:
            return _without(f"tests/test.sh did not finish within {task.verifier_timeout_s:g} s")
        return _reward(sandbox, code)
    except (PipelineError, OSError) as error:  # what the program left there is no fault of the pipeline
        return _without(" ".join(str(error).split()))


def solve(task: HarborTask, sandbox: Sandbox, output: Path) -> int | None:
    """Run the task's solution; returns its exit code, None if it took longer than the program may.

    Raises UserError if there is none.
    """
    if not task.has_solution:
        raise UserError(f"{task.folder / 'solution' / 'solve.sh'}: no such file; accepted: a task with a solution")
    sandbox.clear("/solution")
    return _run(task, sandbox, "solution", "solve.sh", task.solution_environment, output, task.agent_timeout_s)


def _run(
    task: HarborTask,
    sandbox: Sandbox,
    folder: str,
    script: str,
    env: Mapping[str, str],
    output: Path,
    limit_s: float | None,
) -> int | None:
    sandbox.put(task.folder / folder, f"/{folder}")
    path = f"/{folder}/{script}"
    if not sandbox.has_own_root:
        _lead_into(sandbox.path("/"), sandbox.path(f"/{folder}"))
        path = str(sandbox.path(path))
    program = sandbox.start(["bash", path], env=env, output=output)
    code = program.wait(limit_s)
    program.kill()
    return code


def _lead_into(root: Path, scripts: Path) -> None:
    """Rewrite paths such as /app/x in scripts: in a sandbox without a root of its own they are below its folder."""
    inside = re.compile(rf"(?<![\w./-])/({'|'.join(OWN_FOLDERS)})(?![\w.-])")
    for file in filter(Path.is_file, scripts.rglob("*")):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        file.write_text(inside.sub(lambda match: f"{root}/{match[1]}", text), encoding="utf-8")


def _reward(sandbox: Sandbox, code: int) -> HarborVerdict:
    """As Harbor has it: of reward.json if that is there, else of reward.txt."""
    text, written = (_text_of(sandbox.path(f"{_VERIFIER}/reward.{kind}")) for kind in ("txt", "json"))
    if written is not None:
        try:
            values = json.loads(written)
        except ValueError:
            return _without(f"reward.json holds {written[:40]!r}; accepted: an object of numbers")
        numbers = (
            {key: float(value) for key, value in values.items() if _is_number(value)}
            if isinstance(values, dict)
            else {}
        )
        if "reward" in numbers or (len(numbers) == 1 and text is None):
            return HarborVerdict(reward=numbers.get("reward", next(iter(numbers.values()))), problem=None)
        if text is None:
            return _without(f"reward.json holds {written[:40]!r}; accepted: an object with a number 'reward'")
    if text is None:
        return _without(f"wrote no reward to {_VERIFIER}/reward.txt; tests/test.sh ended with {code}")
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        return _without(f"reward.txt holds {text.strip()[:40]!r}; accepted: a number")
    return HarborVerdict(reward=reward, problem=None)


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def _without(problem: str) -> HarborVerdict:
    return HarborVerdict(reward=None, problem=problem)


def _text_of(file: Path) -> str | None:
    """The beginning of a file; None where there is none, or no plain file: opening a pipe could wait for ever."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                return None
            return opened.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
