"""Where a run goes when the person names no folder, and whether a folder holds one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rlmux.core.errors import UserError

RUN_LOG = "run.db"


def choose(out: str | None, name: str) -> Path:
    """`out`, or a new folder under runs/. Nothing is made yet."""
    if out is not None:
        folder = Path(out)
        if Path.cwd().is_relative_to(folder.resolve()):
            raise UserError(f"--out {out}: you are in it; accepted: a folder that does not exist or is empty")
        return folder
    stem = f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    folder = Path("runs") / stem
    number = 2
    while folder.exists():
        folder = Path("runs") / f"{stem}-{number}"
        number += 1
    return folder


def check_run(folder: Path) -> None:
    """Raises UserError unless the folder holds a run."""
    if not (folder / RUN_LOG).is_file():
        problem = f"holds no run (no {RUN_LOG})" if folder.is_dir() else "no such folder"
        there = sorted(str(log.parent) for log in Path("runs").glob(f"*/{RUN_LOG}"))
        hint = f", such as {', '.join(there[-3:])}" if there else ""
        raise UserError(f"{folder}: {problem}; accepted: the folder of a run{hint}")
