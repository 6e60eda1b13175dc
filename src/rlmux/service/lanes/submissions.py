"""Pipelines that are submitted to a lane: checked, kept, handed to its controller, exactly once.

    POST submissions ─▶ checked ─▶ service.db (on disk) ─▶ controller: `submit` with the id ─▶ its log ─▶ answer
                                        └── what was not handed over, or not known to be: again, by the lane's thread

The controller's log accepts an id once, so that either process may be killed at any point: an answered submission is
never lost or duplicated. A submission is kept as `accepted` (202) while its controller is away.

A module of its own: it is one API with its delivery, while `service` starts and stops processes.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Response

from rlmux.config.load import Spec, parse_spec
from rlmux.core.errors import OverQuotaError, RlmuxError, SpecError, UserError
from rlmux.runtime.control.control_requests import Check, Submit
from rlmux.runtime.control.control_socket import NotRunningError, send_request
from rlmux.service.dashboard.auth.access import Principal
from rlmux.service.dashboard.parameters import Caller, Limit
from rlmux.service.dashboard.router import Address, LongWork, get, post
from rlmux.service.dashboard.schemas import timeline_schemas as shapes
from rlmux.service.lanes.authorization import check_rights, own_user
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.controllers import DRAINS, LaneController, is_draining
from rlmux.service.lanes.submission_ledger import ACCEPTED, OVER_QUOTA, REFUSED, SubmissionLedger, SubmissionRow
from rlmux.service.problems import ProblemError

MAX_TEXT_BYTES = 256 << 10
_MAX_KEY_CHARS = 100
_ANSWER_LIMIT_S = 30.0
_STATUS = {ACCEPTED: 202, REFUSED: 422, OVER_QUOTA: 429}
_ADDRESS = "/submissions"


class LaneSubmissions:
    """See the module."""

    def __init__(self, lanes: Mapping[str, LaneController], ledger: SubmissionLedger, bundles: Bundles) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._bundles = bundles
        self._handing_over = LongWork(max_running=8, max_waiting=64)
        self._sending = {name: threading.Lock() for name in lanes}

    def addresses(self) -> tuple[Address, ...]:
        return (
            post(
                _ADDRESS,
                self.submit,
                "Submit a file, or check it; needs an Idempotency-Key unless it is checked alone",
                scope="submit",
                others=(201, 202),
                long_work=self._handing_over,
            ),
            get(_ADDRESS, self.newest, "What was submitted, newest first"),
            get(f"{_ADDRESS}/{{id}}", self.one, "One submission"),
        )

    def submit(self, caller: Caller, body: shapes.Submission, response: Response) -> shapes.Submitted | shapes.Checked:
        fields = body.model_dump(exclude_unset=True, exclude={"dry_run"})
        if len(body.text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
            raise ProblemError(413, "the file is too large", where="text", accepted=f"{MAX_TEXT_BYTES >> 10} KiB")
        if body.dry_run:
            return shapes.Checked.model_validate(self._checked(fields, caller.principal))
        key = caller.headers.get("idempotency-key", "")
        if not key.isprintable() or not 0 < len(key) <= _MAX_KEY_CHARS:
            accepted = f"1 to {_MAX_KEY_CHARS} characters, new for each submission and the same when it is sent again"
            raise ProblemError(400, "not a key", where="Idempotency-Key", accepted=accepted)
        if caller.principal is not None:  # a key is its user's own
            key = f"{caller.principal.user} {key}"
        sha256 = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        found = self._ledger.find_key(key) or self._add(key, sha256, fields, caller.principal)
        if found.body_sha256 != sha256:
            raise ProblemError(
                422, "this key came with another body before", where="Idempotency-Key", accepted="a new key"
            )
        if found.state == ACCEPTED:
            self.deliver(found.lane)
            found = self._ledger.find_id(found.id) or found
        if found.state in (REFUSED, OVER_QUOTA):
            raise ProblemError(_STATUS[found.state], str(found.reason), where="text")
        response.status_code = _STATUS.get(found.state, 201)
        return shapes.Submitted.model_validate(found.fields())

    def newest(self, caller: Caller, limit: Limit = 100) -> shapes.Submissions:
        user = None if caller.principal is None or caller.principal.sees_all else caller.principal.user
        items = [shapes.Submitted.model_validate(row.fields()) for row in self._ledger.newest(limit, user)]
        return shapes.Submissions(items=items, as_of_seq=None)

    def one(self, caller: Caller, id: str) -> shapes.Submitted:
        found = self._ledger.find_id(id)
        principal = caller.principal
        if found is None or principal is None or not (principal.sees_all or principal.user == found.user):
            raise ProblemError(404, f"no submission {id[:80]!r}", accepted=f"those of {_ADDRESS}")
        return shapes.Submitted.model_validate(found.fields())

    def deliver(self, lane: str) -> None:
        """Send the controller every submission that it has not confirmed, oldest first."""
        controller = self._lanes.get(lane)
        if controller is None:  # the file has the lane no more
            return
        with self._sending[lane]:
            for row in self._ledger.accepted(lane):
                if not self._send(controller, row):
                    return

    def _send(self, lane: LaneController, row: SubmissionRow) -> bool:
        """Whether the controller answered."""
        if lane.down() is not None:
            return False
        request = Submit(text=row.text, source=row.source, id=row.id)
        try:
            answer = send_request(lane.folder, request, limit_s=_ANSWER_LIMIT_S)
        except NotRunningError:
            return False
        except UserError as error:
            self._ledger.refuse(row.id, str(error), is_over_quota=isinstance(error, OverQuotaError))
        except RlmuxError:  # it is busy or ended early: retried with the same id
            return False
        else:
            self._ledger.take(row.id, answer["pipelines"])
        return True

    def _checked(self, fields: dict[str, Any], principal: Principal | None) -> dict[str, Any]:
        """Whether the lane would take it; nothing is kept. What is wrong with the file is the answer, not an error."""
        lane = self._lane(fields)
        result: dict[str, Any] = {"lane": lane.name, "pipelines": [], "is_lane_asked": False, "wrong": None}
        try:
            spec = self._parsed(lane, fields, principal)
            check_rights(spec, principal)
            result["is_lane_asked"] = _is_free(lane, spec, fields["source"])
        except ProblemError as problem:
            return {**result, "wrong": {"detail": problem.detail, "line": problem.line, "accepted": problem.accepted}}
        pipelines = [{"pipeline": pipeline.name, "num_steps": pipeline.config.num_steps} for pipeline in spec.pipelines]
        return {**result, "pipelines": pipelines}

    def _lane(self, fields: Mapping[str, Any]) -> LaneController:
        lane = self._lanes.get(fields["lane"])
        if lane is None:
            raise ProblemError(404, f"no lane {fields['lane'][:80]!r}", where="lane", accepted=", ".join(self._lanes))
        if is_draining(lane.folder.parent):
            raise ProblemError(503, DRAINS, accepted="the same submission, once it has started again", again_s=60)
        if lane.other_version is not None:
            raise ProblemError(409, str(lane.down()), where="lane", accepted="another lane")
        return lane

    def _add(self, key: str, sha256: str, fields: Mapping[str, Any], principal: Principal | None) -> SubmissionRow:
        """Check a new submission and keep it."""
        lane = self._lane(fields)
        spec = self._parsed(lane, fields, principal)
        check_rights(spec, principal)
        try:
            return self._ledger.add(
                key,
                body_sha256=sha256,
                user=principal.user if principal else "",
                lane=lane.name,
                source=fields["source"],
                text=spec.resolved,
                bundle=fields.get("bundle"),
                names=[pipeline.name for pipeline in spec.pipelines],
            )
        except sqlite3.OperationalError as error:
            raise ProblemError(507, f"it cannot be kept: {error}", accepted="a disk with room") from None

    def _parsed(self, lane: LaneController, fields: Mapping[str, Any], principal: Principal | None) -> Spec:
        """The file, checked; a pipeline without a user is the caller's."""
        folder: Path | None = self._bundles.no_code
        if fields.get("bundle") is not None:
            folder = self._bundles.folder_of(fields["bundle"])
        if folder is None:
            raise ProblemError(404, "no such bundle", where="bundle", accepted="one that was uploaded: POST /bundles")
        try:
            text, source = fields["text"], fields["source"]
            spec = parse_spec(text, source=source, folder=folder, cluster_of=lane.spec)
            overrides = own_user(spec, principal)
            if overrides:
                spec = parse_spec(text, source=source, folder=folder, cluster_of=lane.spec, overrides=overrides)
        except SpecError as error:
            raise ProblemError(400, str(error), where="text", line=_line_of(str(error), fields["source"])) from None
        paths = [
            spec.code_folder,
            *(Path(pipeline.config.task.path) for pipeline in spec.pipelines if pipeline.config.task.path),
        ]
        for path in paths:
            if ".." in path.parts:
                raise ProblemError(400, "a path leaves the bundle", where="text", accepted="paths without ..")
        return spec


def _is_free(lane: LaneController, spec: Spec, source: str) -> bool:
    """Whether the lane's controller would accept the file; False if it is away or busy.

    Raises ProblemError with the controller's error.
    """
    if lane.down() is not None:
        return False
    try:
        send_request(lane.folder, Check(text=spec.resolved, source=source), limit_s=_ANSWER_LIMIT_S)
    except NotRunningError:
        return False
    except UserError as error:
        raise ProblemError(422, str(error), where="text") from None
    except RlmuxError:
        return False
    return True


def _line_of(error: str, source: str) -> int | None:
    """The line that an error of a file begins with, as in `two.yaml:9: ...`."""
    number = error.removeprefix(f"{source}:").partition(":")[0]
    return int(number) if error.startswith(f"{source}:") and number.isdecimal() else None
