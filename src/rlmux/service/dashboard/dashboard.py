"""The dashboard of a folder: the wiring of its parts, and its route table.

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

from fastapi import Request, Response
from starlette.responses import PlainTextResponse

from rlmux.log.run_log import SCHEMA_VERSION
from rlmux.runtime.records.folders import TOKEN
from rlmux.service.addresses import OIDC
from rlmux.service.dashboard import pages
from rlmux.service.dashboard.audit_handlers import AuditReads
from rlmux.service.dashboard.auth.access import Access, Limits, Principal
from rlmux.service.dashboard.auth.audit import Audit
from rlmux.service.dashboard.auth.host_middleware import Gate, Hosts
from rlmux.service.dashboard.auth.sessions import LONGEST_SESSION_S
from rlmux.service.dashboard.control import Control
from rlmux.service.dashboard.cost import CostReads
from rlmux.service.dashboard.finding_handlers import Finding
from rlmux.service.dashboard.handlers import Reads, Trouble
from rlmux.service.dashboard.indexing import Indexing
from rlmux.service.dashboard.openapi import Document
from rlmux.service.dashboard.parameters import Caller
from rlmux.service.dashboard.prometheus import Scrape
from rlmux.service.dashboard.router import PREFIX, Address, ApiRouter, cookie_name, get, post
from rlmux.service.dashboard.sample_handlers import SampleReads
from rlmux.service.dashboard.schemas.run_schemas import Login, Nothing, Version, WhoAmI
from rlmux.service.dashboard.stream import Events, Streams, Watch
from rlmux.service.dashboard.timeline_handlers import TimelineReads
from rlmux.service.dashboard.webhook import Webhook
from rlmux.service.dashboard.what_if_jobs import Questions
from rlmux.service.http_server import Server
from rlmux.service.index.lanes import Root
from rlmux.service.problems import ProblemError

API_VERSION = 1
_SPARE_NAME = ".indexes"
"""Folder of the indexes of runs that this process may not write to. A temporary one would outlive a killed process."""
_LANE, _PIPELINE = "/lanes/{lane}", "/pipelines/{lane}/{name}"


class Dashboard:
    """Mount it before the server starts; close it after the server."""

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
        """`folder`: of one run, or of several. `trouble`: a lane's problem outside its index. `down`: a controller's
        problem that needs an operator. `lanes`: lanes that may have no log yet. `more`: additional routes.

        Raises UserError if others can read its token.
        """
        self._server = server
        self._temporary = None if os.access(folder, os.W_OK) else tempfile.TemporaryDirectory(prefix="rlmux-serve-")
        spare = folder / _SPARE_NAME if self._temporary is None else Path(self._temporary.name)
        token_folder = folder if self._temporary is None else spare
        self.token_path = token_folder / TOKEN
        self.access = Access(limits)
        try:
            self.token = self.access.watch_admin_token(token_folder)
            self.access.watch(token_folder)
        except BaseException:  # an interrupt removes the folder too, and propagates
            self._remove_temporary()
            raise
        self.indexing = Indexing(folder, spare)
        self._webhook: Webhook | None = None
        root = Root(folder, spare, lanes)
        self._reads = reads = Reads(root, lambda run: trouble(run) or self.indexing.trouble(run), down)
        watch = Watch(reads)
        provider = server.listening.provider
        self._sessions = _Sessions(self.access, server.port, has_provider=provider is not None)
        scrape = Scrape(reads)
        self._control = Control(reads)
        read = table(reads, Streams(reads, watch, self.access), self._sessions, scrape)
        kept = AuditReads(token_folder)
        reading = (kept, TimelineReads(reads), CostReads(reads), SampleReads(reads), Finding(reads))
        others = (*reading, Questions(reads), self._control)
        every = (*read, *(address for other in others for address in other.addresses()), *more)
        document = Document()
        self.addresses = (*every, document.address)
        audit = Audit(token_folder)
        door = ApiRouter(self.access, server.port, scrape.observe, reads, audit)
        if provider is not None:
            from rlmux.service.dashboard.auth.oidc import OidcLogin

            server.mount_app(OIDC, OidcLogin(provider, self.access, audit, self._sessions.set_cookie).app)
        server.mount(PREFIX, document.added_to(door.router(self.addresses)))
        server.mount("", pages.router(server))
        server.wrap(lambda app: Gate(app, Hosts(server.host, allowed_hosts)))
        server.run_beside(watch.run)
        server.before_close(watch.close)

    def start(self) -> None:
        """Start the indexer."""
        self.indexing.start()

    def check(self) -> None:
        """Raises ThreadDiedError or StorageError if the indexer's supervising thread has ended."""
        self.indexing.thread.check()

    def login_url(self) -> str:
        """A URL that logs a browser in once, within a minute. Browsers do not send the part after the #."""
        return f"{self._server.url}/login#t={self.access.make_ticket()}"

    def send_alerts(self, url: str) -> None:
        """Send alerts to a webhook."""
        self._webhook = Webhook(self._reads, url)
        self._webhook.start()

    def close(self) -> None:
        if self._webhook is not None:
            self._webhook.close()
        self.indexing.close()
        self._control.close()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


