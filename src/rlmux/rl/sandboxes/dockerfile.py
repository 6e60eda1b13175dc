"""A task's Dockerfile without Docker: its files, working directory and variables, in a sandbox that has no image.

    FROM      this machine's own system, whatever it names
    WORKDIR   where programs start, and what relative paths of COPY begin at
    COPY      from environment/
    ENV       variables of every program

A module of its own: harbor_suite says what a task is, this how far one goes without an image.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rlmux.core.errors import UserError
from rlmux.rl.sandboxes.folder import FolderSandbox

_ACCEPTED = "FROM, WORKDIR, COPY, ENV; or sandbox: docker"


def apply_dockerfile(file: Path, sandbox: FolderSandbox) -> None:
    """Do what the Dockerfile says. Raises UserError, with file and line, for what needs an image."""
    for number, instruction, rest in _instructions(file.read_text(encoding="utf-8")):
        where = f"{file} line {number}"
        match instruction:
            case "FROM":
                pass
            case "WORKDIR":
                _work_in(_joined(sandbox.workdir, _words(rest, where)[0]), sandbox)
            case "COPY":
                _copy(_words(rest, where), file.parent, sandbox, where)
            case "ENV":
                sandbox.environment.update(_variables(_words(rest, where), where))
            case _:
                raise UserError(f"{where}: {instruction} needs an image; accepted here: {_ACCEPTED}")


def _work_in(workdir: str, sandbox: FolderSandbox) -> None:
    sandbox.path(workdir).mkdir(parents=True, exist_ok=True)
    sandbox.workdir = workdir


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(number of its first line, instruction in capitals, the rest) of each; a backslash continues a line."""
    first, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        if not parts:
            first = number
        parts.append(line.rstrip().removesuffix("\\"))
        if line.rstrip().endswith("\\"):
            continue
        instruction, _, rest = " ".join(parts).strip().partition(" ")
        parts = []
        if instruction:
            yield first, instruction.upper(), rest.strip()


def _words(rest: str, where: str) -> list[str]:
    """The words of an instruction, written in JSON or as a shell has them."""
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise UserError(f"{where}: {error}; accepted: words, with quotes that are closed") from error
    if not words or not all(isinstance(word, str) for word in words):
        raise UserError(f"{where}: {rest!r}; accepted: at least one word")
    return list(words)


def _variables(words: list[str], where: str) -> dict[str, str]:
    if "=" not in words[0]:  # the older form: ENV NAME VALUE
        return {words[0]: " ".join(words[1:])}
    if bad := next((word for word in words if not re.match(r"\w+=", word)), None):
        raise UserError(f"{where}: {bad!r}; accepted: NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _joined(workdir: str, path: str) -> str:
    return str(PurePosixPath(workdir) / path)


def _copy(words: list[str], folder: Path, sandbox: FolderSandbox, where: str) -> None:
    flag = next((word for word in words if word.startswith("--")), None)
    if flag is not None or len(words) < 2:
        raise UserError(f"{where}: COPY {flag or words[0]}; accepted: COPY FROM... TO; or sandbox: docker")
    *sources, to = words
    target = _joined(sandbox.workdir, to)
    is_folder = len(sources) > 1 or to.endswith(("/", "/.")) or to == "." or sandbox.path(target).is_dir()
    for name in sources:
        source = folder / name.lstrip("/")
        if not source.resolve().is_relative_to(folder.resolve()) or not source.exists():
            raise UserError(f"{where}: COPY {name}: not in {folder}; accepted: a file or folder of it")
        sandbox.put(source, _joined(target, source.name) if is_folder and source.is_file() else target)
