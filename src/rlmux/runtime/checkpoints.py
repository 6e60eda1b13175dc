"""A pipeline's checkpoints on disk: which there are, which is good, which may go.

    PIPELINE/step_12/  step_13/  latest      each folder whole by the way it is written; `latest` names the newest

A damaged one is skipped for the one before it, and said.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from rlmux.core.errors import CheckpointError
from rlmux.engines.checkpoint import read_checkpoint
from rlmux.engines.files import sync_path

_NAME = re.compile(r"step_(\d+)")


class CheckpointFolder:
    """The checkpoints of one pipeline; keeps the newest `keep` of them."""

    def __init__(self, folder: Path, *, keep: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._keep = max(1, keep)
        self._say = say

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def weights(self, version: int) -> Path:
        """Where rollout workers find a version that is no longer in shared memory."""
        return self.path(version) / "model.safetensors"

    def newest(self) -> tuple[int, Path] | None:
        """The newest checkpoint whose every checksum holds, with its step."""
        for step in reversed(self._steps()):
            try:
                read_checkpoint(self.path(step))
            except CheckpointError as error:
                self._say(f"{error}; falling back to the checkpoint before it")
            else:
                return step, self.path(step)
        return None

    def mark_latest(self, step: int) -> None:
        """Name the newest checkpoint, once it is there."""
        aside = self._folder / ".latest.tmp"
        aside.write_text(f"step_{step}\n")
        sync_path(aside)
        aside.replace(self._folder / "latest")
        sync_path(self._folder)

    def prune(self) -> None:
        """Remove the oldest, never the newest `keep`."""
        for step in self._steps()[: -self._keep]:
            shutil.rmtree(self.path(step), ignore_errors=True)

    def _steps(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir()) if self._folder.is_dir() else ()
        return sorted(int(match[1]) for match in names if match)
