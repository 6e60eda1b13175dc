"""Gangs lie within one machine under every policy that gives a pipeline training nodes of its own number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlmux.core.actions import Admit
from rlmux.core.model import Cluster, NodeId, Phase, Pool
from rlmux.core.scheduler import Scheduler
from rlmux.policies import POLICIES, make_policy
from rlmux.policies.search.candidates import least_loaded

SHARE_ALL_NODES = ("fifo", "gap-ratio")
"""Policies that train every pipeline on all training nodes of a cluster with two pools."""


def two_machines(machines: str = "aaaabbbb", *, is_one_pool: bool = False) -> Cluster:
    """A training pool of two machines with four nodes each, with rollout nodes beside it or as its own."""
    train = Pool(name="train", phase=Phase.TRAIN, num_nodes=8, serves_both_phases=is_one_pool, machines=tuple(machines))
    rollout = Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=8)
    return Cluster(pools={"train": train} if is_one_pool else {"rollout": rollout, "train": train})


def machines_of(cluster: Cluster, nodes: Sequence[NodeId]) -> set[str | None]:
    return {cluster.machine_of(node) for node in nodes}


@pytest.mark.parametrize(
    ("policy", "is_one_pool"),
    [(name, is_one) for name in POLICIES for is_one in (False, True) if is_one or name not in SHARE_ALL_NODES],
)
def test_a_gang_of_four_gets_one_of_two_machines_with_four_nodes_each(builders, policy, is_one_pool):
    on = two_machines("abababab", is_one_pool=is_one_pool)
    driver = builders.Driver(Scheduler(on, make_policy(policy)))
    driver.submit(builders.pipeline("small"), builders.pipeline("gang", num_train_nodes=4))
    driver.run()
    (gang,) = [action for action in driver.actions(Admit) if action.pipeline == "gang"]
    assert len(gang.placement.train_nodes) == 4
    assert len(machines_of(on, gang.placement.train_nodes)) == 1


def test_a_second_gang_on_shared_nodes_trains_on_one_machine_where_that_costs_no_load(builders):
    on = two_machines(is_one_pool=True)
    driver = builders.Driver(Scheduler(on, make_policy("jigsaw")))
    driver.submit(*(builders.pipeline(name, num_train_nodes=3) for name in "abc"))
    first, second, third = (action.placement.train_nodes for action in driver.actions(Admit))
    assert [node.index for node in first] == [0, 1, 2]
    assert [node.index for node in second] == [4, 5, 6]
    assert [node.index for node in third][:2] == [3, 7], "less load is worth more than one machine"


def ranked(*loads_s: float) -> list[tuple[float, NodeId]]:
    """Nodes 0, 1, ... with their loads, least loaded first."""
    nodes = [(load_s, NodeId("train", index)) for index, load_s in enumerate(loads_s)]
    return sorted(nodes, key=lambda node: node[0])


@pytest.mark.parametrize(
    ("loads_s", "indices"),
    [
        ((9, 0, 0, 0, 0, 0, 0, 0), [4, 5, 6, 7]),
        ((9, 0, 0, 0, 0, 0, 0, 9), [1, 2, 3, 4]),
        ((1, 1, 1, 0, 0, 1, 1, 1), [3, 4, 0, 1]),
        ((1, 1, 1, 1, 0, 1, 1, 1), [4, 5, 6, 7]),
    ],
)
def test_the_least_loaded_nodes_are_of_one_machine_where_one_has_as_little_load(loads_s, indices):
    on = two_machines()
    assert [node.index for node in least_loaded(ranked(*loads_s), 4, on)] == indices
