"""The table of a pipeline's steps, a row each: what pages, the API and `rlmux export` tell. Keys are stable.

step  end_s  seconds  solo_s  slowdown  weights_sha256  metrics.NAME  stages.STAGE
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmux.core.model import PipelineId
from rlmux.report.follow import Follower
from rlmux.report.follow_steps import PublishedStep
from rlmux.report.history import without_collector
from rlmux.report.log import NOT_SHOWN, Entry, LogReader
from rlmux.report.records import PipelineRecord


def read_step_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every published step of every pipeline of a run, in order. Raises LogError where its log cannot be read."""
    sha256: dict[tuple[PipelineId, int], str] = {}
    with LogReader(folder) as log, without_collector():
        follower = Follower(log.header)
        for part in log.parts(bare=NOT_SHOWN):
            follower.add(part)
            if isinstance(part, Entry) and part.type == "step" and (found := shas_of(part.value)):  # type: ignore[arg-type]
                sha256[found[:2]] = found[2]
        steps = follower.look().steps
    history = follower.history
    return {
        str(name): [
            step_row(published, record, sha256.get((name, step)))
            for step, published in steps.get(name, {}).items()
            if published is not None
        ]
        for name, record in history.pipelines.items()
    }


def step_row(published: PublishedStep, record: PipelineRecord, sha256: str | None) -> dict[str, Any]:
    """One step of the table."""
    time = published.time
    return {
        "step": time.step,
        "end_s": time.end_s,
        "seconds": time.seconds,
        "solo_s": time.solo_s,
        "slowdown": time.seconds / time.solo_s if time.solo_s > 0.0 else None,
        "weights_sha256": sha256,
        "metrics": record.metrics.get(time.step, {}),
        "stages": published.stages,
    }


def shas_of(notes: Mapping[str, Any]) -> tuple[PipelineId, int, str] | None:
    """(pipeline, step, hash) of a `step` note that has one."""
    sha256 = notes.get("weights_sha256")
    return (PipelineId(str(notes["pipeline"])), int(notes["step"]), str(sha256)) if sha256 else None
