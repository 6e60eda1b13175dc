"""Pipelines that give their nodes back at a step boundary: by their user, for a quota, for one that is entitled."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit, Park, Queue, Refuse, Release, Remind
from rlmux.core.events import (
    HoldReleased,
    NodeLost,
    ParkRequested,
    PipelineCancelled,
    PipelineParked,
    PipelineRestarted,
    SharesSet,
)
from rlmux.core.model import Account, NodeId, PhaseSeconds, Pipeline, PipelineId, PipelineStatus, Urgency
from rlmux.core.queue.quotas import DAY_S
from rlmux.core.queue_order import AccountShare, Quota, Share, ShareSettings
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import AGED_S, FairShares

LAB = Account("", "ann")


def driver_of(builders, policy: str = "solo", **sizes):
    return builders.Driver(Scheduler(builders.cluster(**sizes), make_policy(policy), FairShares()))


@pytest.fixture
def driver(builders):
    """One node of each pool, without sharing: one pipeline at a time."""
    return driver_of(builders)


def set_shares(driver, *accounts: AccountShare, **fields) -> None:
    driver.send(SharesSet(time_s=driver.now_s, shares=ShareSettings(accounts=accounts, **fields)))


def ask_to_park(driver, name: str) -> None:
    driver.send(ParkRequested(time_s=driver.now_s, pipeline=PipelineId(name)))


def release(driver, name: str) -> None:
    driver.send(HoldReleased(time_s=driver.now_s, pipeline=PipelineId(name)))


def status(driver, name: str) -> PipelineStatus:
    return driver.scheduler.query.status(PipelineId(name))


def steps_generated(driver, name: str) -> list[int]:
    return [step for _, pipeline, stage, step in driver.starts() if (pipeline, stage) == (name, "generate")]


def names(driver, kind: type) -> list[str]:
    return [action.pipeline for action in driver.actions(kind)]


def test_a_parked_pipeline_ends_its_step_and_goes_on_with_the_next_one(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=3), builders.pipeline("b", num_steps=1))
    ask_to_park(driver, "a")
    driver.run()
    assert (status(driver, "a"), status(driver, "b")) == ("waiting", "finished")
    assert driver.scheduler.query.reason(PipelineId("a")) == "its user parked it"
    release(driver, "a")
    driver.run()
    assert names(driver, Admit) == ["a", "b", "a"]
    assert steps_generated(driver, "a") == [1, 2, 3]
    assert status(driver, "a") is PipelineStatus.FINISHED


def test_no_other_gets_its_devices_before_its_processes_have_ended(driver, builders):
    driver.park_s = 5.0
    driver.submit(builders.pipeline("a", num_steps=2), builders.pipeline("b", num_steps=1))
    ask_to_park(driver, "a")
    driver.run()
    parked_s = next(event.time_s for event in driver.events if isinstance(event, PipelineParked))
    started_s = [time_s for time_s, action in driver.log if isinstance(action, Admit) and action.pipeline == "b"]
    assert started_s == [parked_s]
    assert parked_s == 3.0 + 5.0


def test_one_that_is_let_go_on_before_its_step_ends_never_parks(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=2))
    ask_to_park(driver, "a")
    release(driver, "a")
    driver.run()
    assert not driver.actions(Park)
    assert status(driver, "a") is PipelineStatus.FINISHED


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("num_events", range(14))
def test_whenever_it_is_asked_no_step_is_left_out_or_done_twice(builders, staleness, num_events):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", num_steps=4, staleness=staleness))
    for _ in range(num_events):
        driver.step()
    if status(driver, "a") is not PipelineStatus.RUNNING:
        return
    ask_to_park(driver, "a")
    driver.run()
    if status(driver, "a") is PipelineStatus.WAITING:
        release(driver, "a")
        driver.run()
    assert status(driver, "a") is PipelineStatus.FINISHED
    assert steps_generated(driver, "a") == [1, 2, 3, 4]
    updates = [step for _, _, stage, step in driver.starts() if stage == "update"]
    assert updates == [1, 2, 3, 4]


def test_one_that_is_cancelled_while_it_parks_is_released_once(driver, builders):
    driver.park_s = 5.0
    driver.submit(builders.pipeline("a", num_steps=2))
    ask_to_park(driver, "a")
    while not driver.actions(Park):
        driver.step()
    driver.send(PipelineCancelled(time_s=driver.now_s, pipeline=PipelineId("a")))
    driver.run()
    assert names(driver, Release) == ["a"]
    assert status(driver, "a") is PipelineStatus.CANCELLED


def test_one_that_loses_its_node_or_its_trainer_while_it_parks_goes_on_from_what_is_kept(builders):
    driver = driver_of(builders, rollout=2)
    driver.park_s = 5.0
    driver.submit(builders.pipeline("a", num_steps=3))
    ask_to_park(driver, "a")
    while not driver.actions(Park):
        driver.step()
    driver.send(PipelineRestarted(time_s=driver.now_s, pipeline=PipelineId("a"), restored_step=0))
    driver.send(NodeLost(time_s=driver.now_s, node=NodeId("rollout", 0)))
    driver.run()
    release(driver, "a")
    driver.run()
    assert steps_generated(driver, "a") == [1, 1, 2, 3]


def test_a_quota_of_devices_keeps_what_a_user_asks_for_at_once_below_it(builders):
    driver = driver_of(builders, rollout=4, train=4)
    set_shares(driver, AccountShare(account=LAB, quota=Quota(max_devices=4)))
    driver.submit(*(builders.pipeline(f"a{number}", num_steps=1, user="ann") for number in range(4)))
    driver.submit(builders.pipeline("b", num_steps=1, user="bob"))
    assert names(driver, Admit) == ["a0", "a1", "b"]
    reason = "over quota: it requests 2 devices of 4 that ann may have, and 4 are held"
    assert driver.scheduler.query.reason(PipelineId("a2")) == reason
    driver.run()
    assert len(names(driver, Release)) == 5


def test_what_asks_for_more_than_its_quota_is_refused_with_the_numbers(driver, builders):
    set_shares(driver, AccountShare(account=Account("lab", ""), quota=Quota(max_devices=1)))
    driver.submit(builders.pipeline("a", user="ann", project="lab"))
    (refused,) = driver.actions(Refuse)
    assert refused.reason == "over quota: it requests 2 devices of 1 that lab may have"


def test_one_over_its_quota_holds_up_no_other(builders):
    driver = driver_of(builders, rollout=2, train=2)
    set_shares(driver, AccountShare(account=LAB, quota=Quota(max_running=1)))
    driver.submit(*(builders.pipeline(f"a{number}", num_steps=1, user="ann") for number in range(3)))
    driver.submit(builders.pipeline("b", num_steps=1, user="bob"))
    assert names(driver, Admit) == ["a0", "b"]
    assert names(driver, Queue) == ["a1", "a2"]


def test_spent_hours_park_what_runs_at_its_next_step_and_the_next_day_starts_it_again(driver, builders):
    """Steps of 3 s on two devices: an hour of one device is spent in the step that ends at 1800 s."""
    set_shares(driver, AccountShare(account=LAB, quota=Quota(device_hours_a_day=1.0)))
    driver.submit(builders.pipeline("a", num_steps=1000, user="ann"))
    while not driver.actions(Remind):
        driver.step()
    assert driver.now_s == 1800.0
    assert driver.scheduler.query.reason(PipelineId("a")) == (
        "over quota: the 1 device-hours of ann for this day are used; more come at 86400 s"
    )
    driver.run()
    admitted_s = [time_s for time_s, action in driver.log if isinstance(action, Admit)]
    assert admitted_s == [0.0, DAY_S]
    assert steps_generated(driver, "a") == list(range(1, 1001))


def test_a_charge_over_midnight_counts_on_each_day_what_falls_there(driver, builders):
    set_shares(driver, AccountShare(account=LAB, quota=Quota(device_hours_a_day=1e6)))
    driver.now_s = DAY_S - 1.0
    driver.submit(builders.pipeline("a", num_steps=1, user="ann"))
    driver.run()
    assert driver.scheduler.state.charged_today == {Account("ann", "ann"): {"rollout": 2.0, "train": 2.0}}


def heavy_use(driver, builders, num_steps: int = 12) -> None:
    """A pipeline of ann that has run for some steps, and bob's that waits."""
    driver.submit(builders.pipeline("a", num_steps=100, user="ann"))
    while len(steps_generated(driver, "a")) < num_steps:
        driver.step()
    driver.submit(builders.pipeline("b", num_steps=2, user="bob"))


