"""Sums of a pipeline's weights in a log, step by step, by which two runs are compared.

    note `step`         weights_checksum      of every published step
    note `checkpoint`   weights_sha256        of every checkpoint, once it is durable

Logs of rlmux 0.1.0 have `weights_sha256` in the note `step`, and no checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlmux.core.model import PipelineId

SUMS = {"weights_checksum": "checksum", "weights_sha256": "sha256"}
"""Names of the sums by their keys in notes."""
SUM_NOTES = ("step", "checkpoint")
"""Notes that have sums."""


class WeightSums(NamedTuple):
    """Sums of one step's weights, from a note."""

    pipeline: PipelineId
    step: int
    by_name: Mapping[str, str]


def weight_sums(type: str, fields: Mapping[str, Any]) -> WeightSums | None:
    """The sums in a note; None where it has none. Those of version 0 are of no step."""
    if type not in SUM_NOTES or not fields.get("step"):
        return None
    found = {name: str(fields[key]) for key, name in SUMS.items() if fields.get(key)}
    return WeightSums(PipelineId(str(fields["pipeline"])), int(fields["step"]), found) if found else None


class StepSums:
    """Sums by pipeline and step, as a log's notes come in."""

    def __init__(self) -> None:
        self._by_step: dict[tuple[PipelineId, int], dict[str, str]] = {}

    def add(self, type: str, fields: Mapping[str, Any]) -> WeightSums | None:
        """Sums of a note; None if it has none."""
        found = weight_sums(type, fields)
        if found is not None:
            self._by_step.setdefault((found.pipeline, found.step), {}).update(found.by_name)
        return found

    def of(self, pipeline: PipelineId, step: int) -> Mapping[str, str]:
        """Sums by name; empty if there are none."""
        return self._by_step.get((pipeline, step), {})
