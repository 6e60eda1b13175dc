"""The commands of a service: serve, drain, budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmux.cli.commands.options import Folder, Json
from rlmux.core.errors import UserError

if TYPE_CHECKING:
    from rlmux.log.folder_lock import FolderLock
    from rlmux.service.addresses import Listening
    from rlmux.service.dashboard.dashboard import Dashboard

DEFAULT_LISTEN = "127.0.0.1:7460"
_PAGES_NEED = ("fastapi", "uvicorn", "h11", "prometheus_client")
_SERVING_NEEDS = (*_PAGES_NEED, "google.protobuf")
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help=f"Address of the server; by default {DEFAULT_LISTEN}, or the service's former address.",
    ),
]
Served = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR|FILE]",
        help="Folder of a run, or with runs in it: its pages. A YAML file with lanes: a service. Without: your service "
        "on this machine.",
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the pages in a browser, logged in.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Another name that browsers reach it by; may be repeated."),
]
WebhookUrl = Annotated[
    str | None,
    typer.Option(
        "--webhook",
        metavar="URL",
        help="Address that alerts are sent to as JSON, by POST; Slack's and Discord's, and Apprise's services, too.",
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate (PEM): the server speaks HTTPS.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of --tls-cert (PEM).")]
BehindProxy = Annotated[
    list[str] | None,
    typer.Option("--behind-proxy", metavar="CIDR", help="Network of a trusted proxy; may be repeated."),
]
UserHeader = Annotated[
    str | None,
    typer.Option("--user-header", metavar="NAME", help="Header in which the proxy names the user."),
]
Oidc = Annotated[
    str | None,
    typer.Option("--oidc", metavar="ISSUER", help="OpenID Connect provider that logs users in; needs rlmux[oidc]."),
]
OidcClient = Annotated[
    str | None,
    typer.Option("--oidc-client", metavar="ID", help="This server at --oidc; its secret is in RLMUX_OIDC_SECRET."),
]
OidcClaim = Annotated[
    str | None, typer.Option("--oidc-claim", metavar="NAME", help="Claim with a user's login; by default email.")
]
HealthAddress = Annotated[
    str | None,
    typer.Option(
        "--health",
        metavar="HOST:PORT",
        help="Another address, for the probes of an orchestrator alone: /healthz and /readyz; such as 0.0.0.0:7461.",
    ),
]
ServeOut = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Folder of the service; by default runs/service-FILE.")
]


def serve(
    path: Served = None,
    listen: Listen = None,
    out: ServeOut = None,
    opens: Open = False,
    allow_host: AllowHost = None,
    webhook: WebhookUrl = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    behind_proxy: BehindProxy = None,
    user_header: UserHeader = None,
    oidc: Oidc = None,
    oidc_client: OidcClient = None,
    oidc_claim: OidcClaim = None,
    health: HealthAddress = None,
) -> None:
    """Keep a service that takes pipelines and Tinker clients, or show the pages of runs.

    Without an argument: one lane with this machine's devices. Its file and its folder are in ~/.local/state/rlmux.
    FILE: its lanes. A lane takes submissions, and with the section `serve` Tinker clients and programs, too.
    DIR: pages with device timelines, pipelines, curves, steps and logs, during the run and after it.
    Lanes outlive the server, which finds them again at its next start.

    \b
    Example: rlmux serve --open
    """
    if webhook is not None:
        _check_installed(*_PAGES_NEED)
        from rlmux.service.dashboard.webhook import check_webhook

        check_webhook(webhook)
    way = _Way(
        listen, tls_cert, tls_key, tuple(behind_proxy or ()), user_header, (oidc, oidc_client, oidc_claim), health
    )

    def ready(pages: Dashboard) -> None:
        _print_pages(pages, opens)
        if webhook:
            pages.send_alerts(webhook)

    if path is None:
        if out is not None:
            raise UserError("--out: accepted with a FILE; your own service has its folder")
        _serve_own(way, allow_host or [], ready)
    elif Path(path).is_dir():
        _show(Path(path), out, way, allow_host or [], ready)
    else:
        _serve_file(Path(path), out, way, allow_host or [], ready)


@dataclass(frozen=True, slots=True)
class _Way:
    """Options of the server's address."""

    listen: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: tuple[str, ...] = ()
    user_header: str | None = None
    oidc: tuple[str | None, str | None, str | None] = (None, None, None)
    """Issuer, client and claim of a provider."""
    health: str | None = None

    def listening(self, default: str = DEFAULT_LISTEN) -> Listening:
        """Raises UserError for missing packages and contradictory options."""
        host, port = _address(self.listen or default)
        _check_installed(*_PAGES_NEED)
        from rlmux.service.addresses import listening_of, provider_of

        issuer, client, claim = self.oidc
        if issuer is None and (client or claim):
            raise UserError(f"--oidc-{'client' if client else 'claim'}: accepted with --oidc ISSUER")
        return listening_of(
            host,
            port,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            behind_proxy=self.behind_proxy,
            user_header=self.user_header,
            provider=None if issuer is None else provider_of(issuer, client, claim),
        )