def test_one_over_its_share_makes_room_for_another_and_goes_on_behind_it(driver, builders):
    set_shares(driver)
    heavy_use(driver, builders)
    driver.run()
    assert names(driver, Park) == ["a"]
    assert names(driver, Admit) == ["a", "b", "a"]
    assert steps_generated(driver, "a") == list(range(1, 101))


@pytest.mark.parametrize(
    "fields",
    [{"min_steps": 50}, {"parks": False}],
    ids=["before it has run for long enough", "where the file says that none parks"],
)
def test_none_is_parked(driver, builders, fields):
    set_shares(driver, **fields)
    heavy_use(driver, builders)
    driver.step()
    assert not any(run.parking.is_parking for run in driver.scheduler.state.runs.values())


def test_what_was_promised_an_slo_is_never_parked_for_another(driver, builders):
    set_shares(driver)
    driver.submit(builders.pipeline("a", num_steps=30, user="ann", slo_slowdown=2.0))
    while len(steps_generated(driver, "a")) < 12:
        driver.step()
    driver.submit(builders.pipeline("b", num_steps=2, user="bob"))
    driver.run()
    assert not driver.actions(Park)


def test_a_larger_weight_is_over_its_share_later(builders):
    driver = driver_of(builders)
    set_shares(driver, AccountShare(account=LAB, share=Share(weight=100.0)))
    heavy_use(driver, builders)
    driver.run()
    assert not driver.actions(Park)


