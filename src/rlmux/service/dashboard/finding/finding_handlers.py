"""Handlers that find and compare runs of all lanes.

GET  compare?of=L/NAME&of=L/NAME                               both rows, and whether they are the same run
POST pipelines/L/NAME/labels {labels, note}                    kept beside the log, for the search and the lists
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Query

from rlmux.core.errors import UserError
from rlmux.report.comparison import identity
from rlmux.report.weight_sums import SUMS
from rlmux.service.dashboard.control import check_own
from rlmux.service.dashboard.finding.labels import set_labels
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import Caller, CallerContext
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.dashboard.router import Address, get, post
from rlmux.service.dashboard.schemas.run_schemas import Compared, Labels, LabelsSet

_TWO = Query(min_length=2, max_length=2, description="of=L/NAME, each quoted as in addresses, twice")


class Finding:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        return (
            get("/compare", self.compare, "Two pipelines, and whether they are the same run"),
            post("/pipelines/{lane}/{name}/labels", self.set_labels, "Set labels and a note", scope="control"),
        )

    def set_labels(self, caller: Caller, lane: str, name: str, body: Labels) -> LabelsSet:
        """Replace the labels and the note of one of the caller's own pipelines."""
        with self._reads.open(lane, caller.principal) as reader:
            row, _ = self._reads.check_pipeline(reader, name)
        check_own(caller, lambda _: str(row["user"]))
        folder, _ = self._reads.folders(lane)
        try:
            return LabelsSet.model_validate(set_labels(folder, name, labels=body.labels, note=body.note))
        except UserError as error:
            raise ProblemError(409, str(error)) from None

    def compare(self, caller: Caller, of: Annotated[list[str], _TWO]) -> Compared:
        rows, plans, sums = zip(*(self._compared(caller, *_place_of(one)) for one in of), strict=True)
        found = identity(plans, sums)
        return Compared.model_validate({"items": rows, "identity": {**asdict(found), "says": str(found)}})

    def _compared(
        self, caller: CallerContext, lane: str, name: str
    ) -> tuple[dict[str, Any], str | None, dict[int, dict[str, str]]]:
        """(row, plan, sums of the weights by step and key) of one pipeline."""
        with self._reads.open(lane, caller.principal) as reader:
            row, detail = self._reads.check_pipeline(reader, name)
            found = reader.rows("SELECT step, json FROM step WHERE pipeline = ? AND json IS NOT NULL", name)
        rows = {int(step): json.loads(text) for step, text in found}
        sums = {step: {key: its[key] for key in SUMS if its[key]} for step, its in rows.items()}
        return {"lane": lane, **row}, detail["plan_sha256"], sums


def _place_of(text: str) -> tuple[str, str]:
    """Lane and pipeline of `L/NAME`, each URL-quoted. Raises ProblemError."""
    lane, _, name = text.partition("/")
    if not lane or not name or "/" in name:
        raise ProblemError(400, f"of is {text[:80]!r}", where="?of", accepted="L/NAME, each quoted as in addresses")
    return unquote(lane), unquote(name)
