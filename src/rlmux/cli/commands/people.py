"""The commands on who may do what on a server, and who did: user, project, audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlmux.cli.commands.options import Json
from rlmux.core.errors import UserError

if TYPE_CHECKING:
    from rlmux.service.dashboard.auth.users import People

ServiceFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the service, or of the run or runs that are shown.")
]


def user(
    action: Annotated[Literal["set", "list", "remove"], typer.Argument(metavar="set|list|remove")],
    folder: ServiceFolder,
    name: Annotated[str | None, typer.Argument(metavar="[USER]", help="User to add, to change or to remove.")] = None,
    role: Annotated[str | None, typer.Option("--role", help="viewer, member, operator or admin.")] = None,
    code: Annotated[
        Literal["yes", "no"] | None,
        typer.Option(
            "--code", metavar="yes|no", help="Whether the user may submit code of its own; yes for a new user."
        ),
    ] = None,
    login: Annotated[
        str | None, typer.Option("--login", metavar="NAME", help="The user's name in --user-header.")
    ] = None,
    json: Json = False,
) -> None:
    """Add, change, list or remove the users of a server.

    Once a server has a user, only its users have access.

    A viewer reads, a member submits and changes pipelines of its own, an operator sees and changes all of them, an
    admin may do everything. A running server applies every change at its next request.

    \b
    Example: rlmux user set runs/service-lanes ann --role member
    """
    from rlmux.service.dashboard.auth import users

    found = _people(folder)
    if action == "list":
        rows = [
            {
                "user": each,
                "role": person.role,
                "code": "yes" if person.may_run_code else "no",
                "login": person.login or "-",
                "projects": ", ".join(sorted(found.projects_of(each))) or "-",
            }
            for each, person in found.users.items()
        ]
        _show(rows, {"users": rows}, as_json=json)
    elif name is None:
        raise UserError(f"rlmux user {action}: accepted: rlmux user {action} DIR USER")
    elif action == "set":
        person = users.set_user(
            folder, name, role=role, may_run_code=None if code is None else code == "yes", login=login
        )
        may = "" if person.may_run_code else ", without code of its own"
        typer.echo(f"{name}: is {person.role}{may}")
    else:
        users.remove_user(folder, name)
        typer.echo(f"{name}: may do nothing from now on")


def project(
    action: Annotated[Literal["set", "list", "remove"], typer.Argument(metavar="set|list|remove")],
    folder: ServiceFolder,
    name: Annotated[str | None, typer.Argument(metavar="[PROJECT]", help="Project to make, change or remove.")] = None,
    add: Annotated[
        list[str] | None, typer.Option("--add", metavar="USER", help="User who becomes a member; may be repeated.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", metavar="USER", help="User who is no member; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Set the members of a project, list projects or remove one.

    Members see each other's pipelines, samples and logs.

    \b
    Example: rlmux project set runs/service-lanes vision --add ann --add bob
    """
    from rlmux.service.dashboard.auth import users

    found = _people(folder)
    if action == "list":
        rows = [{"project": each, "members": ", ".join(members) or "-"} for each, members in found.projects.items()]
        _show(rows, {"projects": rows}, as_json=json)
    elif name is None:
        raise UserError(f"rlmux project {action}: accepted: rlmux project {action} DIR PROJECT")
    elif action == "set":
        members = users.set_project(folder, name, add=add or (), drop=drop or ())
        typer.echo(f"{name}: has {', '.join(members) or 'no members'}")
    else:
        users.remove_project(folder, name)
        typer.echo(f"{name}: has no members from now on")


def audit(
    place: Annotated[str, typer.Argument(metavar="DIR|URL", help="Folder of a service or a run; or http://HOST:PORT.")],
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Largest number of requests.")] = 100,
    user: Annotated[str | None, typer.Option("--user", help="Only requests of this user.")] = None,
    json: Json = False,
) -> None:
    """Show a server's audit log, newest request first.

    It holds each request that may have an effect, and each refused request.

    \b
    Example: rlmux audit runs/service-lanes --user ann
    """
    rows = _audit_rows(place, limit, user)
    shown = [
        {
            "at": row["at"],
            "user": row["user"] or "-",
            "token": row["token"] or row["by"] or "-",
            "address": row["address"],
            "asked": f"{row['method']} {row['path']}",
            "answer": "-" if row["status"] is None else str(row["status"]),
        }
        for row in rows
    ]
    _show(shown, {"items": rows}, as_json=json)


def _audit_rows(place: str, limit: int, user: str | None) -> list[dict[str, Any]]:
    from rlmux.client.target import is_url

    if is_url(place):
        from rlmux.client.on_server import OnServer

        with closing(OnServer(place, lambda text: None)) as server:
            return server.audit(limit, user)
    from rlmux.service.dashboard.auth import audit as kept

    if not Path(place).is_dir():
        raise UserError(f"{place}: no such folder; accepted: that of a server, or its URL")
    return kept.read(Path(place), limit=limit, user=user)[0]


def _people(folder: Path) -> People:
    """Who is in the folder's file. Raises UserError where there is no such folder."""
    from rlmux.service.dashboard.auth import users

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; accepted: that of a server")
    return users.read(folder) or users.People(users={}, projects={})


def _show(rows: Sequence[Mapping[str, Any]], value: Mapping[str, Any], *, as_json: bool) -> None:
    from rlmux.cli import tables

    if as_json:
        tables.print_json(value)
    else:
        tables.print_rows([dict(row) for row in rows])
