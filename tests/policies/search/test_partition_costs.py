"""The search for groups counts switches and syncs as the ledger does: what it proposes, the books take."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.model import (
    Cluster,
    Footprint,
    GroupId,
    NodeId,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Placement,
    Pool,
    SwitchEstimate,
)
from rlmux.core.placement.group_load import Member, group_load
from rlmux.policies.search.cycle_steps import CycleStepFinder
from rlmux.policies.search.partition import NodePrices, candidate_groups, demand_of

MEMORY_BYTES = 10.0
PRICES = NodePrices(rollout_usd=1.0, train_usd=3.0, rollout_device_bytes=MEMORY_BYTES, train_device_bytes=MEMORY_BYTES)
CLUSTER = Cluster(
    pools={
        name: Pool(name=name, phase=phase, usd_per_gpu_hour=usd, device_memory_bytes=MEMORY_BYTES)
        for name, phase, usd in (("r", Phase.ROLLOUT, 1.0), ("t", Phase.TRAIN, 3.0))
    }
)
seconds = st.floats(0, 20)
longer = st.floats(1, 1.6)
state_bytes = st.sampled_from([None, 2.0, 6.0])


@st.composite
def pipelines(draw):
    """Some hold their devices longer than they compute, now and then so long that their SLO is broken by that alone."""
    slos = draw(st.lists(st.floats(1, 3), min_size=1, max_size=5))
    estimates = [
        PhaseSeconds(rollout_s=draw(st.floats(10, 100)), train_s=draw(st.floats(10, 100)), sync_s=draw(seconds))
        for _ in slos
    ]
    return [
        Pipeline(
            id=PipelineId(f"p{number}"),
            num_steps=None,
            estimate=estimate,
            held=draw(st.one_of(st.none(), st.builds(_longer, st.just(estimate), longer, longer))),
            colocated_estimate=draw(st.sampled_from([None, PhaseSeconds(rollout_s=60.0, train_s=60.0)])),
            slo_slowdown=slo,
            switch=draw(st.one_of(st.none(), st.builds(SwitchEstimate, rollout_s=seconds, train_s=seconds))),
            footprint=Footprint(rollout_device_bytes=draw(state_bytes), train_device_bytes=draw(state_bytes)),
        )
        for number, (slo, estimate) in enumerate(zip(slos, estimates, strict=True))
    ]


def _longer(estimate: PhaseSeconds, rollout: float, train: float) -> PhaseSeconds:
    return PhaseSeconds(
        rollout_s=estimate.rollout_s * rollout, train_s=estimate.train_s * train, sync_s=estimate.sync_s
    )


def in_the_books(candidate, made):
    """The candidate as the ledger would sum it up."""
    train = (NodeId("t", 0),)
    members = tuple(
        Member(
            pipeline=made[index],
            placement=Placement(
                group=GroupId(0),
                rollout_nodes=train if candidate.is_colocated else tuple(NodeId("r", number) for number in pins),
                train_nodes=train,
            ),
            steps_per_cycle=steps,
        )
        for index, pins, steps in zip(
            candidate.members,
            candidate.pins,
            candidate.steps_per_cycle or (1,) * len(candidate.members),
            strict=True,
        )
    )
    rollout_nodes = tuple(dict.fromkeys(node for one in members for node in one.placement.rollout_nodes))
    return group_load(GroupId(0), members, rollout_nodes, train, CLUSTER)


@given(pipelines())
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_every_group_that_the_search_proposes_keeps_its_slos_in_the_books(made):
    demands = [demand_of(one) for one in made]
    found = candidate_groups(demands, PRICES)
    found += CycleStepFinder().candidate_groups(demands, PRICES, found)
    for candidate in found:
        group = in_the_books(candidate, made)
        is_beyond_alone = len(candidate.members) == 1 and not demands[candidate.members[0]].takes_neighbours
        assert group.period_s <= group.budget_s * (1 + 1e-9) or is_beyond_alone, candidate


def test_a_pair_whose_switches_break_an_slo_is_not_proposed():
    def found(switch):
        pair = [
            Pipeline(
                id=PipelineId(name),
                num_steps=None,
                estimate=PhaseSeconds(rollout_s=50.0, train_s=50.0),
                slo_slowdown=1.05,
                switch=switch,
            )
            for name in "ab"
        ]
        return [c.members for c in candidate_groups([demand_of(one) for one in pair], PRICES) if len(c.members) == 2]

    assert found(None) == [(0, 1)]
    assert found(SwitchEstimate(rollout_s=2.0, train_s=2.0)) == [(0, 1)]  # 104 s of 105
    assert found(SwitchEstimate(rollout_s=2.0, train_s=3.0)) == []  # a member's own step, or the training node: 106 s


def test_phases_count_as_long_as_they_hold_their_devices():
    def found(held_s):
        pair = [
            Pipeline(
                id=PipelineId(name),
                num_steps=None,
                estimate=PhaseSeconds(rollout_s=50.0, train_s=50.0),
                held=PhaseSeconds(rollout_s=50.0, train_s=held_s),
                slo_slowdown=1.05,
            )
            for name in "ab"
        ]
        return [c.members for c in candidate_groups([demand_of(one) for one in pair], PRICES) if len(c.members) == 2]

    assert found(50.0) == [(0, 1)]
    assert found(53.0) == []  # the training node is held for 106 s of 105
