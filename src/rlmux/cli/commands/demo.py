"""The command about the examples of the wheel: demo."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rlmux.cli.commands import training
from rlmux.cli.commands.options import Json, Sets
from rlmux.core.errors import UserError

_DEFAULT_OUT = "runs/demo"


def demo(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Example, or the beginning of its name, such as 03.")
    ] = "01_two_pipelines",
    lists: Annotated[bool, typer.Option("--list", help="List the examples, and run nothing.")] = False,
    copy: Annotated[
        Path | None, typer.Option("--copy", metavar="DIR", help="Copy the examples into a new folder, and run nothing.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help=f"Folder to make; by default {_DEFAULT_OUT}, which is replaced."),
    ] = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Run an example that comes with rlmux: by default, two tiny pipelines learn side by side.

    For an example of another command than `rlmux run`, its commands are printed.

    \b
    Example: rlmux demo
             rlmux demo --list
             rlmux demo 03 --set defaults.steps=5
             rlmux demo --copy examples
    """
    if copy is not None:
        _copy(copy)
    elif lists:
        width = max(map(len, _examples()))
        for each, file in _examples().items():
            typer.echo(f"{each:{width}}  {_idea(file)}")
    elif (commands := _commands(_example(name)))[0].startswith("rlmux run "):
        training.run(str(_example(name)), out=out or _DEFAULT_OUT, overwrite=out is None, sets=sets, json=json)
    else:
        typer.echo(f"rlmux: {_example(name).name} is not a file of `rlmux run`; its commands:", err=True)
        typer.echo("\n".join(commands))


def _folder() -> Path:
    return Path(str(files("rlmux") / "examples"))


def _examples() -> dict[str, Path]:
    """Files by name, such as `serve/tiny`."""
    folder = _folder()
    return {str(file.relative_to(folder).with_suffix("")): file for file in sorted(folder.rglob("*.yaml"))}


def _example(name: str) -> Path:
    """Raises UserError for a name that begins no example's name, or several."""
    found = [file for each, file in _examples().items() if each.startswith(name.removesuffix(".yaml"))]
    if len(found) != 1:
        raise UserError(f"NAME {name!r}: accepted: {', '.join(_examples())}")
    return found[0]


def _comment(file: Path) -> list[str]:
    """Lines above the first key."""
    return re.findall(r"# ?(.*)\n", re.match(r"(#.*\n)*", file.read_text(encoding="utf-8"))[0])  # type: ignore[index]


def _idea(file: Path) -> str:
    """The first paragraph of the comment, in one line."""
    words = " ".join(re.split(r"\n(?:\n|  )", "\n".join(_comment(file)))[0].split())
    idea = re.sub(r"[.:] docs/\S+$", "", words.removeprefix("New here: ")).rstrip(".")
    return idea[0].upper() + idea[1:]


def _commands(file: Path) -> list[str]:
    """The commands of the comment, with the paths of this machine."""
    indented = [line.strip() for line in _comment(file) if line.startswith("  ")]
    folder = shlex.quote(str(_folder()))
    return [line.replace("examples/", f"{folder}/") for line in indented if re.match(r"(RLMUX_\w+=\S+ )?\w+ ", line)]


def _copy(folder: Path) -> None:
    """Raises UserError for a folder that exists or cannot be made."""
    try:
        shutil.copytree(_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        reason = error.strerror or "some files cannot be written"
        raise UserError(f"--copy {folder}: {reason}; accepted: a folder that does not exist") from None
    typer.echo(f"rlmux: {len(_examples())} examples in {folder}; next:", err=True)
    typer.echo(f"rlmux run {shlex.quote(str(folder / '01_two_pipelines.yaml'))}")
