"""Which project a client's key belongs to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from rlmux.core.errors import RlmuxError


class UnknownKeyError(RlmuxError):
    """A key that the file does not list."""


class Keys:
    """The keys of the file; without any, each key is a project of its own.

    Keys are compared by hash with every entry, in constant time.
    """

    def __init__(self, project_by_key: Mapping[str, str]) -> None:
        self._project_by_hash = {_hash(key): project for key, project in project_by_key.items()}

    def project(self, key: str) -> str:
        """Raises UnknownKeyError."""
        given = _hash(key)
        if not self._project_by_hash:
            return "key-" + given.hex()[:8]
        found = [project for known, project in self._project_by_hash.items() if hmac.compare_digest(known, given)]
        if not found:
            raise UnknownKeyError("this API key is not known here; accepted: one of serve.keys")
        return found[0]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
