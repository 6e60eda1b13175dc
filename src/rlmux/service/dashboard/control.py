"""What is asked of a run that goes on, through the control socket in its folder: the verbs of the command line.

GET  lanes/L/status  queue  usage  pipelines/L/NAME/why        keys of `rlmux status --json`, `queue`, `usage`, `why`
GET  lanes/L/spec                                              the file that the run began with
POST lanes/L/shares {text, source}                             {outcome}
POST pipelines/L/NAME/cancel  hold  release  rank  park  unpark   {pipeline, outcome}
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmux.config.load import without_pipelines
from rlmux.core.errors import RlmuxError, UserError
from rlmux.report.log import LogReader
from rlmux.runtime.control_requests import record_of
from rlmux.runtime.control_socket import NoAnswerError, NotRunningError, ask
from rlmux.runtime.run_status import StatusReader
from rlmux.service.dashboard.door import Address, Asked, LongWork, get
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.dashboard.reads import SHOWN_ONLY, Reads

_LIMIT_S = 20.0
_LANE, _PIPELINE = "/lanes/{lane}", "/pipelines/{lane}/{name}"


class Control:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._status_by_folder: dict[Path, StatusReader] = {}
        self._is_read = threading.Lock()
        self._asking = LongWork(at_once=8, waiting=64)

    def addresses(self) -> tuple[Address, ...]:
        asking: dict[str, Any] = {"long_work": self._asking}
        return (
            get(f"{_LANE}/status", self.status),
            get(f"{_LANE}/queue", self.queue, **asking),
            get(f"{_LANE}/spec", self.spec),
            get(f"{_PIPELINE}/why", self.why, **asking),
            get(f"{_LANE}/usage", self.usage, **asking),
            Address(method="POST", path=f"{_LANE}/shares", scope="admin", answer=self.set_shares, **asking),
            *(
                Address(
                    method="POST", path=f"{_PIPELINE}/{verb}", scope="control", answer=self._telling(verb), **asking
                )
                for verb in ("cancel", "hold", "release", "rank", "park", "unpark")
            ),
        )

    def close(self) -> None:
        with self._is_read:
            for reader in self._status_by_folder.values():
                reader.close()
            self._status_by_folder.clear()

    def status(self, asked: Asked) -> Any:
        folder = self._reads.run_folder(asked.path["lane"])
        with self._is_read:
            if folder not in self._status_by_folder:
                self._status_by_folder[folder] = StatusReader(folder)
            shown = self._status_by_folder[folder].read()
        return self._covered(asked, shown)

    def spec(self, asked: Asked) -> Any:
        """The file that the run began with, whose cluster holds for all that is submitted."""
        folder = self._reads.run_folder(asked.path["lane"])
        with LogReader(folder) as log:
            written = log.header.get("spec") or {}
        if "resolved" not in written:
            raise ProblemError(404, "its log keeps no file", accepted="a lane that `rlmux run` or `rlmux serve` began")
        sight = self._reads.sight(asked.path["lane"], asked.who)
        text = without_pipelines(written["resolved"], sight.shows) if sight.is_limited else written["resolved"]
        return {"source": str(written["source"]), "text": text}

    def why(self, asked: Asked) -> Any:
        self._check_seen(asked)
        return self._ask(asked, "why", name=asked.path["name"])

    def queue(self, asked: Asked) -> Any:
        return self._ask(asked, "queue")

    def usage(self, asked: Asked) -> Any:
        """What the controller says now; of a run that does not go on, what its log said last."""
        sight = self._reads.sight(asked.path["lane"], asked.who)
        try:
            return sight.cover_usage(self._told(asked, "usage"))
        except ProblemError as problem:
            if problem.status != 409:
                raise
        with self._reads.open(asked.path["lane"], asked.who) as reader:
            return sight.cover_usage(reader.facts.get("accounts") or {"accounts": []})

    def set_shares(self, asked: Asked) -> Any:
        fields = asked.body
        is_good = isinstance(fields, dict) and set(fields) == {"text", "source"}
        if not is_good or any(type(value) is not str for value in fields.values()):
            raise ProblemError(400, "no shares", where="body", accepted='{"text": YAML, "source": its name}')
        return self._ask(asked, "set_shares", **fields)

    def _telling(self, verb: str) -> Callable[[Asked], Any]:
        def tell(asked: Asked) -> Any:
            fields = {} if asked.body is None else asked.body
            takes = {"rank"} if verb == "rank" else set()
            is_good = isinstance(fields, dict) and set(fields) == takes
            if not is_good or any(type(value) is not int for value in fields.values()):
                accepted = '{"rank": a whole number}' if takes else "{}"
                raise ProblemError(400, f"not what {verb} takes", where="body", accepted=accepted)
            self._check_seen(asked)
            self._check_own(asked)
            return self._ask(asked, verb, name=asked.path["name"], **fields)

        return tell

    def _check_seen(self, asked: Asked) -> None:
        """A pipeline that is to come is in no index: its controller says whose it is."""
        if asked.who is not None and not asked.who.sees_all:
            name = asked.path["name"]
            if not self._reads.sight(asked.path["lane"], asked.who).sees(self._told(asked, "account", name=name)):
                raise ProblemError(404, f"no pipeline {name[:80]!r}", accepted=SHOWN_ONLY)

    def _check_own(self, asked: Asked) -> None:
        """Neither operator nor administrator: one changes one's own pipelines alone."""
        if asked.who is not None and not asked.who.may("admin") and asked.who.role != "operator":
            user = self._told(asked, "account", name=asked.path["name"])["user"]
            if user != asked.who.user:
                raise ProblemError(
                    403, f"pipeline {asked.path['name']!r} is of another user", accepted="one of your own, or admin"
                )

    def _ask(self, asked: Asked, request: str, **fields: Any) -> dict[str, Any]:
        """What the controller says, as far as the caller may know it."""
        return self._covered(asked, self._told(asked, request, **fields))

    def _told(self, asked: Asked, request: str, **fields: Any) -> dict[str, Any]:
        folder = self._reads.run_folder(asked.path["lane"])
        down = self._reads.down(asked.path["lane"])
        if down is not None:
            raise ProblemError(503, down)
        try:
            answer = ask(folder, record_of({"request": request, **fields}), limit_s=_LIMIT_S)
        except NotRunningError:
            name = asked.path["lane"]
            raise ProblemError(409, f"nothing runs in lane {name} now", accepted="a lane that goes on") from None
        except NoAnswerError as error:
            raise ProblemError(503, str(error)) from None
        except UserError as error:
            raise self._refusal(asked, request, str(error)) from None
        except RlmuxError as error:
            raise ProblemError(503, str(error)) from None
        del answer["ok"]
        return answer

    def _refusal(self, asked: Asked, request: str, text: str) -> ProblemError:
        """What the controller refuses, without names that the caller is not shown."""
        sight = self._reads.sight(asked.path["lane"], asked.who)
        if sight.is_limited and request == "account":  # its text names every pipeline
            return ProblemError(404, f"no pipeline {asked.path['name'][:80]!r}", accepted=SHOWN_ONLY)
        return ProblemError(409, str(sight.cover(text)))

    def _covered(self, asked: Asked, answer: dict[str, Any]) -> dict[str, Any]:
        """What a controller says, as far as the caller may know it."""
        sight = self._reads.sight(asked.path["lane"], asked.who)
        if not sight.is_limited:
            return answer
        rows = {name: row for name, row in answer.get("pipelines", {}).items() if sight.shows(name)}
        upcoming = [row for row in answer.get("upcoming", ()) if sight.sees(row)]  # in no index: none would be shown
        covered: dict[str, Any] = sight.cover({**answer, "pipelines": rows, "upcoming": upcoming})
        kept = {**covered, "upcoming": upcoming}
        return {key: value for key, value in kept.items() if key in answer}
