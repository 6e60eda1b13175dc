"""A run in another process or on a server: submit pipelines, cancel them, read their status.

connect(DIR) ─▶ Connection ── control socket ──▶ the run's controller
connect(URL) ─▶ Connection ── HTTP ──▶ rlmux serve ── control socket ──▶ the lane's controller

A server that is away when the connection is made is an error at once. Later calls retry for `patience_s`, with a
warning of the logger `rlmux.connect`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rlmux.api.files import IN_CODE, File, load_file
from rlmux.api.run_handle import Run
from rlmux.client.target import RunTarget, is_url, target_of
from rlmux.config import Purpose
from rlmux.core.errors import UserError

PATIENCE_S = 30.0
_POLL_S = 0.5
_OVER = ("finished", "failed", "cancelled", "refused")
_LOG = logging.getLogger("rlmux.connect")


class Connection:
    """A running run. Each call connects anew, so nothing has to be closed."""

    def __init__(self, place: str | Path, *, patience_s: float = PATIENCE_S) -> None:
        """Raises UserError for a folder without a run, one that nothing runs in now, and a URL that does not answer.

        `patience_s`: seconds of each call's retries.
        """
        if not patience_s >= 0:
            raise UserError(f"patience_s is {patience_s}; accepted: a number of seconds, 0 or more")
        self._place = place
        self._patience_s = 0.0
        if not self.status()["is_going_on"]:
            raise UserError(
                f"{place}: nothing runs here now; accepted: a run that goes on (rlmux run --keep-open), or "
                "rlmux.open_run for one that is over"
            )
        self._patience_s = patience_s

    def __repr__(self) -> str:
        return f"<Connection to {self._place}>"

    @property
    def run(self) -> Run:
        """The run's folder as Python values. Raises UserError for a run on a server."""
        if is_url(self._place):
            raise UserError(f"{self._place}: its folder is the server's; accepted: a connection to a folder")
        return Run(self._place)

    def status(self) -> dict[str, Any]:
        """What `rlmux status --json` prints."""
        with closing(self._target()) as target:
            return target.status()

    def submit(self, file: File, *, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Add the file's pipelines to the run, whose cluster, policy and shares hold. Returns what became of each.

        A server gets the file's code and rows with it. Raises UserError for a file that does not fit the run; nothing
        of it is then submitted.
        """
        with closing(self._target()) as target:
            spec = load_file(file, purpose=Purpose.RUN, overrides=overrides, cluster_of=target.spec())
            return target.submit(spec, spec.source if isinstance(file, str | Path) else IN_CODE)

    def cancel(self, pipeline: str) -> str:
        """End one pipeline at its next safe point. Returns what became of it; UserError for one that is unknown."""
        return str(self._send_command("cancel", pipeline)["outcome"])

    def retry(self, pipeline: str) -> str:
        """Have a failed pipeline go on from its newest checkpoint, as soon as there is room; the others are not
        disturbed."""
        return str(self._send_command("retry", pipeline)["outcome"])

    def remove(self, pipeline: str, *, parts: str = "all") -> int:
        """Remove the files of a pipeline that is over: `all`, its `checkpoints` or its `samples`. Returns the bytes
        that this frees; what the pipeline used stays counted."""
        return int(self._send_command("remove", pipeline, parts=parts, dry_run=False)["freed_bytes"])

    def hold(self, pipeline: str) -> str:
        """Keep a waiting pipeline from starting until it is released."""
        return str(self._send_command("hold", pipeline)["outcome"])

    def release(self, pipeline: str) -> str:
        """Allow a held pipeline to start."""
        return str(self._send_command("release", pipeline)["outcome"])

    def rank(self, pipeline: str, rank: int) -> str:
        """Order a waiting pipeline among its user's: lower ranks are placed first."""
        return str(self._send_command("rank", pipeline, rank=rank)["outcome"])

    def park(self, pipeline: str) -> str:
        """Free a pipeline's devices from its next step boundary until `unpark`; weights stay the same."""
        return str(self._send_command("park", pipeline)["outcome"])

    def unpark(self, pipeline: str) -> str:
        """Resume a parked pipeline."""
        return str(self._send_command("unpark", pipeline)["outcome"])

    def usage(self) -> dict[str, Any]:
        """What `rlmux usage --json` prints."""
        with closing(self._target()) as target:
            return target.usage()

    def why(self, pipeline: str) -> dict[str, Any]:
        """What `rlmux why --json` prints."""
        return self._send_command("why", pipeline)

    def wait(self, *pipelines: str, timeout_s: float | None = None) -> dict[str, str]:
        """Wait until these pipelines, by default all, are over. Returns the status of each.

        Raises UserError for an unknown name, TimeoutError after `timeout_s` seconds, or once a server has been away for
        longer than it is waited for.
        """
        due_s = None if timeout_s is None else time.monotonic() + timeout_s
        patience_s = self._patience_s if is_url(self._place) else 0.0  # a server starts its controller again
        stopped_s: float | None = None
        while True:
            shown = self.status()
            known = {name: pipeline["status"] for name, pipeline in shown["pipelines"].items()}
            known.update({submission["pipeline"]: "upcoming" for submission in shown["upcoming"]})
            for name in pipelines:
                if name not in known:
                    raise UserError(f"no pipeline {name!r}; accepted: {', '.join(known) or 'none yet'}")
            status_by_name = {name: known[name] for name in pipelines or known}
            now_s = time.monotonic()
            stopped_s = None if shown["is_going_on"] else now_s if stopped_s is None else stopped_s
            is_given_up = stopped_s is not None and now_s - stopped_s >= patience_s
            if is_given_up or all(status in _OVER for status in status_by_name.values()):
                return status_by_name
            if due_s is not None and now_s > due_s:
                raise TimeoutError(f"not over after {timeout_s:g} s: {status_by_name}")
            time.sleep(_POLL_S)

    def _target(self) -> RunTarget:
        return target_of(self._place, _LOG.warning, patience_s=self._patience_s)

    def _send_command(self, request: str, pipeline: str, **fields: Any) -> dict[str, Any]:
        with closing(self._target()) as target:
            return target.send_command(request, pipeline, **fields)


def connect(place: str | Path, *, patience_s: float = PATIENCE_S) -> Connection:
    """A connection to the run in this folder, or to a lane: `http://HOST:PORT/lanes/NAME`, with RLMUX_TOKEN set.

    Raises UserError where nothing answers now. `patience_s`: seconds of each later call's retries; 0: it raises at
    once.
    """
    return Connection(place, patience_s=patience_s)
