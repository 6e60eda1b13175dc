"""Placed pipelines are placed again: together once their steps bound them, apart where paid nodes are free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, WorkLeft
from rlmux.core.placement.choice import FruitlessSearch
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.rlmux import RlMux
from rlmux.policies.rollmux import RollMux

MEAN = PhaseSeconds(rollout_s=60.0, train_s=40.0)
LIMIT = PhaseSeconds(rollout_s=120.0, train_s=80.0)


def ledger_of(num_nodes, *, num_left=1000, num_waiting=0):
    pools = {
        phase.value: Pool(name=phase.value, phase=phase, num_nodes=num_nodes, usd_per_gpu_hour=2.0)
        for phase in (Phase.ROLLOUT, Phase.TRAIN)
    }
    left = WorkLeft(now_s=0.0, submitted_s=0.0, num_left=num_left, done_solo_s=0.0)
    return PlacementLedger(Cluster(pools=pools), lambda name: left, lambda: num_waiting)


def admit(ledger, policy, *names, **fields):
    for name in names:
        one = Pipeline(id=PipelineId(name), num_steps=1000, **{"estimate": MEAN, **fields})
        ledger.admit(one, policy.place(one, PlacementView(ledger)))


def groups_of(ledger):
    return [[str(member.pipeline.id) for member in group.members] for group in ledger.groups()]


def carry_out(ledger, moves):
    for move in moves:
        if not isinstance(move, FruitlessSearch):
            ledger.relocate(move.pipeline, move.choice)
    ledger.check()


# --- together


def test_rollmux_joins_pipelines_that_no_group_took_at_the_limit_when_their_bounds_are_narrow():
    ledger, policy = ledger_of(None), RollMux()
    admit(ledger, policy, "a", "b", slo_slowdown=1.3, slo_probability=0.95, held=LIMIT)
    assert groups_of(ledger) == [["a"], ["b"]]
    first = policy.rebalance(PlacementView(ledger))
    assert [type(one) for one in first] == [FruitlessSearch, FruitlessSearch]
    for name in ("a", "b"):
        ledger.revise(replace(ledger.pipeline(PipelineId(name)), held=MEAN))
    carry_out(ledger, policy.rebalance(PlacementView(ledger)))
    assert groups_of(ledger) == [["b", "a"]]


def test_a_pipeline_that_found_no_group_is_not_tried_again_until_its_bound_changes():
    ledger, policy = ledger_of(None), RollMux()
    admit(ledger, policy, "a", "b", slo_slowdown=1.3, slo_probability=0.95, held=LIMIT)
    for search in policy.rebalance(PlacementView(ledger)):
        ledger.note_fruitless_search(search.pipelines)
    assert policy.rebalance(PlacementView(ledger)) == ()


# --- apart


def test_pipelines_use_counted_nodes_before_they_share_and_those_that_become_free():
    ledger, policy = ledger_of(2), RlMux()
    admit(ledger, policy, "a", "b", "c")
    assert groups_of(ledger) == [["a", "c"], ["b"]]
    ledger.depart(PipelineId("b"))
    carry_out(ledger, policy.rebalance(PlacementView(ledger)))
    assert groups_of(ledger) == [["a"], ["c"]]


def test_free_nodes_go_to_the_member_whose_work_gains_most_however_short_the_cycle():
    """`long` makes the cycle; `short` is slowed to it, though no device is busier by it."""
    ledger, policy = ledger_of(2), RlMux()
    admit(ledger, policy, "long", estimate=PhaseSeconds(rollout_s=300.0, train_s=300.0))
    admit(ledger, policy, "other", "short")
    assert groups_of(ledger) == [["long", "short"], ["other"]]
    ledger.depart(PipelineId("other"))
    carry_out(ledger, policy.rebalance(PlacementView(ledger)))
    assert groups_of(ledger) == [["long"], ["short"]]


def test_pipelines_that_are_alone_join_each_other_for_one_that_waits():
    ledger, policy = ledger_of(2, num_waiting=1), RlMux()
    admit(ledger, policy, "a", "b", slo_slowdown=1.3)
    assert groups_of(ledger) == [["a"], ["b"]]
    carry_out(ledger, policy.rebalance(PlacementView(ledger)))
    assert groups_of(ledger) == [["b", "a"]]


@pytest.mark.parametrize("reason", [{"num_waiting": 1}, {"num_left": 3}], ids=["another waits", "little is left"])
def test_members_stay_where_the_free_nodes_are_anothers_or_the_move_would_not_pay(reason):
    ledger, policy = ledger_of(2, **reason), RlMux()
    admit(ledger, policy, "a", "b", "c")
    ledger.depart(PipelineId("b"))
    assert policy.rebalance(PlacementView(ledger)) == ()
