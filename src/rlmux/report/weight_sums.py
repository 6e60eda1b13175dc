"""Sums of a pipeline's weights in a log, step by step, by which two runs are compared.

    note `step`         weights_checksum      of every published step
    note `checkpoint`   weights_sha256        of every checkpoint, once it is durable

Logs of rlmux 0.1.0 have `weights_sha256` in the note `step`, and no checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlmux.core.model import PipelineId
from rlmux.log.notes import CheckpointNote, Note, StepNote

SUMS = {"weights_checksum": "checksum", "weights_sha256": "sha256"}
"""Names of the sums by their keys in notes."""
SUM_NOTES = (StepNote.type, CheckpointNote.type)
"""Notes that have sums."""


class WeightSums(NamedTuple):
    """Sums of one step's weights, from a note."""

    pipeline: PipelineId
    step: int
    by_name: Mapping[str, str]


def weight_sums(note: Note | None) -> WeightSums | None:
    """The sums in a note; None where it has none. Those of version 0 are of no step."""
    if not isinstance(note, StepNote | CheckpointNote) or not note.step:
        return None
    found = {name: sum for key, name in SUMS.items() if (sum := getattr(note, key, None))}
    return WeightSums(note.pipeline, note.step, found) if found else None


class StepSums:
    """Sums by pipeline and step, as a log's notes come in."""

    def __init__(self) -> None:
        self._by_step: dict[tuple[PipelineId, int], dict[str, str]] = {}

    def add(self, note: Note | None) -> WeightSums | None:
        """Sums of a note; None if it has none."""
        found = weight_sums(note)
        if found is not None:
            self._by_step.setdefault((found.pipeline, found.step), {}).update(found.by_name)
        return found

    def of(self, pipeline: PipelineId, step: int) -> Mapping[str, str]:
        """Sums by name; empty if there are none."""
        return self._by_step.get((pipeline, step), {})
