"""Nodes that are about to go: nothing is placed there, and what is there leaves at its next step boundary."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit, ExpectLoss, Park
from rlmux.core.events import NodeJoined, NodeLost, NoticeGiven
from rlmux.core.model import NodeId, Pipeline, PipelineId, PipelineStatus, Stage, Urgency
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares

FIRST = NodeId("rollout", 0)


def driver_of(builders, policy: str = "solo", **sizes):
    return builders.Driver(Scheduler(builders.cluster(**sizes), make_policy(policy), FairShares()))


def give_notice(driver, node: NodeId = FIRST, *, after_s: float = 100.0) -> None:
    driver.send(NoticeGiven(time_s=driver.now_s, node=node, gone_at_s=driver.now_s + after_s))


def lose(driver, node: NodeId = FIRST) -> None:
    driver.send(NodeLost(time_s=driver.now_s, node=node))


def admissions(driver) -> list[tuple[str, int]]:
    """(pipeline, number of its first rollout node) of each admission."""
    return [(one.pipeline, one.placement.rollout_nodes[0].index) for one in driver.actions(Admit)]


def generated(driver, name: str) -> list[int]:
    return [step for _, pipeline, stage, step in driver.starts() if (pipeline, stage) == (name, "generate")]


def test_a_pipeline_ends_its_step_leaves_with_a_checkpoint_and_goes_on_elsewhere(builders):
    driver = driver_of(builders, rollout=2, train=1)
    driver.submit(builders.pipeline("a", num_steps=3))
    give_notice(driver)
    assert driver.actions(Park) == [], "its step is under way"
    driver.run()
    assert [one.is_awaited for one in driver.actions(Park)] == [True]
    assert admissions(driver) == [("a", 0), ("a", 1)]
    assert generated(driver, "a") == [1, 2, 3], "no step is made twice"
    lose(driver)
    assert driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.FINISHED


def test_the_loss_is_asked_for_at_its_time(builders):
    driver = driver_of(builders)
    give_notice(driver, after_s=30.0)
    assert driver.actions(ExpectLoss) == [ExpectLoss(node=FIRST, at_s=30.0)]


def test_nothing_is_placed_on_it_and_waits_if_there_is_no_other(builders):
    driver = driver_of(builders, "rollmux", rollout=1, train=1)
    give_notice(driver)
    driver.submit(builders.pipeline("a"))
    assert driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.WAITING
    lose(driver)
    driver.send(NodeJoined(time_s=driver.now_s, node=FIRST))
    driver.run()
    assert driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.FINISHED


@pytest.mark.parametrize("policy", ["rollmux", "rlmux", "fifo", "gavel", "most-idle", "random"])
def test_no_other_joins_a_group_that_has_the_node(builders, policy):
    driver = driver_of(builders, policy, rollout=2, train=2)
    driver.submit(builders.pipeline("a", num_steps=2, rollout_s=2.0, train_s=2.0))
    (there,) = driver.actions(Admit)
    give_notice(driver, there.placement.rollout_nodes[0])
    driver.submit(builders.pipeline("b", num_steps=2))
    placed = [one.placement.rollout_nodes for one in driver.actions(Admit) if one.pipeline == "b"]
    assert all(there.placement.rollout_nodes[0] not in nodes for nodes in placed)
    driver.run()
    assert driver.scheduler.query.is_idle()


def test_a_notice_that_is_too_short_costs_the_open_step_alone(builders):
    driver = driver_of(builders, rollout=2, train=1)
    driver.submit(builders.pipeline("a", num_steps=3))
    for _ in range(2):
        driver.step()
    driver.step()
    give_notice(driver, after_s=0.0)
    lose(driver)
    driver.run()
    assert admissions(driver) == [("a", 0), ("a", 1)]
    assert generated(driver, "a") == [1, 2, 2, 3]


def test_a_node_that_stays_after_all_takes_pipelines_again(builders):
    driver = driver_of(builders)
    give_notice(driver)
    driver.send(NodeJoined(time_s=driver.now_s, node=FIRST))
    driver.submit(builders.pipeline("a", num_steps=1))
    driver.run()
    assert driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.FINISHED


def test_a_second_notice_changes_the_time_alone(builders):
    driver = driver_of(builders, rollout=2)
    driver.submit(builders.pipeline("a", num_steps=2))
    give_notice(driver, after_s=50.0)
    give_notice(driver, after_s=20.0)
    assert [one.at_s for one in driver.actions(ExpectLoss)] == [50.0, 20.0]
    driver.run()
    lose(driver)
    assert admissions(driver) == [("a", 0), ("a", 1)]


def test_a_filler_leaves_at_once(builders):
    stages = (Stage.GENERATE, Stage.REWARD)
    filler = Pipeline(id=PipelineId("eval"), num_steps=2, urgency=Urgency.FILLER, stages=stages,
                      estimate=builders.pipeline("x").estimate)  # fmt: skip
    driver = driver_of(builders, rollout=2)
    driver.submit(filler)
    give_notice(driver)
    assert admissions(driver) == [("eval", 0), ("eval", 1)]
    driver.run()
    assert driver.scheduler.query.is_idle()


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), policy=st.sampled_from(["solo", "rollmux", "rlmux", "fifo", "jigsaw", "colocated"]))
def test_whenever_notices_come_all_pipelines_end_and_no_invariant_breaks(builders, data, policy):
    driver = driver_of(builders, policy, rollout=3, train=2)
    driver.submit(*(builders.pipeline(f"p{index}", num_steps=data.draw(st.integers(1, 4))) for index in range(4)))
    nodes = [NodeId("rollout", 0), NodeId("rollout", 1), NodeId("train", 0)]
    state = dict.fromkeys(nodes, "there")
    for _ in range(data.draw(st.integers(1, 25))):
        node = data.draw(st.sampled_from(nodes))
        if state[node] == "there":
            give_notice(driver, node)
            state[node] = "leaving"
        elif state[node] == "leaving" and data.draw(st.booleans()):
            lose(driver, node)
            state[node] = "lost"
        else:
            driver.send(NodeJoined(time_s=driver.now_s, node=node))
            state[node] = "there"
        for _ in range(data.draw(st.integers(0, 4))):
            driver.step()
    for node, where in state.items():
        if where != "there":
            driver.send(NodeJoined(time_s=driver.now_s, node=node))
    driver.run()
    assert driver.scheduler.query.is_idle()
