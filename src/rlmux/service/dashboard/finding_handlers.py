"""Handlers that find and compare runs of all lanes.

GET  search?q&limit                                            pipelines of all lanes that match every word
GET  compare?of=L/NAME&of=L/NAME                               2 to 20 rows, what differs; of two: are they one run
POST pipelines/L/NAME/labels {labels, note}                    kept beside the log, for the search and the lists
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Query

from rlmux.core.errors import UserError
from rlmux.report.comparison import identity
from rlmux.report.weight_sums import SUMS
from rlmux.service.dashboard.control import check_own
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.labels import NONE, labels_of, set_labels
from rlmux.service.dashboard.parameters import Caller, CallerContext, Limit
from rlmux.service.dashboard.router import Address, get, post
from rlmux.service.dashboard.schemas.run_schemas import Compared, Labels, LabelsSet, Search
from rlmux.service.index.search import Document, document_of, is_match, matches, words_of
from rlmux.service.problems import ProblemError

_SEARCHED = """
SELECT name, json_extract(json, '$.status'), json_extract(json, '$.submitted_s'),
       json_object('name', name, 'user', json_extract(json, '$.user'), 'project', json_extract(json, '$.project')),
       json_extract(detail, '$.config')
FROM pipeline ORDER BY place DESC
"""
SearchWords = Annotated[str, Query(min_length=1, max_length=512, description="words, each the beginning of one")]
_SOME = Query(min_length=2, max_length=20, description="of=L/NAME, each quoted as in addresses, twice to 20 times")


class Finding:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        return (
            get("/search", self.search, "Pipelines of all lanes that match every word, newest first"),
            get("/compare", self.compare, "Two to twenty pipelines: what differs; of two, whether they are one run"),
            post("/pipelines/{lane}/{name}/labels", self.set_labels, "Set labels and a note", scope="control"),
        )

    def search(self, caller: Caller, q: SearchWords, limit: Limit = 20) -> Search:
        words = words_of(q)
        if not words:
            raise ProblemError(400, f"q is {q[:80]!r}", where="?q", accepted="a word with a letter or a digit")
        found = []
        for lane in self._reads.names():
            with contextlib.suppress(ProblemError):  # its index is being made
                found += self._found(caller, lane, words)
        found.sort(key=lambda entry: entry[0], reverse=True)
        items = [{**row, "matches": matches(document, words)} for _, row, document in found[:limit]]
        return Search.model_validate({"items": items, "total": len(found), "as_of_seq": None})

    def _found(
        self, caller: CallerContext, lane: str, words: Sequence[str]
    ) -> list[tuple[float, dict[str, Any], Document]]:
        """(Unix time of its submission, row, document) of each pipeline of a lane that matches."""
        with self._reads.open(lane, caller.principal) as reader:
            rows = reader.rows(_SEARCHED)
            created = reader.facts["lane"]["created"]
        its_labels = self._reads.mask(caller, {"lane": lane, "of": labels_of(self._reads.folders(lane)[0])})["of"]
        begun_s = datetime.fromisoformat(created).timestamp() if created else 0.0
        found = []
        for name, status, submitted_s, row, config in rows:
            its = its_labels.get(name, NONE)
            document = document_of(row, config, tuple(its["labels"]), its["note"])
            if is_match(document, words):
                shown = {"lane": lane, "name": name, "status": status, "submitted_s": submitted_s}
                found.append((begun_s + (submitted_s or 0.0), {**shown, "labels": its["labels"]}, document))
        return found

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

    def compare(self, caller: Caller, of: Annotated[list[str], _SOME]) -> Compared:
        rows, details, sums = zip(*(self._compared(caller, *_place_of(address)) for address in of), strict=True)
        configs = [detail["config"] for detail in details]
        answer = {"items": rows, "differs": _differing(configs), "groups": _groups(configs)}
        if len(of) == 2:
            found = identity((details[0]["plan_sha256"], details[1]["plan_sha256"]), (sums[0], sums[1]))
            answer["identity"] = {**asdict(found), "says": str(found)}
        return Compared.model_validate({"identity": None, **answer})

    def _compared(
        self, caller: CallerContext, lane: str, name: str
    ) -> tuple[dict[str, Any], dict[str, Any], dict[int, dict[str, str]]]:
        """(row, detail, sums of the weights by step and key) of one pipeline."""
        with self._reads.open(lane, caller.principal) as reader:
            row, detail = self._reads.check_pipeline(reader, name)
            ((place,),) = reader.rows("SELECT place FROM pipeline WHERE name = ?", name)
            found = reader.rows("SELECT step, json FROM step WHERE pipeline = ? AND json IS NOT NULL", name)
        rows = {int(step): json.loads(text) for step, text in found}
        sums = {step: {key: its[key] for key in SUMS if its[key]} for step, its in rows.items()}
        labels = labels_of(self._reads.folders(lane)[0]).get(name, NONE)["labels"]
        return {"lane": lane, **row, "place": place, "labels": labels}, detail, sums


def _differing(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Values by key of which at least two differ, in the order of the pipelines; None where a key is missing."""
    keys = sorted({key for config in configs for key in config})
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: its for key, its in values.items() if any(value != its[0] for value in its)}


def _groups(configs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Places of pipelines that differ in `seed` alone; one without a file is a group by itself."""
    groups: dict[Any, list[int]] = {}
    for place, config in enumerate(configs):
        rest = json.dumps({**config, "seed": None}, sort_keys=True)
        groups.setdefault(rest if config else place, []).append(place)
    return list(groups.values())


def _place_of(text: str) -> tuple[str, str]:
    """Lane and pipeline of `L/NAME`, each URL-quoted. Raises ProblemError."""
    lane, _, name = text.partition("/")
    if not lane or not name or "/" in name:
        raise ProblemError(400, f"of is {text[:80]!r}", where="?of", accepted="L/NAME, each quoted as in addresses")
    return unquote(lane), unquote(name)
