"""The planner on graphs small enough to reason about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.estimation.colocation import NO_SHARING, SharingEntry, SharingTable, SharingTriple
from rlmux.core.model import SubStage
from rlmux.policies.lookahead.priorities import longest_paths
from rlmux.policies.lookahead.problem import IdleMigration, Problem, SiblingMigration, WorkItem
from rlmux.policies.lookahead.search import look_ahead
from rlmux.policies.search.greedy import greedy


def item(pipeline: int, sub_stage: str, devices: tuple[int, ...], seconds: float, **fields) -> WorkItem:
    return WorkItem(pipeline=pipeline, sub_stage=SubStage(sub_stage), devices=devices, seconds=seconds, **fields)


TABLE = SharingTable.of(
    [
        SharingEntry(sub_stage_a="update", sub_stage_b="tail", device_fraction=0.75, slowdown_a=1.15, slowdown_b=1.3),
        SharingEntry(sub_stage_a="dense", sub_stage_b="tail", device_fraction=0.5, slowdown_a=1.3, slowdown_b=1.3),
    ]
)


def figure_11() -> Problem:
    """A tail, a training and a shard: the pair that does most per second leaves the shard alone for its whole time."""
    return Problem(
        work_items=(
            item(0, "tail", (0,), 4.0, tail_s=4.0),
            item(1, "update", (0,), 4.0),
            item(2, "dense", (0,), 8.0, tail_s=4.0),
        ),
        sharing=TABLE,
    )


def test_greedy_takes_the_best_pair_and_ends_later_than_the_look_ahead():
    by_greed, ahead = greedy(figure_11()), look_ahead(figure_11())
    assert by_greed.starts_now == (0, 1)
    assert ahead.starts_now == (0, 2)
    assert by_greed.makespan_s == pytest.approx(8 + 4 * 1.15 + (4 - 4 * 1.15 / 1.3) * 0.3 / 1.3, abs=0.2)
    assert ahead.makespan_s == pytest.approx(10.26, abs=0.01)
    assert by_greed.makespan_s > 1.2 * ahead.makespan_s


def test_tasks_on_one_device_without_sharing_run_one_after_another():
    problem = Problem(
        work_items=(item(0, "update", (0,), 2.0), item(1, "update", (0, 1), 3.0), item(2, "dense", (1,), 1.0))
    )
    made = look_ahead(problem)
    assert made.makespan_s == pytest.approx(5.0)
    for first in range(3):
        for second in range(first):
            if set(problem.work_items[first].devices) & set(problem.work_items[second].devices):
                assert made.end_s[second] <= made.start_s[first] or made.end_s[first] <= made.start_s[second]


def test_a_device_is_held_for_the_critical_path_where_that_ends_sooner():
    """The long chain comes free in a second; starting the filler now would delay all of it."""
    problem = Problem(
        work_items=(
            item(0, "dense", (1,), 1.0),
            item(0, "update", (0, 1), 6.0, needs=(0,)),
            item(1, "dense", (0,), 5.0),
            item(0, "dense", (1,), 6.0, needs=(1,)),
        )
    )
    made = look_ahead(problem)
    assert made.makespan_s == pytest.approx(13.0)
    assert 2 not in made.starts_now
    assert greedy(problem).makespan_s == pytest.approx(17.0)


def test_a_pair_runs_at_the_pace_of_the_table_and_speeds_up_when_one_ends():
    problem = Problem(work_items=(item(0, "update", (0,), 4.0), item(1, "tail", (0,), 6.0, tail_s=6.0)), sharing=TABLE)
    made = look_ahead(problem)
    assert made.end_s[0] == pytest.approx(4.6)
    assert made.end_s[1] == pytest.approx(4.6 + 6.0 - 4.6 / 1.3)


def test_an_item_goes_through_its_sub_stages_and_each_has_its_own_neighbours():
    """Dense decode may run beside the tail, and its prefill may not: it begins when the tail has a second left."""
    later = ((8.0, SubStage.DENSE_DECODE), (4.0, SubStage.TAIL_DECODE))
    rollout = item(0, "prefill", (0,), 9.0, later=later, tail_s=2.0)
    problem = Problem(work_items=(item(1, "tail", (0,), 5.0, tail_s=5.0, is_running=True), rollout), sharing=TABLE)
    assert look_ahead(problem).start_s[1] == pytest.approx(5.0)
    begun = replace(rollout, sub_stage=SubStage.DENSE_DECODE, seconds=8.0, later=later[1:])
    made = look_ahead(replace(problem, work_items=(problem.work_items[0], begun)))
    assert made.start_s[1] == 0.0
    # Beside the tail 4 s of dense decode take 5.2 s; then the tail has 1 s left, beside which no other tail helps.
    assert made.end_s[1] == pytest.approx(5.2 + (5.0 - 5.2 / 1.3) * 2.0 + 4.0 - (5.0 - 5.2 / 1.3))


def test_a_shard_waits_for_the_tail_of_another_where_two_in_their_dense_part_gain_little():
    """Beside the dense part the table allows it, at a gain of 1.1; beside the tail it gains 1.8."""
    pairs = (("dense", "dense", 1.8), ("dense", "tail", 1.1))
    sharing = SharingTable.of(
        SharingEntry(sub_stage_a=a, sub_stage_b=b, device_fraction=0.5, slowdown_a=slowdown, slowdown_b=slowdown)
        for a, b, slowdown in pairs
    )
    shards = tuple(item(number, "dense", (0,), 8.0, tail_s=4.0) for number in range(2))
    made = look_ahead(Problem(work_items=shards, sharing=sharing))
    assert made.start_s == (0.0, pytest.approx(4.0))
    assert made.makespan_s == pytest.approx(4.0 + 4.0 * 1.1 + 4.0)


def test_pipelines_take_turns_phase_after_phase_where_that_ends_sooner():
    """Neither the longest path nor one pipeline first has pipeline 0 first in the rollouts alone (seed 126 of
    `benchmarks/exact_schedule.py`)."""
    problem = Problem(
        work_items=(
            item(0, "dense", (0,), 5.7, tail_s=1.6),
            item(0, "dense", (1,), 4.1, tail_s=2.1),
            item(0, "dense", (2,), 3.9, tail_s=2.1),
            item(0, "update", (0,), 4.3, needs=(0, 1, 2)),
            item(1, "dense", (0,), 6.2, tail_s=3.7),
            item(1, "dense", (1,), 6.5, tail_s=3.0),
            item(1, "dense", (2,), 4.0, tail_s=2.1),
            item(1, "update", (0, 1, 2), 3.7, needs=(4, 5, 6)),
        ),
        sibling_migrations=(
            SiblingMigration(source=1, target=0, cost_s=0.2, stretch=1.1),
            SiblingMigration(source=4, target=5, cost_s=0.2, stretch=1.1),
        ),
    )
    assert look_ahead(problem).makespan_s == pytest.approx(16.2)


def test_three_share_a_device_only_at_rates_that_were_measured_for_three():
    kinds = ("dense", "tail", "update")
    triple = SharingTriple(sub_stages=kinds, device_fractions=(0.3, 0.3, 0.4), slowdowns=(1.5, 1.5, 1.5))
    items = tuple(item(number, kind, (0,), 3.0) for number, kind in enumerate(kinds))
    with_triple = SharingTable(TABLE.entries, (triple,))
    assert look_ahead(Problem(work_items=items, sharing=with_triple)).makespan_s == pytest.approx(4.5)
    assert look_ahead(Problem(work_items=items, sharing=TABLE)).makespan_s > 6.0


def test_work_on_several_devices_goes_at_the_pace_of_the_slowest():
    problem = Problem(
        work_items=(item(0, "update", (0, 1), 4.0), item(1, "tail", (1,), 10.0, tail_s=10.0)), sharing=TABLE
    )
    assert look_ahead(problem).end_s[0] == pytest.approx(4.6)


@pytest.mark.parametrize("table", [NO_SHARING, TABLE])
def test_running_items_that_share_a_device_go_on_together_whatever_the_table_says(table):
    """A tail that left the rest of its node, beside the next rollout: no pair of them is in either table."""
    problem = Problem(
        work_items=(
            item(0, "tail", (0,), 2.0, tail_s=2.0, is_running=True),
            item(1, "tail", (0,), 5.0, tail_s=5.0, is_running=True),
            item(0, "update", (1,), 1.0, needs=(0,)),
            item(2, "prefill", (0,), 3.0),
        ),
        sharing=table,
    )
    for made in (look_ahead(problem), greedy(problem)):
        assert made.end_s == pytest.approx((4.0, 7.0, 5.0, 10.0))
        assert made.start_s[3] == pytest.approx(7.0)


def test_three_running_items_that_no_table_has_take_a_third_of_their_device_each():
    items = tuple(item(number, "prefill", (0,), 1.0 + number, is_running=True) for number in range(3))
    assert look_ahead(Problem(work_items=items)).end_s == pytest.approx((3.0, 5.0, 6.0))


def test_a_running_item_that_migrates_off_a_shared_device_leaves_the_other_alone():
    problem = Problem(
        work_items=(
            item(0, "dense", (0,), 4.0, is_running=True),
            item(1, "dense", (0,), 4.0, is_running=True),
        ),
        idle_migrations=(IdleMigration(item=0, device=1, cost_s=0.5),),
    )
    made = look_ahead(problem)
    assert made.idle_migrations_now == (0,)
    assert made.end_s == pytest.approx((4.5, 4.0))


def test_a_playout_of_years_ends_where_a_rounding_error_is_more_than_the_seconds_left():
    years_s = 1e8
    items = [
        item(number % 2, SubStage.DENSE_DECODE, (0,), years_s / 3 + number * years_s / 11, tail_s=years_s / 7)
        for number in range(6)
    ]
    expected_s = sum(one.seconds for one in items)
    assert look_ahead(Problem(work_items=tuple(items))).makespan_s == pytest.approx(expected_s)


def two_tails(cost_s: float) -> Problem:
    """A tail on each of two devices, and training that waits for one of them."""
    return Problem(
        work_items=(
            item(0, "dense", (0,), 4.0, tail_s=4.0, is_running=True),
            item(0, "dense", (1,), 5.0, tail_s=5.0, is_running=True),
            item(1, "update", (0,), 6.0),
        ),
        sibling_migrations=(SiblingMigration(source=0, target=1, cost_s=cost_s, stretch=1.1),),
    )


def test_a_tail_migrates_where_that_lets_another_pipeline_start():
    made = look_ahead(two_tails(cost_s=0.2))
    assert made.sibling_migrations_now == (0,)
    assert made.start_s[2] == 0.0
    assert made.makespan_s == pytest.approx(6.0)


def test_no_tail_migrates_where_that_costs_more_than_it_frees():
    made = look_ahead(two_tails(cost_s=8.0))
    assert made.sibling_migrations == ()
    assert made.makespan_s == pytest.approx(10.0)


def test_a_deadline_comes_before_the_makespan():
    long, urgent = item(0, "update", (0,), 5.0), item(1, "update", (0,), 1.0, deadline_s=1.0)
    work_items = (long, urgent, item(0, "dense", (1,), 9.0, needs=(0,)))
    assert look_ahead(Problem(work_items=work_items)).start_s[1] == 0.0


def test_the_longest_path_counts_what_waits():
    work_items = (item(0, "dense", (0,), 2.0), item(0, "update", (0,), 3.0, needs=(0,)), item(1, "dense", (1,), 4.0))
    assert longest_paths(work_items, [item.seconds for item in work_items]) == [5.0, 3.0, 4.0]


def test_a_plan_is_a_function_of_its_problem():
    assert look_ahead(figure_11()) == look_ahead(figure_11())


def whole_shards(cost_s: float) -> Problem:
    """Two pipelines, each with a shard of 4 s on both devices, of which nothing has begun; then 2 s of training."""
    shares = [item(number, "dense", (device,), 4.0, tail_s=3.0) for number in (0, 1) for device in (0, 1)]
    trains = (item(0, "update", (0,), 2.0, needs=(0, 1)), item(1, "update", (1,), 2.0, needs=(2, 3)))
    return Problem(
        work_items=(*shares, *trains),
        sibling_migrations=(
            SiblingMigration(source=1, target=0, cost_s=cost_s, is_whole=True),
            SiblingMigration(source=0, target=1, cost_s=cost_s, is_whole=True),
            SiblingMigration(source=2, target=3, cost_s=cost_s, is_whole=True),
            SiblingMigration(source=3, target=2, cost_s=cost_s, is_whole=True),
        ),
    )


def test_whole_shards_migrate_where_that_saves_device_time():
    made = look_ahead(whole_shards(cost_s=1.0))
    assert made.sibling_migrations_now == (0, 2)
    assert made.makespan_s == pytest.approx(4.0 + 1.0 + 2.0)


def test_no_whole_shard_migrates_where_its_sibling_would_take_twice_as_long():
    made = look_ahead(whole_shards(cost_s=4.0))
    assert made.sibling_migrations == ()
    assert made.makespan_s == pytest.approx(8.0 + 2.0)


def late_shard(*others: int) -> Problem:
    """A rollout on three devices, of which one is held by another pipeline's training for 6 s more."""
    return Problem(
        work_items=(
            item(1, "update", (0,), 6.0, is_running=True),
            *(item(0, "dense", (device,), 4.0) for device in range(3)),
        ),
        sibling_migrations=(
            SiblingMigration(source=1, target=2, others=others, cost_s=4.0 / (1 + len(others)), is_whole=True),
        ),
    )


