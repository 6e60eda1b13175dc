"""The table of a pipeline's steps, a row each: for pages, the API and `rlmux export`. Keys are stable.

step  end_s  seconds  solo_s  slowdown  weights_checksum  weights_sha256  metrics.NAME  stages.STAGE  delivery
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmux.log.run_log import NOT_SHOWN, Entry, LogReader
from rlmux.report.timeline.history import without_collector
from rlmux.report.timeline.live_steps import PublishedStep
from rlmux.report.timeline.live_timeline import Follower
from rlmux.report.timeline.records import PipelineRecord
from rlmux.report.weight_sums import SUM_NOTES, SUMS, StepSums

BARE = tuple(type for type in NOT_SHOWN if type not in SUM_NOTES)
"""Notes that the table needs nothing of."""


def read_step_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every published step of every pipeline of a run, in order. Raises LogError where its log cannot be read."""
    sums = StepSums()
    with LogReader(folder) as log, without_collector():
        follower = Follower(log.header)
        for part in log.parts(bare=BARE):
            follower.add(part)
            if isinstance(part, Entry) and part.type in SUM_NOTES:
                sums.add(part.note)
        steps = follower.look().steps
    history = follower.history
    return {
        str(name): [
            step_row(published, record, sums.of(name, step))
            for step, published in steps.get(name, {}).items()
            if published is not None
        ]
        for name, record in history.pipelines.items()
    }


def step_row(published: PublishedStep, record: PipelineRecord, sums: Mapping[str, str]) -> dict[str, Any]:
    """One step of the table."""
    time, delivery = published.time, record.delivery(published.time.step)
    return {
        "step": time.step,
        "end_s": time.end_s,
        "seconds": time.seconds,
        "solo_s": time.solo_s,
        "slowdown": time.seconds / time.solo_s if time.solo_s > 0.0 else None,
        **{key: sums.get(name) for key, name in SUMS.items()},
        "metrics": record.metrics.get(time.step, {}),
        "stages": published.stages,
        "delivery": None if delivery is None else delivery.as_json(),
    }
