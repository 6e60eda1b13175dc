"""Authentication by tokens, one-time tickets and browser sessions.

    admin.token, tokens.json (0600) ──▶ bearer token ──────────────────────▶ Who       both are reread on change
    ticket (60 s, once) or token ── login ──▶ session cookie ──▶ Who (12 h after the last request, 7 days at most)

Secrets are stored as SHA-256: they are random, so a fast hash suffices. Tickets live as long as the process, sessions
longer (sessions.py). The class belongs to the thread of the server's event loop.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.runtime.records.folders import TOKEN
from rlmux.service.dashboard.auth import atomic_json, tokens, users
from rlmux.service.dashboard.auth.sessions import Sessions
from rlmux.service.dashboard.auth.users import People

TICKET_S = 60.0
LOGINS_PER_MINUTE = 5
_PROXY = "proxy "
"""Prefix of the key of a caller named by a proxy; no hash contains a blank."""
_PROVIDER = "provider "
"""Prefix of a session's token where a provider named the user."""
_MAX_KNOWN = 10_000
"""Largest number of remembered addresses and tickets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller."""

    user: str
    scopes: frozenset[str]
    """`read`, `admin`, ...; `admin` holds all."""
    key: str
    """Hash of the token or session; key of the rate limit."""
    expires_at: float | None = None
    """Unix time at which an idle session expires; None for a token."""
    is_session: bool = False
    token: str = ""
    """Id of the token, if any."""
    is_limited: bool = False
    """Whether roles and projects apply: the folder has users."""
    role: str = "admin"
    projects: frozenset[str] = frozenset()
    """Projects that the user is a member of."""
    may_run_code: bool = True
    """Whether the user may submit code."""

    @property
    def sees_all(self) -> bool:
        """Whether the caller may see every pipeline."""
        return not self.is_limited or self.role in users.SEES_ALL

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


SERVER = Principal(user="", scopes=frozenset({"admin"}), key="")
"""The server itself, for reads that mask names later."""
ANONYMOUS = Principal(user="", scopes=frozenset(), key="", is_limited=True, role="", may_run_code=False)
"""An unauthenticated caller."""


