"""The command that serves models: serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlmux.cli.commands.options import PolicyName
from rlmux.core.errors import UserError

Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Address of the server.")]
ServeFile = Annotated[
    str | None, typer.Argument(metavar="FILE", help="YAML file with cluster and serve (docs/bring-your-own.md).")
]
ServeOut = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Folder to make; by default runs/FILE-POLICY-TIME.")
]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Go on with a server that was stopped or killed.")
]


def serve(
    file: ServeFile = None,
    listen: Listen = "127.0.0.1:7460",
    policy: PolicyName = None,
    out: ServeOut = None,
    resume: Resume = None,
) -> None:
    """Serve models to clients that speak the Tinker API.

    Training loops written for that API run unchanged and share the file's devices.

    \b
    Example: rlmux serve examples/serve/tiny.yaml
    """
    from rlmux.config.serve import load_serve_file
    from rlmux.policies import POLICIES, make_policy
    from rlmux.runtime import folders

    if (file is None) == (resume is None):
        raise UserError("accepted: either FILE or --resume DIR")
    address = _address(listen)
    _check_installed()
    from rlmux.service import serve as server

    if resume is not None:
        folders.check_run(resume)
        spec = server.spec_of(resume, list(POLICIES))
        server.serve(spec, resume, policy=make_policy(spec.policy), address=address, on_ready=_say, is_resuming=True)
        return
    assert file is not None
    spec = load_serve_file(Path(file), policies=list(POLICIES))
    name = policy or spec.policy
    if name not in POLICIES:
        raise UserError(f"--policy {name!r}: accepted: {', '.join(POLICIES)}")
    with folders.chosen(out, f"{Path(file).stem}-{name}") as folder:
        server.serve(spec, folder, policy=make_policy(name), address=address, on_ready=_say)
        typer.echo(f"rlmux: stopped; go on with: rlmux serve --resume {folder}", err=True)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {listen}: accepted: HOST:PORT, such as 127.0.0.1:7460")
    return host.strip("[]"), int(port)


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "google.protobuf") if find_spec(name.split(".")[0]) is None]
    if missing:
        raise UserError(f"serve: {missing[0]} is not installed; install it with: pip install 'rlmux[serve,train]'")


def _say(url: str) -> None:
    """The two lines that a client needs."""
    typer.echo(f"export TINKER_BASE_URL={url}/tinker")
    typer.echo("export TINKER_API_KEY=tml-anything")
