"""The table of a pipeline's steps, a row each: for pages, the API and `rlmux export`. Keys are stable.

step  end_s  seconds  solo_s  slowdown  weights_checksum  weights_sha256  metrics.NAME  stages.STAGE  delivery
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmux.log.notes import EndNote
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
    with contextlib.closing(StepRowsReader(folder)) as reader:
        return reader.read()


class StepRowsReader:
    """Reads the table of a run that goes on; each read takes only new rows from the log."""

    def __init__(self, folder: Path) -> None:
        """Raises LogError where the folder's log cannot be read."""
        self._log = LogReader(folder)
        self.header = self._log.header
        self._follower, self._sums, self._seq = Follower(self.header), StepSums(), 0
        self.is_over = False
        """Whether the last row that was read ends its process's part of the run."""

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """Steps that are new, or have new figures, since the last read; every pipeline has a list."""
        with without_collector():
            for part in self._log.parts(after=self._seq, bare=BARE):
                self._follower.add(part)
                self._seq = max(self._seq, part.seq)
                self.is_over = isinstance(part, Entry) and part.type == EndNote.type
                if isinstance(part, Entry) and part.type in SUM_NOTES:
                    self._sums.add(part.note)
            steps = self._follower.look().steps
        return {
            str(name): [
                step_row(published, record, self._sums.of(name, step))
                for step, published in steps.get(name, {}).items()
                if published is not None
            ]
            for name, record in self._follower.history.pipelines.items()
        }

    def close(self) -> None:
        self._log.close()


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