def test_a_late_shard_is_spread_over_all_its_siblings_rather_than_given_to_one():
    to_one, spread = look_ahead(late_shard()), look_ahead(late_shard(3))
    assert to_one.end_s[1:] == pytest.approx((0.0, 8.0, 4.0))
    assert spread.sibling_migrations_now == (0,)
    assert spread.end_s[1:] == pytest.approx((0.0, 6.0, 6.0))


def test_a_shard_that_has_begun_does_not_migrate_as_a_whole():
    problem = whole_shards(cost_s=0.1)
    begun = tuple(
        replace(one, is_running=True) if number == 1 else one for number, one in enumerate(problem.work_items)
    )
    assert not {0} & set(look_ahead(replace(problem, work_items=begun)).sibling_migrations_now)


def migrating(cost_s: float, *, is_running: bool) -> Problem:
    """Device 0 is wanted by a shard of one pipeline and training of another; device 1 is free for the shard."""
    shard = item(0, "dense", (0,), 4.0, is_running=is_running)
    return Problem(
        work_items=(shard, item(1, "update", (0,), 6.0)),
        idle_migrations=(IdleMigration(item=0, device=1, cost_s=cost_s),),
    )


@pytest.mark.parametrize("is_running", [False, True])
def test_a_shard_migrates_to_an_idle_device_where_others_want_its_own(is_running):
    made = look_ahead(migrating(0.5, is_running=is_running))
    assert made.idle_migrations_now == (0,)
    assert made.start_s[1] == 0.0
    assert made.end_s == pytest.approx((4.5, 6.0))


