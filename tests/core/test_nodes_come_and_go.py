"""Nodes that are lost and join again: pipelines that were pinned there go on elsewhere, or wait."""

from __future__ import annotations

from rlmux.core.actions import Admit, Release
from rlmux.core.events import NodeJoined, NodeLost, PipelineCancelled
from rlmux.core.model import NodeId, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy


def status(driver, name: str) -> PipelineStatus:
    return driver.scheduler.query.status(PipelineId(name))


def test_a_pipeline_goes_on_from_its_last_version_on_what_is_left(builders):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=2), make_policy("rollmux")))
    driver.submit(builders.pipeline("a"))
    for _ in range(3):
        driver.step()
    (admit,) = driver.actions(Admit)
    driver.send(NodeLost(time_s=driver.now_s, node=admit.placement.rollout_nodes[0]))
    again = driver.actions(Admit)[-1]
    assert again.placement.rollout_nodes != admit.placement.rollout_nodes
    driver.run()
    assert status(driver, "a") is PipelineStatus.FINISHED


def test_with_nothing_left_it_waits_until_a_node_joins(builders):
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux")))
    driver.submit(builders.pipeline("a"))
    driver.step()
    driver.send(NodeLost(time_s=driver.now_s, node=NodeId("rollout", 0)))
    assert status(driver, "a") is PipelineStatus.WAITING
    assert not driver.step()
    driver.send(NodeJoined(time_s=driver.now_s + 5.0, node=NodeId("rollout", 0)))
    driver.run()
    assert status(driver, "a") is PipelineStatus.FINISHED


def test_one_that_was_cancelled_leaves_with_the_node_that_ran_its_last_order(builders):
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux")))
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.send(PipelineCancelled(time_s=0.5, pipeline=PipelineId("a")))
    assert driver.scheduler.query.has_orders(), "its order has not ended yet"
    driver.send(NodeLost(time_s=0.6, node=NodeId("rollout", 0)))
    assert status(driver, "a") is PipelineStatus.CANCELLED
    assert Release(pipeline=PipelineId("a")) in driver.actions(Release)
    assert status(driver, "b") is PipelineStatus.WAITING
    driver.send(NodeJoined(time_s=1.0, node=NodeId("rollout", 0)))
    driver.run()
    assert status(driver, "b") is PipelineStatus.FINISHED
