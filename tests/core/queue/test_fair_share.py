"""Waiting pipelines of several accounts: who is offered room first, and what their users may say."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit, Park, Queue, Release, Relocate
from rlmux.core.decayed_usage import FULL_S, HALF_LIFE_S, DecayedUsage
from rlmux.core.events import HoldReleased, NodeLost, PipelineCancelled, PipelineHeld, PipelineRanked, WaitsRestored
from rlmux.core.model import QUEUED, NodeId, PhaseSeconds, Pipeline, PipelineId, PipelineStatus, Urgency
from rlmux.core.queue_order import PipelineWait
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares


@pytest.fixture
def driver(builders):
    """One node of each pool, without sharing: one pipeline at a time."""
    return builders.Driver(Scheduler(builders.cluster(), make_policy("solo"), FairShares()))


def admitted(driver) -> str:
    return " ".join(action.pipeline for action in driver.actions(Admit))


def test_a_later_account_is_not_kept_waiting_by_a_hundred_submissions_of_another(driver, builders):
    driver.submit(*(builders.pipeline(f"a{number}", num_steps=1, user="ann") for number in range(100)))
    driver.submit(builders.pipeline("b0", num_steps=1, user="bob"))
    driver.run()
    assert admitted(driver).split().index("b0") == 1


def test_ageing_goes_on_in_a_resumed_run(driver, builders):
    """`b0` had waited for two weeks, and its account has used more than the other one."""
    wait = PipelineWait(pipeline=PipelineId("b0"), since_s=0.0)
    driver.now_s = 14 * 86400.0
    driver.send(WaitsRestored(time_s=driver.now_s, waits=(wait,)))
    driver.submit(builders.pipeline("now", urgency=Urgency.URGENT), builders.pipeline("a0", urgency=Urgency.URGENT))
    driver.submit(builders.pipeline("b0", urgency=Urgency.BACKGROUND))
    driver.run()
    assert admitted(driver) == "now b0 a0"


def test_without_accounts_pipelines_start_as_they_came(driver, builders):
    driver.submit(*(builders.pipeline(f"p{number}") for number in range(5)))
    driver.run()
    assert admitted(driver) == "p0 p1 p2 p3 p4"


def test_a_rank_given_later_puts_ones_own_in_order(driver, builders):
    driver.submit(*(builders.pipeline(f"p{number}", user="ann") for number in range(4)))
    driver.send(PipelineRanked(time_s=0.0, pipeline=PipelineId("p3"), rank=-1))
    driver.run()
    assert admitted(driver) == "p0 p3 p1 p2"


def test_the_urgent_go_first_and_the_background_last(driver, builders):
    driver.submit(
        builders.pipeline("p0"), builders.pipeline("late", urgency=Urgency.BACKGROUND), builders.pipeline("p1")
    )
    driver.submit(builders.pipeline("now", urgency=Urgency.URGENT))
    driver.run()
    assert admitted(driver) == "p0 now p1 late"


def test_a_held_pipeline_waits_until_it_is_released_and_holds_up_no_other(driver, builders):
    driver.submit(builders.pipeline("p0"), builders.pipeline("p1"), builders.pipeline("p2"))
    driver.send(PipelineHeld(time_s=0.0, pipeline=PipelineId("p1")))
    assert driver.actions(Queue)[-1].pipeline in ("p1", "p2")
    assert driver.scheduler.query.reason(PipelineId("p1")) == "its user holds it"
    driver.run()
    assert admitted(driver) == "p0 p2"
    driver.send(HoldReleased(time_s=driver.now_s, pipeline=PipelineId("p1")))
    driver.run()
    assert admitted(driver) == "p0 p2 p1"


def test_a_hold_of_one_that_is_over_changes_nothing(driver, builders):
    driver.submit(builders.pipeline("p0"))
    driver.run()
    assert driver.send(PipelineHeld(time_s=driver.now_s, pipeline=PipelineId("p0"))) == []


def test_a_held_pipeline_may_be_cancelled(driver, builders):
    driver.submit(builders.pipeline("p0"), builders.pipeline("p1"))
    driver.send(PipelineHeld(time_s=0.0, pipeline=PipelineId("p1")))
    driver.send(PipelineCancelled(time_s=0.0, pipeline=PipelineId("p1")))
    assert driver.scheduler.query.status(PipelineId("p1")) is PipelineStatus.CANCELLED
    driver.run()
    assert admitted(driver) == "p0"


def test_a_pipeline_that_lost_its_node_keeps_its_account(driver, builders):
    driver.submit(builders.pipeline("a0", user="ann"), builders.pipeline("b0", user="bob"))
    driver.send(NodeLost(time_s=0.0, node=NodeId("rollout", 0)))
    assert driver.scheduler.query.status(PipelineId("a0")) is PipelineStatus.WAITING


def pinned_device_s(driver) -> float:
    """Device-seconds for which a pipeline was pinned to the device, from the actions alone."""
    pools = driver.scheduler.cluster.pools
    pins, total, last_s = {}, 0.0, 0.0
    for time_s, action in [*driver.log, (driver.now_s, None)]:
        held = {device for nodes in pins.values() for node in nodes for device in pools[node.pool].devices(node)}
        total, last_s = total + len(held) * (time_s - last_s), time_s
        if isinstance(action, Admit | Relocate):
            pins[action.pipeline] = action.placement.nodes
        elif isinstance(action, Release | Park):
            pins.pop(action.pipeline, None)
    return total


@st.composite
def submissions(draw):
    made = []
    for number in range(draw(st.integers(2, 10))):
        phases = PhaseSeconds(rollout_s=draw(st.integers(1, 6)), train_s=draw(st.integers(1, 6)))
        pipeline = Pipeline(
            id=PipelineId(f"p{number}"),
            num_steps=draw(st.integers(1, 4)),
            num_rollout_nodes=draw(st.sampled_from([1, 1, 2])),
            estimate=phases if draw(st.integers(0, 5)) else None,
            slo_slowdown=draw(st.sampled_from([1.0, 1.5, math.inf])),
            user=draw(st.sampled_from(["ann", "bob", "eve"])),
            urgency=draw(st.sampled_from(QUEUED)),
            rank=draw(st.integers(-1, 1)),
        )
        made.append((draw(st.integers(0, 8)), pipeline))
    return made


def seconds_of(action) -> float:
    return {"generate": 3.0, "update": 2.0}.get(action.stage, 0.0)


@pytest.mark.parametrize("policy", ["solo", "rollmux", "rlmux"])
@given(made=submissions())
@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_charges_add_up_to_the_seconds_that_devices_were_held(builders, policy, made):
    """And every pipeline ends, with every invariant checked after each event."""
    cluster = builders.cluster(rollout=2, train=2, devices_per_node=2)
    driver = builders.Driver(Scheduler(cluster, make_policy(policy), FairShares()), seconds_of)
    for gap_s, pipeline in made:
        until_s = driver.now_s + gap_s
        while driver.next_end_s() <= until_s:
            driver.step()
        driver.now_s = until_s
        driver.submit(pipeline)
    driver.run()
    statuses = {driver.scheduler.query.status(pipeline.id) for _, pipeline in made}
    assert statuses <= {PipelineStatus.FINISHED, PipelineStatus.REFUSED}
    charged = sum(sum(parts.values()) for parts in driver.scheduler.state.charged_by_pipeline.values())
    assert charged == pytest.approx(pinned_device_s(driver), rel=1e-9)
    assert sum(driver.scheduler.bill().held_by_pool.values()) == pytest.approx(charged, rel=1e-9)
    assert not driver.scheduler.state.held_devices


def test_a_pipeline_alone_pays_for_its_bubbles_and_two_pay_them_in_parts(builders):
    """Rollout 2 s, train 1 s, one step: 3 s on two nodes; of the bubbles of a shared node each pays by its seconds."""
    alone = builders.Driver(Scheduler(builders.cluster(), make_policy("solo"), FairShares()))
    alone.submit(builders.pipeline("a", num_steps=1, user="ann"))
    alone.run()
    assert alone.scheduler.state.charged_by_pipeline == {"a": {"rollout": 3.0, "train": 3.0}}
    both = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux"), FairShares()))
    both.submit(*(builders.pipeline(name, num_steps=2, user=name) for name in "ab"))
    both.run()
    charged = both.scheduler.state.charged_by_pipeline
    assert sum(charged["a"].values()) + sum(charged["b"].values()) == pytest.approx(2 * both.now_s)
    assert sum(charged["a"].values()) < 2 * both.now_s / 2 + 2.0


def test_nothing_is_counted_without_accounts(driver, builders):
    driver.submit(builders.pipeline("p0"))
    driver.run()
    assert not driver.scheduler.state.charged_by_pipeline


def test_usage_that_decays_between_events_is_what_many_small_steps_give():
    exact = DecayedUsage()
    exact.add_rate(2.0, 0.0, 3 * HALF_LIFE_S)
    num = 30_000
    steps = DecayedUsage()
    for number in range(num):
        steps.add_rate(2.0, number / num * 3 * HALF_LIFE_S, (number + 1) / num * 3 * HALF_LIFE_S)
    assert exact.device_s == pytest.approx(2.0 * FULL_S * (1 - 2**-3), rel=1e-12)
    assert steps.device_s == pytest.approx(exact.device_s, rel=1e-9)
    assert exact.at(4 * HALF_LIFE_S) == pytest.approx(exact.device_s / 2, rel=1e-12)
