"""A server's listening address, transport security, trusted proxies, and the provider that logs its users in.

--listen HOST:PORT ── other machines reach it ── TLS of its own, or a proxy's ── else refused

    peer within --behind-proxy? ── yes ─▶ X-Forwarded-For and -Proto are the caller's; --user-header names the user
                               └── no  ─▶ they count for nothing; without TLS, and from another machine: 403

This layer runs before every router. It reads no request body and no route table.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from rlmux.broker.certificate import Tls, tls_of
from rlmux.core.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_USER_CHARS = 200
OIDC = "/oidc"
"""Path of the addresses that a provider's login uses."""
PROXY_USER = "proxy_user"
"""Key in a request's state of the user that a proxy names."""
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A provider, and this server as its client."""

    issuer: str
    """Address whose `/.well-known/openid-configuration` describes it."""
    client_id: str
    claim: str = "email"
    """Claim of the ID token that holds the login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A server's listening address and transport security."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port, or 0 for any that is free."""
    tls: Tls | None = None
    proxies: tuple[_Network, ...] = ()
    """Networks of the proxies whose forwarded headers count."""
    user_header: str | None = None
    """Lower-case name of the header in which a proxy names the user."""
    provider: Provider | None = None
    """Who logs users in, beside their tokens."""

    @property
    def is_private(self) -> bool:
        """Whether traffic is hidden from other machines."""
        return self.host in LOOPBACK or self.tls is not None or bool(self.proxies)

    def check_private(self) -> None:
        """Raises UserError for an address with unencrypted traffic from other machines."""
        if not self.is_private:
            raise UserError(
                f"--listen {self.host}: other machines would read the pages in the clear; accepted: 127.0.0.1, and "
                f"from elsewhere: ssh -L {self.port}:127.0.0.1:{self.port} THIS-MACHINE; or --tls-cert FILE "
                "--tls-key FILE; or --behind-proxy CIDR"
            )


def listening_of(
    host: str,
    port: int,
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    behind_proxy: Sequence[str] = (),
    user_header: str | None = None,
    provider: Provider | None = None,
) -> Listening:
    """The options of `rlmux serve`. Raises UserError for contradictory options and bad files."""
    tls = tls_of(tls_cert, tls_key)
    if user_header is not None and not behind_proxy:
        raise UserError("--user-header: any program could send it; accepted: with --behind-proxy CIDR")
    if user_header is not None and not re.fullmatch(r"[A-Za-z0-9-]{1,64}", user_header):
        raise UserError(f"--user-header {user_header!r}: accepted: a header's name, such as X-Forwarded-Email")
    return Listening(
        host=host,
        port=port,
        tls=tls,
        proxies=tuple(_network(text) for text in behind_proxy),
        user_header=None if user_header is None else user_header.lower(),
        provider=provider,
    )


def provider_of(issuer: str, client_id: str | None, claim: str | None) -> Provider:
    """Raises UserError for options that do not make one, and where Authlib is not installed."""
    if client_id is None:
        raise UserError("--oidc: accepted with --oidc-client ID, the name that the provider has for this server")
    if not issuer.startswith(("https://", "http://127.0.0.1", "http://localhost")):
        raise UserError(f"--oidc {issuer}: accepted: the provider's https:// address")
    missing = [name for name in ("authlib", "httpx2", "itsdangerous") if find_spec(name) is None]
    if missing:
        raise UserError(f"--oidc: {missing[0]} is not installed; install it with: pip install 'rlmux[oidc]'")
    return Provider(issuer=issuer.rstrip("/"), client_id=client_id, claim=claim or "email")


def _network(text: str) -> _Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise UserError(
            f"--behind-proxy {text}: accepted: an address or a network such as 10.0.0.5 or 10.0.0.0/24"
        ) from None


class Proxied:
    """ASGI middleware that applies the headers of trusted proxies."""

    def __init__(self, app: ASGIApp, listening: Listening) -> None:
        self._app = app
        self._listening = listening
        trusted = [str(network) for network in listening.proxies]
        self._forwarded = ProxyHeadersMiddleware(app, trusted)  # type: ignore[arg-type]  # uvicorn has ASGI types of its own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        peer, port = scope.get("client") or ("", 0)
        address = _address(peer)
        scope["client"] = (str(address or peer), port)
        if address is not None and any(address in network for network in self._listening.proxies):
            scope["state"] = {**scope.get("state", {}), PROXY_USER: self._user_of(scope)}
            await self._forwarded(scope, receive, send)  # type: ignore[arg-type]
        elif self._listening.tls is not None or (address is not None and address.is_loopback):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse("This server is asked through its proxy.\n", 403)(scope, receive, send)

    def _user_of(self, scope: Scope) -> str | None:
        """The user that the proxy names; None for no name, several names or an invalid one."""
        wanted = (self._listening.user_header or "").encode()
        given = [value for name, value in scope["headers"] if wanted and name == wanted]
        try:
            (user,) = (value.decode("utf-8").strip() for value in given)
        except ValueError:
            return None
        return user if 0 < len(user) <= MAX_USER_CHARS and user.isprintable() else None


def _address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The peer's address; an IPv4 address is never in its IPv6 form."""
    try:
        found = ipaddress.ip_address(peer)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
