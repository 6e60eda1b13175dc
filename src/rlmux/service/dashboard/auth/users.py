"""Users with roles and projects with members, in a file of the service's folder, written by `rlmux user` and `rlmux
project` and reloaded by a server on change.

    people.json (0600): users ── role, may_run_code, login     projects ── members
                                        │
    a caller's scopes: those of its token, within its role;    its sight: `visibility.py`

Without the file, the folder's one user has all rights. With it, other callers have none, except for holders of
`admin.token` and one-time tickets: only the folder's owner can read those.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlmux.core.errors import UserError
from rlmux.service.dashboard.auth import atomic_json
from rlmux.service.dashboard.auth.tokens import OF_A_USER, SCOPES

NAME = "people.json"
ROLES: Mapping[str, tuple[str, ...]] = {
    "viewer": ("read", "samples"),
    "member": OF_A_USER,
    "operator": (*OF_A_USER, "metrics"),
    "admin": SCOPES,
}
"""Scopes by role."""
SEES_ALL = ("operator", "admin")
"""Roles that see and control every pipeline."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOGIN = re.compile(r"[!-~]{1,200}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A stored user."""

    role: str
    may_run_code: bool = True
    """Whether the user may submit bundles, and modules by name."""
    login: str | None = None
    """The user's name at the proxy; None: the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """The whole file."""

    users: Mapping[str, Person]
    projects: Mapping[str, tuple[str, ...]]
    """Members by project."""

    def of_login(self, login: str) -> str | None:
        """The user of a proxy's login name; None for an unknown one."""
        named = [name for name, person in self.users.items() if person.login == login]
        if named:
            return named[0]
        own = self.users.get(login)
        return login if own is not None and own.login is None else None

    def projects_of(self, user: str) -> frozenset[str]:
        return frozenset(project for project, members in self.projects.items() if user in members)


def read(folder: Path) -> People | None:
    """The file's users and projects; None without a file. Raises UserError for a damaged file, or one that others can
    read."""
    found = atomic_json.read(folder, NAME)
    if found is None:
        return None
    try:
        users = {name: Person(**person) for name, person in found["users"].items()}
        projects = {name: tuple(members) for name, members in found["projects"].items()}
    except (KeyError, TypeError, AttributeError):
        raise atomic_json.damaged(folder, NAME) from None
    if any(person.role not in ROLES for person in users.values()):
        raise atomic_json.damaged(folder, NAME)
    return People(users=users, projects=projects)


def scopes_of(folder: Path, user: str) -> tuple[str, ...]:
    """Scopes of the user's role; `read` in a folder without users. Raises UserError for an unknown user."""
    people = read(folder)
    if people is None:
        return ("read",)
    if user not in people.users:
        known = ", ".join(people.users) or "none yet"
        raise UserError(f"no user {user!r}; accepted: {known}, or first: rlmux user set {folder} {user} --role ROLE")
    return ROLES[people.users[user].role]


def rights_of(folder: Path, user: str, scopes: Collection[str]) -> str:
    """What a token with these scopes may do, and which of them the user's role takes away, in a sentence."""
    people = read(folder)
    person = None if people is None else people.users.get(user)
    role = ROLES[person.role] if person is not None else () if people is not None else scopes
    may = role if "admin" in scopes else [scope for scope in scopes if scope in role]
    cut = [scope for scope in scopes if scope not in role]
    which = (
        "" if not cut else f"; not {', '.join(cut)}: {user} is {person.role if person else 'no user of this folder'}"
    )
    return f"this token may {', '.join(may) or 'do nothing'}{which}"


def set_user(
    folder: Path, name: str, *, role: str | None, may_run_code: bool | None = None, login: str | None = None
) -> Person:
    """Add or change a user and return it; None keeps a value. Raises UserError."""
    _check_name(name)
    if role is not None and role not in ROLES:
        raise UserError(f"--role {role}: accepted: {', '.join(ROLES)}")
    if login is not None and not _LOGIN.fullmatch(login):
        raise UserError(f"--login {login!r}: accepted: the name in the proxy's header, such as ann@lab.example")
    with atomic_json.changing(folder, NAME):
        people = _of(folder)
        if role is None and name not in people.users:
            raise UserError(f"user {name!r}: is new; accepted: --role {', '.join(ROLES)}")
        was = people.users.get(name) or Person(role=role or "")
        person = Person(
            role=was.role if role is None else role,
            may_run_code=was.may_run_code if may_run_code is None else may_run_code,
            login=was.login if login is None else login,
        )
        others = [other for other, user in people.users.items() if other != name and login in (user.login, other)]
        if login is not None and others:
            raise UserError(f"--login {login}: is that of {others[0]}; accepted: one that no other user has")
        _write(folder, replace(people, users={**people.users, name: person}))
    return person


def remove_user(folder: Path, name: str) -> None:
    """Remove a user. Raises UserError for an unknown one."""
    with atomic_json.changing(folder, NAME):
        people = _of(folder)
        users = _without(name, people.users, "user")
        projects = {
            key: tuple(member for member in members if member != name) for key, members in people.projects.items()
        }
        _write(folder, People(users=users, projects=projects))


def set_project(folder: Path, name: str, *, add: Collection[str] = (), drop: Collection[str] = ()) -> tuple[str, ...]:
    """Create a project or change its members, and return them. Raises UserError for unknown users."""
    _check_name(name)
    with atomic_json.changing(folder, NAME):
        people = _of(folder)
        unknown = [user for user in (*add, *drop) if user not in people.users]
        if unknown:
            raise UserError(f"no user {unknown[0]!r}; accepted: {', '.join(people.users) or 'none yet: rlmux user'}")
        members = tuple(dict.fromkeys([*people.projects.get(name, ()), *add]))
        members = tuple(user for user in members if user not in drop)
        _write(folder, replace(people, projects={**people.projects, name: members}))
    return members


def remove_project(folder: Path, name: str) -> None:
    """Remove a project. Raises UserError for an unknown one."""
    with atomic_json.changing(folder, NAME):
        people = _of(folder)
        _write(folder, replace(people, projects=_without(name, people.projects, "project")))


def _of(folder: Path) -> People:
    return read(folder) or People(users={}, projects={})


def _without(name: str, entries: Mapping[str, T], what: str) -> dict[str, T]:
    """All entries but one. Raises UserError for an unknown one."""
    if name not in entries:
        raise UserError(f"no {what} {name!r}; accepted: {', '.join(entries) or 'none yet'}")
    return {key: entry for key, entry in entries.items() if key != name}


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r}: accepted: 1 to 64 letters, digits, '-' and '_'")


def _write(folder: Path, people: People) -> None:
    value: dict[str, Any] = {
        "users": {name: asdict(person) for name, person in people.users.items()},
        "projects": {name: list(members) for name, members in people.projects.items()},
    }
    atomic_json.write_whole(folder, NAME, value)