def test_none_parks_for_one_that_started_without_it_and_was_parked_since(builders):
    """a is to make room for b, which then starts where c ended, and makes room for d before a comes to its boundary."""
    driver = driver_of(builders, rollout=2, train=2)
    set_shares(driver, min_steps=1)
    long = builders.pipeline("a", num_steps=4, rollout_s=50.0, user="ann")
    short = builders.pipeline("c", num_steps=2, rollout_s=30.0, user="ann", slo_slowdown=9.0)
    later = [
        (52.0, builders.pipeline("b", num_steps=30, user="bob")),
        (75.0, builders.pipeline("d", num_steps=60, rollout_s=0.5, train_s=0.5, user="eve")),
    ]
    driver.submit(long, short)
    for at_s, pipeline in later:
        while driver.next_end_s() <= at_s:
            driver.step()
        driver.now_s = at_s
        driver.submit(pipeline)
    driver.run()
    parked = names(driver, Park)
    assert (parked.count("a"), parked.count("b")) == (0, 1), parked


def test_as_few_park_as_make_room(builders):
    """Four nodes are held by four; the one that waits needs two of each pool."""
    driver = driver_of(builders, rollout=4, train=4)
    set_shares(driver)
    driver.submit(*(builders.pipeline(f"a{number}", num_steps=40, user="ann") for number in range(4)))
    while len(steps_generated(driver, "a0")) < 15:
        driver.step()
    driver.submit(builders.pipeline("b", num_rollout_nodes=2, num_train_nodes=2, num_steps=2, user="bob"))
    driver.run()
    assert sorted(names(driver, Park)) == ["a2", "a3"]


