"""Theorem 1 of RollMux: round robin maximises summed utilisation where T_load <= T_cycle.

The theorem compares round robin with schedules that repeat one member. Here they are enumerated: every cyclic order
on the rollout node, every cyclic order on the training node, one member up to three times in a cycle. The last test
shows where the claim ends: repeating two members that overlap each other can do better.
"""

from __future__ import annotations

import random
from itertools import permutations

NEVER = -1e18


def has_period(rollouts, trains, first_train, seconds, period_s):
    """Can these cyclic orders repeat every `period_s` seconds, for one rollout and one training node?

    `rollouts` and `trains` list occurrences (member, number); training begins its cycle at `first_train`. Relaxes
    the start times of a periodic schedule: they settle if and only if the period is long enough.
    """
    trains = trains[first_train:] + trains[:first_train]
    end_roll = dict.fromkeys(rollouts, NEVER)
    end_train = dict.fromkeys(rollouts, NEVER)
    before = {}
    last = {}
    for one in rollouts:
        before[one] = last.get(one[0])
        last[one[0]] = one
    for _ in range(4 * len(rollouts) + 2):
        changed = False
        previous = end_roll[rollouts[-1]] - period_s
        for one in rollouts:
            own = before[one]
            ready = end_train[own] if own else end_train[last[one[0]]] - period_s
            end = max(previous, ready, 0.0) + seconds[one[0]][0]
            changed |= end > end_roll[one] + 1e-9
            previous = end_roll[one] = max(end, end_roll[one])
        previous = end_train[trains[-1]] - period_s
        for one in trains:
            end = max(previous, end_roll[one]) + seconds[one[0]][1]
            changed |= end > end_train[one] + 1e-9
            previous = end_train[one] = max(end, end_train[one])
        if not changed:
            return True
    return False


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


def beats_round_robin(seconds, repeats):
    """Whether some pair of cyclic orders with these numbers of repeats has a higher U_R + U_T."""
    work = sum(repeats[j] * sum(seconds[j]) for j in range(len(seconds)))
    utilization = sum(map(sum, seconds)) / max(map(sum, seconds))  # the theorem's: the cycle is T_cycle
    occurrences = [(j, number) for j in range(len(seconds)) for number in range(repeats[j])]
    period_s = work / utilization * (1 - 1e-6)
    orders = distinct_orders(occurrences)
    fixed = [order for order in orders if order[0] == (0, 0)]
    return any(
        has_period(rollouts, trains, first, seconds, period_s)
        for rollouts in fixed
        for trains in orders
        for first in range(len(trains))
    )


def unsaturated_group(generator, size):
    """The first member is long, so that the premise holds often enough to draw until it does."""
    while True:
        seconds = [(generator.randint(1, 12), generator.randint(1, 12)) for _ in range(size)]
        seconds[0] = (seconds[0][0] + 6 * (size - 1), seconds[0][1] + 6 * (size - 1))
        load_s = max(sum(roll for roll, _ in seconds), sum(train for _, train in seconds))
        if load_s <= max(map(sum, seconds)):
            return seconds


def test_round_robin_attains_the_cycle_time_of_the_longest_member():
    generator = random.Random(1)
    for _ in range(2000):
        size = generator.randint(1, 5)
        seconds = unsaturated_group(generator, size)
        order = [(j, 0) for j in range(size)]
        cycle_s = max(map(sum, seconds))
        assert has_period(order, order, 0, seconds, cycle_s)
        assert not has_period(order, order, 0, seconds, cycle_s * 0.999)


def test_no_schedule_of_two_members_that_repeats_one_beats_round_robin():
    generator = random.Random(2)
    for _ in range(800):
        seconds = unsaturated_group(generator, 2)
        for repeats in ([1, 1], [2, 1], [1, 2], [3, 1], [1, 3]):
            assert not beats_round_robin(seconds, repeats), (seconds, repeats)


def test_no_schedule_of_three_members_that_repeats_one_beats_round_robin():
    generator = random.Random(3)
    for _ in range(60):
        seconds = unsaturated_group(generator, 3)
        for repeats in ([1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2]):
            assert not beats_round_robin(seconds, repeats), (seconds, repeats)


def test_repeating_two_members_that_overlap_each_other_can_beat_round_robin():
    seconds = [(50, 51), (1, 10), (10, 1)]  # T_load 62 <= T_cycle 101: the theorem's premise holds
    order = ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3))
    assert has_period(order, order, 0, seconds, 144.0)
    round_robin = (101 + 11 + 11) / 101
    assert 1.07 * round_robin < (101 + 4 * 11 + 4 * 11) / 144
