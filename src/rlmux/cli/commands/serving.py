"""The commands that serve runs as pages, and models to clients: serve, budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmux.cli.commands.options import Folder, Json, PolicyName
from rlmux.core.errors import UserError

if TYPE_CHECKING:
    from rlmux.service.addresses import Listening
    from rlmux.service.app import Doors
    from rlmux.service.dashboard.dashboard import Dashboard

DEFAULT_LISTEN = "127.0.0.1:7460"
_PAGES_NEED = ("fastapi", "uvicorn", "httptools", "prometheus_client")
_SERVING_NEEDS = (*_PAGES_NEED, "google.protobuf")
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help=f"Address of the server; by default {DEFAULT_LISTEN}, or a resumed server's former address.",
    ),
]
Served = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR|FILE",
        help="Folder of a run, or with runs in it: its pages. A YAML file with lanes: a service to submit to; with "
        "cluster and serve: its models.",
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
        help="Address that alerts are sent to as JSON, by POST; Slack's and Discord's, too. Not with models.",
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
ServeOut = Annotated[
    str | None,
    typer.Option(
        "--out", metavar="DIR", help="Folder; by default runs/FILE-POLICY-TIME, with lanes runs/service-FILE."
    ),
]
Resume = Annotated[Path | None, typer.Option("--resume", metavar="DIR", help="Resume a stopped or killed server.")]


def serve(
    path: Served = None,
    listen: Listen = None,
    policy: PolicyName = None,
    out: ServeOut = None,
    resume: Resume = None,
    opens: Open = False,
    allow_host: AllowHost = None,
    webhook: WebhookUrl = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    behind_proxy: BehindProxy = None,
    user_header: UserHeader = None,
) -> None:
    """Serve a run's pages, lanes for submissions, or models for Tinker clients.

    DIR: pages with device timelines, pipelines, curves, steps and logs, during the run and after it.
    FILE with lanes: one open run per lane. Lanes outlive the server, which finds them again at its next start.
    FILE with models: training loops written for the Tinker API run unchanged and share the devices.

    \b
    Example: rlmux serve runs/demo --open
    """
    _check_webhook(webhook)
    way = _Way(listen, tls_cert, tls_key, tuple(behind_proxy or ()), user_header)

    def ready(pages: Dashboard) -> None:
        _print_pages(pages, opens)
        if webhook:
            pages.send_alerts(webhook)

    if path is not None and Path(path).is_dir():
        _show(Path(path), {"--policy": policy, "--out": out, "--resume": resume}, way, allow_host or [], ready)
        return
    if path is not None and resume is None and _has_lanes(path):
        _serve_lanes(Path(path), out, {"--policy": policy}, way, allow_host or [], ready)
        return
    if webhook:
        raise UserError("--webhook: accepted with DIR, or with a FILE that has lanes")
    _serve_models(path, way, policy, out, resume, opens, allow_host or [])


@dataclass(frozen=True, slots=True)
class _Way:
    """Options of the server's address."""

    listen: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: tuple[str, ...] = ()
    user_header: str | None = None

    def listening(self, default: str = DEFAULT_LISTEN) -> Listening:
        """Raises UserError for missing packages and contradictory options."""
        host, port = _address(self.listen or default)
        _check_installed(*_PAGES_NEED)
        from rlmux.service.addresses import listening_of

        return listening_of(
            host,
            port,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            behind_proxy=self.behind_proxy,
            user_header=self.user_header,
        )


def _has_lanes(file: str) -> bool:
    from rlmux.config.service_file import is_service_file

    return is_service_file(Path(file))


def _serve_lanes(
    file: Path,
    out: str | None,
    others: dict[str, object],
    way: _Way,
    allow_host: list[str],
    ready: Callable[[Dashboard], None],
) -> None:
    _refuse(others, f"each lane of {file} has its own; accepted: --out, --listen, --open, --allow-host")
    listening = way.listening()
    from rlmux.config.service_file import load_service_file
    from rlmux.policies import POLICIES
    from rlmux.service.lanes import data_dir
    from rlmux.service.lanes.devices import check_devices
    from rlmux.service.lanes.service import serve_lanes

    folder = Path(out or Path("runs") / f"service-{file.stem}").absolute()
    code = folder / data_dir.BUNDLES / data_dir.NO_CODE
    check_devices(
        load_service_file(file, folder=file.absolute().parent, policies=list(POLICIES))
    )  # nothing is made yet
    lock = data_dir.open_root(folder)
    specs = load_service_file(file, folder=code, policies=list(POLICIES))

    def print_pages(url: str, pages: Dashboard) -> None:
        typer.echo(f"export RLMUX_TOKEN_FILE={pages.token_path}")
        ready(pages)

    pids = serve_lanes(specs, folder, lock, listening=listening, allowed_hosts=allow_host, on_ready=print_pages)
    for name, pid in pids.items():
        ends = f"pid {pid}; to end it: rlmux stop {folder / name}" if pid is not None else "not started"
        typer.echo(f"rlmux: lane {name} goes on without the server ({ends})", err=True)


