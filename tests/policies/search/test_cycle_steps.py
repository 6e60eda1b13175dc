"""Several steps per cycle in a meta-iteration: from the policy's choice to the order in which the scheduler grants
devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import AdmissionKind, Cluster, Phase, PipelineId, Pool
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.policies.rlmux import RlMux
from rlmux.policies.rollmux import RollMux
from rlmux.policies.search.cycle_steps import CycleStepFinder
from rlmux.policies.search.partition import NodePrices, candidate_groups, demand_of

LONG, SHORT = PipelineId("long"), PipelineId("short")


class Lapping(RollMux):
    """Puts `short` beside `long`, on a rollout node of its own, three steps per cycle to one."""

    def place(self, pipeline, view):
        if pipeline.id == LONG:
            return super().place(pipeline, view)
        (group,) = view.groups()
        return PlacementChoice(
            kind=AdmissionKind.SCALED, group=group.id, num_new_rollout_nodes=1, train_nodes=group.train_nodes,
            steps_per_cycle=((LONG, 1), (SHORT, 3)),
        )  # fmt: skip


@pytest.fixture
def pair(builders):
    return (
        builders.pipeline("long", rollout_s=80, train_s=20, num_steps=8, slo_slowdown=1.1),
        builders.pipeline("short", rollout_s=12, train_s=10, num_steps=24, slo_slowdown=2.0),
    )


def priced(rollout=None, train=None):
    return Cluster(
        pools={
            "r": Pool(name="r", phase=Phase.ROLLOUT, num_nodes=rollout, usd_per_gpu_hour=1.0),
            "t": Pool(name="t", phase=Phase.TRAIN, num_nodes=train, usd_per_gpu_hour=3.0),
        }
    )


def test_the_scheduler_grants_slots_as_the_meta_iteration_was_computed(builders, pair):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=2, train=1), Lapping()))
    driver.submit(*pair)
    driver.run()
    training = [name for _, name, stage, _ in driver.starts() if stage == "update"]
    assert training[:12] == ["short", "short", "short", "long"] * 3  # the first three while `long` rolls out
    starts = [time_s for time_s, name, stage, _ in driver.starts() if (name, stage) == ("long", "generate")]
    assert {later - earlier for earlier, later in itertools.pairwise(starts)} == {100.0}


def test_a_group_with_several_steps_per_cycle_promises_the_mean_step(pair):
    ledger = PlacementLedger(priced())
    policy = Lapping()
    for one in pair:
        ledger.admit(one, policy.place(one, PlacementView(ledger)))
        ledger.check()
    (group,) = ledger.groups()
    assert group.period_s == 100.0
    assert group.slowdown_of(LONG) == 1.0
    assert group.slowdown_of(SHORT) == pytest.approx(100 / 3 / 22)
    assert group.budget_s == pytest.approx(110.0)
    assert not group.keeps_slos_with(replace(pair[1], id=PipelineId("other")), (), 1)  # one turn in 100 s


def test_a_member_that_stays_alone_has_one_step_per_cycle(pair):
    ledger = PlacementLedger(priced())
    policy = Lapping()
    for one in pair:
        ledger.admit(one, policy.place(one, PlacementView(ledger)))
    ledger.depart(LONG)
    ledger.check()
    assert ledger.member(SHORT).steps_per_cycle == 1


def test_a_member_without_a_step_in_the_cycle_is_refused(pair):
    ledger = PlacementLedger(priced())
    choice = PlacementChoice(
        kind=AdmissionKind.NEW, group=None, num_new_rollout_nodes=1, num_new_train_nodes=1, steps_per_cycle=((LONG, 0),)
    )
    with pytest.raises(IllegalTransitionError, match="no step in the cycle"):
        ledger.admit(pair[0], choice)


def test_several_steps_per_cycle_are_found_where_one_each_does_not_fit(pair):
    demands = [demand_of(one) for one in pair]
    prices = NodePrices(rollout_usd=1.0, train_usd=3.0)
    alone = candidate_groups(demands, prices)
    assert [candidate.members for candidate in alone if len(candidate.members) == 2] == []
    (found,) = CycleStepFinder().candidate_groups(demands, prices, alone)
    assert (found.cost_usd, found.members, found.steps_per_cycle) == (5.0, (0, 1), (1, 3))


def test_rlmux_lets_a_short_pipeline_make_several_steps_in_a_long_ones_cycle(pair):
    ledger = PlacementLedger(priced())
    policy = RlMux(usd_per_hour_per_move=0.5)
    for one in pair:
        ledger.admit(one, policy.place(one, PlacementView(ledger)))
    assert ledger.usd_per_hour == 8.0
    for relocation in policy.rebalance(PlacementView(ledger)):
        ledger.relocate(relocation.pipeline, relocation.choice)
        ledger.finish_relocation(relocation.pipeline)
        ledger.check()
    assert ledger.usd_per_hour == 5.0
    (group,) = ledger.groups()
    assert group.period_s <= group.budget_s