POLICIES = ["solo", "rollmux", "rlmux"]
HOUR_S = 3600.0


@st.composite
def floods(draw):
    """(submission in seconds, pipeline): bob's urgent ones keep coming, faster than they end, for ten days, and ann's
    few have every disadvantage: in the background, of a project that has used much and has little weight."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        pipeline = flood_pipeline(draw, f"a{number}", Account("", "ann"), Urgency.BACKGROUND)
        made.append((draw(st.integers(0, 40)) * HOUR_S, pipeline))
    at_h = 0.0
    while at_h < 240.0:
        pipeline = flood_pipeline(draw, f"b{len(made)}", Account("", "bob"), Urgency.URGENT)
        made.append((at_h * HOUR_S, pipeline))
        at_h += draw(st.integers(1, 5))
    return sorted(made, key=lambda one: one[0])


def flood_pipeline(draw, name: str, account: Account, urgency: Urgency) -> Pipeline:
    return Pipeline(
        id=PipelineId(name),
        num_steps=draw(st.integers(1, 6)),
        num_rollout_nodes=draw(st.sampled_from([1, 1, 2])),
        estimate=PhaseSeconds(rollout_s=HOUR_S * draw(st.integers(1, 2)), train_s=HOUR_S * draw(st.integers(1, 2))),
        slo_slowdown=draw(st.sampled_from([1.5, math.inf])),
        user=account.user,
        urgency=urgency,
    )


@pytest.mark.parametrize(
    "policy", ["rollmux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("solo", "rlmux"))]
)
@given(flood=floods())
@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_one_that_waits_for_seven_days_starts_after_what_runs_and_what_came_before_it(builders, policy, flood):
    """However many urgent ones come: after what runs then and what was submitted before, one at a time."""
    driver = driver_of(builders, policy, rollout=2, train=2)
    ann = AccountShare(account=LAB, share=Share(weight=0.1))
    driver.send(SharesSet(time_s=0.0, shares=ShareSettings(min_steps=2, half_life_s=1e6, accounts=(ann,))))
    submitted_s: dict[str, float] = {}
    latest_s: dict[str, float] = {}
    for at_s, pipeline in flood:
        run_until(driver, at_s, submitted_s, latest_s)
        driver.now_s = at_s
        driver.submit(pipeline)
        submitted_s[pipeline.id] = at_s
    run_until(driver, math.inf, submitted_s, latest_s)
    admitted_s: dict[str, float] = {}
    for time_s, action in driver.log:
        if isinstance(action, Admit):
            admitted_s.setdefault(action.pipeline, time_s)
    assert admitted_s.keys() == submitted_s.keys()
    for name, bound_s in latest_s.items():
        assert admitted_s[name] <= bound_s, name


def run_until(driver, until_s: float, submitted_s: dict[str, float], latest_s: dict[str, float]) -> None:
    """Let time pass; notes of each pipeline, once it has waited for seven days, when it starts at the latest."""
    while driver.next_end_s() <= until_s and driver.step():
        runs = driver.scheduler.state.runs
        for name, at_s in submitted_s.items():
            if (
                name not in latest_s
                and status(driver, name) is PipelineStatus.WAITING
                and driver.now_s - at_s >= AGED_S
            ):
                before = [one for one in submitted_s if one != name and submitted_s[one] <= at_s]
                running = [one for one in submitted_s if status(driver, one) is PipelineStatus.RUNNING]
                left_s = sum(seconds_left(runs[PipelineId(one)]) for one in dict.fromkeys([*before, *running]))
                latest_s[name] = driver.now_s + left_s


def seconds_left(run) -> float:
    pipeline = run.pipeline
    return (pipeline.num_steps - run.step.published_version) * (pipeline.estimate.rollout_s + pipeline.estimate.train_s)
