"""Who changed what: one line for each request that may have an effect, refused ones too, before it is answered.

Door ── method other than GET and HEAD ─▶ Audit.add ─▶ audit.jsonl (0600), appended, never rewritten
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

NAME = "audit.jsonl"
_MAX_PATH = 512
"""Characters of an address that are kept."""


class Audit:
    """Writes the file; may be used by any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._is_written = threading.Lock()

    def add(self, *, user: str, token: str, address: str, method: str, path: str, status: int) -> None:
        """Append a line. Raises OSError where it cannot be written. `token`: its id, empty for a session."""
        row = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "user": user,
            "token": token,
            "address": address,
            "method": method,
            "path": path[:_MAX_PATH],
            "status": status,
        }
        data = (json.dumps(row) + "\n").encode()
        with self._is_written:
            descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
