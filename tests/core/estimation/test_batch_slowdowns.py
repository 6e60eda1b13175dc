"""What pipelines of one base lose in one batch, learned from their orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.estimation.batch_slowdowns import BatchSlowdowns, expected_slowdown
from rlmux.core.events import BatchShare
from rlmux.core.model import Phase, Pipeline, PipelineId

A, OTHER = (Pipeline(id=PipelineId(name), num_steps=1, rollout_base=name, dense_threshold=8) for name in ("a", "b"))


def share(num_together, tokens, seconds):
    return BatchShare(num_together=num_together, tokens=tokens, seconds=seconds, held_s=0.0, charged_s=0.0)


def observed(*orders):
    """Slowdowns after orders of pipeline `a` with so many tokens and seconds, batches with others included."""
    slowdowns = BatchSlowdowns()
    for tokens, seconds, batches in orders:
        slowdowns.observe(A, Phase.ROLLOUT, tokens=tokens, seconds=seconds, batches=batches)
    return slowdowns


def test_before_any_order_a_batch_is_as_slow_as_expected():
    assert [BatchSlowdowns().slowdown(A, Phase.ROLLOUT, number) for number in (1, 2, 4)] == [1.0, 1.5, 2.5]


def test_what_was_seen_replaces_what_was_expected():
    alone, together = (100, 1.0, ()), (100, 1.2, [share(2, 100, 1.2)])
    once = observed(alone, together).slowdown(A, Phase.ROLLOUT, 2)
    often = observed(alone, *40 * [together]).slowdown(A, Phase.ROLLOUT, 2)
    assert 1.2 < once < expected_slowdown(A, Phase.ROLLOUT, 2)
    assert often == pytest.approx(1.2, abs=0.02)


def test_the_part_of_an_order_that_ran_alone_is_its_speed_alone():
    slowdowns = observed(*40 * [(150, 2.0, [share(2, 50, 1.0)])])
    assert slowdowns.slowdown(A, Phase.ROLLOUT, 2) == pytest.approx(2.0, abs=0.05)


def test_a_pipeline_that_was_never_seen_alone_teaches_nothing():
    slowdowns = observed(*9 * [(100, 9.0, [share(2, 100, 9.0)])])
    assert slowdowns.slowdown(A, Phase.ROLLOUT, 2) == expected_slowdown(A, Phase.ROLLOUT, 2)


def test_each_base_and_each_number_of_pipelines_has_a_slowdown_of_its_own():
    slowdowns = observed((100, 1.0, ()), *40 * [(100, 1.0, [share(2, 100, 1.0)])])
    assert slowdowns.slowdown(A, Phase.ROLLOUT, 2) == pytest.approx(1.0, abs=0.02)
    assert slowdowns.slowdown(A, Phase.ROLLOUT, 3) == expected_slowdown(A, Phase.ROLLOUT, 3)
    assert slowdowns.slowdown(OTHER, Phase.ROLLOUT, 2) == expected_slowdown(A, Phase.ROLLOUT, 2)


def test_no_batch_is_faster_than_alone():
    assert observed((100, 1.0, ()), *40 * [(100, 0.5, [share(2, 100, 0.5)])]).slowdown(A, Phase.ROLLOUT, 2) == 1.0


def test_one_slow_batch_is_no_reason_to_give_up():
    """The first one probes its rows."""
    assert observed((100, 1.0, ()), (100, 9.0, [share(2, 100, 9.0)])).slowdown(A, Phase.ROLLOUT, 2) < 1.8


def test_more_slots_each_leave_less_to_gain():
    few, many = (replace(A, dense_threshold=threshold) for threshold in (4, 64))
    assert expected_slowdown(few, Phase.ROLLOUT, 2) < 1.4 < 1.8 < expected_slowdown(many, Phase.ROLLOUT, 2) < 2.0


def test_a_tail_alone_does_not_count_as_the_speed_alone_once_an_order_was_alone():
    """Alone the order takes 2 s. Beside another its first 90 tokens take 2 s, and its tail is as slow as ever."""
    mixed = (100, 3.0, [share(2, 90, 2.0)])
    assert observed((100, 2.0, ()), *40 * [mixed]).slowdown(A, Phase.ROLLOUT, 2) == pytest.approx(2.0, abs=0.05)
