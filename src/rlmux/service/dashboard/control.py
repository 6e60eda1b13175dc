"""Control of a running run through the control socket in its folder: the verbs of the command line.

GET  lanes/L/status  queue  usage  pipelines/L/NAME/why        keys of `rlmux status --json`, `queue`, `usage`, `why`
GET  lanes/L/spec                                              the file that the run began with
GET  pipelines/L/NAME/file                                     the part of the submitted file that is the pipeline's
POST lanes/L/shares {text, source}                             {outcome}
POST pipelines/L/NAME/remove {parts}  lanes/L/remove           {outcome, freed_bytes}; of a run that is over too
POST pipelines/L/NAME/cancel  retry  hold  release  rank  park  unpark   {pipeline, outcome}
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlmux.config.load import file_of_pipeline, without_pipelines
from rlmux.core.errors import RlmuxError, UserError
from rlmux.log.folder_lock import living_owner
from rlmux.log.run_log import LogReader
from rlmux.runtime.control.control_requests import record_of
from rlmux.runtime.control.control_socket import NoAnswerError, NotRunningError, send_request
from rlmux.runtime.control.removals import remove_here, remove_run
from rlmux.runtime.control.run_control import removal_fields
from rlmux.runtime.control.run_status import StatusReader
from rlmux.service.dashboard.handlers import SHOWN_ONLY, Reads
from rlmux.service.dashboard.parameters import Caller, CallerContext
from rlmux.service.dashboard.router import Address, LongWork, get, post
from rlmux.service.dashboard.schemas.run_schemas import (
    File,
    LaneRemoval,
    LaneRemoved,
    Nothing,
    Outcome,
    Queue,
    Rank,
    Removal,
    RemovalOutcome,
    Shares,
    Status,
    Why,
)
from rlmux.service.dashboard.schemas.usage_schemas import Usage
from rlmux.service.problems import ProblemError

_LIMIT_S = 20.0
_LANE, _PIPELINE = "/lanes/{lane}", "/pipelines/{lane}/{name}"


def check_own(caller: CallerContext, user_of: Callable[[str], str]) -> None:
    """Raises ProblemError for another user's pipeline, except for operators and administrators.

    `user_of`: the user of a pipeline's name.
    """
    principal, name = caller.principal, caller.path.get("name", "")
    if principal is None or principal.may("admin") or principal.role == "operator":
        return
    if user_of(name) != principal.user:
        raise ProblemError(403, f"pipeline {name!r} is of another user", accepted="one of your own, or admin")


class Control:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._status_by_folder: dict[Path, StatusReader] = {}
        self._is_read = threading.Lock()
        self._long_work = LongWork(max_running=8, max_waiting=64)

    def addresses(self) -> tuple[Address, ...]:
        as_long_work: dict[str, Any] = {"long_work": self._long_work}
        return (
            get(f"{_LANE}/status", self.status, "What `rlmux status --json` prints"),
            get(f"{_LANE}/queue", self.queue, "What waits, in the order of offers", **as_long_work),
            get(f"{_LANE}/spec", self.spec, "The file that the run began with"),
            get(f"{_PIPELINE}/file", self.file, "Its part of the file that it came with", **as_long_work),
            get(f"{_PIPELINE}/why", self.why, "Why it waits, and what would start it now", **as_long_work),
            get(f"{_LANE}/usage", self.usage, "What users and projects have used", **as_long_work),
            post(
                f"{_LANE}/shares",
                self.set_shares,
                "Set what users and projects are entitled to",
                scope="admin",
                **as_long_work,
            ),
            post(f"{_PIPELINE}/remove", self.remove, "As `rlmux remove`", scope="control", **as_long_work),
            post(
                f"{_LANE}/remove",
                self.remove_lane,
                "Remove a lane that the service's file no longer names",
                scope="admin",
                **as_long_work,
            ),
            post(f"{_PIPELINE}/rank", self.rank, "As `rlmux rank`", scope="control", **as_long_work),
            *(
                post(
                    f"{_PIPELINE}/{verb}",
                    self._verb_handler(verb),
                    f"As `rlmux {verb}`",
                    scope="control",
                    **as_long_work,
                )
                for verb in ("cancel", "retry", "hold", "release", "park", "unpark")
            ),
        )

    def close(self) -> None:
        with self._is_read:
            for reader in self._status_by_folder.values():
                reader.close()
            self._status_by_folder.clear()

    def status(self, caller: Caller, lane: str) -> Status:
        folder = self._reads.run_folder(lane)
        with self._is_read:
            if folder not in self._status_by_folder:
                self._status_by_folder[folder] = StatusReader(folder)
            shown = self._status_by_folder[folder].read()
        return Status.model_validate(self._covered(caller, shown))

    def spec(self, caller: Caller, lane: str) -> File:
        """The run's original file, whose cluster applies to every submission."""
        folder = self._reads.run_folder(lane)
        with LogReader(folder) as log:
            written = log.header.get("spec") or {}
        if "resolved" not in written:
            raise ProblemError(404, "its log keeps no file", accepted="a lane that `rlmux run` or `rlmux serve` began")
        sight = self._reads.sight(lane, caller.principal)
        text = without_pipelines(written["resolved"], sight.shows) if sight.is_limited else written["resolved"]
        return File(source=str(written["source"]), text=text)

    def file(self, caller: Caller, lane: str, name: str, short: bool = False) -> File:
        """A file with this pipeline alone, to be submitted under another name. `short`: without default values."""
        with LogReader(self._reads.run_folder(lane)) as log:
            spec = log.header.get("spec") or {}
            files = [(note.source, note.resolved) for note in log.state().submitted]
        for source, resolved in (*reversed(files), (spec.get("source", ""), spec.get("resolved", ""))):
            text = file_of_pipeline(resolved, name, is_short=short)
            if text is not None:
                return File(source=str(source), text=text)
        raise ProblemError(404, f"its log keeps no file of {name[:80]}", accepted="a pipeline that came with a file")

    def why(self, caller: Caller, lane: str, name: str) -> Why:
        self._check_seen(caller)
        return Why.model_validate(self._request_covered(caller, "why", name=name))

    def queue(self, caller: Caller, lane: str) -> Queue:
        return Queue.model_validate(self._request_covered(caller, "queue"))

    def usage(self, caller: Caller, lane: str) -> Usage:
        """Usage from the controller, or from the log of a run that has ended."""
        sight = self._reads.sight(lane, caller.principal)
        try:
            return Usage.model_validate(sight.cover_usage(self._request(caller, "usage")))
        except ProblemError as problem:
            if problem.status != 409:
                raise
        with self._reads.open(lane, caller.principal) as reader:
            return Usage.model_validate(sight.cover_usage(reader.facts.get("accounts") or {"accounts": []}))

    def set_shares(self, caller: Caller, lane: str, body: Shares) -> Outcome:
        return Outcome.model_validate(self._request_covered(caller, "set_shares", **body.model_dump()))

    def rank(self, caller: Caller, lane: str, name: str, body: Rank) -> Outcome:
        return self._command(caller, "rank", rank=body.rank)

    def remove(self, caller: Caller, lane: str, name: str, body: Removal | None = None) -> RemovalOutcome:
        """Through the controller, or here where nothing runs in the lane."""
        with self._reads.open(lane, caller.principal) as reader:
            row, _ = self._reads.check_pipeline(reader, name)
        check_own(caller, lambda name: str(row["user"]))
        given, folder = body or Removal(), self._reads.run_folder(lane)
        by = caller.principal.user if caller.principal else ""
        try:
            answer = self._request_covered(caller, "remove", name=name, by=by, **given.model_dump())
        except ProblemError as problem:
            if problem.status != 409 or living_owner(folder) is not None:
                raise
            try:
                note = remove_here(folder, name, given.parts, by=by, is_dry=given.dry_run)
            except UserError as error:
                raise self._refusal(caller, "remove", str(error)) from None
            answer = removal_fields(note, is_dry=given.dry_run)
        return RemovalOutcome.model_validate(answer)

    def remove_lane(self, caller: Caller, lane: str, body: LaneRemoval | None = None) -> LaneRemoved:
        folder, _ = self._reads.folders(lane)
        if self._reads.is_of_service(folder):
            raise ProblemError(
                409, f"lane {lane} is the service's own", accepted="one that the service's file no longer names"
            )
        is_dry = body is not None and body.dry_run
        with self._is_read:
            reader = None if is_dry else self._status_by_folder.pop(folder, None)
            if reader is not None:
                reader.close()
        try:
            freed_bytes = remove_run(folder, is_dry=is_dry)
        except UserError as error:
            raise ProblemError(409, str(error)) from None
        for beside in self._reads.files_beside(folder) if not is_dry else ():
            beside.unlink(missing_ok=True)
        outcome: Literal["removed", "would be removed"] = "would be removed" if is_dry else "removed"
        return LaneRemoved(outcome=outcome, freed_bytes=freed_bytes)

    def _verb_handler(self, verb: str) -> Callable[..., Outcome]:
        def tell(caller: Caller, lane: str, name: str, body: Nothing | None = None) -> Outcome:
            return self._command(caller, verb)

        return tell

    def _command(self, caller: CallerContext, verb: str, **fields: Any) -> Outcome:
        self._check_seen(caller)
        check_own(caller, lambda name: str(self._request(caller, "account", name=name)["user"]))
        return Outcome.model_validate(self._request_covered(caller, verb, name=caller.path["name"], **fields))

    def _check_seen(self, caller: CallerContext) -> None:
        """Ask the controller for the owner: an upcoming pipeline is in no index."""
        if caller.principal is not None and not caller.principal.sees_all:
            name = caller.path["name"]
            if not self._reads.sight(caller.path["lane"], caller.principal).sees(
                self._request(caller, "account", name=name)
            ):
                raise ProblemError(404, f"no pipeline {name[:80]!r}", accepted=SHOWN_ONLY)

    def _request_covered(self, caller: CallerContext, request: str, **fields: Any) -> dict[str, Any]:
        """The controller's response, filtered for the caller."""
        return self._covered(caller, self._request(caller, request, **fields))

    def _request(self, caller: CallerContext, request: str, **fields: Any) -> dict[str, Any]:
        folder = self._reads.run_folder(caller.path["lane"])
        down = self._reads.down(caller.path["lane"])
        if down is not None:
            raise ProblemError(503, down)
        try:
            answer = send_request(folder, record_of({"request": request, **fields}), limit_s=_LIMIT_S)
        except NotRunningError:
            name = caller.path["lane"]
            raise ProblemError(409, f"nothing runs in lane {name} now", accepted="a lane that goes on") from None
        except NoAnswerError as error:
            raise ProblemError(503, str(error)) from None
        except UserError as error:
            raise self._refusal(caller, request, str(error)) from None
        except RlmuxError as error:
            raise ProblemError(503, str(error)) from None
        del answer["ok"]
        return answer

    def _refusal(self, caller: CallerContext, request: str, text: str) -> ProblemError:
        """The controller's refusal without hidden names."""
        sight = self._reads.sight(caller.path["lane"], caller.principal)
        if sight.is_limited and request == "account":  # its text names every pipeline
            return ProblemError(404, f"no pipeline {caller.path['name'][:80]!r}", accepted=SHOWN_ONLY)
        return ProblemError(409, str(sight.cover(text)))

    def _covered(self, caller: CallerContext, answer: dict[str, Any]) -> dict[str, Any]:
        """A controller's response, filtered for the caller."""
        sight = self._reads.sight(caller.path["lane"], caller.principal)
        if not sight.is_limited:
            return answer
        rows = {name: row for name, row in answer.get("pipelines", {}).items() if sight.shows(name)}
        upcoming = [row for row in answer.get("upcoming", ()) if sight.sees(row)]  # in no index
        covered: dict[str, Any] = sight.cover({**answer, "pipelines": rows, "upcoming": upcoming})
        kept = {**covered, "upcoming": upcoming}
        return {key: value for key, value in kept.items() if key in answer}
