"""Login by an OpenID Connect provider: its user becomes a session of the user with that login.

    /oidc/login ── state, nonce, PKCE ──▶ provider ── code ──▶ /oidc/callback ── ID token, checked ──▶ claim
                                                                              ── Access.login_as ───▶ session cookie

Authlib speaks the protocol. Only the users of the folder have access: a provider may have many others.
"""

from __future__ import annotations

import os
import secrets
from typing import Any, Protocol

import httpx2
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from rlmux.service.addresses import OIDC, Provider
from rlmux.service.dashboard.auth.access import Access
from rlmux.service.dashboard.auth.audit import Audit

SECRET = "RLMUX_OIDC_SECRET"
"""Environment variable of the client's secret; a public client has none."""
_LOGIN_S = 600


class SetCookie(Protocol):
    """Sets the cookie of a session."""

    def __call__(self, response: Response, value: str, *, is_https: bool) -> None: ...


class OidcLogin:
    """The addresses below `OIDC`."""

    def __init__(self, provider: Provider, access: Access, audit: Audit, set_cookie: SetCookie) -> None:
        from authlib.integrations.starlette_client import OAuth

        self._provider = provider
        self._access = access
        self._audit = audit
        self._set_cookie = set_cookie
        self._client: Any = OAuth().register(
            "provider",
            client_id=provider.client_id,
            client_secret=os.environ.get(SECRET),
            server_metadata_url=f"{provider.issuer}/.well-known/openid-configuration",
            client_kwargs={"scope": "openid email profile", "code_challenge_method": "S256"},
        )
        state = Middleware(
            SessionMiddleware,
            secret_key=secrets.token_hex(32),
            session_cookie="rlmux_oidc",
            path=OIDC,
            max_age=_LOGIN_S,
            same_site="lax",  # the provider sends the browser back
        )
        self.app = Starlette(routes=[Route("/login", self._begin), Route("/callback", self._end)], middleware=[state])

    async def _begin(self, request: Request) -> Response:
        back = f"{request.url.scheme}://{request.url.netloc}{OIDC}/callback"
        try:
            redirect: Response = await self._client.authorize_redirect(request, back)
        except (httpx2.HTTPError, ValueError, RuntimeError, KeyError) as error:
            return PlainTextResponse(f"{self._provider.issuer} does not answer as a provider: {error}\n", 502)
        return redirect

    async def _end(self, request: Request) -> Response:
        from authlib.common.errors import AuthlibBaseError
        from joserfc.errors import JoseError

        try:
            token = await self._client.authorize_access_token(request)
        except (AuthlibBaseError, JoseError, httpx2.HTTPError, ValueError, KeyError) as error:
            return PlainTextResponse(f"not logged in: {error}; to try again: {OIDC}/login\n", 401)
        claims = token.get("userinfo") or {}
        login = claims.get(self._provider.claim)
        if not isinstance(login, str) or (self._provider.claim == "email" and claims.get("email_verified") is False):
            return PlainTextResponse(f"not logged in: the provider names no verified {self._provider.claim}\n", 403)
        return await run_in_threadpool(self._login, request, login)

    def _login(self, request: Request, login: str) -> Response:
        """A session of the user with this login, and a line of the audit."""
        address = request.client.host if request.client else ""
        about = {"by": "oidc", "token": "", "address": address, "method": "GET", "path": f"{OIDC}/callback"}
        cookie = self._access.login_as(login)
        if cookie is None:
            self._audit.refused(403, user=login[:200], **about)
            words = (
                f"{login} is no user of this server; its owner adds one with: rlmux user set DIR NAME --login LOGIN\n"
            )
            return PlainTextResponse(words, 403)
        principal = self._access.of_session(cookie)
        self._audit.end(self._audit.begin(user=principal.user if principal else login, **about), 303)
        response = RedirectResponse("/fleet", 303)
        self._set_cookie(response, cookie, is_https=request.url.scheme == "https")
        return response
