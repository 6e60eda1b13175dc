"""Where each policy puts a pipeline, on a ledger that is checked after every change."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.model import AdmissionKind, Cluster, Footprint, Phase, PhaseSeconds, Pipeline, PipelineId, Pool
from rlmux.core.placement.choice import FruitlessSearch, Refusal
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies import POLICIES, make_policy
from rlmux.policies.baselines import Split
from rlmux.policies.optimal import Optimal
from rlmux.policies.rlmux import RlMux
from rlmux.policies.rollmux import RollMux
from rlmux.policies.search.partition import NodePrices, candidate_groups, demand_of
from rlmux.policies.search.set_partition import cheapest_partition
from rlmux.sim.bounds import steady_slo_slack_usd, steady_solo_speed_usd

KEEPS_SLOS = ("solo", "split", "rollmux", "rlmux", "optimal")
SHARES_FREELY = ("fifo", "gap-ratio", "random", "most-idle")


def cluster(rollout=None, train=None, rollout_usd=1.0, train_usd=3.0, host_bytes=math.inf):
    return Cluster(
        pools={
            "r": Pool(name="r", phase=Phase.ROLLOUT, num_nodes=rollout, usd_per_gpu_hour=rollout_usd,
                      host_memory_bytes=host_bytes),
            "t": Pool(name="t", phase=Phase.TRAIN, num_nodes=train, usd_per_gpu_hour=train_usd,
                      host_memory_bytes=host_bytes),
        }
    )  # fmt: skip


def pipeline(name, rollout_s=2.0, train_s=1.0, slo=2.0, **fields):
    estimate = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    return Pipeline(id=PipelineId(name), num_steps=None, estimate=estimate, slo_slowdown=slo, **fields)


class World:
    """A ledger, a policy, and what became of everyone."""

    def __init__(self, policy, the_cluster=None):
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.ledger = PlacementLedger(the_cluster or cluster())
        self.kinds = {}
        self.refusals = {}

    def submit(self, *pipelines):
        for one in pipelines:
            choice = self.policy.place(one, PlacementView(self.ledger))
            if isinstance(choice, Refusal):
                self.refusals[one.id] = choice
                continue
            self.ledger.admit(one, choice)
            self.kinds[one.id] = choice.kind
            self.ledger.check()
        return self

    def depart(self, name):
        self.ledger.depart(PipelineId(name))
        self.ledger.check()
        return self

    def rebalance(self):
        relocations = []
        for choice in self.policy.rebalance(PlacementView(self.ledger)):
            if isinstance(choice, FruitlessSearch):
                self.ledger.note_fruitless_search(choice.pipelines)
            else:
                relocations.append(choice)
        for relocation in relocations:
            placement, _ = self.ledger.relocate(relocation.pipeline, relocation.choice)
            group = self.ledger.group(placement.group)
            assert group.period_s <= group.budget_s * (1 + 1e-9)
            self.ledger.check()
        for relocation in relocations:
            self.ledger.finish_relocation(relocation.pipeline)
        self.ledger.check()
        return tuple(relocations)

    def groups(self):
        return [[str(member.pipeline.id) for member in group.members] for group in self.ledger.groups()]


# one policy at a time


def test_solo_gives_each_pipeline_nodes_of_its_own_and_queues_when_they_are_out():
    world = World("solo", cluster(rollout=2, train=2)).submit(*(pipeline(name) for name in "abc"))
    assert world.groups() == [["a"], ["b"]]
    refusal = world.refusals["c"]
    assert not refusal.is_final
    assert "needs 1 rollout and 1 train nodes; 0 and 0 are free" in refusal.reason


def test_colocated_takes_training_nodes_alone_where_the_speed_there_is_known():
    known = pipeline("a", colocated_estimate=PhaseSeconds(rollout_s=3.0, train_s=1.0))
    world = World("colocated").submit(known)
    placement = world.ledger.placement(PipelineId("a"))
    assert placement.rollout_nodes == placement.train_nodes
    assert world.ledger.usd_per_hour == 3.0


def test_colocated_on_a_small_machine_runs_one_pipeline_after_another_on_all_of_it():
    world = World("colocated", cluster(rollout=1, train=1)).submit(pipeline("a"), pipeline("b"))
    assert [str(node) for node in world.ledger.placement(PipelineId("a")).rollout_nodes] == ["t-0", "r-0"]
    assert not world.refusals["b"].is_final
    world.depart("a").submit(pipeline("b"))
    assert world.groups() == [["b"]]


def test_split_deals_the_nodes_in_equal_shares():
    world = World(Split(num_parts=2), cluster(rollout=1, train=1)).submit(*(pipeline(name) for name in "abc"))
    assert [str(world.ledger.placement(PipelineId(name)).nodes[0]) for name in "ab"] == ["t-0", "r-0"]
    assert not world.refusals["c"].is_final


@pytest.mark.parametrize("policy", ["fifo", "gap-ratio"])
def test_all_pipelines_share_the_whole_of_a_finite_cluster(policy):
    world = World(policy, cluster(rollout=3, train=2)).submit(*(pipeline(name, slo=1.0) for name in "abc"))
    assert world.groups() == [["a", "b", "c"]]
    assert len(world.ledger.placement(PipelineId("c")).rollout_nodes) == 3


@pytest.mark.parametrize("policy", ["fifo", "gap-ratio"])
def test_sets_fill_up_to_the_cap_on_an_unbounded_cluster(policy):
    world = World(policy).submit(*(pipeline(f"p{index}") for index in range(7)))
    assert [len(group) for group in world.groups()] == [5, 2]


def test_gavel_steps_shares_nodes_by_whole_steps_within_every_slo():
    world = World("gavel-steps").submit(pipeline("a", slo=2.0), pipeline("b", slo=2.0), pipeline("c", slo=2.0))
    assert world.groups() == [["a", "b"], ["c"]]  # two solo steps fit a doubled step, three do not


def test_most_idle_packs_regardless_of_slos():
    world = World("most-idle").submit(*(pipeline(name, slo=1.0) for name in "abc"))
    assert world.groups() == [["a", "b", "c"]]


def test_random_places_the_same_submissions_the_same():
    pipelines = [pipeline(f"p{index}") for index in range(20)]
    assert World("random").submit(*pipelines).groups() == World("random").submit(*pipelines).groups()


# rollmux: Algorithm 1


def test_rollmux_packs_into_bubbles_first_then_scales_then_founds():
    world = World("rollmux").submit(
        pipeline("a", 10, 4, slo=1.0),
        pipeline("b", 4, 6, slo=1.4),  # beside a on its node: 14 = T_cycle of a
        pipeline("c", 9, 4, slo=1.2),  # no room on that node, but in its training
        pipeline("d", 1, 13, slo=1.0),  # nowhere
    )
    assert list(world.kinds.values()) == [
        AdmissionKind.NEW, AdmissionKind.DIRECT, AdmissionKind.SCALED, AdmissionKind.NEW,
    ]  # fmt: skip
    assert world.groups() == [["a", "b", "c"], ["d"]]


def test_rollmux_takes_the_first_group_found_among_equals():
    world = World("rollmux").submit(
        pipeline("a", 5, 5, slo=1.0), pipeline("b", 50, 50, slo=1.0), pipeline("c", 6, 6, slo=1.0)
    )
    assert world.groups() == [["a"], ["b"], ["c"]]
    world.submit(pipeline("d", 4, 4, slo=20.0))
    assert world.groups() == [["a", "d"], ["b"], ["c"]]


def test_an_slo_that_is_met_exactly_is_met():
    world = World("rollmux").submit(pipeline("a", 5, 5, slo=1.2), pipeline("b", 7, 5, slo=1.0))
    assert world.groups() == [["a", "b"]]


def test_rollmux_may_saturate_a_group_and_may_be_told_to_leave_saturated_ones_alone():
    twins = [pipeline(name, 6, 4, slo=3.0) for name in "abc"]
    assert World(RollMux()).submit(*twins).groups() == [["a", "b", "c"]]
    assert World(RollMux(skips_saturated=True)).submit(*twins).groups() == [["a", "b"], ["c"]]


def test_a_full_cluster_over_saturates_before_it_queues():
    policy = RollMux(skips_saturated=True)
    world = World(policy, cluster(rollout=1, train=1)).submit(*(pipeline(name, 6, 4, slo=2.0) for name in "abcd"))
    assert world.groups() == [["a", "b", "c"]]
    assert not world.refusals["d"].is_final  # 24 s of rollouts, 20 s allowed


def test_a_wide_pipeline_spans_nodes_that_narrow_ones_share():
    world = World("rollmux").submit(
        pipeline("wide", 4, 6, num_rollout_nodes=2), pipeline("b", 5, 2), pipeline("c", 5, 2, slo=1.5)
    )
    assert world.kinds["b"] is AdmissionKind.DIRECT
    assert world.kinds["c"] is AdmissionKind.DIRECT
    assert world.ledger.usd_per_hour == 5.0


def test_a_pipeline_never_joins_fewer_training_nodes_than_it_needs():
    world = World("rollmux").submit(pipeline("a"), pipeline("b", num_train_nodes=2, slo=9.0))
    assert world.groups() == [["a"], ["b"]]


# refusals


@pytest.mark.parametrize("policy", ["solo", "rollmux", "rlmux", "gavel", "gavel-steps", "random", "most-idle", "fifo"])
def test_what_can_never_fit_is_refused_with_the_numbers(policy):
    small = cluster(rollout=1, train=1, host_bytes=8 * 2**30)
    pools = {name: dataclasses.replace(pool, device_memory_bytes=5e8) for name, pool in small.pools.items()}
    world = World(policy, Cluster(pools=pools)).submit(
        pipeline("wide", num_train_nodes=3),
        pipeline("fat", footprint=Footprint(rollout_host_bytes=9 * 2**30)),
        pipeline("large", footprint=Footprint(rollout_device_bytes=4e8, train_device_bytes=6e8)),
    )
    assert world.refusals["wide"] == Refusal(
        reason="pipeline wide needs 3 nodes of pool 't', which has 1", is_final=True
    )
    assert world.refusals["fat"].reason == (
        "pipeline fat keeps 9.664 GB on each node of pool 'r', which has 8.590 GB of host memory"
    )
    assert world.refusals["large"].reason == (
        "pipeline large keeps a state of 0.600 GB on a device of pool 't', which has 0.500 GB"
    )


def test_a_cluster_without_rollout_pool_refuses_by_name():
    pools = {"t": Pool(name="t", phase=Phase.TRAIN)}
    world = World("rollmux", Cluster(pools=pools)).submit(pipeline("a"))
    assert world.refusals["a"].is_final
    assert "no pool for rollout" in world.refusals["a"].reason


# rlmux: regrouping


def test_rlmux_closes_the_hole_that_a_departure_leaves():
    world = World("rlmux").submit(
        pipeline("a", 5, 5), pipeline("b", 50, 50), pipeline("c", 5, 5), pipeline("d", 50, 50)
    )
    world.rebalance()
    assert sorted(map(sorted, world.groups())) == [["a", "c"], ["b", "d"]]
    world.depart("c").submit(pipeline("e", 6, 6))
    world.rebalance()
    assert sorted(map(sorted, world.groups())) == [["a", "e"], ["b", "d"]]


def test_rlmux_relocates_no_pipeline_for_nothing():
    world = World("rlmux").submit(pipeline("a", 5, 5), pipeline("b", 50, 50))
    assert world.rebalance() == ()
    assert world.rebalance() == ()


def test_rlmux_spreads_over_free_nodes_where_nodes_cost_nothing():
    world = World("rlmux", cluster(rollout=2, train=2, rollout_usd=0, train_usd=0))
    world.submit(*(pipeline(name, slo=math.inf) for name in "abc"))
    assert [len(group) for group in world.groups()] == [2, 1]


def test_a_pipeline_that_fits_no_group_stands_alone_on_its_training_node():
    world = World("rlmux").submit(
        pipeline("a", 5, 5, slo=1.1, colocated_estimate=PhaseSeconds(rollout_s=5.5, train_s=5.0))
    )
    assert world.ledger.usd_per_hour == 3.0


# all policies, random lives

estimates = st.builds(
    PhaseSeconds,
    rollout_s=st.integers(1, 300).map(float),
    train_s=st.integers(1, 300).map(float),
)
footprints = st.sampled_from([Footprint(), Footprint(rollout_host_bytes=30.0, train_host_bytes=20.0)])
fields = st.fixed_dictionaries(
    {
        "estimate": st.one_of(estimates, estimates, st.none()),
        "slo_slowdown": st.floats(1.0, 3.0),
        "num_rollout_nodes": st.sampled_from([1, 1, 2]),
        "num_train_nodes": st.sampled_from([1, 1, 2]),
        "footprint": footprints,
        "colocated_estimate": st.one_of(st.none(), estimates),
    }
)
moves = st.lists(st.one_of(fields, st.integers(0, 30)), min_size=1, max_size=25)


def live(policy, the_cluster, script, rename=str):
    """Submit (a dict of fields) and depart (a number) in order; yields the world after each."""
    world = World(policy, the_cluster)
    placed = []
    for number, entry in enumerate(script):
        if isinstance(entry, dict):
            name = PipelineId(rename(f"p{number:02}"))
            world.submit(Pipeline(id=name, num_steps=None, **entry))
            if name in world.ledger:
                placed.append(name)
        elif placed:
            world.depart(placed.pop(entry % len(placed)))
        if world.policy.name in ("rlmux", "optimal"):
            world.rebalance()
        yield world


@pytest.mark.parametrize("policy", list(POLICIES))
@given(script=moves, sizes=st.sampled_from([(None, None), (3, 2), (6, 4)]))
@settings(max_examples=examples(60), deadline=None)
def test_the_books_add_up_and_slos_hold_through_random_lives(policy, script, sizes):
    for world in live(policy, cluster(*sizes, host_bytes=100.0), script):
        for group in world.ledger.groups():
            if policy in KEEPS_SLOS and not group.is_colocated:
                assert group.period_s <= group.budget_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "random"])
@given(script=moves)
@settings(max_examples=examples(30), deadline=None)
def test_relabelling_pipelines_changes_nothing(policy, script):
    """Names may not decide anything, not even between equals."""
    names = random.Random(0)
    aliases = {}

    def alias(name):
        return aliases.setdefault(name, f"x{names.randrange(10**9)}-{name}")

    plain = live(policy, cluster(), script)
    renamed = live(policy, cluster(), script, rename=alias)
    for one, other in zip(plain, renamed, strict=True):
        assert [[alias(name) for name in group] for group in one.groups()] == other.groups()
        assert one.ledger.usd_per_hour == other.ledger.usd_per_hour


@given(script=st.lists(fields, min_size=1, max_size=9))
@settings(max_examples=examples(40), deadline=None)
def test_no_policy_that_keeps_slos_is_cheaper_than_the_bounds(script):
    pipelines = [
        Pipeline(id=PipelineId(f"p{number}"), num_steps=None, **{**entry, "footprint": Footprint()})
        for number, entry in enumerate(script)
        if entry["estimate"] is not None
    ]
    for policy in ("rollmux", "rlmux", "optimal"):
        world = World(policy).submit(*pipelines)
        world.rebalance()
        bound = steady_slo_slack_usd(pipelines, cluster(), colocated=policy != "rollmux")
        assert world.ledger.usd_per_hour >= bound - 1e-9
    solo = World("solo").submit(*pipelines)
    assert solo.ledger.usd_per_hour >= steady_solo_speed_usd(pipelines, cluster())


# exact search


def brute_force_usd(demands, prices):
    """Cheapest partition by trying them all."""
    costs = {}
    for candidate in candidate_groups(demands, prices):
        costs[candidate.mask] = min(candidate.cost_usd, costs.get(candidate.mask, math.inf))
    best = {0: 0.0}
    for mask in range(1, 1 << len(demands)):
        low = mask & -mask
        best[mask] = min(
            (costs[part] + best[mask ^ part] for part in _subsets(mask) if part & low and part in costs),
            default=math.inf,
        )
    return best[(1 << len(demands)) - 1]


def _subsets(mask):
    part = mask
    while part:
        yield part
        part = (part - 1) & mask


@given(st.lists(st.tuples(estimates, st.floats(1.0, 3.0)), min_size=1, max_size=7))
@settings(max_examples=examples(60), deadline=None)
def test_branch_and_bound_finds_the_cheapest_partition(drawn):
    demands = [
        demand_of(pipeline(f"p{number}", one.rollout_s, one.train_s, slo)) for number, (one, slo) in enumerate(drawn)
    ]
    prices = NodePrices(rollout_usd=1.0, train_usd=3.0)
    found = cheapest_partition(candidate_groups(demands, prices), len(demands))
    assert found is not None
    assert found.is_proven
    assert found.cost_usd == pytest.approx(brute_force_usd(demands, prices))
    assert sorted(i for candidate in found.groups for i in candidate.members) == list(range(len(demands)))


def test_a_search_that_stops_early_says_what_is_proven():
    generator = random.Random(4)
    demands = [
        demand_of(pipeline(f"p{number}", generator.uniform(50, 60), generator.uniform(20, 25), 2.0))
        for number in range(14)
    ]
    prices = NodePrices(rollout_usd=1.0, train_usd=3.0)
    early = cheapest_partition(candidate_groups(demands, prices), len(demands), max_nodes=30)
    assert early is not None
    assert not early.is_proven
    assert early.bound_usd <= early.cost_usd


def test_optimal_groups_at_least_as_cheaply_as_rlmux_and_reports_its_gap():
    generator = random.Random(5)
    pipelines = [
        pipeline(f"p{number}", generator.uniform(50, 100), generator.uniform(50, 100), generator.uniform(1, 2))
        for number in range(10)
    ]
    best, ours = World(Optimal()).submit(*pipelines), World(RlMux()).submit(*pipelines)
    _, found = best.policy.cheapest(PlacementView(World("solo").submit(*pipelines).ledger))
    assert (found.is_proven, found.gap) == (True, 0.0)
    best.rebalance()
    ours.rebalance()
    assert best.ledger.usd_per_hour <= ours.ledger.usd_per_hour


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_frozen_and_holds_nothing_that_changes(name):
    policy = make_policy(name)
    assert type(policy).__dataclass_params__.frozen
    held = {item.name: getattr(policy, item.name) for item in dataclasses.fields(policy)}
    assert all(isinstance(hash(value), int) for value in held.values()), "as of a user's policy"


def test_a_policys_cache_belongs_to_its_placements():
    ledgers = [World("rlmux").ledger for _ in range(2)]
    caches = [PlacementView(ledger).cache("a cache", dict) for ledger in ledgers]
    assert caches[0] is PlacementView(ledgers[0]).cache("a cache", dict)
    assert caches[0] is not caches[1]
