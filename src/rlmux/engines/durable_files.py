"""Files that survive. Imports nothing heavy: the controller reads checkpoints without torch."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Make a file, or a folder's list of names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
