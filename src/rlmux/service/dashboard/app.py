"""The dashboard of a folder, on a server: everything wired, and the table of all addresses.

folder ─▶ Dashboard ─▶ server ── gate ── /api/v1: the table ─▶ reads, timeline, stream
               │                      └─ everything else ─▶ pages
               └─ the indexer's process ─▶ index.db of every lane
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.report.log import SCHEMA_VERSION
from rlmux.service.dashboard import pages
from rlmux.service.dashboard.access import TOKEN_NAME, Access, Limits, Who, token_of
from rlmux.service.dashboard.audit import Audit
from rlmux.service.dashboard.audit_reads import AuditReads
from rlmux.service.dashboard.control import Control
from rlmux.service.dashboard.cost import CostReads
from rlmux.service.dashboard.door import Address, Asked, Door, Told, cookie_name, get
from rlmux.service.dashboard.gate import Gate, Hosts
from rlmux.service.dashboard.indexing import Indexing
from rlmux.service.dashboard.openapi import Document
from rlmux.service.dashboard.parameters import line, one_of, whole, words
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.dashboard.prometheus import Scrape
from rlmux.service.dashboard.questions import Questions
from rlmux.service.dashboard.reads import MAX_SEARCHED_BYTES, Reads, Trouble, parse_place, parse_sort
from rlmux.service.dashboard.samples import SampleReads
from rlmux.service.dashboard.sessions import LONGEST_SESSION_S
from rlmux.service.dashboard.stream import Streams, Watch
from rlmux.service.dashboard.timeline import TimelineReads
from rlmux.service.dashboard.webhook import Webhook
from rlmux.service.index.lanes import Root
from rlmux.service.server import Server

API_VERSION = 1
_LANE, _PIPELINE = "/lanes/{lane}", "/pipelines/{lane}/{name}"


class Dashboard:
    """Mounted on a server before that one starts; close it after the server."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        *,
        allowed_hosts: Collection[str] = (),
        limits: Limits | None = None,
        trouble: Trouble = lambda folder: None,
        down: Trouble = lambda folder: None,
        lanes: Collection[str] = (),
        more: Sequence[Address] = (),
    ) -> None:
        """`folder`: of a run, or of many. `trouble`: what is wrong with a lane beside its index. `down`: why a
        lane's controller needs a person. `lanes`: names of
        lanes that may have no log yet. `more`: addresses beside those of every dashboard.

        Raises UserError where its token is not kept from others.
        """
        self._server = server
        self._spare = tempfile.TemporaryDirectory(prefix="rlmux-serve-")
        spare = Path(self._spare.name)
        token_folder = folder if os.access(folder, os.W_OK) else spare
        self.token_path = token_folder / TOKEN_NAME
        try:
            self.token = token_of(token_folder)
        except BaseException:  # an interrupt, too, leaves no folder behind; it goes on up
            self._spare.cleanup()
            raise
        self.access = Access(limits)
        self.access.add_token(self.token, scopes=["admin"])
        try:
            self.access.watch(token_folder)
        except UserError:
            self._spare.cleanup()
            raise
        self.indexing = Indexing(folder, spare)
        self._webhook: Webhook | None = None
        root = Root(folder, spare, lanes)
        self._reads = reads = Reads(root, lambda one: trouble(one) or self.indexing.trouble(one), down)
        watch = Watch(reads)
        self._sessions = _Sessions(self.access, server.port)
        scrape = Scrape(reads)
        self._control = Control(reads)
        read = table(reads, Streams(reads, watch, self.access), self._sessions, scrape)
        kept = AuditReads(token_folder)
        others = (kept, TimelineReads(reads), CostReads(reads), SampleReads(reads), Questions(reads), self._control)
        every = (*read, *(address for other in others for address in other.addresses()), *more)
        self.addresses = Document(every).addresses
        door = Door(self.access, server.port, scrape.observe, reads, Audit(token_folder))
        server.mount("", door.router(self.addresses))
        server.mount("", pages.router())
        server.wrap(lambda app: Gate(app, Hosts(server.host, allowed_hosts)))
        server.run_beside(watch.run)
        server.before_close(watch.close)

    def start(self) -> None:
        """Begin to index."""
        self.indexing.start()

    def check(self) -> None:
        """Raises ThreadDiedError or StorageError where the thread that minds the indexer has ended."""
        self.indexing.thread.check()

    def login_url(self) -> str:
        """An address that logs a browser in, once, within a minute. What follows the # is sent to no server."""
        return f"{self._server.url}/login#t={self.access.make_ticket()}"

    def send_alerts(self, url: str) -> None:
        """Tell an address of alerts, from now on."""
        self._webhook = Webhook(self._reads, url)
        self._webhook.start()

    def close(self) -> None:
        if self._webhook is not None:
            self._webhook.close()
        self.indexing.close()
        self._control.close()
        self._spare.cleanup()


