"""The queue for admission: a wide pipeline starts when it was told, and others fill what it leaves until then."""

from __future__ import annotations

import pytest

from rlmux.core.actions import Admit, Queue
from rlmux.core.events import NodeJoined, NodeLost, PipelineCancelled, WaitsRestored
from rlmux.core.model import NodeId, Pipeline, PipelineId, PipelineStatus
from rlmux.core.queue_order import PipelineWait
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy


@pytest.fixture
def driver(builders):
    return builders.Driver(Scheduler(builders.cluster(rollout=2, train=2), make_policy("solo")))


def admissions(driver) -> dict[str, float]:
    return {action.pipeline: time_s for time_s, action in driver.log if isinstance(action, Admit)}


def reason(driver, name: str) -> str:
    return driver.scheduler.query.reason(PipelineId(name))


def submit_at(driver, time_s, *pipelines) -> None:
    """Let everything end that ends before this time, then submit."""
    while driver.next_end_s() <= time_s:
        driver.step()
    driver.now_s = time_s
    driver.submit(*pipelines)


def test_a_pipeline_that_needs_two_nodes_is_not_starved_by_those_that_need_one(driver, builders):
    """Two small ones run, out of step with each other, and a new one comes whenever one ends."""
    driver.submit(builders.pipeline("s0", num_steps=4), builders.pipeline("s1", num_steps=2))
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2, num_steps=2))
    for number in range(2, 40):
        submit_at(driver, 6.0 * (number - 1), builders.pipeline(f"s{number}", num_steps=4))
    driver.run()
    assert admissions(driver)["wide"] == 12.0  # s0 ends then


def test_a_small_pipeline_that_ends_in_time_overtakes_and_one_that_does_not_waits(driver, builders):
    driver.submit(builders.pipeline("s0", num_steps=10))  # until 30 s
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2, num_steps=2))
    driver.submit(builders.pipeline("long", num_steps=11), builders.pipeline("short", num_steps=9))
    assert set(admissions(driver)) == {"s0", "short"}
    driver.run()
    assert admissions(driver) == {"s0": 0.0, "short": 0.0, "wide": 30.0, "long": 36.0}


def test_a_pipeline_beside_which_the_head_still_fits_overtakes_however_long_it_takes(builders):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=5, train=5), make_policy("solo")))
    driver.submit(builders.pipeline("s0", num_rollout_nodes=4, num_steps=10))
    driver.submit(builders.pipeline("wide", num_rollout_nodes=3, num_steps=2), builders.pipeline("long", num_steps=99))
    driver.run()
    assert admissions(driver) == {"s0": 0.0, "long": 0.0, "wide": 30.0}


def test_without_estimates_nothing_overtakes(driver, builders):
    unknown = Pipeline(id=PipelineId("s0"), num_steps=4)
    driver = builders.Driver(driver.scheduler, seconds=lambda action: float(bool(action.devices)))
    driver.submit(unknown, builders.pipeline("wide", num_rollout_nodes=2), builders.pipeline("tiny", num_steps=1))
    assert set(admissions(driver)) == {"s0"}
    assert "when s0 has ended" in reason(driver, "wide")
    driver.run()
    assert admissions(driver)["wide"] < admissions(driver)["tiny"]


def test_seconds_that_were_seen_let_others_overtake_a_pipeline_without_estimate(driver, builders):
    driver = builders.Driver(driver.scheduler, seconds=lambda action: float(bool(action.devices)))
    driver.submit(Pipeline(id=PipelineId("s0"), num_steps=50))
    for _ in range(10):
        driver.step()
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2), builders.pipeline("tiny", num_steps=1))
    assert "tiny" in admissions(driver)


