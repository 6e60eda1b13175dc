"""Handlers of trajectories, read from each pipeline's own file.

pipelines/L/NAME/samples?...  ─▶ matching rows, a page at a time
pipelines/L/NAME/samples/STEP/PROMPT/SAMPLE  ─▶ one trajectory with its text and its prompt group's rewards
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path, Query

from rlmux.core.errors import UserError
from rlmux.report.samples import SAMPLES_NAME, SampleReader, page_of, whole_of
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import Caller, CallerContext, Cursor, Line
from rlmux.service.dashboard.router import Address, get
from rlmux.service.dashboard.schemas.timeline_schemas import Sample, Samples
from rlmux.service.problems import ProblemError

_ADDRESS = "/pipelines/{lane}/{name}/samples"
Place = Annotated[int, Path(ge=0, le=2**20 - 1, description=f"STEP/PROMPT/SAMPLE, each up to {2**20 - 1}")]
Number = Annotated[int | None, Query(ge=0, le=2**20)]
Reward = Annotated[float | None, Query(allow_inf_nan=False, description="a finite number")]


class SampleReads:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        one = f"{_ADDRESS}/{{step}}/{{prompt}}/{{sample}}"
        return (
            get(_ADDRESS, self.find, "Trajectories that match the filters", scope="samples"),
            get(one, self.one, "One trajectory with its text", scope="samples"),
        )

    def find(
        self,
        caller: Caller,
        lane: str,
        name: str,
        step: Number = None,
        prompt: Number = None,
        stop: Line = None,
        text: Line = None,
        least: Reward = None,
        most: Reward = None,
        sort: Literal["step", "-step", "reward", "-reward", "tokens", "-tokens"] = "-step",
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        cursor: Cursor = 0,
    ) -> Samples:
        given = {"step": step, "prompt": prompt, "stop": stop, "least": least, "most": most, "text": text}
        filters = {key: value for key, value in given.items() if value is not None}
        with self._open(caller) as reader:
            return Samples.model_validate(page_of(reader, filters, sort=sort, at=cursor, limit=limit))

    def one(
        self,
        caller: Caller,
        lane: str,
        name: str,
        step: Place,
        prompt: Place,
        sample: Place,
        special_tokens: Annotated[bool, Query(description="true: written by name, instead of left out")] = False,
    ) -> Sample:
        try:
            with self._open(caller) as reader:
                found = whole_of(reader, step, prompt, sample, special_tokens=special_tokens)
        except UserError as error:
            what, _, accepted = str(error).partition("; accepted: ")
            raise ProblemError(404, what, where="?special_tokens", accepted=accepted) from None
        if found is None:
            raise ProblemError(404, "this trajectory was not kept", accepted="one of those that /samples lists")
        return Sample.model_validate(found)

    def _open(self, caller: CallerContext) -> SampleReader:
        name = caller.path["name"]
        path = self._reads.folder_of(caller) / SAMPLES_NAME
        if not path.is_file():
            raise ProblemError(
                404, f"no trajectories of {name} were kept", accepted="a pipeline of a run of this version"
            )
        return SampleReader(path)
