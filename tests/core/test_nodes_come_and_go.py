"""Nodes that are lost and join again: pipelines that were pinned there go on elsewhere, or wait."""

from __future__ import annotations

import pytest

from rlmux.core import invariants
from rlmux.core.actions import Admit, ExpectLoss, Release
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import NodeJoined, NodeLost, NoticeGiven, PipelineCancelled
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


@pytest.mark.parametrize("node", [NodeId("rollout", 2), NodeId("rollout", -1), NodeId("gpu", 0)])
@pytest.mark.parametrize("event", [NodeLost, NodeJoined, lambda **of: NoticeGiven(**of, gone_at_s=9.0)])
def test_an_event_about_a_node_that_was_never_there_is_refused_at_the_gate(builders, event, node):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=2), make_policy("rollmux")))
    names = "rollout-0 to rollout-1, train-0"
    with pytest.raises(IllegalTransitionError, match=f"^no node {node}; nodes: {names}\n"):
        driver.send(event(time_s=0.0, node=node))


def test_what_is_known_of_a_node_already_changes_nothing(builders):
    """Ray and an expired notice both report a loss; a user and Ray both report a return."""
    driver = builders.Driver(Scheduler(builders.cluster(rollout=2), make_policy("rollmux")))
    driver.submit(builders.pipeline("a"))
    node = NodeId("rollout", 1)

    def changes(event: object) -> list[object]:
        num_before = len(driver.actions())
        driver.send(event)
        invariants.check(driver.scheduler)
        return driver.actions()[num_before:]

    assert changes(NodeJoined(time_s=0.0, node=node)) == []
    assert changes(NodeLost(time_s=0.1, node=node)) == []
    assert changes(NodeLost(time_s=0.2, node=node)) == []
    assert changes(NoticeGiven(time_s=0.3, node=node, gone_at_s=9.0)) == []
    assert not driver.scheduler.query.placement.is_about_to_go(node)
    assert changes(NodeJoined(time_s=0.4, node=node)) == []
    assert changes(NodeJoined(time_s=0.5, node=node)) == []
    assert changes(NoticeGiven(time_s=0.6, node=node, gone_at_s=9.0)) == [ExpectLoss(node=node, at_s=9.0)]
    driver.run()
    assert status(driver, "a") is PipelineStatus.FINISHED
