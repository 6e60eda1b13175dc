"""Alerts sent to a webhook: each once when it starts to fire and once when it is resolved.

    alerts of every lane ── every few seconds ──▶ what is new, what is gone ──POST──▶ address

    hooks.slack.com, slack+URL              {"text": ...}
    discord.com/api/webhooks, discord+URL   {"content": ...}
    any other http:// or https://           the alert's fields, with `lane` and `state`
    mailto://, tgram://, ntfy://, ...       a line of text, by Apprise (https://appriseit.com/services/)

A failed delivery is retried, `_MAX_TRIES` tries in all, then dropped with a line on stderr, so that one refused alert
does not block others. A started server sends the alerts that fire at that time.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from rlmux.core.errors import LogError, UserError
from rlmux.service.addresses import LOOPBACK
from rlmux.service.dashboard.auth.access import SERVER
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.problems import ProblemError

LOOK_EVERY_S = 2.0
_ANSWER_LIMIT_S = 5.0
_MAX_TRIES = 10
_LONGEST_WAIT_S = 60.0
"""Seconds before a message is tried again: 2, 4, 8 ... and at most this many."""
_MAX_TEXT = 1900
"""Characters of a message of text; Discord takes 2000."""
_MAX_AT_ONCE = 20
"""Alerts that one look sends: an address that answers slowly holds nothing else up."""

_DOWN = "lane_down"
"""The rule of an alert that is known without the lane's index."""

Key = tuple[str, str | None, str]
"""Lane, pipeline and rule: one notification per alert, however its numbers change."""


def url_of(webhook: str) -> str:
    """The address itself, without the form that may be named before it."""
    form, plus, url = webhook.partition("+")
    return url if plus and form in _FORMS else webhook


