"""The look-ahead with a schedule to start from."""

from __future__ import annotations

from rlmux.core.model import SubStage
from rlmux.policies.lookahead.priorities import Priorities
from rlmux.policies.lookahead.problem import Problem, WorkItem
from rlmux.policies.lookahead.search import look_ahead, play_out


def item(pipeline: int, devices: tuple[int, ...], seconds: float, needs: tuple[int, ...] = ()) -> WorkItem:
    return WorkItem(pipeline=pipeline, sub_stage=SubStage.UPDATE, devices=devices, seconds=seconds, needs=needs)


TWO = Problem(work_items=(item(0, (0,), 4.0), item(0, (1,), 4.0, (0,)), item(1, (0,), 1.0), item(1, (1,), 6.0, (2,))))
"""The second pipeline had better begin: 1 + 6 + 4 seconds instead of 4 + 4 + 6."""


def test_priorities_in_cycle_order_hold_a_later_slot_back():
    strict = Priorities([0, 1, 2, 3], after={2: 0, 3: 1}, unshared=frozenset(range(4)))
    assert play_out(TWO, strict).end_s == (4.0, 8.0, 5.0, 14.0)


def test_a_plan_is_never_worse_than_what_it_starts_from():
    best = Priorities([2, 3, 0, 1])
    assert play_out(TWO, best).makespan_s == 11.0
    assert look_ahead(TWO, budget=1, openings=(best,)).makespan_s == 11.0
    worse = Priorities([0, 1, 2, 3], after={2: 0, 3: 1})
    assert look_ahead(TWO, openings=(worse,)).makespan_s == 11.0


def test_a_schedule_says_when_its_pipelines_end_in_the_mean():
    assert look_ahead(TWO).mean_end_s == (11.0 + 7.0) / 2
