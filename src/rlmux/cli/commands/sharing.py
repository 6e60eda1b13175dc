"""Commands for programs with their own trainers: broker, token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlmux.cli.commands.options import PolicyName, Sets


def broker(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file with cluster (docs/how-to/your-trainer.md).")],
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="ADDRESS",
            help="unix:PATH, tcp://HOST:PORT or tls://HOST:PORT; by default a socket in --out.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Certificate (PEM) of --listen tls://HOST:PORT."),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of --tls-cert (PEM).")] = None,
    policy: PolicyName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the log; by default runs/broker-FILE. An existing one is resumed."
        ),
    ] = None,
    sets: Sets = None,
) -> None:
    """Grant permits for the file's pools, so that your own programs take turns.

    A program joins with `rlmux.share`; Ctrl-C ends the broker, and programs wait until it is started again.

    \b
    Example: rlmux broker examples/09_permits.yaml --policy fifo
    """
    from rlmux.broker import broker_run, certificate
    from rlmux.cli import inputs
    from rlmux.policies import make_policy

    spec = inputs.load_for_broker(file, sets, policy)
    tls = certificate.tls_of(tls_cert, tls_key)
    folder = out or broker_run.default_folder(file)

    def print_address(address: str) -> None:
        typer.echo(
            f"rlmux: permits for {', '.join(spec.cluster.pools)} under {spec.policy}; in each program's shell:",
            err=True,
        )
        typer.echo(f"export RLMUX_BROKER={address}")

    broker_run.run_broker(
        spec,
        folder,
        policy=make_policy(spec.policy),
        address=listen,
        token=broker_run.environment_token(),
        tls=tls,
        on_listening=print_address,
    )
    typer.echo(f"rlmux: ended; what happened: rlmux report {folder}", err=True)


def token(
    action: Annotated[Literal["add", "list", "revoke"], typer.Argument(metavar="add|list|revoke")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the service, or of the run it shows.")],
    name: Annotated[str | None, typer.Argument(metavar="[USER|ID]", help="User to add, or token to revoke.")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            help="read, samples, submit, control, metrics or admin; may be repeated. By default all of the user's "
            "role; read in a folder without users.",
        ),
    ] = None,
    days: Annotated[float, typer.Option("--days", help="Days until the token expires.")] = 90.0,
) -> None:
    """Add, list or revoke the access tokens of a server's users.

    A token is printed once and stored as a hash. A running server applies every change at its next request.

    \b
    Example: rlmux token add runs/service-lanes ann
             rlmux token add runs/service-lanes ann --scope read --scope metrics
    """
    from rlmux.core.errors import UserError
    from rlmux.service.dashboard.auth import tokens, users

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; accepted: that of a server")
    if action == "list":
        for token in tokens.read(folder):
            ends = time.strftime("%Y-%m-%d", time.gmtime(token.ends_at))
            typer.echo(f"{token.id}  {token.user}  {','.join(token.scopes)}  until {ends}")
    elif name is None:
        missing = "USER" if action == "add" else "ID"
        raise UserError(f"rlmux token {action}: accepted: rlmux token {action} DIR {missing}")
    elif action == "add":
        scopes = scope or users.scopes_of(folder, name)
        typer.echo(tokens.add(folder, name, scopes, days=days, now=time.time()))
        typer.echo(f"rlmux: {users.rights_of(folder, name, scopes)}", err=True)
    else:
        tokens.revoke(folder, name)
        typer.echo(f"{name}: is refused from now on")
