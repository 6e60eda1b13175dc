"""The folder of a service: created, or reused after an earlier one; one server at a time.

ROOT/
  admin.token  service.db  bundles/       the service's own
  devices.json                            which devices each lane has
  LANE/                                   a run's folder, with the log that is the truth of the lane
  LANE.yaml  LANE.log                     its file, and what its controller printed
"""

from __future__ import annotations

from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.log.folder_lock import FolderLock

BUNDLES = "bundles"
NO_CODE = "none"
"""Empty folder in the bundles' folder, for pipelines without code."""


def open_root(folder: Path) -> FolderLock:
    """Create or reuse the folder, private to the user. Raises UserError if it is another's or in use."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = (folder / BUNDLES / NO_CODE).is_dir()
        if not is_ours and any(folder.iterdir()):
            raise UserError(f"--out {folder}: not empty, and no service was in it; accepted: a new or an empty folder")
        (folder / BUNDLES / NO_CODE).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made: {error.strerror}; accepted: another folder") from None
    lock = FolderLock.take(folder)
    lock.sign()
    return lock
