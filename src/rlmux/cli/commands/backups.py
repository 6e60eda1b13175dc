"""The commands about backups: backup, restore."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmux.cli.commands.options import Json

if TYPE_CHECKING:
    from rlmux.runtime.control.backup import Copied


def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run or of a service; it may be running.")],
    to: Annotated[Path, typer.Option("--to", metavar="OUT", help="Folder to make, new or empty.")],
    json: Json = False,
) -> None:
    """Copy the folder of a run or of a service while it is written to.

    Logs, checkpoints, samples, submissions, tokens and bundles, as of one moment each, with a hash of every file. OUT
    holds secrets, and is private to you. What is derived from the logs is left out.

    \b
    Example: rlmux backup runs/demo --to backups/demo-1
    """
    from rlmux.runtime.control.backup import back_up
    from rlmux.runtime.records.folders import salvage_hint

    with salvage_hint(folder):
        _show(f"{folder}: backed up to {to}", lambda progress: back_up(folder, to, on_progress=progress), json)


def restore(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder that `rlmux backup` made.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to make, new or empty.")],
    json: Json = False,
) -> None:
    """Copy a backup to a folder, in which its run or its service goes on.

    Every file's hash is verified first. Then: rlmux resume DIR, or rlmux serve FILE --out DIR.

    \b
    Example: rlmux restore backups/demo-1 --to runs/demo
    """
    from rlmux.runtime.control.backup import restore as copy_back

    _show(f"{backup}: restored to {to}", lambda progress: copy_back(backup, to, on_progress=progress), json)


def _show(done: str, copy: Callable[[Any], Copied], as_json: bool) -> None:
    from rlmux.cli import progress
    from rlmux.cli.tables import print_json
    from rlmux.report.timeline.records import size_words

    started_s = time.monotonic()
    with progress.bar("files", is_quiet=as_json) as shown:
        copied = copy(shown or (lambda number, total: None))
    seconds = round(time.monotonic() - started_s, 3)
    if as_json:
        print_json(
            {
                "folder": str(copied.folder),
                "files": copied.num_files,
                "bytes": copied.num_bytes,
                "seconds": seconds,
                "logs": copied.logs,
                "left_out": list(copied.left_out),
            }
        )
        return
    for sentence in copied.left_out:
        typer.echo(f"rlmux: {sentence}", err=True)
    typer.echo(f"{done}: {copied.num_files} files, {size_words(copied.num_bytes)}, {seconds:.1f} s")
