"""Browser sessions, kept across restarts in `sessions.json` of the server's folder (0600), without secrets:

login ──▶ begin(hash of the cookie) ──▶ sessions.json ──▶ the next server ──▶ find(hash of the cookie)

The last use of a session is written every ten minutes; a killed server loses at most that. If the file cannot be
written, sessions end with the server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.service.dashboard.auth import atomic_json

NAME = "sessions.json"
SESSION_S, LONGEST_SESSION_S = 12 * 3600.0, 7 * 86400.0
_WRITE_EVERY_S = 600.0
_MAX_SESSIONS = 10_000


@dataclass(slots=True)
class BrowserSession:
    """One browser login."""

    token: str
    """Hash of the login's token; empty for a ticket."""
    begun: float
    """Unix time of the login."""
    used: float
    """Unix time of the last request."""

    @property
    def ends(self) -> float:
        """Unix time at which it expires when idle."""
        return min(self.used + SESSION_S, self.begun + LONGEST_SESSION_S)


class Sessions:
    """Sessions by the hash of their cookie, oldest first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._folder: Path | None = None
        self._sessions: dict[str, BrowserSession] = {}
        self._written = 0.0
        """Unix time of the last write."""

    def keep_in(self, folder: Path) -> None:
        """Load the previous server's sessions and store changes there. Raises UserError for a bad file."""
        self._folder = folder
        found = atomic_json.read(folder, NAME) or {}
        try:
            self._sessions = {
                key: BrowserSession(str(kept["token"]), float(kept["begun"]), float(kept["used"]))
                for key, kept in found.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            raise atomic_json.damaged(folder, NAME) from None

    def begin(self, key: str, token: str) -> None:
        while len(self._sessions) >= _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        now = self._clock()
        self._sessions[key] = BrowserSession(token, now, now)
        self._write()

    def find(self, key: str) -> BrowserSession | None:
        """The session of a cookie, if it has not expired."""
        session = self._sessions.get(key)
        return session if session is not None and self._clock() < session.ends else None

    def use(self, session: BrowserSession) -> None:
        """Renew the session's expiry."""
        session.used = self._clock()
        if session.used - self._written >= _WRITE_EVERY_S:
            self._write()

    def end(self, key: str) -> None:
        if self._sessions.pop(key, None) is not None:
            self._write()

    def end_of_token(self, token: str) -> None:
        """End every session of a token."""
        self._sessions = {key: session for key, session in self._sessions.items() if session.token != token}
        self._write()

    def _write(self) -> None:
        self._written = now = self._clock()
        self._sessions = {key: session for key, session in self._sessions.items() if now < session.ends}
        if self._folder is not None:
            with contextlib.suppress(UserError):
                atomic_json.write_whole(
                    self._folder, NAME, {key: asdict(session) for key, session in self._sessions.items()}
                )
