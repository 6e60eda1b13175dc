"""What the addresses of trajectories answer, read from each pipeline's own file.

pipelines/L/NAME/samples?...  ─▶ rows that meet what is asked, a page at a time
pipelines/L/NAME/samples/STEP/PROMPT/SAMPLE  ─▶ one, with its text and the rewards of its prompt group
"""

from __future__ import annotations

import math
from typing import Any

from rlmux.report.samples import SAMPLES_NAME, SORTS, SampleReader, page_of, whole_of
from rlmux.service.dashboard.door import Address, Asked, get
from rlmux.service.dashboard.parameters import Parse, line, whole
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.dashboard.reads import Reads

_ADDRESS = "/pipelines/{lane}/{name}/samples"
_FILTERS = ("step", "prompt", "stop", "least", "most", "text")


class SampleReads:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        asks: dict[str, Parse] = {
            "step": whole(0, 2**20),
            "prompt": whole(0, 2**20),
            "stop": line,
            "text": line,
            "least": parse_reward,
            "most": parse_reward,
            "sort": parse_sample_sort,
            "limit": whole(1, 200),
            "cursor": whole(0, 2**53),
        }
        return (
            get(_ADDRESS, self.find, asks, scope="samples"),
            get(f"{_ADDRESS}/{{step}}/{{prompt}}/{{sample}}", self.one, scope="samples"),
        )

    def find(self, asked: Asked) -> Any:
        query = asked.query
        at, limit = query.get("cursor", 0), query.get("limit", 50)
        filters = {name: query[name] for name in _FILTERS if name in query}
        with self._open(asked) as reader:
            return page_of(reader, filters, sort=query.get("sort", "-step"), at=at, limit=limit)

    def one(self, asked: Asked) -> Any:
        try:
            place = {key: whole(0, 2**20 - 1)(asked.path[key]) for key in ("step", "prompt", "sample")}
        except ValueError as error:
            raise ProblemError(404, "no such place", accepted=f"STEP/PROMPT/SAMPLE, {error}") from None
        with self._open(asked) as reader:
            found = whole_of(reader, **place)
        if found is None:
            raise ProblemError(404, "this trajectory was not kept", accepted="one of those that /samples lists")
        return found

    def _open(self, asked: Asked) -> SampleReader:
        name = asked.path["name"]
        path = self._reads.folder_of(asked) / SAMPLES_NAME
        if not path.is_file():
            raise ProblemError(
                404, f"no trajectories of {name} were kept", accepted="a pipeline of a run of this version"
            )
        return SampleReader(path)


def parse_reward(text: str) -> float:
    """A finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def parse_sample_sort(text: str) -> str:
    if text not in SORTS:
        raise ValueError(", ".join(SORTS))
    return text