def _serve_own(way: _Way, allow_host: list[str], ready: Callable[[Dashboard], None]) -> None:
    """The service of this user, whose file is written at its first start."""
    from rlmux.client import own_service
    from rlmux.config.service_file import file_of_machine
    from rlmux.log.folder_lock import living_owner
    from rlmux.runtime.records.folders import TOKEN

    _check_installed(*_SERVING_NEEDS)
    from rlmux.service.lanes import data_dir
    from rlmux.service.lanes.devices import machine_devices

    root, file = own_service.own_root(), own_service.own_file()
    if living_owner(root) is not None:
        raise UserError(
            f"your service runs already, at {own_service.last_url(root)}; its token is in "
            f"{root / TOKEN}; to end it: rlmux stop {root}"
        )
    lock = data_dir.open_root(root)
    if not file.exists():
        file.write_text(file_of_machine(len(machine_devices())), encoding="utf-8")
    typer.echo(f"rlmux: the lanes of {file}", err=True)
    _serve_lanes(file, root, lock, way, allow_host, ready, submit="rlmux submit FILE")


def _serve_file(
    file: Path, out: str | None, way: _Way, allow_host: list[str], ready: Callable[[Dashboard], None]
) -> None:
    from rlmux.broker.certificate import tls_of
    from rlmux.config.service_file import load_service_file
    from rlmux.policies import POLICIES
    from rlmux.service.hosted_lane import check_permits
    from rlmux.service.lanes import data_dir
    from rlmux.service.lanes.devices import check_devices

    lanes = load_service_file(file, policies=list(POLICIES))
    _check_installed(*_SERVING_NEEDS)
    check_devices({name: lane.spec for name, lane in lanes.items()})  # nothing is made yet
    for lane in lanes.values():
        if lane.serve is not None:
            check_permits(lane.serve, tls_of(way.tls_cert, way.tls_key))
    root = Path(out or Path("runs") / f"service-{file.stem}").absolute()
    _serve_lanes(file, root, data_dir.open_root(root), way, allow_host, ready, submit=None)


def _serve_lanes(
    file: Path,
    root: Path,
    lock: FolderLock,
    way: _Way,
    allow_host: list[str],
    ready: Callable[[Dashboard], None],
    *,
    submit: str | None,
) -> None:
    """`submit`: the command that submits a file; None: the one with the lane's address."""
    from rlmux.client.own_service import last_url
    from rlmux.config.service_file import load_service_file
    from rlmux.policies import POLICIES
    from rlmux.service.lanes import data_dir
    from rlmux.service.service import Ready, serve_lanes

    def print_ready(server: Ready) -> None:
        if server.tinker_url is not None:
            typer.echo(f"export TINKER_BASE_URL={server.tinker_url}\nexport TINKER_API_KEY=tml-anything")
        if server.permits is not None:
            typer.echo(f"export RLMUX_BROKER={server.permits}")
        for sentence in (*server.other_versions, *server.neighbours):
            typer.echo(f"rlmux: {sentence}", err=True)
        if server.dashboard is None:
            return
        if submit is None:
            typer.echo(f"export RLMUX_TOKEN_FILE={server.dashboard.token_path}")
        ready(server.dashboard)
        lane = server.lanes[0] if len(server.lanes) == 1 else "NAME"
        typer.echo(f"submit: {submit or f'rlmux submit FILE --to {server.url}/lanes/{lane}'}")

    code = root / data_dir.BUNDLES / data_dir.NO_CODE
    with lock:
        listening = way.listening((last_url(root) or DEFAULT_LISTEN).rpartition("://")[2])
        lanes = load_service_file(file, folder=code, policies=list(POLICIES))
        pids = serve_lanes(
            lanes,
            root,
            listening=listening,
            allowed_hosts=allow_host,
            health=None if way.health is None else _address(way.health, "--health"),
            on_ready=print_ready,
        )
    for name, pid in pids.items():
        ends = f"pid {pid}; to end it: rlmux stop {root / name}" if pid is not None else "not started"
        typer.echo(f"rlmux: lane {name} goes on without the server ({ends})", err=True)


