"""Does what a file points at exist: rows, a reward function? Nothing is imported to know.

A module of its own: it looks at files that a spec names, and imports none of them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import shutil
from difflib import get_close_matches
from pathlib import Path

from rlmux.core.errors import UserError

_ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def check_rows_file(path: Path) -> None:
    """Raises UserError unless this is a file of rows, by its name."""
    if path.suffix not in _ROW_SUFFIXES:
        raise UserError("not a file of rows by its name; accepted: .jsonl or .parquet")
    if not os.path.isfile(path):  # one that is too long to exist is no file either
        raise UserError(f"no such file ({path}); accepted: a .jsonl or .parquet file")


def check_command(command: str, folder: Path) -> None:
    """Raises UserError for a command without a program of this machine or this folder, or a script that is missing."""
    try:
        first, *others = shlex.split(command)
    except ValueError as error:
        raise UserError(f"no command: {error}; accepted: words as in a shell, with quotes closed") from None
    if first != "python" and not (folder / first).is_file() and shutil.which(first) is None:
        raise UserError(f"no program {first!r} on this machine or in {folder}; accepted: a program and its arguments")
    for word in others:
        if word.endswith(".py") and "{" not in word and not (folder / word).is_file():
            raise UserError(f"no file {folder / word}; accepted: a script beside the spec file, or its whole path")


def check_function(reference: str, folder: Path) -> None:
    """Raises UserError unless `module:function` is beside the file or in an installed package."""
    module, _, function = reference.partition(":")
    source = _beside(module, folder)
    if source is None:
        if not _is_installed(module):
            file = folder.joinpath(*module.split(".")).with_suffix(".py")
            raise UserError(f"no module {module!r}; accepted: an installed one, or the file {file}")
        return
    try:
        names = _top_level_names(source)
    except SyntaxError as error:
        raise UserError(f"{source}, line {error.lineno}: not Python: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not Python: {error}") from None
    if names is not None and function not in names:
        close = get_close_matches(function, names, n=1)
        hint = f"nearest: {close[0]}; " if close else ""
        accepted = ", ".join(names) or "none, it has no function"
        raise UserError(f"{source} has no {function!r}; {hint}accepted: {accepted}")


def _beside(module: str, folder: Path) -> Path | None:
    stem = folder.joinpath(*module.split("."))
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in candidates if os.path.isfile(path)), None)


def _is_installed(module: str) -> bool:
    """Whether the first part of a dotted name is installed. (Finding the rest would import it.)"""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:
        return True


def _top_level_names(source: Path) -> list[str] | None:
    """Names that could be functions, which a module is not; None where a star import or a condition hides them."""
    names: list[str] = []
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.ImportFrom(names=aliases):
                if any(alias.name == "*" for alias in aliases):
                    return None
                names += [alias.asname or alias.name for alias in aliases]
            case ast.If() | ast.Try() | ast.With():
                return None
    return names
