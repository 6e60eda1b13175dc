"""What the last steps say of the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.estimation.estimates import Curve, StepHistory
from rlmux.core.model import DeviceId, PhaseSeconds, Pipeline, PipelineId, SubStage

A = PipelineId("a")
D0, D1 = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)


def history(curves: list[list[tuple[float, int]]]) -> StepHistory:
    pipeline = Pipeline(id=A, num_steps=None, estimate=PhaseSeconds(rollout_s=9.0, train_s=2.0))
    made = StepHistory(pipeline)
    for step, reports in enumerate(curves, 1):
        made.open_rollout(step, (D0,), 0.0)
        for seconds, active in reports[:-1]:
            made.add_progress(D0, active, seconds)
        made.end_shard(D0, reports[-1][0], prefill_s=0.5)
    return made


SHORT, LONG = [(1.0, 32), (4.0, 8), (6.0, 0)], [(1.0, 32), (4.2, 8), (12.0, 0)]


def test_sub_stages_begin_as_in_the_last_steps_and_the_end_of_the_tail_is_a_range():
    known = history([SHORT, LONG, SHORT]).estimates()
    assert known.shard_s == 6.0
    assert known.tail_s == 2.0
    left = known.remaining_time(8, run_s=4.0)
    assert (left.low_s, left.median_s, left.high_s) == (2.0, 2.0, pytest.approx(7.8))


def test_the_live_count_corrects_the_prediction():
    known = history([SHORT, SHORT, SHORT]).estimates()
    assert known.remaining_time(8, run_s=9.0).median_s == 2.0  # late: still 8 to go
    assert known.remaining_time(None, run_s=4.0).median_s == 2.0


def test_before_the_first_step_the_users_estimate_stands_in():
    known = history([]).estimates()
    assert (known.shard_s, known.train_s) == (9.0, 2.0)
    assert known.remaining_time(None, run_s=4.0).median_s == 5.0


def test_a_shard_is_cut_where_it_begins_to_decode_and_where_half_of_its_slots_are_left():
    known = history([SHORT, LONG, SHORT]).estimates()
    whole = ((6.0, SubStage.PREFILL), (5.5, SubStage.DENSE_DECODE), (2.0, SubStage.TAIL_DECODE))
    assert known.sub_stages(16) == known.sub_stages(None) == whole
    assert known.sub_stages(64) == ((6.0, SubStage.PREFILL), (5.5, SubStage.TAIL_DECODE))


def test_a_sub_stage_that_lasts_next_to_nothing_belongs_to_its_neighbour():
    long = history([[(1.0, 32), (4.2, 8), (12.0, 0)]]).estimates()
    assert long.sub_stages(16) == ((12.0, SubStage.DENSE_DECODE), (7.8, SubStage.TAIL_DECODE))


def test_before_the_first_step_half_of_a_rollout_is_its_tail():
    assert history([]).estimates().sub_stages(16) == ((9.0, SubStage.DENSE_DECODE), (4.5, SubStage.TAIL_DECODE))


def test_the_tail_of_a_shard_that_reports_nothing_is_not_known():
    assert history([[(6.0, 0)]]).estimates().tail_s == 0.0


def test_the_curve_of_a_shard_that_another_migrated_to_is_not_learned():
    made = history([SHORT])
    made.open_rollout(2, (D0, D1), 0.0)
    made.add_migration(D1, (D0,), 4, 0.4)
    made.end_shard(D0, 99.0)
    assert made.estimates().shard_s == 6.0
    assert made.estimates().migrate_s == pytest.approx(0.1)


def test_time_to_is_when_a_curve_has_fallen_for_good():
    curve = Curve((0.0, 1.0, 2.0, 3.0, 5.0), (8, 4, 6, 2, 0))
    assert curve.time_to(4) == 3.0
    assert curve.time_to(8) == 0.0


def test_a_step_is_due_by_the_solo_time_of_the_pipelines_own_pools_sync_included(builders):
    one = builders.pipeline("a", rollout_s=60.0, train_s=40.0, slo_slowdown=1.5)
    one = replace(
        one,
        estimate=replace(one.estimate, sync_s=4.0),
        colocated_estimate=PhaseSeconds(rollout_s=100.0, train_s=100.0),
    )
    mine = StepHistory(one)
    mine.open_rollout(1, (DeviceId("train", 0, 0),), 10.0)
    assert mine.due_s == pytest.approx(10.0 + 1.5 * 104.0)
    mine.open_rollout(2, (DeviceId("rollout", 0, 0),), 120.0)
    assert mine.due_s == pytest.approx(10.0 + 2 * 1.5 * 104.0)


def test_what_a_shard_waits_for_its_tools_is_part_of_what_is_left_of_the_next_one():
    made = StepHistory(Pipeline(id=PipelineId("a"), num_steps=4))
    for step in (1, 2):
        made.open_rollout(step, (D0,), 0.0)
        made.add_pause(D0, 1.0, waited_s=0.5)
        made.add_wait(D0, 1.5)
        made.end_shard(D0, 1.0, waited_s=0.0)
    assert made.estimates().shard_wait_s == pytest.approx(2.0)
    made.open_rollout(3, (D0,), 0.0)
    assert made.wall_left_s(D0, 0.0) == pytest.approx(2.0 + 2.0)
    made.add_pause(D0, 1.0, waited_s=0.5)
    assert made.wall_left_s(D0, 1.0) == pytest.approx(2.5)
    assert made.wall_left_s(D1, 0.0) == 0.0, "it has no shard there"


def test_what_control_takes_is_no_wait_for_tools():
    made = StepHistory(Pipeline(id=PipelineId("a"), num_steps=4))
    made.open_rollout(1, (D0,), 0.0)
    made.end_shard(D0, 1.0, waited_s=0.05)
    made.open_rollout(2, (D0,), 0.0)
    assert made.estimates().shard_wait_s == 0.0
    assert made.wall_left_s(D0, 0.0) == 0.0


def test_the_spread_of_forecasts_is_how_far_shards_and_trainings_were_off_in_the_median():
    made = StepHistory(Pipeline(id=PipelineId("a"), num_steps=9))
    for step, seconds in enumerate((1.0, 1.0, 1.1, 1.1, 0.9), start=1):
        made.open_rollout(step, (D0,), 0.0)
        made.end_shard(D0, seconds)
        if step < 4:
            assert made.estimates().spread is None
    assert made.estimates().spread == pytest.approx(0.1, abs=0.03)