def _show(folder: Path, out: str | None, way: _Way, allow_host: list[str], ready: Callable[[Dashboard], None]) -> None:
    for option, is_given in (("--out", out is not None), ("--health", way.health is not None)):
        if is_given:
            raise UserError(f"{option}: a folder is shown, not run; accepted: --listen, --open, --allow-host")
    listening = way.listening()
    from rlmux.service.folder_address import open_folder

    open_folder(folder, listening=listening, allowed_hosts=allow_host, on_ready=ready)


def _print_pages(pages: Dashboard, opens: bool) -> None:
    """The line with the address that logs a browser in."""
    typer.echo(f"dashboard: {pages.login_url()}")
    typer.echo(f"rlmux: the address works once, for a minute; later: the token in {pages.token_path}", err=True)
    if opens and typer.launch(pages.login_url()) != 0:
        typer.echo("rlmux: no browser could be opened; open the address above", err=True)


def drain(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a service, on its machine.")],
    keep_pages: Annotated[bool, typer.Option("--keep-pages", help="The server goes on, with its pages.")] = False,
    json: Json = False,
) -> None:
    """End a service so that its next start goes on with every pipeline, as before an upgrade.

    Submissions are refused, each lane's controller ends at its next safe point, then the server ends.

    \b
    Example: rlmux drain runs/service-lanes
    """
    from rlmux.cli import tables
    from rlmux.client import in_folder

    ended: list[str] = []

    def on_end(name: str) -> None:
        ended.append(name)
        if not json:
            typer.echo(f"lane {name}: stopped")

    starts = in_folder.drain(folder, keeps_pages=keep_pages, on_end=on_end)
    if json:
        tables.print_json({"folder": str(folder), "lanes": ended, "serve": starts})
    elif starts is None:
        typer.echo(f"{folder}: drained; its pages go on; to end the server: rlmux stop {folder}")
    else:
        typer.echo(f"{folder}: drained; everything goes on with: {starts}")


def budget(
    folder: Folder,
    project: Annotated[str | None, typer.Argument(metavar="PROJECT", help="Project whose budget is set.")] = None,
    hours: Annotated[
        str | None, typer.Argument(metavar="HOURS", help="Device-hours a day, or `none`: as many as it likes.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the daily compute budgets of a lane's projects, or set one.

    A change applies at once, waiting clients included, and survives a restart of the server.

    \b
    Example: rlmux budget runs/service-lanes/models vision 40
    """
    from rlmux.cli.tables import show_budgets
    from rlmux.runtime.records import folders

    if (project is None) != (hours is None):
        raise UserError("budget: accepted: DIR, or DIR PROJECT HOURS")
    folders.check_run(folder)
    _check_installed(*_SERVING_NEEDS)
    from rlmux.service.hosted_lane import open_budgets

    with open_budgets(folder) as (budgets, projects):
        if project is not None:
            if project not in projects:
                raise UserError(f"project {project!r}: accepted: {', '.join(projects) or 'none has computed yet'}")
            budgets.set_hours(project, _hours(hours or ""))
        rows = {name: (budgets.used_hours(name), budgets.hours(name)) for name in projects}
    if not rows:
        typer.echo("rlmux: no project has computed anything yet", err=True)
    show_budgets(rows, as_json=json)


def _hours(text: str) -> float:
    """Raises UserError for an invalid number of hours."""
    try:
        hours = math.inf if text == "none" else float(text)
    except ValueError:
        hours = 0.0
    if not hours > 0:
        raise UserError(f"HOURS {text!r}: accepted: device-hours a day above 0, or none")
    return hours


def _address(listen: str, option: str = "--listen") -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{option} {listen}: accepted: HOST:PORT, such as 127.0.0.1:7460")
    return host.strip("[]"), int(port)


def _check_installed(*names: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name.split(".")[0]) is None]
    if missing:
        raise UserError(f"serve: {missing[0]} is not installed; install it with: pip install 'rlmux[serve,train]'")
