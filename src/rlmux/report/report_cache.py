"""What the reports beside a log were made of: those of a log that has not changed are not made again.

    write_report ──▶ sha256 of every row and block, of this code, of the files ──▶ .report.made
         ▲                                                                             │
         └── all of them as they are now: the files stay, and their summary is read ◀──┘

The log decides: its segments are checked against the hashes that their successors name, and its rows against what the
files were made of. A record that is missing, damaged or of anything else counts for nothing. It may be deleted.

A module of its own: whether reports are current is decided apart from their content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import rlmux.core
from rlmux.log.run_log import LogReader
from rlmux.log.segments import file_sha256

MADE_NAME = ".report.made"
_CODE = (".py", ".css", ".js")


def origin_of(folder: Path) -> dict[str, str]:
    """What reports of this folder are made of now. Raises LogError for a log that is damaged."""
    with LogReader(folder) as reader:
        return {"log": reader.sha256(), "code": _code_sha256(), "title": folder.absolute().name}


def are_made_of(folder: Path, origin: Mapping[str, str], names: Sequence[str]) -> bool:
    """Whether these files of the folder are as they were made, of just that."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / MADE_NAME).read_bytes())
        return bool(found == {**origin, "files": {name: file_sha256(folder / name) for name in names}})
    return False


def record(folder: Path, origin: Mapping[str, str], names: Sequence[str]) -> None:
    """Note what these files were made of, where the folder allows it. Aside, then in place."""
    aside = folder / f"{MADE_NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):
        made = {**origin, "files": {name: file_sha256(folder / name) for name in names}}
        try:
            aside.touch(mode=0o600)
            aside.write_text(json.dumps(made), encoding="utf-8")
            aside.replace(folder / MADE_NAME)
        finally:
            aside.unlink(missing_ok=True)


@cache
def _code_sha256() -> str:
    """Hash of the code that decides the content of reports."""
    digest = hashlib.sha256(version("rlmux").encode())
    package = Path(rlmux.core.__file__).parents[1]
    for room in ("core", "log", "report"):
        for path in sorted(path for path in (package / room).rglob("*") if path.suffix in _CODE):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
