"""A run that goes on in another process: submit pipelines to it, cancel them, see where it is.

connect(DIR) ─▶ Connection ── control socket ──▶ the run's controller
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.api.files import IN_CODE, File
from rlmux.api.runs import Run
from rlmux.core.errors import UserError

_POLL_S = 0.5
_OVER = ("finished", "failed", "cancelled", "refused", "stopped")


class Connection:
    """A run that goes on. Each call asks it anew, so that nothing is to be closed."""

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError for a folder that holds no run, or one that nothing runs in now."""
        self.run = Run(folder)
        if not self.status()["is_going_on"]:
            raise UserError(
                f"{folder}: nothing runs here now; accepted: a run that goes on (rlmux run --keep-open), or "
                "rlmux.open_run for one that is over"
            )

    def __repr__(self) -> str:
        return f"<Connection to {self.run.folder}>"

    def status(self) -> dict[str, Any]:
        """What `rlmux status --json` prints."""
        return self.run.status()

    def submit(self, file: File, *, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Add the file's pipelines to the run, whose cluster and policy hold. Returns what became of each.

        Raises UserError for a file that does not fit the run; nothing of it is then submitted.
        """
        from rlmux.api.files import load_for_submission
        from rlmux.runtime.control_socket import ask
        from rlmux.runtime.launch import spec_of

        spec = load_for_submission(file, overrides=overrides, run=spec_of(self.run.folder))
        source = spec.source if isinstance(file, str | Path) else IN_CODE
        answer: list[dict[str, Any]] = ask(self.run.folder, "submit", text=spec.resolved, source=source)["pipelines"]
        return answer

    def cancel(self, pipeline: str) -> str:
        """End one pipeline at its next safe point. Returns what became of it; UserError for one that is unknown."""
        from rlmux.runtime.control_socket import ask

        return str(ask(self.run.folder, "cancel", name=pipeline)["outcome"])

    def wait(self, *pipelines: str, timeout_s: float | None = None) -> dict[str, str]:
        """Wait until these pipelines, by default all, are over. Returns the status of each.

        Raises UserError for an unknown name, TimeoutError after `timeout_s` seconds.
        """
        due_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            shown = self.status()
            known = {name: one["status"] for name, one in shown["pipelines"].items()}
            known.update({one["pipeline"]: "upcoming" for one in shown["upcoming"]})
            for name in pipelines:
                if name not in known:
                    raise UserError(f"no pipeline {name!r}; accepted: {', '.join(known) or 'none yet'}")
            asked = {name: known[name] for name in pipelines or known}
            if not shown["is_going_on"] or all(status in _OVER for status in asked.values()):
                return asked
            if due_s is not None and time.monotonic() > due_s:
                raise TimeoutError(f"not over after {timeout_s:g} s: {asked}")
            time.sleep(_POLL_S)


def connect(folder: str | Path) -> Connection:
    """A connection to the run that goes on in this folder."""
    if "://" in str(folder):
        raise UserError(f"{folder}: accepted: the folder of a run that goes on")
    return Connection(folder)
