"""Tokens of several users, in a file of the service's folder: `rlmux token` writes it, a server reads it again when it
has changed.

    rlmux token add ─▶ tokens.json (0600): id, sha256, user, scopes, ends ─▶ Access ─▶ Who, until it ends

A token is shown once and kept as its hash alone. One that is revoked is refused from the next request on.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.service.dashboard.auth import atomic_json

NAME = "tokens.json"
OF_A_USER = ("read", "samples", "submit", "control")
"""What a user does with runs and pipelines."""
SCOPES = (*OF_A_USER, "metrics", "admin")
"""What a token may be for. `control`: of its user's own pipelines; `admin` holds all, of all pipelines."""
DAY_S = 86_400.0
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptToken:
    """A token as the file has it."""

    id: str
    """Its part that people see."""
    sha256: str
    """Hash of the whole token."""
    user: str
    scopes: tuple[str, ...]
    ends_at: float
    """Unix time from which on it is refused."""


def make_token() -> tuple[str, str]:
    """(a new token, its id)."""
    id = _random(8)
    return f"rlx_{id}_{_random(32)}", id


def id_of(token: str) -> str:
    """The part of a token that people see; empty for one of another form."""
    parts = token.split("_")
    return parts[1] if len(parts) == 3 else ""


def add(folder: Path, user: str, scopes: Sequence[str], *, days: float, now: float) -> str:
    """Keep a new token of a user; returns it. Raises UserError for scopes that there are not."""
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise UserError(f"--scope {', '.join(unknown) or 'none'}: accepted: {', '.join(SCOPES)}")
    if not 0.0 < days <= 3660.0:
        raise UserError(f"--days {days:g}: accepted: more than 0, 3660 at most")
    token, id = make_token()
    kept = KeptToken(
        id=id,
        sha256=hashlib.sha256(token.encode()).hexdigest(),
        user=user,
        scopes=tuple(scopes),
        ends_at=now + days * DAY_S,
    )
    with atomic_json.changing(folder, NAME):
        _write(folder, [*read(folder), kept])
    return token


def revoke(folder: Path, id: str) -> None:
    """Refuse a token from now on. Raises UserError for one that there is not."""
    with atomic_json.changing(folder, NAME):
        kept = read(folder)
        left = [one for one in kept if one.id != id]
        if len(left) == len(kept):
            raise UserError(f"{folder}: no token {id!r}; accepted: {', '.join(one.id for one in kept) or 'none yet'}")
        _write(folder, left)


def read(folder: Path) -> list[KeptToken]:
    """The tokens of the file, oldest first. Raises UserError where it is damaged, or others can read it."""
    found = atomic_json.read(folder, NAME)
    try:
        rows = [] if found is None else found["tokens"]
        return [KeptToken(**{**row, "scopes": tuple(row["scopes"])}) for row in rows]
    except (KeyError, TypeError):
        raise atomic_json.damaged(folder, NAME) from None


def _write(folder: Path, kept: Sequence[KeptToken]) -> None:
    atomic_json.write_whole(folder, NAME, {"tokens": [asdict(one) for one in kept]})


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