@dataclass(slots=True)
class _Bucket:
    """Token bucket of one caller's requests."""

    left: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rate limits of callers."""

    requests_per_s: float = 50.0
    burst: float = 100.0
    logins_per_minute: float = LOGINS_PER_MINUTE


class Access:
    """See the module."""

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits or Limits()
        self._clock = clock
        self._tokens: dict[str, Principal] = {}
        self._kept: dict[str, Principal] = {}
        """Tokens of the folder's file by hash; `expires_at` is their expiry."""
        self._admin: dict[str, Principal] = {}
        """The token of `admin.token` by hash; empty while the file is unreadable, or readable to others."""
        self._admin_folder: Path | None = None
        self._admin_stamp: tuple[int, ...] | None = None
        self._folder: Path | None = None
        self._stamps: tuple[object, object] = (None, None)
        self._people: People | None = None
        self._tickets: dict[str, float] = {}
        self._sessions = Sessions(clock)
        self._buckets: dict[str, _Bucket] = {}

    def add_token(self, token: str, *, scopes: Collection[str], user: str | None = None) -> None:
        key = _hash(token)
        id = tokens.id_of(token)
        self._tokens[key] = Principal(user=user or _user(), scopes=frozenset(scopes), key=key, token=id)

    def watch_admin_token(self, folder: Path) -> str:
        """Accept the token in the folder's `admin.token`, and after a change the new one alone. A removed file is
        replaced. Returns the present token. Raises UserError for a file that others can read."""
        self._admin_folder = folder
        return self._read_admin(folder)

    def _read_admin(self, folder: Path) -> str:
        self._admin, self._admin_stamp = {}, _stamp(folder / TOKEN)
        token = token_of(folder)
        key = _hash(token)
        who = Principal(user=_user(), scopes=frozenset({"admin"}), key=key, token=tokens.id_of(token))
        self._admin, self._admin_stamp = {key: who}, _stamp(folder / TOKEN)
        return token

    def _read_changed_admin(self) -> None:
        """Raises UserError or OSError for a file that cannot be had; no token of it is accepted then."""
        if self._admin_folder is not None:
            stamp = _stamp(self._admin_folder / TOKEN)
            if stamp is None or stamp != self._admin_stamp:
                self._read_admin(self._admin_folder)

    def watch(self, folder: Path) -> None:
        """Accept the tokens in the folder's file as well, reread when it changes, and store sessions there. Raises
        UserError for a bad file."""
        self._folder = folder
        self._sessions.keep_in(folder)
        self._read_again()

    def _read_again(self) -> None:
        """Reload changed files; an unreadable file counts as empty."""
        if self._folder is None:
            return
        stamps = (atomic_json.stamp(self._folder, tokens.NAME), atomic_json.stamp(self._folder, users.NAME))
        if stamps == self._stamps:
            return
        self._stamps, self._kept = stamps, {}
        self._people = People(users={}, projects={})
        self._people = users.read(self._folder)
        for token in tokens.read(self._folder):
            principal = Principal(
                user=token.user,
                scopes=frozenset(token.scopes),
                key=token.sha256,
                expires_at=token.ends_at,
                token=token.id,
            )
            self._kept[token.sha256] = self._limited(principal)

    def _limited(self, principal: Principal) -> Principal:
        """The caller with the scopes of its user's role; an unknown user has none."""
        if self._people is None:
            return principal
        person = self._people.users.get(principal.user)
        may = frozenset(users.ROLES[person.role]) if person else frozenset[str]()
        return replace(
            principal,
            scopes=may if principal.may("admin") else principal.scopes & may,
            is_limited=True,
            role=person.role if person else "",
            projects=self._people.projects_of(principal.user),
            may_run_code=person is not None and person.may_run_code,
        )

    def _accepted(self) -> dict[str, Principal]:
        """Every valid token, by hash."""
        with contextlib.suppress(UserError, OSError):
            self._read_changed_admin()
        with contextlib.suppress(UserError):
            self._read_again()
        now = self._clock()
        kept = {
            key: principal
            for key, principal in self._kept.items()
            if principal.expires_at is not None and now < principal.expires_at
        }
        return {**kept, **self._tokens, **self._admin}

    def revoke(self, token: str) -> None:
        """Revoke the token and its sessions from the next request on."""
        key = _hash(token)
        self._tokens.pop(key, None)
        self._admin.pop(key, None)
        self._sessions.end_of_token(key)

    def make_ticket(self) -> str:
        """A one-time login secret, valid for a minute."""
        ticket = secrets.token_urlsafe(32)
        _drop_oldest(self._tickets)
        self._tickets[_hash(ticket)] = self._clock() + TICKET_S
        return ticket

    def of_token(self, token: str) -> Principal | None:
        key = _hash(token)
        found = [principal for known, principal in self._accepted().items() if hmac.compare_digest(known, key)]
        return found[0] if found else None

    def of_session(self, cookie: str) -> Principal | None:
        """The caller of a session, whose expiry is renewed."""
        key = _hash(cookie)
        session = self._sessions.find(key)
        if session is None:
            return None
        principal = self._of_login(session.token)
        if principal is None:
            self._sessions.end(key)
            return None
        self._sessions.use(session)
        return replace(principal, key=key, expires_at=session.ends, is_session=True, token="")

    def _of_login(self, token: str) -> Principal | None:
        """The caller that began a session. `token`: the hash of a token, a provider's login, or empty for a ticket."""
        if token.startswith(_PROVIDER):
            login = token.removeprefix(_PROVIDER)
            return self.of_proxy(login) if self._is_user(login) else None
        return self._accepted().get(token) if token else _owner()

    def _is_user(self, login: str) -> bool:
        """Whether the folder has a user with this login."""
        with contextlib.suppress(UserError):
            self._read_again()
        return self._people is not None and self._people.of_login(login) is not None

    def login_as(self, login: str) -> str | None:
        """The cookie of a new session of the user that a provider names; None for one that the folder does not have."""
        return self._begin_session(f"{_PROVIDER}{login}") if self._is_user(login) else None

    def login(self, *, ticket: str | None = None, token: str | None = None) -> str | None:
        """The cookie of a new session; None if neither secret is valid."""
        if ticket is not None:
            ends = self._tickets.pop(_hash(ticket), 0.0)
            if self._clock() >= ends:
                return None
            of_token = ""
        else:
            known = self.of_token(token or "")
            if known is None:
                return None
            of_token = known.key
        return self._begin_session(of_token)

    def _begin_session(self, token: str) -> str:
        cookie = secrets.token_urlsafe(32)
        self._sessions.begin(_hash(cookie), token)
        return cookie

    def of_proxy(self, user: str) -> Principal:
        """The caller named by a proxy, with its role's scopes; without users, with all scopes but `admin`."""
        with contextlib.suppress(UserError):
            self._read_again()
        if self._people is None:
            return Principal(user=user, scopes=frozenset(tokens.OF_A_USER), key=f"{_PROXY}{user}")
        named = self._people.of_login(user)
        return self._limited(
            Principal(user=named or user, scopes=frozenset({"admin"} if named else ()), key=f"{_PROXY}{user}")
        )

    def renewed(self, principal: Principal, cookie: str) -> Principal | None:
        """The caller's current rights, for a long request; None once its credential is invalid."""
        if principal.is_session:
            return self.of_session(cookie)
        if principal.key.startswith(_PROXY):
            return self.of_proxy(principal.key.removeprefix(_PROXY))
        return self._accepted().get(principal.key)

    def logout(self, cookie: str) -> None:
        self._sessions.end(_hash(cookie))

    def is_within_rate(self, caller: str) -> bool:
        """Count a request of a caller (a key or an address); whether it is within the limit."""
        return self._take(caller, self._limits.requests_per_s, self._limits.burst)

    def may_login(self, address: str) -> bool:
        """Count a login of an address; whether it is within the limit."""
        per_minute = self._limits.logins_per_minute
        return self._take(f"login {address}", per_minute / 60.0, per_minute)

    def _take(self, name: str, per_s: float, burst: float) -> bool:
        now = time.monotonic()
        bucket = self._buckets.get(name)
        if bucket is None:
            _drop_oldest(self._buckets)
            bucket = self._buckets[name] = _Bucket(burst, now)
        bucket.left = min(burst, bucket.left + (now - bucket.at) * per_s)
        bucket.at = now
        if bucket.left < 1.0:
            return False
        bucket.left -= 1.0
        return True


def token_of(folder: Path) -> str:
    """The token in a folder's `admin.token`, created by the first call. Raises UserError if others can read it."""
    path = folder / TOKEN
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: other users can read it; accepted: chmod 600 {path}, or remove it") from None
        token = path.read_text(encoding="utf-8").strip()
        if len(token) < 32:
            raise UserError(f"{path}: holds no token; remove it, and the next start makes one") from None
        return token
    token, _ = tokens.make_token()
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{token}\n")
    return token


def _stamp(path: Path) -> tuple[int, ...] | None:
    """A stamp that changes with the file and its rights; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _owner() -> Principal:
    """The caller of a ticket: the user that started the server."""
    return Principal(user=_user(), scopes=frozenset({"admin"}), key="")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _drop_oldest(known: dict[str, Any]) -> None:
    """Evict the oldest entry of a full table."""
    while len(known) >= _MAX_KNOWN:
        del known[next(iter(known))]
