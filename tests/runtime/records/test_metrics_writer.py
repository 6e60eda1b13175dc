"""Metrics of each step: a line for scripts, and an event that TensorBoard reads."""

from __future__ import annotations

import json

import pytest

from rlmux.core.actions import Release
from rlmux.core.model import PipelineId
from rlmux.log.notes import StepNote
from rlmux.runtime.records.metrics_writer import MetricsWriter

NAME = PipelineId("a")


def step(number: int, reward: float) -> StepNote:
    metrics = {"reward_mean": reward, "kl": None}
    return StepNote(pipeline=NAME, step=number, metrics=metrics)


def test_tensorboard_reads_the_steps_also_of_a_folder_that_was_moved_meanwhile(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "run" / NAME).mkdir(parents=True)
    writer = MetricsWriter(tmp_path / "run")
    writer.update(1.0, (), (), [step(1, 0.25)])
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        writer.update(2.0, (), (), [step(2, 0.5)])
    writer.update(3.0, (), [Release(pipeline=NAME)], ())
    accumulator = EventAccumulator(str(moved / NAME / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in accumulator.Scalars("reward/mean")] == [(1, 0.25)]
    lines = (moved / NAME / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward_mean"] for line in lines] == [0.25]
