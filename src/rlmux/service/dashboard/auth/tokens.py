"""Users' tokens in a file of the service's folder, written by `rlmux token` and reloaded by a server on change.

    rlmux token add ─▶ tokens.json (0600): id, sha256, user, scopes, ends ─▶ Access ─▶ Who, until it ends

A token is shown once and stored as a hash. Revocation applies from the next request on.
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
"""Scopes for work with runs and pipelines."""
SCOPES = (*OF_A_USER, "metrics", "admin")
"""Accepted scopes. `control` covers the user's own pipelines; `admin` covers everything."""
DAY_S = 86_400.0
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptToken:
    """A stored token."""

    id: str
    """Public part of the token."""
    sha256: str
    """Hash of the whole token."""
    user: str
    scopes: tuple[str, ...]
    ends_at: float
    """Unix time of expiry."""


def make_token() -> tuple[str, str]:
    """(a new token, its id)."""
    id = _random(8)
    return f"rlx_{id}_{_random(32)}", id


def id_of(token: str) -> str:
    """The public part of a token; empty for another format."""
    parts = token.split("_")
    return parts[1] if len(parts) == 3 else ""


def add(folder: Path, user: str, scopes: Sequence[str], *, days: float, now: float) -> str:
    """Create and return a user's token. Raises UserError for an unknown scope."""
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
    """Revoke a token. Raises UserError for an unknown one."""
    with atomic_json.changing(folder, NAME):
        kept = read(folder)
        left = [token for token in kept if token.id != id]
        if len(left) == len(kept):
            raise UserError(
                f"{folder}: no token {id!r}; accepted: {', '.join(token.id for token in kept) or 'none yet'}"
            )
        _write(folder, left)


def read(folder: Path) -> list[KeptToken]:
    """The file's tokens, oldest first. Raises UserError for a damaged file, or one that others can read."""
    found = atomic_json.read(folder, NAME)
    try:
        rows = [] if found is None else found["tokens"]
        return [KeptToken(**{**row, "scopes": tuple(row["scopes"])}) for row in rows]
    except (KeyError, TypeError):
        raise atomic_json.damaged(folder, NAME) from None


def _write(folder: Path, kept: Sequence[KeptToken]) -> None:
    atomic_json.write_whole(folder, NAME, {"tokens": [asdict(token) for token in kept]})


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
