"""Commands for programs that keep their own trainers: broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlmux.cli.commands.options import PolicyName, Sets


def broker(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file with cluster (docs/bring-your-own-trl.md).")],
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS", help="unix:PATH or tcp://HOST:PORT; by default a socket in --out."),
    ] = None,
    policy: PolicyName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the log; by default runs/broker-FILE. One is gone on with."
        ),
    ] = None,
    sets: Sets = None,
) -> None:
    """Hand out permits for the file's pools, so that programs of your own take turns.

    A program joins with `rlmux.share`; Ctrl-C ends the broker, and programs wait until it is started again.

    \b
    Example: rlmux broker examples/09_permits.yaml --policy fifo
    """
    from rlmux.broker import run
    from rlmux.cli import inputs
    from rlmux.policies import make_policy

    spec = inputs.load_for_broker(file, sets, policy)
    folder = out or run.default_folder(file)

    def say(address: str) -> None:
        typer.echo(
            f"rlmux: permits for {', '.join(spec.cluster.pools)} under {spec.policy}; in each program's shell:",
            err=True,
        )
        typer.echo(f"export RLMUX_BROKER={address}")

    run.run_broker(
        spec,
        folder,
        policy=make_policy(spec.policy),
        address=listen,
        token=run.environment_token(),
        say=say,
    )
    typer.echo(f"rlmux: ended; what happened: rlmux report {folder}", err=True)
