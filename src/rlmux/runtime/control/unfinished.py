"""How a pipeline goes on in a later part of its run, or after it failed: what its checkpoints and the log say of it.

submission ─▶ from_checkpoint ─▶ with_last_standing ─▶ to be submitted again
                                                   └─▶ lost_step_notes: steps that the log does not have
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlmux.core.model import BoundedSteps, PhaseSeconds
from rlmux.log import value_codec
from rlmux.log.notes import Note
from rlmux.log.run_state import RunState
from rlmux.runtime.backend import Submission
from rlmux.runtime.records.filler_outputs import answered_steps
from rlmux.runtime.weights.checkpoints import checkpoint_folder


def from_checkpoint(submission: Submission, folder: Path, state: RunState) -> Submission:
    """The submission, its first step set by its newest checkpoint. Damaged ones are reported at admission."""
    if submission.pipeline.is_filler:
        num_answered = answered_steps(folder / submission.config.name, submission.config)
        first_step = min(num_answered, state.steps.get(submission.pipeline.id, 0)) + 1
        return replace(submission, pipeline=replace(submission.pipeline, first_step=first_step))
    newest = checkpoint_folder(submission, folder).newest(before=submission.config.num_steps)
    if newest is None:
        return submission
    return replace(submission, pipeline=replace(submission.pipeline, first_step=newest.step + 1))


def lost_step_notes(submissions: Sequence[Submission], folder: Path, state: RunState) -> list[Note]:
    """Notes of steps that a resume does not repeat and the log does not have, from their checkpoints."""
    return [
        note
        for submission in submissions
        for note in checkpoint_folder(submission, folder).step_notes(
            after=state.steps.get(submission.pipeline.id, 0), through=submission.pipeline.first_step - 1
        )
    ]


def with_last_standing(submission: Submission, state: RunState) -> Submission:
    """The submission with its user's last hold and rank, and estimates from its own steps."""
    pipeline = replace(submission.pipeline, **state.standings.get(submission.pipeline.id, {}))
    measured = state.measured.get(pipeline.id)
    if measured is not None and pipeline.estimate is None:
        estimate, held = PhaseSeconds(**measured["estimate"]), PhaseSeconds(**measured["held"])
        pipeline = replace(pipeline, estimate=estimate, held=held)
    bounded = state.bounded.get(pipeline.id)
    if bounded is not None:
        pipeline = replace(pipeline, bounded=value_codec.reader(BoundedSteps)(bounded, "bounded"))
    return replace(submission, pipeline=pipeline)
