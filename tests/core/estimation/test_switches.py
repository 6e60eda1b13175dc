"""What the scheduler makes of switches: which pipelines may join, what fills a gap, which state leaves a device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlmux.core.actions import Pause, RunStage, Switch
from rlmux.core.estimation.estimates import StepHistory
from rlmux.core.estimation.switches import num_fitting, switch_seconds
from rlmux.core.events import ChunkFinished, ReplyArrived, StageFinished, StagePaused
from rlmux.core.model import Cluster, DeviceId, Footprint, NodeId, Phase, Pool, SwitchEstimate
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

DEAR = SwitchEstimate(rollout_s=0.5, train_s=0.5)
SIX = Footprint(rollout_device_bytes=6.0, train_device_bytes=6.0)


def pools(memory_bytes: float, *, usd: float = 0.0) -> Cluster:
    """Two nodes of each kind, or as many as are paid for."""
    return Cluster(
        pools={
            phase.value: Pool(
                name=phase.value,
                phase=phase,
                num_nodes=None if usd else 2,
                device_memory_bytes=memory_bytes,
                usd_per_gpu_hour=usd,
            )
            for phase in (Phase.ROLLOUT, Phase.TRAIN)
        }
    )


# --- how many fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "fitting"),
    [((6.0, 6.0), 1), ((4.0, 3.0, 3.0), math.inf), ((4.0, 4.0, 4.0), 2), ((None,), math.inf), ((None, 1.0), 1)],
)
def test_of_states_that_do_not_all_fit_the_largest_say_how_many_do(sizes, fitting):
    assert num_fitting(sizes, 10.0) == fitting


def test_only_pipelines_that_share_a_device_they_do_not_all_fit_pay_for_switches(builders):
    nodes = [NodeId("rollout", 0), NodeId("rollout", 1), NodeId("train", 0)]
    a, b, c = (builders.pipeline(name, switch=DEAR, footprint=SIX) for name in "abc")
    tenants = [(a, nodes[:1], nodes[2:]), (b, nodes[:1], nodes[2:]), (c, nodes[1:2], nodes[2:])]
    assert switch_seconds(tenants, pools(10.0).pools) == [(0.5, 0.5), (0.5, 0.5), (0.0, 0.5)]
    assert switch_seconds(tenants, pools(12.0).pools) == [(0.0, 0.5), (0.0, 0.5), (0.0, 0.5)]
    assert switch_seconds(tenants, pools(18.0).pools) == [(0.0, 0.0)] * 3


# --- placement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["rollmux", "rlmux"])
@pytest.mark.parametrize(
    ("switch", "memory_bytes", "num_groups"),
    [(None, 10.0, 1), (DEAR, 12.0, 1), (SwitchEstimate(rollout_s=0.0, train_s=0.0), 10.0, 1), (DEAR, 10.0, 2)],
    ids=["unmeasured", "both fit", "quick", "dear"],
)
def test_no_pipeline_joins_a_group_in_which_switches_would_break_an_slo(
    builders, policy, switch, memory_bytes, num_groups
):
    """Each takes 3 s alone and accepts 3.3; both alternating take 3 s, and 4 with two switches each."""
    scheduler = Scheduler(pools(memory_bytes, usd=10.0), make_policy(policy))
    driver = builders.Driver(scheduler)
    for name in "ab":
        driver.submit(
            builders.pipeline(
                name, rollout_s=1.5, train_s=1.5, slo_slowdown=1.1, switch=switch, footprint=SIX, num_steps=30
            )
        )
    assert scheduler.query.placement.num_groups == num_groups
    driver.run()


def test_a_group_knows_its_period_with_the_switches_in_it(builders):
    scheduler = Scheduler(pools(10.0, usd=1.0), make_policy("rollmux"))
    pair = [
        builders.pipeline(name, rollout_s=2.0, train_s=2.0, slo_slowdown=2.0, switch=DEAR, footprint=SIX)
        for name in "ab"
    ]
    builders.Driver(scheduler).submit(pair[0])
    (alone,) = scheduler.query.placement.groups()
    assert alone.period_s == pytest.approx(4.0)
    expected_s = alone.period_with(pair[1], alone.rollout_nodes, 0)
    builders.Driver(scheduler).submit(pair[1])
    (both,) = scheduler.query.placement.groups()
    assert both.period_s == pytest.approx(expected_s) == pytest.approx(5.0)


# --- learned from the run -----------------------------------------------------------------------------------


def test_what_switches_took_replaces_what_was_measured_before(builders):
    history = StepHistory(builders.pipeline("a", switch=SwitchEstimate(rollout_s=0.5, train_s=9.0)))
    assert history.estimates().switch_s(Phase.ROLLOUT) == 0.5
    for seconds in (0.3, 0.2, 0.4):
        history.add_switch(Phase.ROLLOUT, seconds, is_warm=True)
    assert history.estimates().switch_s(Phase.ROLLOUT) == pytest.approx(0.3)
    assert history.estimates().switch_s(Phase.TRAIN) == 9.0


def test_weights_that_come_in_with_every_order_are_no_switch(builders):
    history = StepHistory(builders.pipeline("a"))
    assert history.estimates().switch_s(Phase.ROLLOUT) == 0.0
    history.add_switch(Phase.ROLLOUT, 0.2, is_warm=False)
    history.add_switch(Phase.ROLLOUT, 0.7, is_warm=True)
    assert history.estimates().switch_s(Phase.ROLLOUT) == pytest.approx(0.5)


class Switching:
    """Ends every order after its stage and its switch, and reports the switch."""

    def __init__(self, builders, scheduler: Scheduler, switch_s: float) -> None:
        self.driver = builders.Driver(scheduler, lambda action: 2.0)
        self.switch_s = switch_s

    def run(self) -> None:
        driver = self.driver
        send, driver.send = driver.send, lambda event: send(self._with_switch(event))
        driver.run()

    def _with_switch(self, event):
        if not isinstance(event, StageFinished):
            return event
        (action,) = [a for a in self.driver.actions(RunStage) if a.order == event.order]
        return replace(event, switch_s=self.switch_s * (action.switch is Switch.WARM))


@pytest.mark.parametrize("policy", ["jigsaw", "rlmux"])
def test_the_same_events_give_the_same_orders_again_whatever_was_learned_of_switches(builders, policy):
    scheduler = Scheduler(pools(10.0), make_policy(policy))
    run = Switching(builders, scheduler, 0.4)
    run.driver.submit(*(builders.pipeline(name, num_steps=5, footprint=SIX) for name in "abc"))
    run.run()
    learned = [scheduler.query.pipeline(name).estimates.switch_s(Phase.TRAIN) for name in scheduler.query.pipelines()]
    assert max(learned) == pytest.approx(0.4)
    again = Scheduler(pools(10.0), make_policy(policy))
    assert [action for event in run.driver.events for action in again.handle(event)] == list(run.driver.actions())


# --- pauses and gaps ----------------------------------------------------------------------------------------


def one_device(builders, *, memory_bytes: float, switch: SwitchEstimate | None):
    """Two pipelines on one device; a's tools have been waited for once, for a second."""
    pool = Pool(name="gpu", phase=Phase.TRAIN, num_nodes=1, device_memory_bytes=memory_bytes)
    scheduler = Scheduler(Cluster(pools={"gpu": pool}), make_policy("jigsaw"))
    driver = builders.Driver(scheduler)
    footprint = Footprint(rollout_device_bytes=2.0, train_device_bytes=2.0)
    driver.submit(*(builders.pipeline(n, rollout_s=40.0, switch=switch, footprint=footprint) for n in "ab"))
    (order,) = scheduler.query.orders()
    driver.send(idle(order, 1.0))
    driver.send(StagePaused(time_s=1.0, order=order.id, seconds=0.5, is_waiting=True))
    driver.send(ReplyArrived(time_s=2.0, pipeline=order.pipeline, device=DeviceId("gpu", 0, 0)))
    (other,) = scheduler.query.orders()
    driver.send(StagePaused(time_s=3.0, order=other.id, seconds=0.5, is_waiting=True))
    driver.send(ReplyArrived(time_s=4.0, pipeline=other.pipeline, device=DeviceId("gpu", 0, 0)))
    (order,) = scheduler.query.orders()
    return driver, order


