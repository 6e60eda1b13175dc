"""The best split of nodes into rollout and training nodes: by hand, and as the simulator has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.policies import make_policy
from rlmux.sim.models.decoder import Unfinished
from rlmux.sim.simulator import simulate
from rlmux.sim.split_search import best_split, recorded_seconds, split_of, splits, wants_another_rollout_node
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.recorded import RecordedSeconds
from rlmux.sim.workloads.recorded_rollout import Iterations, RecordedRollout
from rlmux.sim.world import TrueSeconds

NUM_NODES = 6
TRAIN_S = 12.0
"""Seconds of training on one node."""


def in_proportion(seconds: float):
    return lambda count: seconds / count


def nodes_of(split) -> tuple[int, int]:
    return split.num_rollout_nodes, split.num_train_nodes


def test_overlapping_phases_are_split_so_that_the_longer_one_is_shortest():
    assert nodes_of(best_split(in_proportion(10.0), in_proportion(5.0), 3, overlaps=True)) == (2, 1)
    assert nodes_of(best_split(in_proportion(5.0), in_proportion(10.0), 3, overlaps=True)) == (1, 2)


def test_nodes_that_shorten_nothing_are_given_back():
    """The longest answer takes 4 s, so three rollout nodes are no faster than two, nor is a fourth training node."""
    split = best_split(lambda count: max(4.0, 8.0 / count), in_proportion(8.0), 8, overlaps=True)
    assert nodes_of(split) == (2, 2)
    assert split.step_s == 4.0


def test_phases_one_after_the_other_are_split_by_their_sum():
    split = best_split(in_proportion(9.0), in_proportion(4.0), 5, overlaps=False)
    assert nodes_of(split) == (3, 2)
    assert split.step_s == 5.0


def test_one_node_cannot_be_split():
    with pytest.raises(ValueError, match="1 nodes cannot be split; accepted: 2 or more"):
        best_split(in_proportion(1.0), in_proportion(1.0), 1, overlaps=True)


def test_another_rollout_node_is_due_once_rollouts_lag_by_what_it_saves():
    """On two nodes a third saves 1/6 of the rollout's 12 s: 2 s."""
    rollout_s = in_proportion(24.0)
    assert not wants_another_rollout_node(rollout_s, in_proportion(8.1), 2, 1)
    assert wants_another_rollout_node(rollout_s, in_proportion(8.0), 2, 1)
    assert not wants_another_rollout_node(lambda count: 12.0, in_proportion(1.0), 2, 1), "it would save nothing"


@given(
    rollout=st.lists(st.integers(1, 50), min_size=7, max_size=7),
    train=st.lists(st.integers(1, 50), min_size=7, max_size=7),
    num_nodes=st.integers(2, 8),
    overlaps=st.booleans(),
)
def test_no_split_is_shorter_nor_as_short_on_fewer_nodes(rollout, train, num_nodes, overlaps):
    rollout_s, train_s = (lambda count: rollout[count - 1]), (lambda count: train[count - 1])
    best = best_split(rollout_s, train_s, num_nodes, overlaps=overlaps)
    for one in range(1, num_nodes):
        for other in range(1, num_nodes - one + 1):
            split = split_of(rollout_s, train_s, one, other, overlaps)
            assert (split.step_s, split.num_nodes) >= (best.step_s, best.num_nodes)


# as simulated


def recorded_world() -> RecordedSeconds:
    """Sixteen prompts with two answers each, most of them short and one of them very long."""
    lengths = [40, 60, 50, 70, 45, 55, 65, 240] * 4
    rollout = RecordedRollout(
        trajectories=tuple(Unfinished(tokens, -1.0) for tokens in lengths),
        group_size=2,
        slots=4,
        iterations=Iterations(rows=(1, 2, 4), seconds=(0.01, 0.012, 0.016), prompt_s=0.001),
        fixed_s=0.0,
    )
    by_stage = {Stage.GENERATE: 1.0, Stage.UPDATE: TRAIN_S}
    return RecordedSeconds(by_stage=by_stage, by_step={}, rollouts={1: rollout})


def simulated_step_s(world: RecordedSeconds, num_rollout: int, num_train: int, staleness: int) -> float:
    pools = (
        Pool(name="r", phase=Phase.ROLLOUT, num_nodes=num_rollout),
        Pool(name="t", phase=Phase.TRAIN, num_nodes=num_train),
    )
    train_s = TRAIN_S / num_train
    one = Pipeline(
        id=PipelineId("a"),
        num_steps=40,
        staleness=staleness,
        num_rollout_nodes=num_rollout,
        num_train_nodes=num_train,
        estimate=PhaseSeconds(rollout_s=1.0, train_s=train_s),
    )
    here = RecordedSeconds(by_stage={**world.by_stage, Stage.UPDATE: train_s}, by_step={}, rollouts=world.rollouts)
    workload = Workload(
        name="split",
        cluster=Cluster(pools={pool.name: pool for pool in pools}),
        arrivals=(Arrival(submit_s=0.0, pipeline=one, world=here),),
    )
    return simulate(workload, make_policy("solo")).hours * 3600 / 40


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_simulator_has_no_split_that_is_faster(staleness):
    world = recorded_world()
    rollout_s, train_s = recorded_seconds(world, devices_per_node=1, num_train_nodes=1)
    best = best_split(rollout_s, train_s, NUM_NODES, overlaps=staleness > 0)
    steps_s = {
        (one, other): simulated_step_s(world, one, other, staleness)
        for one in range(1, NUM_NODES)
        for other in range(1, NUM_NODES - one + 1)
    }
    assert steps_s[nodes_of(best)] == pytest.approx(best.step_s, rel=0.05)
    assert steps_s[nodes_of(best)] <= min(steps_s.values()) * 1.001


def test_a_file_is_split_by_its_estimates_and_by_a_run_of_the_same_names():
    def workload(world: TrueSeconds) -> Workload:
        one = Pipeline(
            id=PipelineId("a"), num_steps=3, staleness=1, estimate=PhaseSeconds(rollout_s=30.0, train_s=TRAIN_S)
        )
        pool = Pool(name="r", phase=Phase.ROLLOUT, num_nodes=1)
        return Workload(
            name="w", cluster=Cluster(pools={"r": pool}), arrivals=(Arrival(submit_s=0.0, pipeline=one, world=world),)
        )

    (row,) = splits(workload(TrueSeconds(by_stage={})), NUM_NODES)
    assert (row["rollout_nodes"], row["train_nodes"], row["step_s"]) == (4, 2, 7.5)
    assert row["gain"] == 30.0 / 7.5
    (row,) = splits(workload(TrueSeconds(by_stage={})), NUM_NODES, workload(recorded_world()))
    assert row["rollout_nodes"] + row["train_nodes"] <= NUM_NODES
    assert row["rollout_s"] >= 240 * 0.01, "no number of nodes shortens the longest answer"
