"""What pipelines of one base lose in one batch, learned from their orders."""

from __future__ import annotations

import pytest

from rlmux.core.estimation.batch_slowdowns import BatchSlowdowns, expected_slowdown
from rlmux.core.events import BatchShare
from rlmux.core.model import Phase, Pipeline, PipelineId


def share(num_together, tokens, seconds):
    return BatchShare(num_together=num_together, tokens=tokens, seconds=seconds, held_s=0.0, charged_s=0.0)


def observed(*orders):
    """Slowdowns after orders of pipeline `a` with so many tokens and seconds, batches with others included."""
    slowdowns = BatchSlowdowns()
    pipeline = Pipeline(id=PipelineId("a"), num_steps=1, rollout_base="base")
    for tokens, seconds, batches in orders:
        slowdowns.observe(pipeline, Phase.ROLLOUT, tokens=tokens, seconds=seconds, batches=batches)
    return slowdowns


def test_before_any_order_a_batch_is_as_slow_as_expected():
    assert [BatchSlowdowns().slowdown(Phase.ROLLOUT, "base", number) for number in (1, 2, 4)] == [1.0, 1.5, 2.5]


def test_what_was_seen_replaces_what_was_expected():
    alone, together = (100, 1.0, ()), (100, 1.2, [share(2, 100, 1.2)])
    once = observed(alone, together).slowdown(Phase.ROLLOUT, "base", 2)
    often = observed(alone, *40 * [together]).slowdown(Phase.ROLLOUT, "base", 2)
    assert 1.2 < once < expected_slowdown(Phase.ROLLOUT, 2)
    assert often == pytest.approx(1.2, abs=0.02)


def test_the_part_of_an_order_that_ran_alone_is_its_speed_alone():
    slowdowns = observed(*40 * [(150, 2.0, [share(2, 50, 1.0)])])
    assert slowdowns.slowdown(Phase.ROLLOUT, "base", 2) == pytest.approx(2.0, abs=0.05)


def test_a_pipeline_that_was_never_seen_alone_teaches_nothing():
    slowdowns = observed(*9 * [(100, 9.0, [share(2, 100, 9.0)])])
    assert slowdowns.slowdown(Phase.ROLLOUT, "base", 2) == expected_slowdown(Phase.ROLLOUT, 2)


def test_each_base_and_each_number_of_pipelines_has_a_slowdown_of_its_own():
    slowdowns = observed((100, 1.0, ()), *40 * [(100, 1.0, [share(2, 100, 1.0)])])
    assert slowdowns.slowdown(Phase.ROLLOUT, "base", 2) == pytest.approx(1.0, abs=0.02)
    assert slowdowns.slowdown(Phase.ROLLOUT, "base", 3) == expected_slowdown(Phase.ROLLOUT, 3)
    assert slowdowns.slowdown(Phase.ROLLOUT, "other", 2) == expected_slowdown(Phase.ROLLOUT, 2)


def test_no_batch_is_faster_than_alone():
    assert observed((100, 1.0, ()), *40 * [(100, 0.5, [share(2, 100, 0.5)])]).slowdown(Phase.ROLLOUT, "base", 2) == 1.0
