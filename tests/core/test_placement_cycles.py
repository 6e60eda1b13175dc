"""The period of a strict meta-iteration: formula, exact value, and simulation agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.estimation.cycles import (
    PhaseLoad,
    cycle_order,
    cycle_s,
    fits_period,
    is_formula_exact,
    load_s,
    meta_iteration_s,
)


def load(rollout_s, train_s, *nodes):
    return PhaseLoad(rollout_s=rollout_s, train_s=train_s, rollout_nodes=nodes)


def simulated_period_s(loads, num_rounds=240):
    """Play the meta-iterations one after another and measure their rate once the start is forgotten."""
    node_s, trained_s, train_s, ends = {}, [0.0] * len(loads), {}, []
    for _ in range(num_rounds):
        for j, one in enumerate(loads):
            start = max([trained_s[j] + one.sync_s, *(node_s.get(node, 0.0) for node in one.rollout_nodes)])
            end = start + one.rollout_s
            node_s.update(dict.fromkeys(one.rollout_nodes, end - one.tail_s))
            trained_s[j] = max([end, *(train_s.get(node, 0.0) for node in one.train_nodes)]) + one.train_s
            train_s.update(dict.fromkeys(one.train_nodes, trained_s[j]))
        ends.append(trained_s[:])
    half = num_rounds // 2  # an even number of phases_started of every small period
    return max((last - then) / (num_rounds - half) for last, then in zip(ends[-1], ends[half - 1], strict=True))


def with_syncs(loads, syncs):
    return [replace(one, sync_s=sync_s) for one, sync_s in zip(loads, syncs, strict=False)]


def period_as_simulated(loads, syncs):
    """The period, held against the simulation; nothing noticeably shorter is said to do."""
    synced = with_syncs(loads, syncs)
    assume(not is_formula_exact(synced))
    period_s = meta_iteration_s(synced)
    assert period_s == pytest.approx(simulated_period_s(synced), abs=1e-9)
    assert fits_period(synced, period_s * (1 + 1e-7))
    assert period_s == 0 or not fits_period(synced, period_s * (1 - 1e-4))
    return period_s


seconds = st.integers(0, 20).map(float)
on_one_node = st.builds(load, seconds, seconds, st.sampled_from("ABC"))
on_some_nodes = st.builds(
    lambda rollout_s, train_s, nodes: load(rollout_s, train_s, *nodes),
    seconds, seconds, st.lists(st.sampled_from("ABC"), min_size=1, max_size=3, unique=True),
)  # fmt: skip


@given(st.lists(on_one_node, min_size=1, max_size=6))
@settings(max_examples=examples(300), deadline=None)
def test_one_rollout_node_each_gives_max_of_cycle_and_load(loads):
    expected = max(cycle_s(loads), load_s(loads))
    assert meta_iteration_s(loads) == expected
    assert simulated_period_s(loads) == pytest.approx(expected, abs=1e-9)


@given(st.lists(on_some_nodes, min_size=1, max_size=5))
@settings(max_examples=examples(300), deadline=None)
def test_spanning_rollouts_take_as_long_as_simulated(loads):
    assert meta_iteration_s(loads) == pytest.approx(simulated_period_s(loads), abs=1e-9)


def test_a_rollout_that_spans_shared_nodes_can_exceed_cycle_and_load():
    loads = [load(10, 1, "A"), load(1, 1, "A", "B"), load(10, 1, "B")]
    assert (cycle_s(loads), load_s(loads)) == (11, 11)
    assert meta_iteration_s(loads) == 11.5


def test_equal_spanning_sets_behave_as_one_node():
    loads = [load(5, 3, "A", "B"), load(4, 4, "A", "B"), load(2, 9, "C")]
    assert meta_iteration_s(loads) == max(cycle_s(loads), load_s(loads))


# syncs: after its training a member's next rollout begins so much later, and no node is held


@given(st.lists(on_one_node, min_size=1, max_size=6), st.lists(seconds, min_size=6, max_size=6))
@settings(max_examples=examples(300), deadline=None)
def test_what_is_promised_with_syncs_is_kept_and_at_most_a_sync_too_long(loads, syncs):
    synced = with_syncs(loads, syncs)
    promised, played = meta_iteration_s(synced), simulated_period_s(synced)
    assert played <= promised + 1e-9
    assert promised <= played + max(one.sync_s for one in synced)
    assert fits_period(synced, promised)
    assert promised == 0 or not fits_period(synced, promised * (1 - 1e-4))


@given(st.lists(on_some_nodes, min_size=2, max_size=5), st.lists(seconds, min_size=5, max_size=5))
@settings(max_examples=examples(200), deadline=None)
def test_spanning_rollouts_with_syncs_take_as_long_as_simulated(loads, syncs):
    assert period_as_simulated(loads, syncs) > 0


trains_on_its_own = st.builds(
    lambda one, train_nodes: replace(one, train_nodes=tuple(train_nodes)),
    on_some_nodes,
    st.lists(st.sampled_from("XY"), min_size=1, max_size=2, unique=True),
)


@given(st.lists(trains_on_its_own, min_size=1, max_size=5), st.lists(seconds, min_size=5, max_size=5))
@settings(max_examples=examples(200), deadline=None)
def test_members_that_train_on_nodes_of_their_own_take_as_long_as_simulated(loads, syncs):
    """Two of them may share nothing at all: each goes at its own pace, and the slower one's is promised."""
    assert period_as_simulated(loads, syncs) >= 0


