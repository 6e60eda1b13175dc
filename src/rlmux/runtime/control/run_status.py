"""The status of a run, possibly in progress in another process.

the run's log ── entries that are new ──▶ CondensedHistory ──▶ status
the control socket ── which process runs it, what is still to come ──▶ beside it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlmux.core.errors import RlmuxError
from rlmux.log.run_log import NOT_SHOWN, LogReader
from rlmux.report.acknowledgements import with_acknowledged
from rlmux.report.alerts import Alerts, disk_alert
from rlmux.report.status import status
from rlmux.report.timeline.condensed_state import BlockEnd, CondensedHistory, keep, kept_history
from rlmux.report.timeline.history import without_collector
from rlmux.runtime.control.control_requests import GetStatus
from rlmux.runtime.control.control_socket import NoAnswerError, NotRunningError, send_request

ANSWER_LIMIT_S = 5.0
"""Seconds after which a controller that gives no answer counts as busy."""
KEPT_ROWS = 50_000
"""Rows after which the condensed past is stored again."""


class StatusReader:
    """Reads the status of one run repeatedly; each read takes only new rows from the log."""

    def __init__(self, folder: Path, *, answer_limit_s: float = ANSWER_LIMIT_S) -> None:
        """Raises LogError where the folder's log cannot be read."""
        self._folder = folder
        self._answer_limit_s = answer_limit_s
        self._log = LogReader(folder)
        self._history, self._seq = CondensedHistory(self._log.header), 0
        self._alerts = Alerts()

    def read(self) -> dict[str, Any]:
        """The status as `rlmux status --json` prints it."""
        answer = self._request_status()  # before the log: a run that ends between the two is then shown as ended
        with without_collector():
            if not self._seq:
                self._take_past()
            self._follow()
            steps = self._history.step_times()
        shown = status(self._history, is_going_on=answer is not None, steps=steps)
        shown["now_s"] = max(shown["now_s"], answer["now_s"]) if answer else shown["now_s"]
        alerts = self._alerts.look(self._history, steps, now_s=shown["now_s"], is_going_on=answer is not None)
        firing = [alert.to_json() for alert in [*alerts, disk_alert(self._folder)] if alert is not None]
        shown["alerts"] = with_acknowledged(self._folder, firing)
        shown["pid"] = answer["pid"] if answer else None
        shown["is_kept_open"] = bool(answer and answer["is_kept_open"])
        shown["upcoming"] = answer["upcoming"] if answer else []
        return shown

    def _take_past(self) -> None:
        """Load the condensed past of a long run, fold the blocks since, and store the result if there are many."""
        kept = kept_history(self._folder, self._log.header)
        if kept is not None and self._log.block_end(kept[1].last_seq) == kept[1]:
            self._history, (self._seq, _) = kept
        newest = self._log.block_end()
        if newest is not None and newest[0] - self._seq >= KEPT_ROWS:
            self._follow(until=newest[0])
            keep(self._folder, self._history, BlockEnd(*newest))

    def _follow(self, until: int | None = None) -> None:
        for part in self._log.parts(after=self._seq, until=until, bare=NOT_SHOWN):
            self._history.add(part)
            self._seq = max(self._seq, part.seq)
        self._history.condense()

    def _request_status(self) -> dict[str, Any] | None:
        """The controller's status; None without a controller."""
        try:
            return send_request(self._folder, GetStatus(), limit_s=self._answer_limit_s)
        except NotRunningError:
            return None
        except NoAnswerError:
            return {"now_s": 0.0, "pid": None, "is_kept_open": False, "upcoming": []}
        except RlmuxError:  # the run ended during the request
            return None

    def close(self) -> None:
        self._log.close()
