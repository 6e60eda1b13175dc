"""Which project a client's key belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rlmux.core.errors import RlmuxError


class UnknownKeyError(RlmuxError):
    """A key that the file does not list."""


class Keys:
    """The keys of the file; without any, each key is a project of its own."""

    def __init__(self, project_by_key: Mapping[str, str]) -> None:
        self._project_by_key = project_by_key

    def project(self, key: str) -> str:
        """Raises UnknownKeyError."""
        if not self._project_by_key:
            return "key-" + hashlib.sha256(key.encode()).hexdigest()[:8]
        if key not in self._project_by_key:
            raise UnknownKeyError("this API key is not known here; accepted: one of serve.keys")
        return self._project_by_key[key]
