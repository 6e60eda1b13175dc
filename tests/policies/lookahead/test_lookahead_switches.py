"""What the look-ahead makes of switches: states that are there are used first, and a migration must pay for its own."""

from __future__ import annotations

import pytest

from rlmux.policies.lookahead.problem import Problem, SiblingMigration, WorkItem
from rlmux.policies.lookahead.search import look_ahead


def on_one_device(switch_s: float, **fields) -> Problem:
    """a's rollout is there; b's and a's next are ready, and b's is a little longer."""
    work_items = (
        WorkItem(pipeline=1, sub_stage="dense", devices=(0,), seconds=1.2, state=2, switch_s=switch_s),
        WorkItem(pipeline=0, sub_stage="dense", devices=(0,), seconds=1.0, state=0, switch_s=switch_s),
        WorkItem(pipeline=1, sub_stage="dense", devices=(0,), seconds=1.2, state=2, switch_s=switch_s),
        WorkItem(pipeline=0, sub_stage="dense", devices=(0,), seconds=1.0, state=0, switch_s=switch_s),
    )
    return Problem(work_items=work_items, **fields)


def test_a_plan_switches_as_seldom_as_it_can():
    made = look_ahead(on_one_device(0.5, kept=((0,),), num_kept=(1,)), budget=4000)
    assert made.makespan_s == pytest.approx(4.4 + 0.5)
    assert {made.start_s[1], made.start_s[3]} == {0.0, 1.0}, "those whose state is there come first"


def test_where_two_states_fit_each_is_brought_once():
    made = look_ahead(on_one_device(0.5, kept=((0,),), num_kept=(2,)))
    assert made.makespan_s == pytest.approx(4.4 + 0.5)
    everything = look_ahead(on_one_device(0.5, kept=((0, 2),), num_kept=(2,)))
    assert everything.makespan_s == pytest.approx(4.4)


def test_without_room_to_count_switches_cost_nothing():
    assert look_ahead(on_one_device(0.5)).makespan_s == pytest.approx(4.4)


@pytest.mark.parametrize(("switch_s", "num_merges"), [(0.0, 1), (3.0, 0)])
def test_a_tail_does_not_migrate_for_work_that_would_pay_for_it_in_switches(switch_s, num_merges):
    """b's training could have the tail's device at once; a's next rollout there would then find its state gone."""
    work_items = (
        WorkItem(pipeline=0, sub_stage="tail", devices=(0,), seconds=2.0, tail_s=2.0, is_running=True, state=0),
        WorkItem(pipeline=0, sub_stage="tail", devices=(1,), seconds=2.2, tail_s=2.2, is_running=True, state=0),
        WorkItem(pipeline=1, sub_stage="update", devices=(0,), seconds=2.0, state=3, switch_s=switch_s),
        WorkItem(pipeline=0, sub_stage="dense", devices=(0,), seconds=1.0, needs=(1,), state=0, switch_s=switch_s),
    )
    merge = SiblingMigration(source=0, target=1, cost_s=0.1)
    made = look_ahead(Problem(work_items=work_items, sibling_migrations=(merge,), kept=((0,), (0,)), num_kept=(1, 1)))
    assert len(made.sibling_migrations_now) == num_merges
