"""A pool that serves both phases: every policy places on it, and every pipeline ends."""

from __future__ import annotations

import pytest

from rlmux.core.actions import Admit, Queue, Refuse, RunStage
from rlmux.core.model import Cluster, Footprint, Phase, Pool
from rlmux.core.scheduler import Scheduler
from rlmux.policies import POLICIES, make_policy

OWN_NODES = ("solo", "colocated", "split", "gavel")


def one_pool(num_nodes=1, **fields):
    return Cluster(
        pools={
            "gpus": Pool(name="gpus", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=num_nodes, **fields),
        }
    )


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_both_phases_of_every_pipeline_on_it(builders, policy, num_nodes):
    driver = builders.Driver(Scheduler(one_pool(num_nodes), make_policy(policy)))
    driver.submit(*(builders.pipeline(name, num_steps=2) for name in "abc"))
    driver.run()
    starts = driver.starts()
    for name in "abc":
        assert [start[3] for start in starts if start[1:3] == (name, "update")] == [1, 2]
    for action in driver.actions(Admit):
        assert set(action.placement.train_nodes) <= set(action.placement.rollout_nodes)
    devices = {device.node_id for action in driver.actions(RunStage) for device in action.devices}
    assert {str(node) for node in devices} <= {f"gpus-{index}" for index in range(num_nodes)}
    assert not driver.actions(Refuse)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in OWN_NODES])
def test_pipelines_share_one_device_where_the_policy_shares(builders, policy):
    driver = builders.Driver(Scheduler(one_pool(), make_policy(policy)))
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    assert len(driver.actions(Admit)) == 2


@pytest.mark.parametrize("policy", OWN_NODES)
def test_pipelines_of_their_own_nodes_follow_one_another(builders, policy):
    driver = builders.Driver(Scheduler(one_pool(), make_policy(policy)))
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    (queued,) = driver.actions(Queue)
    waits = "waits for its turn" if policy == "gavel" else "needs 1 nodes for both phases; 0 are free"
    assert queued.reason.startswith(f"pipeline b {waits}")


@pytest.mark.parametrize("policy", ["solo", "colocated", "rollmux", "jigsaw"])
def test_a_pipeline_gets_as_many_nodes_as_its_wider_phase_asks_for(builders, policy):
    driver = builders.Driver(Scheduler(one_pool(None), make_policy(policy)))
    driver.submit(builders.pipeline("a", num_rollout_nodes=3), builders.pipeline("b", num_train_nodes=2))
    placements = [action.placement for action in driver.actions(Admit)]
    assert len(placements[0].rollout_nodes) == 3
    assert len(placements[0].train_nodes) == 1
    assert len(placements[1].train_nodes) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_host_memory_must_hold_both_phases(builders, policy):
    driver = builders.Driver(Scheduler(one_pool(host_memory_bytes=10e9), make_policy(policy)))
    footprint = Footprint(rollout_host_bytes=6e9, train_host_bytes=5e9)
    driver.submit(builders.pipeline("big", footprint=footprint))
    (refused,) = driver.actions(Refuse)
    assert refused.reason == (
        "pipeline big keeps 11.000 GB on each node of pool 'gpus', which has 10.000 GB of host memory"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_must_hold_either_state(builders, policy):
    driver = builders.Driver(Scheduler(one_pool(device_memory_bytes=10e9), make_policy(policy)))
    for name, train_bytes in (("fits", 10e9), ("large", 11e9)):
        footprint = Footprint(rollout_device_bytes=9e9, train_device_bytes=train_bytes)
        driver.submit(builders.pipeline(name, footprint=footprint))
    (refused,) = driver.actions(Refuse)
    assert refused.reason.startswith("pipeline large keeps a state of 11.000 GB on a device of pool 'gpus', which")
