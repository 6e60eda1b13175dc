"""Origin (run and plan) of each pipeline's weights, checkpoints and samples, from the run's log.

    header   run_id                            made with the run
    plan     pipeline, plan_sha256             a note for each pipeline, when it comes to the run
    alerts   pipeline, rules                   a note for one whose file has rules of alerts otherwise

A resumed pipeline keeps its noted hash, so that a later rlmux, whose files have more keys, accepts its checkpoints. A
log without a run_id is from an older rlmux: origins are neither marked nor checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlmux.log.notes import AlertsNote, Note, PlanNote
from rlmux.rl.origin import Origin, plan_sha256
from rlmux.runtime.backend import Submission


def with_origin(
    submission: Submission, run_id: str | None, plan_by_pipeline: Mapping[str, str] | None = None
) -> Submission:
    """The submission, marked. `plan_by_pipeline`: hashes of pipelines that were in the run before."""
    if run_id is None:
        return submission
    plan = (plan_by_pipeline or {}).get(submission.pipeline.id) or plan_sha256(submission.config)
    origin = Origin(run_id=run_id, pipeline=submission.config.name, plan_sha256=plan)
    return replace(submission, origin=origin)


def plan_notes(submissions: Sequence[Submission]) -> list[Note]:
    """Notes of pipelines that join a run."""
    plans = [
        PlanNote(pipeline=new.pipeline.id, plan_sha256=new.origin.plan_sha256)
        for new in submissions
        if new.origin is not None
    ]
    alerts = [AlertsNote(pipeline=new.pipeline.id, rules=new.alerts) for new in submissions if new.alerts]
    return [*plans, *alerts]
