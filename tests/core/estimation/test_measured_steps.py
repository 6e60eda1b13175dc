"""What a pipeline's steps took: those that are done count for its SLO as they were."""

from __future__ import annotations

import pytest

from rlmux.core.estimation.measured_steps import DoneSteps, MeasuredSteps
from rlmux.core.model import DeviceId, PhaseSeconds, Pipeline, PipelineId

MEAN = PhaseSeconds(rollout_s=2.0, train_s=1.0, sync_s=0.5)


def done_steps(**fields) -> DoneSteps:
    return DoneSteps(Pipeline(id=PipelineId("a"), num_steps=9, **{"estimate": MEAN, **fields}))


def test_a_rollout_counts_as_alone_where_one_device_computed_the_shards_of_two():
    """SLOs are judged by the step alone: the whole of one shard migrated, so its target took twice as long."""
    devices = tuple(DeviceId("rollout", node, 0) for node in (0, 1))
    measured = MeasuredSteps()
    for step, factor in enumerate((1.0, 1.2, 1.5), 1):
        measured.open_rollout(step, devices)
        has_migrated = step == 3
        if has_migrated:
            measured.add_migration(step)
            measured.add_rollout(step, devices[0], 2 * factor * 20.0, 2 * factor * 20.0)
        for device in () if has_migrated else devices:
            measured.add_rollout(step, device, factor * 20.0, factor * 20.0)
        measured.add_train(step, factor * 10.0, factor * 10.0)
        measured.end_step(step)
        assert measured.last == PhaseSeconds(rollout_s=factor * 20.0, train_s=factor * 10.0)


def test_what_was_trained_again_counts_once():
    done = done_steps()
    for step in (1, 2, 3, 2, 3):
        done.add(step, MEAN, MEAN)
    assert done.solo_s(3) == pytest.approx(3 * 3.5)
    assert done.solo_s(0) == 0.0


def test_steps_count_with_what_they_took_and_not_with_what_the_next_is_expected_to_take():
    done = done_steps()
    for step, factor in enumerate((2.0, 1.0), 1):
        done.add(step, PhaseSeconds(rollout_s=factor * 2.0, train_s=factor * 1.0), MEAN)
    assert (done.solo_s(1), done.solo_s(2)) == (6.5, 10.0)


def test_a_step_on_other_nodes_counts_as_it_would_have_been_on_its_own():
    done = done_steps()
    together = PhaseSeconds(rollout_s=1.0, train_s=4.0)
    done.add(1, PhaseSeconds(rollout_s=1.5, train_s=4.0), together)
    assert done.solo_s(1) == pytest.approx(1.5 * 2.0 + 1.0 + 0.5)


def test_without_an_estimate_steps_count_as_they_were_measured():
    done = done_steps(estimate=None, first_step=4)
    done.add(4, PhaseSeconds(rollout_s=3.0, train_s=1.0, sync_s=0.2), None)
    assert (done.solo_s(3), done.solo_s(4)) == (0.0, pytest.approx(4.2))