def with_tails(loads, parts):
    return [replace(one, tail_s=part * one.rollout_s / 4) for one, part in zip(loads, parts, strict=False)]


quarters = st.lists(st.integers(0, 4), min_size=5, max_size=5)


@given(st.lists(trains_on_its_own, min_size=1, max_size=5), st.lists(seconds, min_size=5, max_size=5), quarters)
@settings(max_examples=examples(300), deadline=None)
def test_rollouts_whose_tails_leave_their_nodes_take_as_long_as_simulated(loads, syncs, parts):
    assume(any(parts[: len(loads)]))
    assert period_as_simulated(with_tails(loads, parts), syncs) >= 0


@given(st.lists(on_one_node, min_size=2, max_size=5), st.lists(seconds, min_size=5, max_size=5), quarters)
@settings(max_examples=examples(300), deadline=None)
def test_tails_that_leave_a_single_node_take_as_long_as_simulated(loads, syncs, parts):
    """Here a bound often says the period without a search for the longest cycle."""
    assume(any(parts[: len(loads)]))
    assert period_as_simulated(with_tails(loads, parts), syncs) >= 0


def test_the_next_rollout_begins_beside_a_tail():
    tailed = replace(load(100, 20, "A"), tail_s=40.0)
    assert meta_iteration_s([load(100, 20, "A")] * 2) == 200.0
    assert meta_iteration_s([tailed] * 2) == 120.0


def test_two_narrow_members_train_side_by_side_beside_a_wide_one():
    wide = replace(load(20, 20, "A"), train_nodes=("X", "Y"))
    left, right = (replace(load(10, 20, node), train_nodes=(train,)) for node, train in (("B", "X"), ("C", "Y")))
    assert meta_iteration_s([wide, left, right]) == 40.0
    assert meta_iteration_s([replace(one, train_nodes=("X", "Y")) for one in (wide, left, right)]) == 60.0


def test_a_sync_hides_behind_the_others_work():
    loads = [replace(load(10, 10, "A"), sync_s=5.0), load(10, 20, "A")]
    assert meta_iteration_s(loads) == 30.0
    assert meta_iteration_s(loads[:1]) == 25.0


def test_an_empty_group_takes_no_time():
    assert meta_iteration_s([]) == 0.0


# several steps per cycle


def simulated_meta_iteration_s(loads, num_rounds=240):
    node_s, trained_s, train_s, ends = {}, {}, 0.0, []
    for _ in range(num_rounds):
        for j in cycle_order([one.steps_per_cycle for one in loads]):
            one = loads[j]
            begin = max([trained_s.get(j, 0.0) + one.sync_s, *(node_s.get(node, 0.0) for node in one.rollout_nodes)])
            end = begin + one.rollout_s
            node_s.update(dict.fromkeys(one.rollout_nodes, end))
            train_s = trained_s[j] = max(train_s, end) + one.train_s
        ends.append(train_s)
    return (ends[-1] - ends[num_rounds // 2 - 1]) / (num_rounds - num_rounds // 2)


several_steps = st.builds(
    lambda rollout_s, train_s, nodes, steps_per_cycle: PhaseLoad(
        rollout_s=rollout_s, train_s=train_s, rollout_nodes=tuple(nodes), steps_per_cycle=steps_per_cycle
    ),
    seconds, seconds, st.lists(st.sampled_from("AB"), min_size=1, max_size=2, unique=True), st.integers(1, 3),
)  # fmt: skip


@given(st.lists(several_steps, min_size=1, max_size=4))
@settings(max_examples=examples(200), deadline=None)
def test_several_steps_per_cycle_take_as_long_as_simulated_and_the_quick_check_agrees(loads):
    period_s = meta_iteration_s(loads)
    assert period_s == pytest.approx(simulated_meta_iteration_s(loads), abs=1e-9)
    assert fits_period(loads, period_s * (1 + 1e-7))
    assert period_s == 0 or not fits_period(loads, period_s * (1 - 1e-4))


def test_slots_are_spread_over_the_meta_iteration():
    assert cycle_order([1, 1, 1]) == [0, 1, 2]
    assert cycle_order([1, 3]) == [0, 1, 1, 1]
    assert cycle_order([2, 3]) == [0, 1, 1, 0, 1]


def test_a_short_member_with_three_steps_to_a_long_ones_one_fits_the_period():
    long, short = load(80, 20, "A"), load(12, 10, "B")
    assert meta_iteration_s([long, short]) == 100
    thrice = PhaseLoad(rollout_s=12, train_s=10, rollout_nodes=("B",), steps_per_cycle=3)
    assert meta_iteration_s([long, thrice]) == 100  # 33 s a step instead of 100
