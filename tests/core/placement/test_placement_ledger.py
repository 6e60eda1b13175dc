"""The ledger: what may be pinned where, what comes back, and that it always adds up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    Footprint,
    NodeId,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Pool,
)
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.placement_ledger import PlacementLedger

R0, R1, T0, T1 = NodeId("r", 0), NodeId("r", 1), NodeId("t", 0), NodeId("t", 1)


def cluster(rollout=None, train=None, host_bytes=math.inf):
    return Cluster(
        pools={
            "r": Pool(name="r", phase=Phase.ROLLOUT, num_nodes=rollout, usd_per_gpu_hour=1.0,
                      host_memory_bytes=host_bytes),
            "t": Pool(name="t", phase=Phase.TRAIN, num_nodes=train, usd_per_gpu_hour=3.0,
                      host_memory_bytes=host_bytes),
        }
    )  # fmt: skip


def pipeline(name, rollout_s=2.0, train_s=1.0, **fields):
    estimate = PhaseSeconds(rollout_s=rollout_s, train_s=train_s)
    return Pipeline(id=PipelineId(name), num_steps=None, estimate=estimate, **fields)


def new(num_rollout=1, num_train=1, **fields):
    return PlacementChoice(
        kind=AdmissionKind.NEW, group=None, num_new_rollout_nodes=num_rollout, num_new_train_nodes=num_train, **fields
    )


def join(group, rollout_nodes=(), num_new=0):
    kind = AdmissionKind.SCALED if num_new else AdmissionKind.DIRECT
    return PlacementChoice(
        kind=kind, group=group.id, rollout_nodes=tuple(rollout_nodes), num_new_rollout_nodes=num_new,
        train_nodes=group.train_nodes,
    )  # fmt: skip


def only_group(ledger):
    (group,) = ledger.groups()
    return group


def test_direct_scaled_and_new_cost_what_they_take():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a"), new())
    assert ledger.usd_per_hour == 4.0
    ledger.admit(pipeline("b"), join(only_group(ledger), [R0]))
    assert ledger.usd_per_hour == 4.0
    placement = ledger.admit(pipeline("c"), join(only_group(ledger), num_new=1))
    assert (placement.rollout_nodes, placement.train_nodes) == ((R1,), (T0,))
    assert ledger.usd_per_hour == 5.0
    ledger.check()


def test_a_group_sums_up_its_members():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a", 10, 5, slo_slowdown=2.0), new())
    ledger.admit(pipeline("b", 4, 6, slo_slowdown=1.6), join(only_group(ledger), [R0]))
    ledger.admit(pipeline("c", 7, 1, slo_slowdown=3.0), join(only_group(ledger), num_new=1))
    group = only_group(ledger)
    assert group.rollout_loads_s == (14, 7)
    assert (group.train_load_s, group.cycle_s, group.load_s, group.period_s) == (12, 15, 14, 15)
    assert group.budget_s == 16.0  # b: 1.6 * 10
    assert not group.is_saturated


def test_a_rollout_node_leaves_with_its_last_member_and_the_group_with_its_own():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a"), new())
    ledger.admit(pipeline("b"), join(only_group(ledger), num_new=1))
    assert ledger.depart(PipelineId("a")) == (R0,)
    assert only_group(ledger).rollout_nodes == (R1,)
    assert ledger.depart(PipelineId("b")) == (R1, T0)
    assert (ledger.num_groups, ledger.usd_per_hour) == (0, 0.0)
    ledger.check()


def test_a_training_node_leaves_with_the_last_member_that_trains_there():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("narrow", 2, 6), new())
    wide = replace(join(only_group(ledger), [R0]), num_new_train_nodes=1)
    assert ledger.admit(pipeline("wide", 2, 3, num_train_nodes=2), wide).train_nodes == (T0, T1)
    ledger.admit(pipeline("other", 2, 5), replace(join(only_group(ledger), [R0]), train_nodes=(T1,)))
    group = only_group(ledger)
    assert (group.train_nodes, group.train_loads_s, group.train_load_s) == ((T0, T1), (9, 8), 9)
    assert group.period_s == 9.0  # all on both nodes: 14 s
    assert group.usd_per_hour == 7.0
    ledger.check()
    assert ledger.depart(PipelineId("wide")) == ()
    assert ledger.depart(PipelineId("narrow")) == (T0,)
    assert only_group(ledger).train_nodes == (T1,)
    ledger.check()


def test_the_lowest_free_node_is_taken_first_and_the_peak_is_kept():
    ledger = PlacementLedger(cluster())
    for name in "abc":
        ledger.admit(pipeline(name), new())
    ledger.depart(PipelineId("a"))
    assert ledger.admit(pipeline("d"), new()).rollout_nodes == (R0,)
    ledger.depart(PipelineId("b"))
    assert ledger.peak_nodes_by_pool == {"r": 3, "t": 3}


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (new(2, 1), "takes 2 new rollout nodes; 1 are free"),
        (new(1, 0), "without a training node"),
        (new(0, 1), "without a rollout node"),
        (PlacementChoice(kind=AdmissionKind.NEW, group=None, rollout_nodes=(R0,), num_new_train_nodes=1),
         "names nodes that others hold"),
        (PlacementChoice(kind=AdmissionKind.DIRECT, group=7, rollout_nodes=(R0,), train_nodes=(T0,)),
         "does not exist"),
        (PlacementChoice(kind=AdmissionKind.DIRECT, group=0, rollout_nodes=(R1,), train_nodes=(T0,)),
         "has rollout nodes"),
        (PlacementChoice(kind=AdmissionKind.DIRECT, group=0, rollout_nodes=(R0, R0), train_nodes=(T0,)),
         "has rollout nodes"),
        (PlacementChoice(kind=AdmissionKind.DIRECT, group=0, rollout_nodes=(R0,), train_nodes=(T1,)),
         "has training nodes"),
        (PlacementChoice(kind=AdmissionKind.DIRECT, group=0, rollout_nodes=(R0,), train_nodes=()),
         "has training nodes"),
        (PlacementChoice(kind=AdmissionKind.DIRECT, group=0, rollout_nodes=(), train_nodes=(T0,)),
         "names no rollout node"),
    ],
)  # fmt: skip
def test_a_choice_that_does_not_hold_is_refused_before_anything_changes(choice, why):
    ledger = PlacementLedger(cluster(rollout=2, train=2))
    ledger.admit(pipeline("a"), new())
    before = only_group(ledger)
    with pytest.raises(IllegalTransitionError, match=why):
        ledger.admit(pipeline("b"), choice)
    assert PipelineId("b") not in ledger
    assert only_group(ledger) == before
    assert ledger.num_free_nodes(Phase.ROLLOUT) == 1
    ledger.check()


def test_no_pipeline_is_placed_twice_or_leaves_twice():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a"), new())
    with pytest.raises(IllegalTransitionError, match="already placed"):
        ledger.admit(pipeline("a"), new())
    ledger.depart(PipelineId("a"))
    with pytest.raises(IllegalTransitionError, match="not placed"):
        ledger.depart(PipelineId("a"))


def test_residency_is_counted_by_bytes_where_footprints_are_known():
    footprint = Footprint(rollout_host_bytes=40, train_host_bytes=30)
    ledger = PlacementLedger(cluster(host_bytes=100))
    ledger.admit(pipeline("a", footprint=footprint), new())
    ledger.admit(pipeline("b", footprint=footprint), join(only_group(ledger), [R0]))
    assert only_group(ledger).free_rollout_bytes == (20,)
    with pytest.raises(IllegalTransitionError, match="no memory"):
        ledger.admit(pipeline("c", footprint=footprint), join(only_group(ledger), [R0]))
    ledger.admit(pipeline("c", footprint=footprint), join(only_group(ledger), num_new=1))
    assert only_group(ledger).free_train_bytes == 10
    with pytest.raises(IllegalTransitionError, match="no memory"):
        ledger.admit(pipeline("d", footprint=footprint), join(only_group(ledger), num_new=1))
    ledger.check()


def test_the_cap_counts_only_pipelines_without_footprint():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("p0"), new())
    for index in range(1, 5):
        ledger.admit(pipeline(f"p{index}"), join(only_group(ledger), [R0]))
    with pytest.raises(IllegalTransitionError, match="no memory"):
        ledger.admit(pipeline("p5"), join(only_group(ledger), [R0]))
    known = pipeline("known", footprint=Footprint(rollout_host_bytes=1.0))
    ledger.admit(known, join(only_group(ledger), [R0]))
    assert only_group(ledger).num_members == 6


def test_a_pipeline_without_estimate_stops_no_other():
    ledger = PlacementLedger(cluster())
    unknown = Pipeline(id=PipelineId("unknown"), num_steps=None, slo_slowdown=1.0)
    ledger.admit(pipeline("a", slo_slowdown=1.5), new())
    group = only_group(ledger)
    assert group.keeps_slos_with(unknown, [R0], 0)
    ledger.admit(unknown, join(group, [R0]))
    assert only_group(ledger).period_s == group.period_s
    assert only_group(ledger).budget_s == group.budget_s


def test_colocated_nodes_serve_both_phases_training_nodes_first():
    ledger = PlacementLedger(cluster(rollout=2, train=2))
    placement = ledger.admit(pipeline("a"), new(2, 1, is_colocated=True))
    assert placement.rollout_nodes == (T0, R0, R1)
    assert placement.train_nodes == (T0,)
    with pytest.raises(IllegalTransitionError, match="both phases"):
        ledger.admit(pipeline("b"), join(only_group(ledger), [R0]))
    ledger.check()


def test_a_relocated_pipeline_keeps_its_old_nodes_until_it_has_really_left():
    ledger = PlacementLedger(cluster(rollout=2, train=2))
    ledger.admit(pipeline("a"), new())
    ledger.admit(pipeline("b"), new())
    target = ledger.group(ledger.placement(PipelineId("a")).group)
    placement, released = ledger.relocate(PipelineId("b"), join(target, [R0]))
    assert (placement.rollout_nodes, released) == ((R0,), (R1, T1))
    ledger.check()
    assert ledger.num_free_nodes(Phase.TRAIN) == 0
    assert ledger.usd_per_hour == 8.0
    assert ledger.finish_relocation(PipelineId("b")) == (R1, T1)
    assert ledger.num_free_nodes(Phase.TRAIN) == 1
    ledger.check()


def test_a_pipeline_that_ends_before_its_relocation_gives_back_both():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a"), new())
    ledger.relocate(PipelineId("a"), new())
    assert set(ledger.depart(PipelineId("a"))) == {R0, T0, R1, T1}
    assert ledger.usd_per_hour == 0.0
    ledger.check()


def test_a_relocation_that_does_not_hold_changes_nothing():
    ledger = PlacementLedger(cluster(rollout=2, train=1))
    ledger.admit(pipeline("a"), new())
    ledger.admit(pipeline("b"), join(only_group(ledger), num_new=1))
    before = only_group(ledger)
    with pytest.raises(IllegalTransitionError, match="are free"):
        ledger.relocate(PipelineId("b"), new())
    assert only_group(ledger) == before
    ledger.check()


def test_a_new_price_counts_for_groups_nodes_in_use_and_searches():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a", slo_slowdown=2.0), new())
    ledger.note_fruitless_search((PipelineId("a"),))
    ledger.set_price("t", 6.0)
    assert (only_group(ledger).usd_per_hour, ledger.usd_per_hour) == (7.0, 7.0)
    assert only_group(ledger).least_usd_per_hour == pytest.approx((1.0 * 2.0 + 6.0 * 1.0) / 6.0)
    assert not ledger.was_searched_in_vain((PipelineId("a"),))
    ledger.check()


def test_a_lost_node_is_not_handed_out_until_it_is_regained():
    ledger = PlacementLedger(cluster(rollout=2, train=2))
    ledger.admit(pipeline("a"), new())
    assert ledger.lose_node(R0) == (PipelineId("a"),)
    ledger.depart(PipelineId("a"))
    assert ledger.num_free_nodes(Phase.ROLLOUT) == 1
    assert ledger.admit(pipeline("b"), new()).rollout_nodes == (R1,)
    ledger.check()
    ledger.regain_node(R0)
    assert ledger.admit(pipeline("c"), new()).rollout_nodes == (R0,)
    ledger.check()


def test_a_cluster_without_training_pool_is_a_users_mistake():
    pool = Pool(name="r", phase=Phase.ROLLOUT)
    with pytest.raises(UserError, match="no pool has phase 'train'"):
        PlacementLedger(Cluster(pools={"r": pool}))


def test_check_notices_a_ledger_that_was_tampered_with():
    ledger = PlacementLedger(cluster())
    ledger.admit(pipeline("a"), new())
    ledger._nodes._by_pool["r"].give_back(R0)
    with pytest.raises(IllegalTransitionError, match="nodes in use and nodes held differ"):
        ledger.check()