class _Sessions:
    """Login, logout, and who asks."""

    def __init__(self, access: Access, port: int) -> None:
        self._access = access
        self._port = port

    async def login(self, asked: Asked) -> Any:
        if not self._access.may_login(asked.address):
            raise ProblemError(429, "too many logins", accepted="5 a minute")
        body = asked.body
        if not isinstance(body, dict) or len(body) != 1 or not isinstance(next(iter(body.values())), str):
            raise ProblemError(400, "not a login", where="body", accepted='{"ticket": TEXT} or {"token": TEXT}')
        ((key, secret),) = body.items()
        if key not in ("ticket", "token"):
            raise ProblemError(400, f"no field {key[:80]!r}", where="body", accepted="ticket or token")
        cookie = self._access.login(**{key: secret})
        if cookie is None:
            raise ProblemError(
                401, f"this {key} is not good", where="body", accepted="a new ticket, or the token of admin.token"
            )
        who = self._access.of_session(cookie)
        assert who is not None
        headers = {"Set-Cookie": self._set_cookie(asked, cookie, int(LONGEST_SESSION_S))}
        return Told(value=_shown(who), headers=headers, user=who.user)

    async def logout(self, asked: Asked) -> Any:
        self._access.logout(asked.cookie)
        return Told(status=204, headers={"Set-Cookie": self._set_cookie(asked, "", 0)})

    async def whoami(self, asked: Asked) -> Any:
        assert asked.who is not None
        return _shown(asked.who)

    def _set_cookie(self, asked: Asked, value: str, age_s: int) -> str:
        name = cookie_name(self._port, is_https=asked.is_https)
        secure = "; Secure" if asked.is_https else ""
        return f"{name}={value}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}"


def _shown(who: Who) -> dict[str, Any]:
    ends = None if who.expires_at is None else datetime.fromtimestamp(who.expires_at, UTC).isoformat(timespec="seconds")
    return {
        "user": who.user,
        "scopes": sorted(who.scopes),
        "expires_at": ends,
        "role": who.role,
        "projects": sorted(who.projects),
        "may_run_code": who.may_run_code,
    }


def _version(asked: Asked) -> Any:
    return {"version": version("rlmux"), "api": API_VERSION, "log_schema": SCHEMA_VERSION}


def table(reads: Reads, streams: Streams, sessions: _Sessions, scrape: Scrape) -> tuple[Address, ...]:
    """Addresses of the service, its lanes and its pipelines; other handlers name their own."""
    page = {"limit": whole(1, 500), "cursor": whole(0, 2**53)}
    return (
        get("/health", reads.health, scope=None),
        get("/version", _version, scope=None),
        Address(method="POST", path="/login", scope=None, answer=sessions.login, is_async=True),
        Address(method="POST", path="/logout", scope="read", answer=sessions.logout, is_async=True),
        get("/whoami", sessions.whoami, is_async=True),
        get("/lanes", reads.lanes),
        get(_LANE, reads.lane),
        get(f"{_LANE}/devices", reads.devices),
        get(f"{_LANE}/alerts", reads.alerts),
        Address(method="POST", path=f"{_LANE}/alerts", scope="control", answer=reads.acknowledge),
        get(f"{_LANE}/events", reads.events, {"limit": whole(1, 500)}),
        get(
            "/pipelines",
            reads.pipelines,
            {**page, "lane": line, "status": words, "name": line, "sort": parse_sort},
        ),
        get(_PIPELINE, reads.pipeline),
        get("/compare", reads.compare, {"of": parse_place}, lists=("of",)),
        get(
            f"{_PIPELINE}/steps",
            reads.steps,
            {**page, "limit": whole(1, 1000), "from": whole(0, 2**31), "to": whole(0, 2**31)},
        ),
        get(
            f"{_PIPELINE}/metrics",
            reads.metrics,
            {"names": words, "x": one_of("step", "time_s"), "points": whole(2, 4000)},
        ),
        get(
            f"{_PIPELINE}/logs",
            reads.logs,
            {"offset": whole(-(2**53), 2**53), "limit": whole(1, MAX_SEARCHED_BYTES), "grep": line},
            scope="samples",
        ),
        get("/metrics", scrape.answer, scope="metrics"),
        get("/metrics/grafana.json", scrape.grafana, scope="metrics"),
        get("/stream", streams.stream, {"topics": words}, is_async=True),
    )
