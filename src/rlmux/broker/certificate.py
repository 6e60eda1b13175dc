"""The certificate that a server or a broker shows, from --tls-cert and --tls-key.

A module of its own: `rlmux serve` and `rlmux broker` take the same options, and read them before they make anything.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from rlmux.core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A certificate, validated by reading it once."""

    cert: Path
    """PEM of the certificate chain."""
    key: Path
    """PEM of its key, without a password."""

    def server_context(self) -> ssl.SSLContext:
        """Settings of a server's connections. Raises OSError or ValueError for files that are no such pair."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key, password=_no_password)
        return context


def tls_of(cert: Path | None, key: Path | None) -> Tls | None:
    """The two options; None without them. Raises UserError for one alone, and for files that are no such pair."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise UserError(f"{given}: needs {missing} FILE too")
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise UserError(f"{option} {path}: {error.strerror}; accepted: a PEM file") from None
    tls = Tls(cert=cert.absolute(), key=key.absolute())
    try:
        tls.server_context()
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "it is no PEM file, or has a password"
        raise UserError(
            f"--tls-cert {cert}, --tls-key {key}: {str(why).lower().replace('_', ' ')}; accepted: PEM files of a "
            "certificate and of its own key, without a password"
        ) from None
    return tls


def _no_password() -> str:
    """Replaces a prompt on the terminal."""
    return ""
