"""Slowness has a price where steps are given: budgets from what is left, layouts as the books count them, parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    GroupId,
    NodeId,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Placement,
    Pool,
    RolloutTail,
    SwitchEstimate,
    TailPoint,
    WorkLeft,
)
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.group_load import Member, group_load
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.rlmux import RlMux
from rlmux.policies.search.economy import MOST_SLOWDOWN, Economy, budget_from, budget_left_s, move_reserve_s
from rlmux.policies.search.layouts import LayoutBook, MemberKind
from rlmux.policies.search.partition import NodePrices, demand_of
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog

PRICES = NodePrices(rollout_usd=1.0, train_usd=3.0)
CLUSTER = Cluster(
    pools={
        "r": Pool(name="r", phase=Phase.ROLLOUT, usd_per_gpu_hour=1.0),
        "t": Pool(name="t", phase=Phase.TRAIN, usd_per_gpu_hour=3.0),
    }
)


def pipeline(name="a", rollout_s=60.0, train_s=40.0, slo=1.5, num_steps=100, **fields):
    estimate = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    return Pipeline(id=PipelineId(name), num_steps=num_steps, estimate=estimate, slo_slowdown=slo, **fields)


def left_of(one, *, now_s, num_left, num_steps=100):
    done_s = (num_steps - num_left) * one.estimate.solo_s
    return WorkLeft(now_s=now_s, submitted_s=0.0, num_left=num_left, done_solo_s=done_s)


# budgets


@settings(max_examples=examples(200), deadline=None)
@given(
    slo=st.floats(1.0, 2.5),
    num_steps=st.integers(1, 400),
    part=st.floats(0.0, 1.0),
    pace=st.floats(0.8, 2.0),
    cold_s=st.floats(0.0, 200.0),
)
def test_steps_as_long_as_the_budget_keep_the_slo(slo, num_steps, part, pace, cold_s):
    switch = SwitchEstimate(rollout_s=1.0, train_s=1.0, cold_rollout_s=cold_s)
    one = pipeline(slo=slo, num_steps=num_steps, switch=switch)
    num_left = max(1, round(num_steps * (1 - part)))
    now_s = (num_steps - num_left) * pace * 100.0
    budget_s = budget_from(one, left_of(one, now_s=now_s, num_left=num_left, num_steps=num_steps))
    assert 100.0 <= budget_s <= MOST_SLOWDOWN * 100.0
    if budget_s > 100.0:
        assert now_s + cold_s + num_left * budget_s <= slo * num_steps * 100.0


def test_a_pipeline_that_was_fast_may_be_slower_and_one_that_was_delayed_may_not():
    one = pipeline(slo=1.5)
    fast, even, late = (left_of(one, now_s=now_s, num_left=50) for now_s in (5_000.0, 7_500.0, 14_000.0))
    assert budget_from(one, fast) > 1.5 * 100.0 > budget_from(one, even) > budget_from(one, late) == 100.0


def test_without_a_number_of_steps_the_budget_is_the_slo():
    assert budget_from(pipeline(slo=1.5), None) == 150.0


def test_a_pipeline_keeps_its_spread_in_hand_and_one_that_stays_needs_no_reserve_for_a_move():
    one = pipeline(slo=1.5)
    left = left_of(one, now_s=7_000.0, num_left=50)
    assert budget_from(replace(one, spread=1.1), left) == pytest.approx(budget_from(one, left) / 1.1)
    reserved_s = budget_from(one, left, reserve_s=0.0) - budget_from(one, left)
    assert reserved_s == pytest.approx(0.995 * move_reserve_s(one) / 50)
    placed_now = replace(left, has_begun=False)
    assert budget_from(one, placed_now, reserve_s=0.0) == budget_from(one, left)


def test_a_budget_from_what_is_left_is_at_most_the_slo_and_counts_while_the_slo_can_hold():
    one = pipeline(slo=1.5, slo_probability=0.95)
    fast, late, lost = (left_of(one, now_s=now_s, num_left=50) for now_s in (5_000.0, 9_000.0, 11_000.0))
    assert budget_left_s(one, fast) == 150.0 < budget_from(one, fast)
    assert budget_left_s(one, late) == budget_from(one, late) < 150.0
    assert budget_left_s(one, lost) == 150.0
    assert budget_left_s(replace(one, slo_probability=None), late) == 150.0


# layouts

durations = st.floats(1.0, 100.0)
kinds = st.builds(
    pipeline,
    rollout_s=durations,
    train_s=durations,
    num_rollout_nodes=st.integers(1, 2),
    num_train_nodes=st.integers(1, 2),
    switch=st.one_of(st.none(), st.builds(SwitchEstimate, rollout_s=durations, train_s=durations)),
)


TAIL = RolloutTail(
    points=(TailPoint(num_left=16, begins=0.4, growth=0.15), TailPoint(num_left=4, begins=0.75, growth=0.05)),
    device_fraction=0.125,
)


@settings(max_examples=examples(60), deadline=None)
@given(members=st.lists(kinds, min_size=1, max_size=4), price=st.sampled_from([0.0, 1.2]))
def test_a_layout_takes_as_long_and_costs_as_much_as_its_group_in_the_books(members, price):
    check_layouts(members, price, rel=1e-6)


@settings(max_examples=examples(60), deadline=None)
@given(
    members=st.lists(st.builds(replace, kinds, tail=st.sampled_from([None, TAIL])), min_size=2, max_size=4),
    price=st.sampled_from([0.0, 1.2]),
)
def test_a_layout_with_tails_that_leave_their_nodes_is_as_in_the_books(members, price):
    """Both leave out tails that make the meta-iteration shorter by less than a ten-thousandth."""
    check_layouts(members, price, rel=2e-3)


def check_layouts(members, price, rel):
    members = [replace(one, id=PipelineId(f"p{index}")) for index, one in enumerate(members)]
    work_left = {one.id: left_of(one, now_s=0.0, num_left=100) for one in members}
    ledger = PlacementLedger(CLUSTER, work_left.get)
    economy = Economy(view=PlacementView(ledger), slowness_price=price, hold_up_usd=4.0, move_horizon_h=3.0)
    book = LayoutBook()
    book.use(PRICES)
    numbers = tuple(book.number_of(MemberKind(demand_of(one), economy.slowness_usd(one))) for one in members)
    layouts = book.layouts(numbers)
    assert layouts
    assert list(layouts) == sorted(layouts)
    for layout in layouts:
        nodes = [tuple(NodeId("r", number) for number in pins) for pins in layout.pins]
        train = [tuple(NodeId("t", number) for number in pins) for pins in layout.train_pins]
        assert [len(own) for own in train] == [one.num_train_nodes for one in members]
        group = group_load(
            GroupId(0),
            tuple(
                Member(pipeline=one, placement=Placement(group=GroupId(0), rollout_nodes=own, train_nodes=own_train))
                for one, own, own_train in zip(members, nodes, train, strict=True)
            ),
            tuple(dict.fromkeys(node for own in nodes for node in own)),
            tuple(sorted({node for own in train for node in own})),
            CLUSTER,
        )
        assert (len(group.rollout_nodes), len(group.train_nodes)) == (layout.num_rollout_nodes, layout.num_train_nodes)
        assert group.period_s == pytest.approx(layout.period_s, rel=rel)
        assert economy.cost_usd(group) == pytest.approx(layout.cost_usd, rel=rel)


def test_slowness_has_its_price_in_an_hour_at_half_speed():
    one = pipeline(rollout_s=60.0, train_s=40.0, slo=3.0)
    ledger = PlacementLedger(CLUSTER, lambda name: left_of(one, now_s=0.0, num_left=100))
    for name in ("a", "b", "c", "d"):
        group = next(ledger.groups(), None)
        choice = PlacementChoice(
            kind=AdmissionKind.DIRECT if group else AdmissionKind.NEW,
            group=group.id if group else None,
            rollout_nodes=group.rollout_nodes if group else (),
            train_nodes=group.train_nodes if group else (),
            num_new_rollout_nodes=0 if group else 1,
            num_new_train_nodes=0 if group else 1,
        )
        ledger.admit(replace(one, id=PipelineId(name)), choice)
    (group,) = ledger.groups()
    economy = Economy(view=PlacementView(ledger), slowness_price=1.2, hold_up_usd=4.0, move_horizon_h=3.0)
    assert group.period_s == 240.0
    busy_usd = (60 * 1.0 + 40 * 3.0) / 100
    assert economy.cost_usd(group) == pytest.approx(4.0 + 1.2 * 4 * busy_usd * (1 - 100 / 240))
    assert economy.idle_usd(group) == pytest.approx(4.0 - 4 * busy_usd * 100 / 240)


def test_a_pipeline_whose_speed_on_training_nodes_alone_is_unknown_is_placed_apart():
    ledger = PlacementLedger(CLUSTER, lambda name: left_of(pipeline(), now_s=0.0, num_left=100))
    dear = pipeline(slo=math.inf, num_rollout_nodes=9)  # $12 an hour apart, $3 on its training node alone
    unknown = RlMux().place(dear, PlacementView(ledger))
    known = RlMux().place(replace(dear, colocated_estimate=dear.estimate), PlacementView(ledger))
    assert (unknown.is_colocated, known.is_colocated) == (False, True)


def test_a_newcomer_joins_a_wide_member_and_trains_on_as_many_nodes_as_it_asks_for():
    ledger = PlacementLedger(CLUSTER, lambda name: left_of(pipeline(), now_s=0.0, num_left=100))
    wide = pipeline("wide", slo=2.5, num_train_nodes=2)
    ledger.admit(wide, RlMux().place(wide, PlacementView(ledger)))
    narrow = pipeline("narrow", slo=2.5)
    ledger.admit(narrow, RlMux().place(narrow, PlacementView(ledger)))
    (group,) = ledger.groups()
    assert len(group.train_nodes) == 2
    assert len(ledger.placement(PipelineId("narrow")).train_nodes) == 1
    ledger.check()


def test_a_newcomer_joins_also_where_a_member_never_ends():
    """The dollars to such an end are infinite before and after: each choice would add as little as another."""

    def left(name):
        return None if name == "endless" else left_of(pipeline(), now_s=0.0, num_left=100)

    ledger = PlacementLedger(CLUSTER, left)
    endless = pipeline("endless", slo=2.5, num_steps=None)
    ledger.admit(endless, RlMux().place(endless, PlacementView(ledger)))
    newcomer = pipeline("newcomer", slo=2.5)
    assert RlMux().place(newcomer, PlacementView(ledger)).group is not None


# the whole


@pytest.fixture(scope="module")
def trace():
    """The first pipelines of the production trace."""
    whole = catalog.load("weave", seed=0)
    return replace(whole, arrivals=whole.arrivals[:24])


@pytest.mark.slow
def test_a_price_of_slowness_makes_the_same_work_cheaper_and_keeps_every_slo(trace):
    by_the_hour = simulate(trace, RlMux(slowness_price=0.0), checks=False)
    for_the_work = simulate(trace, RlMux(), checks=False)
    assert for_the_work.solo_hours == pytest.approx(by_the_hour.solo_hours)
    assert for_the_work.cost_usd < 0.99 * by_the_hour.cost_usd
    assert for_the_work.slo_attainment == for_the_work.predicted_slo_attainment == 1.0
    assert for_the_work.num_moves > 0


def test_regroupings_by_work_left_keep_every_invariant(trace):
    short = replace(trace, arrivals=tuple(
        replace(one, pipeline=replace(one.pipeline, num_steps=min(8, one.pipeline.num_steps or 8)))
        for one in trace.arrivals[:12]
    ))  # fmt: skip
    result = simulate(short, RlMux(), checks=True)
    assert result.slo_attainment == 1.0


def test_where_pipelines_leave_by_the_clock_slowness_is_free():
    trace = catalog.load("bl-s:num_pipelines=6,departure=wall", seed=0)
    priced, free = (simulate(trace, RlMux(slowness_price=price)) for price in (1.2, 0.0))
    assert (priced.cost_usd, priced.num_moves) == (free.cost_usd, free.num_moves)
