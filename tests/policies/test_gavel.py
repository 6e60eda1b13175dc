"""`gavel`: what each pipeline could hold, who is next, and that a hundred turns give what the program shares out."""

from __future__ import annotations

import math

import pytest

from rlmux.core.model import Cluster, NodeId, Phase, PhaseSeconds, Pipeline, PipelineId, Placement, Pool
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies import make_policy
from rlmux.policies.gavel import options_of
from rlmux.policies.time_slice_clock import Claim, Configuration, SliceGrant, configuration_of

PAIR, TRAIN = Configuration("r", "t"), Configuration("t", "t")


def view_of(rollout: int | None, train: int | None, **fields) -> PlacementView:
    pools = {
        "r": Pool(name="r", phase=Phase.ROLLOUT, num_nodes=rollout, usd_per_gpu_hour=1.0),
        "t": Pool(name="t", phase=Phase.TRAIN, num_nodes=train, usd_per_gpu_hour=3.0),
    }
    return PlacementView(PlacementLedger(Cluster(pools=pools)))


def pipeline(name: str, *, pair_s: float = 3.0, train_s: float | None = None, **fields) -> Pipeline:
    """A step takes `pair_s` on a node of each pool and `train_s` on a training node alone."""
    return Pipeline(
        id=PipelineId(name),
        num_steps=None,
        estimate=PhaseSeconds(rollout_s=pair_s - 1.0, train_s=1.0),
        colocated_estimate=None if train_s is None else PhaseSeconds(rollout_s=train_s - 1.0, train_s=1.0),
        **fields,
    )


def test_training_nodes_alone_are_an_option_where_it_is_known_how_fast_they_are():
    view = view_of(2, 2)
    assert [one.configuration for one in options_of(pipeline("a"), view)] == [PAIR]
    assert [one.configuration for one in options_of(pipeline("a", train_s=4.0), view)] == [PAIR, TRAIN]


def test_nodes_that_are_counted_are_shared_by_speed():
    """One rollout node, two training nodes: what is nearly as fast on training nodes alone leaves the pair."""
    policy, view = make_policy("gavel"), view_of(1, 2)
    same, slower = pipeline("same", train_s=3.0), pipeline("slower", train_s=9.0)
    shares = policy.share_out((same, slower), view)
    assert shares[PipelineId("same")] == pytest.approx({PAIR: 0.0, TRAIN: 1.0}, abs=1e-6)
    assert shares[PipelineId("slower")] == pytest.approx({PAIR: 1.0, TRAIN: 0.0}, abs=1e-6)


def test_nodes_that_are_paid_as_they_are_used_go_by_dollars_within_the_slo():
    policy, view = make_policy("gavel"), view_of(None, None)
    cheap, late = pipeline("cheap", train_s=3.5, slo_slowdown=2.0), pipeline("late", train_s=7.0, slo_slowdown=2.0)
    shares = policy.share_out((cheap, late), view)
    assert shares == {PipelineId("cheap"): {TRAIN: 1.0}, PipelineId("late"): {PAIR: 1.0}}


def test_one_that_comes_after_targets_were_made_goes_by_dollars_too():
    view = view_of(None, None)
    newcomer = Claim(pipeline=pipeline("cheap", train_s=3.5, slo_slowdown=2.0))
    (answer,) = make_policy("gavel").turns((newcomer,), 500.0, view).values()
    assert answer.configuration == TRAIN


def test_what_has_received_least_of_its_target_is_next():
    policy, view = make_policy("gavel"), view_of(1, 1)
    behind = Claim(pipeline=pipeline("behind"), targets={PAIR: 0.5}, received_s={PAIR: 10.0})
    ahead = Claim(pipeline=pipeline("ahead"), targets={PAIR: 0.5}, received_s={PAIR: 400.0})
    answers = policy.turns((ahead, behind), 1000.0, view)
    assert isinstance(answers[PipelineId("behind")], SliceGrant)
    assert answers[PipelineId("ahead")] == Refusal(
        reason="pipeline ahead waits for its turn: it is to hold nodes for 50% of the time", is_final=False
    )


