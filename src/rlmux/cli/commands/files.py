"""Commands about a file: check."""

from __future__ import annotations

import typer

from rlmux.cli.commands.options import AnyFile, Json, Sets
from rlmux.core.errors import UserError


def check(file: AnyFile, sets: Sets = None, json: Json = False) -> None:
    """Check a file as `run`, `serve` or `broker` would, and start nothing.

    Every mistake that is found is one line on stderr. The exit code is then 2.

    \b
    Example: rlmux check examples/01_two_pipelines.yaml
             rlmux check examples/serve/lanes.yaml --json
    """
    from rlmux.cli import checked_file
    from rlmux.cli.exit_codes import MISTAKE

    try:
        checked = checked_file.check_file(file, sets or ())
    except UserError as error:
        checked_file.show_mistakes(file, error, as_json=json)
        raise typer.Exit(MISTAKE) from None
    checked_file.show(file, checked, as_json=json)