class _Sessions:
    """Routes of login, logout and the current user."""

    def __init__(self, access: Access, port: int, *, has_provider: bool) -> None:
        self._access = access
        self._port = port
        self._has_provider = has_provider

    def version(self) -> Version:
        oidc = f"{OIDC}/login" if self._has_provider else None
        return Version(version=version("rlmux"), api=API_VERSION, log_schema=SCHEMA_VERSION, oidc=oidc)

    async def login(self, caller: Caller, body: Login, request: Request, response: Response) -> WhoAmI:
        if not self._access.may_login(caller.address):
            raise ProblemError(429, "too many logins", accepted="5 a minute")
        cookie = self._access.login(**body.model_dump(exclude_none=True))
        if cookie is None:
            (key,) = body.model_dump(exclude_none=True)
            raise ProblemError(
                401,
                f"this {key} is unknown here, or has ended",
                where="body",
                accepted="the token that you were given (rlmux token add), or for the folder's owner a new address of "
                "rlmux serve or the token in admin.token",
            )
        principal = self._access.of_session(cookie)
        assert principal is not None
        self.set_cookie(response, cookie, is_https=caller.is_https)
        request.state.user = principal.user
        return _shown(principal)

    async def logout(self, caller: Caller, response: Response, body: Nothing | None = None) -> None:
        self._access.logout(caller.cookie)
        self.set_cookie(response, "", is_https=caller.is_https)

    async def whoami(self, caller: Caller) -> WhoAmI:
        assert caller.principal is not None
        return _shown(caller.principal)

    def set_cookie(self, response: Response, value: str, *, is_https: bool) -> None:
        """Set the session's cookie; an empty value removes it."""
        name, age_s = cookie_name(self._port, is_https=is_https), int(LONGEST_SESSION_S) if value else 0
        response.set_cookie(name, value, max_age=age_s, secure=is_https, httponly=True, samesite="strict")


def _shown(principal: Principal) -> WhoAmI:
    ends = (
        None
        if principal.expires_at is None
        else datetime.fromtimestamp(principal.expires_at, UTC).isoformat(timespec="seconds")
    )
    return WhoAmI(
        user=principal.user,
        scopes=sorted(principal.scopes),
        expires_at=ends,
        role=principal.role,
        projects=sorted(principal.projects),
        may_run_code=principal.may_run_code,
    )


def table(reads: Reads, streams: Streams, sessions: _Sessions, scrape: Scrape) -> tuple[Address, ...]:
    """Routes of the service, its lanes and its pipelines; other handlers list their own."""
    return (
        get("/health", reads.health, "That the server lives; with a token, each lane's state", scope=None),
        get("/version", sessions.version, "Versions of the program, the API and the log", scope=None),
        post("/login", sessions.login, "Begin a session, by a ticket or a token", scope=None),
        post("/logout", sessions.logout, "End the session", scope="read", status=204),
        get("/whoami", sessions.whoami, "The current user and its rights"),
        get("/lanes", reads.lanes, "Every lane"),
        get(_LANE, reads.lane, "One lane: state, sums by kind and name"),
        get(f"{_LANE}/summary.json", reads.summary, "The report's figures, to be saved"),
        get(f"{_LANE}/timeline.html", reads.page, "The report's page, to be saved"),
        get(f"{_LANE}/devices", reads.devices, "What each device does now"),
        get(f"{_LANE}/alerts", reads.alerts, "What is wrong now, by rule"),
        post(f"{_LANE}/alerts", reads.acknowledge, "Say that alerts were seen", scope="control"),
        get(f"{_LANE}/events", reads.events, "Failures, losses, restarts, newest first"),
        get("/pipelines", reads.pipelines, "Pipelines of all lanes, or of one"),
        get(_PIPELINE, reads.pipeline, "One pipeline"),
        get(f"{_PIPELINE}/steps", reads.steps, "The table of its steps"),
        get(f"{_PIPELINE}/checkpoints", reads.checkpoints, "Kept checkpoints, and where they lie"),
        get(f"{_PIPELINE}/metrics", reads.metrics, "Curves of its metrics"),
        get(f"{_PIPELINE}/logs", reads.logs, "What its workers printed", scope="samples"),
        get("/metrics", scrape.answer, "Figures for Prometheus", scope="metrics", answers=PlainTextResponse),
        get("/metrics/grafana.json", scrape.grafana, "A dashboard for Grafana", scope="metrics"),
        get("/stream", streams.stream, "Changes as they come", answers=Events),
    )