def test_of_equals_the_deficit_of_earlier_targets_decides_and_then_who_came_first():
    policy, view = make_policy("gavel"), view_of(1, 1)
    first, second, owed = (Claim(pipeline=pipeline(name), targets={PAIR: 0.3}) for name in ("a", "b", "c"))
    owed = Claim(pipeline=owed.pipeline, targets=owed.targets, deficits_s={PAIR: 50.0})
    assert isinstance(policy.turns((first, second), 10.0, view)[PipelineId("a")], SliceGrant)
    assert isinstance(policy.turns((first, second, owed), 10.0, view)[PipelineId("c")], SliceGrant)


def test_nodes_are_kept_for_a_wide_pipeline_that_is_two_turns_behind():
    policy = make_policy("gavel")
    ledger = PlacementLedger(view_of(2, 2).cluster)
    busy = pipeline("busy")
    ledger.admit(busy, options_of(busy, PlacementView(ledger))[0].choice)  # one of two nodes of each pool is left
    wide = Claim(pipeline=pipeline("wide", num_rollout_nodes=2, num_train_nodes=2), targets={PAIR: 0.5})
    small = Claim(pipeline=pipeline("small"), targets={PAIR: 0.5})
    for elapsed_s, is_kept in ((1000.0, False), (2500.0, True)):
        received = Claim(pipeline=small.pipeline, targets=small.targets, received_s={PAIR: elapsed_s / 2})
        others = {PAIR: 0.5 * elapsed_s}  # all in all the nodes were held as they should be
        claims = (wide, received, Claim(pipeline=pipeline("c"), targets={PAIR: 0.5}, received_s=others))
        answers = policy.turns(claims, elapsed_s, PlacementView(ledger))
        assert isinstance(answers[PipelineId("small")], Refusal) == is_kept


def test_a_hundred_turns_give_each_pipeline_its_part_of_each_configuration():
    policy, view = make_policy("gavel"), view_of(1, 2)
    pipelines = (pipeline("a", train_s=4.0), pipeline("b", train_s=6.0), pipeline("c", train_s=3.0))
    targets = policy.share_out(pipelines, view)
    received_s = {one.id: {} for one in pipelines}
    for number in range(100):
        claims = tuple(Claim(pipeline=one, targets=targets[one.id], received_s=received_s[one.id]) for one in pipelines)
        for name, answer in policy.turns(claims, number * 360.0, view).items():
            if isinstance(answer, SliceGrant):
                held = received_s[name]
                held[answer.configuration] = held.get(answer.configuration, 0.0) + 360.0
    for name, by_configuration in targets.items():
        for configuration, target in by_configuration.items():
            assert received_s[name].get(configuration, 0.0) / 36000.0 == pytest.approx(target, abs=0.02)


def test_one_pool_has_one_configuration():
    pool = Pool(name="p", phase=Phase.TRAIN, num_nodes=2, serves_both_phases=True)
    view = PlacementView(PlacementLedger(Cluster(pools={"p": pool})))
    (option,) = options_of(pipeline("a"), view)
    assert option.configuration == Configuration("p", "p")
    choice = make_policy("gavel").place(pipeline("a"), view)
    assert isinstance(choice, PlacementChoice)
    node = NodeId("p", 0)
    placement = Placement(group=0, rollout_nodes=(node,), train_nodes=(node,))
    assert configuration_of(placement) == option.configuration


def test_nodes_that_are_lost_are_shared_out_to_none_of_those_that_need_them():
    ledger = PlacementLedger(view_of(1, 2).cluster)
    wide, small = pipeline("wide", num_train_nodes=2), pipeline("small")
    both = make_policy("gavel").share_out((wide, small), PlacementView(ledger))
    assert set(both) == {PipelineId("wide"), PipelineId("small")}
    ledger.lose_node(NodeId("t", 0))
    one = make_policy("gavel").share_out((wide, small), PlacementView(ledger))
    assert one == {PipelineId("small"): pytest.approx({PAIR: 1.0}, abs=1e-6)}
    ledger.lose_node(NodeId("t", 1))
    assert make_policy("gavel").share_out((wide, small), PlacementView(ledger)) == {}


def test_what_never_fits_is_refused_with_the_numbers():
    answer = make_policy("gavel").place(pipeline("wide", num_train_nodes=3), view_of(1, 1))
    assert answer == Refusal(reason="pipeline wide needs 3 nodes of pool 't', which has 1", is_final=True)
    assert math.isfinite(make_policy("gavel").turn_s)
