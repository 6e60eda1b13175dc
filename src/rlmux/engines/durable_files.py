"""Durable files. Imports nothing heavy: the controller reads checkpoints without torch."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
