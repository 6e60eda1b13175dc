"""Alerts sent to an address of the user's: each once when it begins to fire, and once when it is over.

    alerts of every lane ── every few seconds ──▶ what is new, what is gone ──POST──▶ address

What could not be delivered is tried again at the next look. A server that starts sends what fires then.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

from rlmux.core.errors import LogError
from rlmux.service.dashboard.access import SERVER
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.dashboard.reads import Reads

LOOK_EVERY_S = 2.0
_ANSWER_LIMIT_S = 5.0
_MAX_AT_ONCE = 20
"""Alerts that one look sends: an address that answers slowly holds nothing else up."""

Key = tuple[str, str | None, str]
"""Lane, pipeline and rule: an alert is told of once, however its numbers change."""


class Webhook:
    """See the module."""

    def __init__(self, reads: Reads, url: str) -> None:
        self._reads = reads
        self._url = url
        self._told: dict[Key, dict[str, Any]] = {}
        self._is_reachable = True
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Send what has changed since the last look."""
        firing = self._firing()
        began = [(key, "firing", alert) for key, alert in firing.items() if key not in self._told]
        ended = [(key, "resolved", alert) for key, alert in self._told.items() if key not in firing]
        for key, state, alert in [*began, *ended][:_MAX_AT_ONCE]:
            if not self._send({"lane": key[0], "state": state, **alert}):
                return
            if state == "firing":
                self._told[key] = alert
            else:
                del self._told[key]

    def _firing(self) -> dict[Key, dict[str, Any]]:
        """A lane that cannot be read now has what it had."""
        found: dict[Key, dict[str, Any]] = {}
        for lane in self._reads.names():
            try:
                with self._reads.open(lane, SERVER) as reader:
                    alerts = reader.facts["alerts"]
            except (ProblemError, LogError):
                found.update({key: alert for key, alert in self._told.items() if key[0] == lane})
                continue
            found.update({(lane, alert["pipeline"], alert["rule"]): alert for alert in alerts})
        return found

    def _send(self, message: dict[str, Any]) -> bool:
        """Whether the address took it. The first failure in a row is a line on stderr."""
        data = json.dumps(message).encode()
        request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_LIMIT_S):
                self._is_reachable = True
        except (OSError, urllib.error.URLError, ValueError) as error:
            if self._is_reachable:
                print(f"--webhook {self._url}: {error}; alerts are sent again", file=sys.stderr, flush=True)
            self._is_reachable = False
        return self._is_reachable
