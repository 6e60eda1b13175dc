"""Default folders of runs, and checks that a folder holds a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from rlmux.core.errors import LogError, UserError

RUN_LOG = "run.db"
RUN_HEADER = "header.json"
SERVED = "serve.yaml"
"""File of a lane that serves models or permits: its section `serve`."""
ADDRESS = "listen"
"""File of a service's folder: the URL of its newest server."""
DRAINING = "draining"
"""File of a service's folder: no submission is taken and no controller is started until its next server."""
TOKEN = "admin.token"
"""File of a served folder: the token of its owner."""


@contextmanager
def chosen(out: str | Path | None, name: str) -> Iterator[Path]:
    """`out`, or a new folder under runs/, created at once so that no other command takes it.

    The new folder is removed afterwards if it is empty.
    """
    if out is not None:
        folder = Path(out)
        if Path.cwd().is_relative_to(folder.resolve()):
            raise UserError(f"--out {out}: you are in it; accepted: a folder that does not exist or is empty")
        yield folder
        return
    parent = Path("runs")
    is_first = not parent.exists()
    folder = _make(parent, f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}")
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds a run
            folder.rmdir()
            if is_first:
                parent.rmdir()


def _make(parent: Path, stem: str) -> Path:
    """A new folder of this name, with a number appended if the name is taken."""
    try:
        parent.mkdir(exist_ok=True)
        for number in count(1):
            folder = parent / (stem if number == 1 else f"{stem}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                return folder
    except OSError as error:
        raise UserError(f"{parent}: {error.strerror}; accepted: --out with a folder that can be made") from None
    raise AssertionError("numbers do not end")


def check_run(folder: Path, *, may_be_damaged: bool = False) -> None:
    """Raises UserError unless the folder holds a run. `may_be_damaged`: its log may be gone."""
    if not (folder / RUN_LOG).is_file() and not (may_be_damaged and (folder / RUN_HEADER).is_file()):
        if str(folder).startswith(("http:/", "https:/")):  # a path has lost its second slash
            address = str(folder).replace(":/", "://", 1)
            raise UserError(
                f"{address}: is an address; accepted: the folder of the run, on its machine (of an address: rlmux "
                "status, queue, why, usage, alerts, samples, export, logs)"
            )
        problem = f"holds no run (no {RUN_LOG})" if folder.is_dir() else "no such folder"
        there = sorted(str(log.parent) for log in Path("runs").glob(f"*/{RUN_LOG}"))
        hint = f", such as {', '.join(there[-3:])}" if there else ""
        if (folder / RUN_HEADER).is_file():
            hint = f"; its log is gone, and what its other files hold is left: rlmux resume {folder} --salvage"
        raise UserError(f"{folder}: {problem}; accepted: the folder of a run{hint}")


@contextmanager
def salvage_hint(folder: Path) -> Iterator[None]:
    """Add the remedy to an error about a damaged log."""
    try:
        yield
    except UserError:
        raise
    except LogError as error:
        raise LogError(f"{error}; what is readable of a damaged log: rlmux resume {folder} --salvage") from None


def is_hosted(folder: Path) -> bool:
    """Whether the folder is a lane's whose controller runs in its server's process."""
    return (folder / SERVED).is_file()