@pytest.mark.parametrize("is_running", [False, True])
def test_no_shard_migrates_where_that_costs_more_than_it_frees(is_running):
    made = look_ahead(migrating(7.0, is_running=is_running))
    assert made.idle_migrations_now == ()
    assert made.makespan_s == pytest.approx(10.0)


def test_a_shard_that_migrates_later_stays_until_then():
    problem = migrating(0.5, is_running=False)
    held = (*problem.work_items, item(1, "dense", (1,), 1.0, is_running=True))
    made = look_ahead(replace(problem, work_items=held))
    assert made.makespan_s == pytest.approx(6.0)
    assert made.idle_migrations_now == ()


def test_a_migration_of_a_rollout_to_come_is_planned_and_not_made():
    """So the pipeline whose training runs is seen to need one device next, and the other one keeps its own."""
    later = [item(0, "dense", (device,), 4.0, tail_s=3.0, needs=(0,)) for device in (0, 1)]
    work_items = (item(0, "update", (0,), 1.0, is_running=True), *later, item(1, "dense", (1,), 6.0))
    later = SiblingMigration(source=2, target=1, cost_s=1.0, is_whole=True, is_later=True)
    made = look_ahead(Problem(work_items=work_items, sibling_migrations=(later,)))
    assert made.makespan_s == pytest.approx(6.0)
    assert made.sibling_migrations == (0,)
    assert made.sibling_migrations_now == ()
    assert look_ahead(Problem(work_items=work_items)).makespan_s == pytest.approx(10.0)
