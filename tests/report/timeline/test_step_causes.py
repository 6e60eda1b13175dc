"""Why a step takes longer than alone: every second has a cause, and all of them add up to what was measured."""

from __future__ import annotations

import math

import pytest
from tests.log_script import ROLLOUT, TRAIN, AlternatingRun

from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.report.reports import read_timeline
from rlmux.report.slos import StepTime
from rlmux.report.summary import step_times
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.live_steps import PublishedStep
from rlmux.report.timeline.step_causes import (
    APART,
    HAD_DEVICE,
    SLOWER_BESIDE,
    StepCause,
    read_step_causes,
    step_causes,
)


def busy(device, start_s: float, end_s: float, name: str, stage: Stage, *, step: int = 1, order: int, lane: int = 0):
    return device, Interval(start_s, end_s, Kind.BUSY, Cause.COMPUTE, name, step, stage, order, 1.0, lane)


def step(number: int, start_s: float, end_s: float, solo_s: float, **stages: float) -> PublishedStep:
    return PublishedStep(StepTime(number, end_s, end_s - start_s, solo_s), stages)


def seconds(found) -> dict[tuple[str, str | None, Stage | None], float]:
    return {(one.cause, one.pipeline, one.stage): pytest.approx(one.seconds) for one in found.causes}


def test_a_wait_for_a_device_is_put_down_to_the_pipeline_that_had_it_and_what_it_did():
    placed = [
        busy(ROLLOUT, 0.0, 2.0, "a", Stage.GENERATE, order=1),
        busy(TRAIN, 1.0, 5.0, "b", Stage.UPDATE, order=2),
        (TRAIN, Interval(5.0, 5.5, Kind.SWITCH, Cause.SWITCH, "a", 1, Stage.UPDATE, 3)),
        busy(TRAIN, 5.5, 8.5, "a", Stage.UPDATE, order=3),
        (TRAIN, Interval(8.5, 9.0, Kind.BUBBLE, Cause.CONTROL)),
    ]
    found = step_causes("a", [step(1, 0.0, 10.0, 6.0, publish=1.0)], placed)
    assert seconds(found) == {
        (HAD_DEVICE, "b", Stage.UPDATE): 3.0,
        ("switch", None, None): 0.5,
        ("control", None, None): 0.5,
    }
    assert (found.step_s, found.alone_s) == (10.0, 6.0)
    assert found.slowdown == pytest.approx(10 / 6)


def test_what_a_neighbour_adds_is_measured_against_steps_without_one():
    """Step 3 has the tokens of step 2, and took 3 s more beside `b`, which was there for 5 s."""
    placed = [
        busy(ROLLOUT, 0.0, 4.0, "a", Stage.GENERATE, step=2, order=1),
        busy(ROLLOUT, 4.0, 11.0, "a", Stage.GENERATE, step=3, order=2),
        busy(ROLLOUT, 5.0, 10.0, "b", Stage.UPDATE, order=3, lane=1),
    ]
    steps = [step(2, 0.0, 4.0, 4.0), step(3, 4.0, 11.0, 7.0)]
    found = step_causes("a", steps, placed, {2: 100.0, 3: 100.0})
    assert seconds(found) == {(SLOWER_BESIDE, "b", Stage.GENERATE): 1.5}
    assert (found.step_s, found.alone_s) == (5.5, 4.0)
    unknown = step_causes("a", steps[1:], placed, {3: 100.0})
    assert (unknown.causes, unknown.alone_s) == ([], 7.0), "without a step alone, nothing is known"


def test_phases_that_a_pipeline_alone_would_overlap_are_named_where_they_lay_apart():
    placed = [
        busy(ROLLOUT, 0.0, 4.0, "a", Stage.GENERATE, order=1),
        busy(TRAIN, 4.0, 7.0, "a", Stage.UPDATE, order=2),
    ]
    found = step_causes("a", [step(1, 0.0, 7.0, 4.0)], placed)
    assert seconds(found) == {(APART, None, None): 3.0}


@pytest.mark.parametrize("seed", range(5))
def test_alone_and_causes_of_any_run_add_up_to_what_its_summary_has(tmp_path, seed):
    folder = AlternatingRun(num_steps=12, seed=seed).script.write(tmp_path / "run")
    for name, steps in step_times(read_timeline(folder)).items():
        found = read_step_causes(folder, name)
        assert (found.first_step, found.last_step, found.num_steps) == (2, 12, 11)
        mean_s = math.fsum(one.seconds for one in steps[1:]) / 11
        assert found.step_s == pytest.approx(mean_s)
        assert found.alone_s + math.fsum(one.seconds for one in found.causes) == pytest.approx(mean_s)
        assert 0.0 < found.alone_s <= math.fsum(one.solo_s for one in steps[1:]) / 11 + 1e-9
        others = {one.pipeline for one in found.causes if one.cause == HAD_DEVICE}
        assert others == {"tools" if name == "sort" else "sort"}


@pytest.mark.parametrize(
    ("cause", "pipeline", "stage", "label"),
    [
        (HAD_DEVICE, "b", Stage.OLD_LOGPROBS, "waited for a device that b had (old logprobs)"),
        (SLOWER_BESIDE, "b", Stage.UPDATE, "slower beside b (update)"),
        ("waiting for rollout", "b", None, "waiting for rollout of b"),
        (APART, None, None, APART),
    ],
)
def test_causes_in_words(cause, pipeline, stage, label):
    assert StepCause(cause=cause, pipeline=pipeline, stage=stage, seconds=1.0).label == label


def test_an_unknown_pipeline_is_a_mistake(tmp_path):
    folder = AlternatingRun(num_steps=2).script.write(tmp_path / "run")
    with pytest.raises(UserError, match="no pipeline 'x'; accepted: sort, tools"):
        read_step_causes(folder, "x")
