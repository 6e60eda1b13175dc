"""The legal moves of a pipeline's life, as a table.

WAITING ─▶ RUNNING ─▶ FINISHED | CANCELLED | FAILED
   ▲  │       │
   │  │       └─▶ WAITING   (its node was lost)
   │  └─▶ REFUSED | CANCELLED | FAILED
"""

from __future__ import annotations

from collections.abc import Mapping

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import PipelineId, PipelineStatus

LEGAL_MOVES: Mapping[PipelineStatus, tuple[PipelineStatus, ...]] = {
    PipelineStatus.WAITING: (
        PipelineStatus.RUNNING,
        PipelineStatus.REFUSED,
        PipelineStatus.CANCELLED,
        PipelineStatus.FAILED,
    ),
    PipelineStatus.RUNNING: (
        PipelineStatus.FINISHED,
        PipelineStatus.CANCELLED,
        PipelineStatus.FAILED,
        PipelineStatus.WAITING,
    ),
    PipelineStatus.FINISHED: (),
    PipelineStatus.CANCELLED: (),
    PipelineStatus.FAILED: (),
    PipelineStatus.REFUSED: (),
}


def check_move(pipeline: PipelineId, old: PipelineStatus, new: PipelineStatus) -> None:
    """Raises IllegalTransitionError unless `old` may become `new`."""
    if new not in LEGAL_MOVES[old]:
        accepted = ", ".join(LEGAL_MOVES[old]) or "nothing: it is over"
        raise IllegalTransitionError(f"pipeline {pipeline} is {old} and cannot become {new}; it may become {accepted}")