def test_a_wait_is_explained_with_what_would_end_it(driver, builders):
    driver.submit(builders.pipeline("s0", num_steps=10))
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2), builders.pipeline("long", num_steps=99))
    assert reason(driver, "wide") == (
        "pipeline wide needs 2 rollout and 1 train nodes; 1 and 1 are free, and none of 1 groups takes it within "
        "memory and every SLO; it is first in the queue and starts when s0 has ended, expected at 30 s"
    )
    assert reason(driver, "long") == (
        "pipeline long would fit, but wide is before it in the queue and would start later than at 30 s"
    )
    assert [action.pipeline for action in driver.actions(Queue)] == ["wide", "long"]


def test_where_estimates_were_wrong_nothing_overtakes_after_the_promised_time(builders):
    """`s0` takes ten times what is estimated: from 30 s on, what frees a node frees it for `wide`."""
    pools = builders.cluster(rollout=3, train=3)
    slow = builders.Driver(
        Scheduler(pools, make_policy("solo")),
        seconds=lambda action: (
            (10.0 if action.pipeline == "s0" else 1.0) * (2.0 if action.stage == "generate" else 1.0)
        ),
    )
    slow.submit(builders.pipeline("s0", num_steps=10), builders.pipeline("s1", num_steps=9))
    slow.submit(builders.pipeline("wide", num_rollout_nodes=3))
    for number in range(2, 30):
        submit_at(slow, 10.0 * number, builders.pipeline(f"s{number}", num_steps=1))
    slow.run()
    early = [name for name, time_s in admissions(slow).items() if time_s < admissions(slow)["wide"]]
    assert early == ["s0", "s1", "s2"]
    assert admissions(slow)["wide"] == 300.0


def test_a_resumed_run_keeps_the_start_that_the_head_was_promised(driver, builders):
    """Promised to start at 30 s, which is past: `short` would end before `s0` does, and starts after `wide` now."""
    driver.now_s = 31.0
    wait = PipelineWait(pipeline=PipelineId("wide"), since_s=1.0, promised_s=30.0)
    driver.send(WaitsRestored(time_s=31.0, waits=(wait,)))
    driver.submit(builders.pipeline("s0", num_steps=10), builders.pipeline("wide", num_rollout_nodes=2))
    driver.submit(builders.pipeline("short", num_steps=2))
    assert set(admissions(driver)) == {"s0"}
    assert driver.scheduler.wait_of(PipelineId("wide")).waited_s == 30.0
    assert driver.scheduler.query.reserved_start_s(PipelineId("wide")) == 30.0


def test_what_waited_behind_a_pipeline_starts_when_that_is_cancelled(driver, builders):
    driver.submit(builders.pipeline("s0", num_steps=10))
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2), builders.pipeline("long", num_steps=99))
    driver.send(PipelineCancelled(time_s=1.0, pipeline=PipelineId("wide")))
    assert admissions(driver)["long"] == 1.0


def test_a_pipeline_that_waits_for_a_lost_node_holds_up_no_other(driver, builders):
    node = NodeId("rollout", 1)
    driver.send(NodeLost(time_s=0.0, node=node))
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2), builders.pipeline("s0", num_steps=2))
    assert set(admissions(driver)) == {"s0"}
    driver.submit(builders.pipeline("s1", num_steps=1), builders.pipeline("s2", num_steps=2))
    driver.send(NodeJoined(time_s=1.0, node=node))
    assert set(admissions(driver)) == {"s0", "s1"}, "s2 ends after s0, when both nodes are for wide"
    driver.run()
    assert driver.scheduler.query.status(PipelineId("wide")) is PipelineStatus.FINISHED


def test_a_pipeline_that_was_parked_is_before_those_that_came_later(driver, builders):
    driver.submit(builders.pipeline("s0", num_rollout_nodes=2, num_steps=4))
    driver.submit(builders.pipeline("s1", num_steps=4))
    node = NodeId("rollout", 0)
    driver.send(NodeLost(time_s=1.0, node=node))
    assert admissions(driver)["s1"] == 1.0
    driver.submit(builders.pipeline("s2", num_steps=99))
    driver.send(NodeJoined(time_s=2.0, node=node))
    assert "s2" not in admissions(driver)
