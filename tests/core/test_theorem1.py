"""Theorem 1 of RollMux: round robin maximises summed utilisation where T_load <= T_cycle.

The period of round robin is the one that placement promises (`meta_iteration_s`). The theorem compares it with
schedules that repeat one member. Here they are enumerated: every cyclic order
on the rollout node, every cyclic order on the training node, one member up to three times in a cycle; thousands of
random groups at once, an order at a time. The last test shows where the claim ends: repeating two members that
overlap each other can do better.
"""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest

from rlmux.core.estimation.cycles import PhaseLoad, meta_iteration_s
from rlmux.core.model import NodeId
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

NEVER = -1e18


def has_period(rollouts, trains, first_train, seconds_N, period_N):
    """Can these cyclic orders repeat at the period, for one rollout and one training node? By group, shape (N,).

    `rollouts` and `trains` list occurrences (member, number); training begins its cycle at `first_train`.
    `seconds_N` is (N, members, 2). Relaxes the start times of a periodic schedule: they settle if and only if the
    period is long enough.
    """
    trains = trains[first_train:] + trains[:first_train]
    end_roll = {one: np.full(len(period_N), NEVER) for one in rollouts}
    end_train = {one: np.full(len(period_N), NEVER) for one in rollouts}
    before = {}
    last = {}
    for one in rollouts:
        before[one] = last.get(one[0])
        last[one[0]] = one
    changed_N = np.ones(len(period_N), dtype=bool)
    for _ in range(4 * len(rollouts) + 2):
        changed_N = np.zeros(len(period_N), dtype=bool)
        previous = end_roll[rollouts[-1]] - period_N
        for one in rollouts:
            own = before[one]
            ready = end_train[own] if own else end_train[last[one[0]]] - period_N
            end = np.maximum(np.maximum(previous, ready), 0.0) + seconds_N[:, one[0], 0]
            changed_N |= end > end_roll[one] + 1e-9
            previous = end_roll[one] = np.maximum(end, end_roll[one])
        previous = end_train[trains[-1]] - period_N
        for one in trains:
            end = np.maximum(previous, end_roll[one]) + seconds_N[:, one[0], 1]
            changed_N |= end > end_train[one] + 1e-9
            previous = end_train[one] = np.maximum(end, end_train[one])
        if not changed_N.any():
            break
    return ~changed_N


def distinct_orders(occurrences):
    """Orders of the occurrences, equal members interchangeable in order of number."""
    seen = {}
    for order in permutations([member for member, _ in occurrences]):
        counts: dict[int, int] = {}
        named = []
        for member in order:
            named.append((member, counts.get(member, 0)))
            counts[member] = counts.get(member, 0) + 1
        seen[tuple(named)] = None
    return list(seen)


def beats_round_robin(seconds_N, repeats):
    """Which groups have a pair of cyclic orders with these numbers of repeats that has a higher U_R + U_T."""
    solo_N = seconds_N.sum(axis=2)
    utilization_N = solo_N.sum(axis=1) / promised_period(seconds_N)
    period_N = solo_N @ np.array(repeats) / utilization_N * (1 - 1e-6)
    occurrences = [(j, number) for j in range(len(repeats)) for number in range(repeats[j])]
    orders = distinct_orders(occurrences)
    fixed = [order for order in orders if order[0] == (0, 0)]
    beaten_N = np.zeros(len(seconds_N), dtype=bool)
    for rollouts in fixed:
        for trains in orders:
            for first in range(len(trains)):
                beaten_N |= has_period(rollouts, trains, first, seconds_N, period_N)
    return beaten_N


def promised_period(seconds_N):
    """Seconds of a cycle that placement promises each group on one rollout and one training node, shape (N,)."""
    nodes = (NodeId("rollout", 0),)
    return np.array(
        [
            meta_iteration_s([PhaseLoad(rollout_s=roll, train_s=train, rollout_nodes=nodes) for roll, train in group])
            for group in seconds_N.tolist()
        ]
    )


def unsaturated_group(generator, size):
    """The first member is long, so that the premise holds often enough to draw until it does."""
    while True:
        seconds = [(generator.randint(1, 12), generator.randint(1, 12)) for _ in range(size)]
        seconds[0] = (seconds[0][0] + 6 * (size - 1), seconds[0][1] + 6 * (size - 1))
        load_s = max(sum(roll for roll, _ in seconds), sum(train for _, train in seconds))
        if load_s <= max(map(sum, seconds)):
            return seconds


def unsaturated_groups(seed, size, count):
    generator = random.Random(seed)
    return np.array([unsaturated_group(generator, size) for _ in range(count)], dtype=float)


def assert_none_beats_round_robin(seconds_N, repeats):
    beaten_N = beats_round_robin(seconds_N, repeats)
    assert not beaten_N.any(), (seconds_N[beaten_N][0], repeats)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_round_robin_attains_the_cycle_time_of_the_longest_member(size):
    seconds_N = unsaturated_groups(1, size, 2000)
    order = tuple((j, 0) for j in range(size))
    cycle_N = promised_period(seconds_N)
    assert (cycle_N == seconds_N.sum(axis=2).max(axis=1)).all()
    assert has_period(order, order, 0, seconds_N, cycle_N).all()
    assert not has_period(order, order, 0, seconds_N, cycle_N * 0.999).any()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_policy_runs_such_groups_at_the_promised_period(builders, size):
    for seconds in unsaturated_groups(5, size, 20).tolist():
        driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux")))
        for number, (rollout_s, train_s) in enumerate(seconds):
            driver.submit(builders.pipeline(f"p{number}", num_steps=6, rollout_s=rollout_s, train_s=train_s))
        driver.run()
        begun_s = [time_s for time_s, name, stage, step in driver.starts() if (name, stage) == ("p0", "update")]
        assert np.diff(begun_s)[2:] == pytest.approx(promised_period(np.array([seconds]))[0])


@pytest.mark.parametrize("repeats", [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)])
def test_no_schedule_of_two_members_that_repeats_one_beats_round_robin(repeats):
    assert_none_beats_round_robin(unsaturated_groups(2, 2, 5000), repeats)


@pytest.mark.parametrize("repeats", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_no_schedule_of_three_members_that_repeats_one_beats_round_robin(repeats):
    assert_none_beats_round_robin(unsaturated_groups(3, 3, 4000), repeats)


@pytest.mark.slow
@pytest.mark.parametrize(
    "repeats", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (1, 1, 3), (1, 1, 1, 1), (1, 2, 1, 1)]
)
def test_no_larger_group_beats_round_robin_either(repeats):
    assert_none_beats_round_robin(unsaturated_groups(4, len(repeats), 10_000 if len(repeats) == 3 else 500), repeats)


def test_the_enumeration_can_say_yes():
    """Two equal members, each twice: four steps in 20 s are possible, in less they are not."""
    seconds_N = np.array([[(5.0, 5.0), (5.0, 5.0)]])
    twice = ((0, 0), (1, 0), (0, 1), (1, 1))
    assert has_period(twice, twice, 0, seconds_N, np.array([20.0])).all()
    assert not has_period(twice, twice, 0, seconds_N, np.array([19.9])).any()


def test_repeating_two_members_that_overlap_each_other_can_beat_round_robin():
    seconds = [(50, 51), (1, 10), (10, 1)]  # T_load 62 <= T_cycle 101: the theorem's premise holds
    order = ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3))
    assert has_period(order, order, 0, np.array([seconds], dtype=float), np.array([144.0])).all()
    round_robin = (101 + 11 + 11) / 101
    assert 1.07 * round_robin < (101 + 4 * 11 + 4 * 11) / 144