def _show(
    folder: Path,
    others: dict[str, object],
    way: _Way,
    allow_host: list[str],
    ready: Callable[[Dashboard], None],
) -> None:
    _refuse(others, "a folder is shown, not run; accepted: --listen, --open, --allow-host")
    listening = way.listening()
    from rlmux.service.folder_address import open_folder

    open_folder(folder, listening=listening, allowed_hosts=allow_host, on_ready=ready)


def _refuse(options: dict[str, object], why: str) -> None:
    """Raises UserError for the first option that was given."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UserError(f"{given[0]}: {why}")


def _print_pages(pages: Dashboard, opens: bool) -> None:
    """The line with the address that logs a browser in."""
    typer.echo(f"dashboard: {pages.login_url()}")
    typer.echo(f"rlmux: the address works once, for a minute; later: the token in {pages.token_path}", err=True)
    if opens and typer.launch(pages.login_url()) != 0:
        typer.echo("rlmux: no browser could be opened; open the address above", err=True)


def _serve_models(
    file: str | None,
    way: _Way,
    policy: str | None,
    out: str | None,
    resume: Path | None,
    opens: bool,
    allow_host: list[str],
) -> None:
    from rlmux.api.files import look_for_plugin
    from rlmux.cli import inputs
    from rlmux.config.serve_file import load_serve_file
    from rlmux.policies import POLICIES, make_policy
    from rlmux.runtime.records import folders

    if (file is None) == (resume is None):
        raise UserError("accepted: a run's DIR, a FILE with cluster and serve, or --resume DIR")
    _check_installed(*_SERVING_NEEDS)
    if resume is not None:
        folders.check_run(resume)
        resume_server(resume, way, opens=opens, allow_host=allow_host)
        return
    listening = way.listening()
    assert file is not None
    from rlmux.service import app as server

    spec = load_serve_file(Path(file), policies=list(POLICIES))
    if policy is not None:
        inputs.check_policy("--policy", policy)
    name = policy or spec.policy
    look_for_plugin(name, Path(file).absolute().parent)
    chosen = make_policy(name)
    with folders.chosen(out, f"{Path(file).stem}-{name}") as folder:
        server.serve(
            spec,
            folder,
            policy=chosen,
            listening=listening,
            allowed_hosts=allow_host,
            on_ready=lambda url, doors: _print_addresses(url, doors, opens),
        )
        typer.echo(f"rlmux: stopped; go on with: rlmux serve --resume {folder}", err=True)


def resume_server(
    folder: Path, way: _Way | None = None, *, opens: bool = False, allow_host: Sequence[str] = ()
) -> None:
    """Resume a stopped or killed server, by default at its former address."""
    from rlmux.policies import POLICIES, make_policy

    _check_installed(*_SERVING_NEEDS)
    from rlmux.service import app as server

    spec = server.spec_of(folder, list(POLICIES))
    listening = (way or _Way()).listening(server.last_address(folder) or DEFAULT_LISTEN)
    server.serve(
        spec,
        folder,
        policy=make_policy(spec.policy),
        listening=listening,
        allowed_hosts=allow_host,
        on_ready=lambda url, doors: _print_addresses(url, doors, opens),
        is_resuming=True,
    )


def budget(
    folder: Folder,
    project: Annotated[str | None, typer.Argument(metavar="PROJECT", help="Project whose budget is set.")] = None,
    hours: Annotated[
        str | None, typer.Argument(metavar="HOURS", help="Device-hours a day, or `none`: as many as it likes.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the daily compute budgets of a model server's projects, or set one.

    A change applies at once, waiting clients included, and survives a restart of the server.

    \b
    Example: rlmux budget runs/served vision 40
    """
    from rlmux.cli.tables import show_budgets
    from rlmux.runtime.records import folders

    if (project is None) != (hours is None):
        raise UserError("budget: accepted: DIR, or DIR PROJECT HOURS")
    folders.check_run(folder)
    _check_installed(*_SERVING_NEEDS)
    from rlmux.policies import POLICIES
    from rlmux.service import app as server

    with server.open_budgets(folder, list(POLICIES)) as (budgets, projects):
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


def _check_webhook(url: str | None) -> None:
    if url is not None and not re.match(r"((slack|discord)\+)?https?://[^/\s]+", url):
        raise UserError(
            f"--webhook {url}: accepted: an address that begins with http:// or https://, slack+ or discord+ before it "
            "or not"
        )


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {listen}: accepted: HOST:PORT, such as 127.0.0.1:7460")
    return host.strip("[]"), int(port)


def _check_installed(*names: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name.split(".")[0]) is None]
    if missing:
        raise UserError(f"serve: {missing[0]} is not installed; install it with: pip install 'rlmux[serve,train]'")


def _print_addresses(url: str, doors: Doors, opens: bool) -> None:
    """Print the environment of clients and programs, and the pages' address."""
    typer.echo(f"export TINKER_BASE_URL={url}/tinker")
    typer.echo("export TINKER_API_KEY=tml-anything")
    if doors.permits is not None:
        typer.echo(f"export RLMUX_BROKER={doors.permits.address}")
    if doors.dashboard is not None:
        _print_pages(doors.dashboard, opens)