class Webhook:
    """See the module."""

    def __init__(self, reads: Reads, webhook: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._reads = reads
        self._place = _place_of(url_of(webhook))
        self._deliver = _delivery_of(webhook)
        self._now_s = now_s
        self._notified: dict[Key, dict[str, Any]] = {}
        self._dropped: set[Key] = set()
        """Keys of `_notified` that were not delivered: their ends are not sent either."""
        self._tries: dict[tuple[Key, str], tuple[int, float]] = {}
        """(number of tries, time of the next) of each message that was not taken, by alert and state."""
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
            try:
                self.look()
            except Exception as error:  # no alert is worth all others
                self._print(f"{type(error).__name__}: {error}; the next look is in {LOOK_EVERY_S:g} s")

    def look(self) -> None:
        """Send what has changed since the last look."""
        firing = self._firing()
        began = [(key, "firing", alert) for key, alert in firing.items() if key not in self._notified]
        ended = [(key, "resolved", alert) for key, alert in self._notified.items() if key not in firing]
        messages = [(key, state, alert) for key, state, alert in [*began, *ended] if self._is_due(key, state)]
        self._tries = {key: each for key, each in self._tries.items() if (key[0] in firing) == (key[1] == "firing")}
        for key, state, alert in messages[:_MAX_AT_ONCE]:
            problem = None if key in self._dropped else self._send({"lane": key[0], "state": state, **alert})
            if problem is None or self._give_up(key, state, str(problem)):
                self._tries.pop((key, state), None)
                self._note(key, state, alert, is_dropped=problem is not None)
            elif not isinstance(problem, urllib.error.HTTPError):
                return  # nothing answers there: the others wait

    def _is_due(self, key: Key, state: str) -> bool:
        return self._now_s() >= self._tries.get((key, state), (0, -math.inf))[1]

    def _give_up(self, key: Key, state: str, problem: str) -> bool:
        """Count a try that failed; whether it was the last."""
        num_tries = self._tries.get((key, state), (0, 0.0))[0] + 1
        if num_tries < _MAX_TRIES:
            wait_s = min(LOOK_EVERY_S * 2 ** (num_tries - 1), _LONGEST_WAIT_S)
            self._tries[key, state] = num_tries, self._now_s() + wait_s
            return False
        lane, pipeline, rule = key
        about = f"{rule} of {pipeline or 'the run'} in {lane} ({state})"
        self._print(f"{problem}; {about} is dropped after {num_tries} tries")
        return True

    def _note(self, key: Key, state: str, alert: dict[str, Any], *, is_dropped: bool) -> None:
        """The message was taken, or dropped."""
        if state == "resolved":
            del self._notified[key]
            self._dropped.discard(key)
            return
        self._notified[key] = alert
        if is_dropped:
            self._dropped.add(key)

    def _firing(self) -> dict[Key, dict[str, Any]]:
        """A lane that cannot be read now has what it had."""
        found: dict[Key, dict[str, Any]] = {}
        for lane in self._reads.names():
            try:
                with self._reads.open(lane, SERVER) as reader:
                    alerts = reader.facts["alerts"]
            except (ProblemError, LogError):
                found.update(
                    {key: alert for key, alert in self._notified.items() if key[0] == lane and key[2] != _DOWN}
                )
                alerts = self._reads.lane_alerts(lane)
            found.update({(lane, alert["pipeline"], alert["rule"]): alert for alert in alerts})
        return found

    def _send(self, message: dict[str, Any]) -> Exception | None:
        """None where the address took it. The first failure in a row is a line on stderr."""
        try:
            self._deliver(message)
            self._is_reachable = True
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if self._is_reachable:
                self._print(f"{error}; it is sent again")
            self._is_reachable = False
            return error
        return None

    def _print(self, text: str) -> None:
        print(f"--webhook {self._place}: {text}", file=sys.stderr, flush=True)


def check_webhook(webhook: str) -> None:
    """Raises UserError for an address that nothing can be sent to."""
    if re.match(r"((slack|discord)\+)?https?://[^/\s]+", webhook):
        return
    accepted = "an address with http:// or https://, slack+ or discord+ before it or not"
    if "://" in webhook and find_spec("apprise") is None:
        raise UserError(
            f"--webhook {_place_of(webhook)}: needs Apprise; accepted: pip install 'rlmux[notify]', or {accepted}"
        )
    if "://" not in webhook or _service_of(webhook) is None:
        raise UserError(f"--webhook {_place_of(webhook)}: accepted: {accepted}; or one of appriseit.com/services")


def _service_of(webhook: str) -> Any:
    """Apprise's service of an address; None for one that it cannot read."""
    import apprise

    return apprise.Apprise.instantiate(webhook)


def _place_of(url: str) -> str:
    """The address without its path and its user: with Slack, Discord and most others these are secrets."""
    split = urlsplit(url)
    is_web = split.scheme in ("http", "https")
    return f"{split.scheme}://{split.netloc.rpartition('@')[2] if is_web else '...'}/" if split.scheme else url


def _delivery_of(webhook: str) -> Callable[[dict[str, Any]], None]:
    """What sends a message. It raises OSError, HTTPException or ValueError for one that was not taken."""
    url = url_of(webhook)
    if urlsplit(url).scheme not in ("http", "https"):
        service = _service_of(webhook)

        def notify(message: dict[str, Any]) -> None:
            if not service.notify(title=f"rlmux: {message['lane']}", body=_text_of(message)):
                raise OSError("the service did not take it")

        return notify
    opener, body = _opener(url), body_of(webhook)

    def post(message: dict[str, Any]) -> None:
        data = json.dumps(body(message)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "rlmux"}  # Discord refuses that of urllib
        with opener.open(urllib.request.Request(url, data, headers, method="POST"), timeout=_ANSWER_LIMIT_S):
            pass

    return post


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Use the environment's proxy, except for this machine's addresses."""
    host = urlsplit(url).hostname or ""
    is_here = host in LOOPBACK or host.startswith("127.")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _text_of(message: Mapping[str, Any]) -> str:
    """An alert in a line."""
    about = f"{message['pipeline']} in {message['lane']}" if message["pipeline"] else message["lane"]
    end = f" {message['advice']}" if message["state"] == "firing" else ""
    return f"{message['state']}: {message['rule']} ({message['level']}) of {about}: {message['text']}.{end}"[:_MAX_TEXT]


_FORMS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "slack": lambda message: {"text": _text_of(message)},
    "discord": lambda message: {"content": _text_of(message)},
}


def body_of(webhook: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """What makes the JSON of a message that the address takes."""
    form, plus, _ = webhook.partition("+")
    if plus and form in _FORMS:
        return _FORMS[form]
    split = urlsplit(webhook)
    if split.hostname == "hooks.slack.com":
        return _FORMS["slack"]
    if split.hostname in ("discord.com", "discordapp.com") and split.path.startswith("/api/"):
        return _FORMS["discord"]
    return lambda message: message