def idle(order, at_s: float) -> ChunkFinished:
    return ChunkFinished(time_s=at_s, order=order.id, num_active=0, num_waiting=0, num_waiting_for_env=8, seconds=0.5)


@pytest.mark.parametrize(
    ("memory_bytes", "rollout_s", "is_paused"),
    [(2.0, 0.3, True), (2.0, 0.6, False), (8.0, 0.6, True)],
    ids=["quick", "dear", "both fit"],
)
def test_a_device_is_left_for_tools_only_where_they_take_longer_than_both_switches(
    builders, memory_bytes, rollout_s, is_paused
):
    switch = SwitchEstimate(rollout_s=rollout_s, train_s=rollout_s)
    driver, order = one_device(builders, memory_bytes=memory_bytes, switch=switch)
    paused = [action.order for action in driver.send(idle(order, 5.0)) if isinstance(action, Pause)]
    assert paused == ([order.id] if is_paused else [])


@pytest.mark.parametrize(("switch_s", "is_filled"), [(0.1, True), (0.9, False)])
def test_a_gap_is_filled_only_by_work_worth_its_switches(builders, switch_s, is_filled):
    """`short` goes through several steps on the training device while `long` rolls out."""
    switch = SwitchEstimate(rollout_s=switch_s, train_s=switch_s)
    pair = [
        builders.pipeline("long", rollout_s=10.0, train_s=2.0, num_steps=4, switch=switch, footprint=SIX),
        builders.pipeline("short", rollout_s=2.0, train_s=1.0, num_steps=12, switch=switch, footprint=SIX),
    ]
    cluster = pools(10.0)
    train = replace(cluster.pools["train"], num_nodes=1)
    driver = builders.Driver(
        Scheduler(Cluster(pools={**cluster.pools, "train": train}), make_policy("rlmux", varies_steps_per_cycle=False))
    )
    driver.submit(*pair)
    driver.run()
    starts = driver.starts()
    (second,) = [at for at, *work in starts if work == ["long", "update", 2]]
    num_before = sum(name == "short" and stage == "update" and at < second for at, name, stage, _ in starts)
    assert (num_before > 3) == is_filled
