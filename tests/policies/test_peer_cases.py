"""Cases that other schedulers' tests and defects taught, asked of ours from outside.

docs/how-it-works/papers.md lists them.

Ids (RB-01 ...) are those of that page. Inputs are pipelines, devices and progress; outputs are orders.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rlmux.core import invariants
from rlmux.core.actions import Admit, MigrateShard, Pause, Refuse, Release, RunStage
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import ChunkFinished, PipelineCancelled, PipelineFailed, StageFinished
from rlmux.core.model import Cluster, Phase, PipelineId, PipelineStatus, Pool, Stage
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

SHARING = ("fifo", "gap-ratio", "rollmux", "jigsaw", "rlmux")
"""Policies under which several pipelines use one set of devices."""


def driver_of(builders, policy="rlmux", **pools):
    return builders.Driver(Scheduler(builders.cluster(**pools), make_policy(policy)))


def running(driver, phase=None):
    return [order for order in driver.scheduler.query.orders() if phase in (None, order.phase)]


def assert_stopped_only_to_move(driver):
    """Only a tail that goes on elsewhere, tokens and all, is ever stopped."""
    stopped, moved = len(driver.actions(Pause)), len(driver.actions(MigrateShard))
    assert stopped <= moved


def test_rb01_one_rollout_takes_every_idle_device(builders):
    driver = driver_of(builders, "gap-ratio", rollout=2)
    driver.submit(builders.pipeline("a"))
    assert len(running(driver, Phase.ROLLOUT)) == 2
    assert not driver.actions(Pause)


def test_rb02_an_estimate_is_enough_to_begin(builders):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", rollout_s=4.0))
    assert running(driver, Phase.ROLLOUT)


def test_rb04_progress_of_the_real_run_replaces_a_wrong_estimate(builders):
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rlmux")), seconds=lambda action: 5.0)
    driver.submit(builders.pipeline("a", rollout_s=1000.0, train_s=1.0, num_steps=4))
    for _ in range(4):
        driver.step()
    assert driver.scheduler.query.pipeline(PipelineId("a")).estimates.shard_s == 5.0


@pytest.mark.parametrize("policy", SHARING)
def test_rb05_rb06_a_newcomer_is_served_without_any_order_being_stopped(builders, policy):
    driver = driver_of(builders, policy, rollout=4)
    driver.submit(builders.pipeline("a", num_steps=3), builders.pipeline("b", num_steps=3))
    driver.run()
    assert_stopped_only_to_move(driver)
    assert {driver.scheduler.query.status(PipelineId(name)) for name in "ab"} == {PipelineStatus.FINISHED}


def test_rb05_the_one_with_most_left_gets_the_next_devices(builders):
    """Four devices, one of which `a` still holds: all that come free go to `b` before `a`'s next step."""
    driver = driver_of(builders, "gap-ratio", rollout=4)
    driver.submit(builders.pipeline("a", num_steps=3), builders.pipeline("b", num_steps=3))
    for _ in range(3):
        driver.step()
    holders = Counter(order.pipeline for order in running(driver, Phase.ROLLOUT))
    assert holders == {"a": 1, "b": 3}


def test_rb07_a_cluster_without_the_pool_a_pipeline_needs_is_refused_by_name(builders):
    only_training = Cluster(pools={"big": Pool(name="big", phase=Phase.TRAIN, num_nodes=1)})
    driver = builders.Driver(Scheduler(only_training, make_policy("rollmux")))
    driver.submit(builders.pipeline("a"))
    (refusal,) = driver.actions(Refuse)
    assert "no pool for rollout" in refusal.reason


def test_rb08_training_takes_exactly_the_devices_it_asks_for(builders):
    driver = driver_of(builders, "solo", rollout=1, train=4)
    driver.submit(builders.pipeline("a", num_train_nodes=2))
    driver.step()
    (order,) = running(driver, Phase.TRAIN)
    assert len(order.devices) == 2
    assert driver.scheduler.query.placement.num_free_nodes(Phase.TRAIN) == 2


def test_rb09_a_rollout_starts_on_what_another_ones_training_leaves(builders):
    driver = driver_of(builders, "rollmux")
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.step()
    assert {(order.pipeline, order.phase) for order in running(driver)} == {("a", Phase.TRAIN), ("b", Phase.ROLLOUT)}


def test_rb10_a_choice_that_does_not_hold_is_refused_before_anything_changes(builders):
    ledger = PlacementLedger(builders.cluster(rollout=2, train=1))
    first, second = builders.pipeline("a"), builders.pipeline("b")
    choice = make_policy("rollmux").place(first, PlacementView(ledger))
    ledger.admit(first, choice)
    before = (list(ledger.groups()), ledger.num_free_nodes(Phase.TRAIN))
    with pytest.raises(IllegalTransitionError, match="takes 1 new train nodes; 0 are free"):
        ledger.admit(second, choice)
    assert (list(ledger.groups()), ledger.num_free_nodes(Phase.TRAIN)) == before
    assert second.id not in ledger
    ledger.check()


@pytest.mark.parametrize("policy", SHARING)
@pytest.mark.parametrize("how", ["cancelled", "failed"])
@pytest.mark.parametrize("num_events", range(0, 9, 2))
def test_rb11_one_that_goes_at_any_moment_leaks_nothing_and_the_other_ends(builders, policy, how, num_events):
    driver = driver_of(builders, policy, rollout=2)
    driver.submit(builders.pipeline("a"), builders.pipeline("b", num_steps=6))
    for _ in range(num_events):
        driver.step()
    if driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.RUNNING:
        gone = {
            "cancelled": PipelineCancelled(time_s=driver.now_s, pipeline=PipelineId("a")),
            "failed": PipelineFailed(time_s=driver.now_s, pipeline=PipelineId("a"), reason="NaN"),
        }
        driver.send(gone[how])
    driver.run()
    assert driver.scheduler.query.status(PipelineId("b")) is PipelineStatus.FINISHED
    assert len(driver.actions(Release)) == 2
    query = driver.scheduler.query
    assert all(not query.held_fraction(device) for device in query.devices())
    assert driver.scheduler.query.placement.num_pipelines == 0


@pytest.mark.parametrize("num_active", [0, 3, 100])
def test_rb12_what_is_left_of_a_shard_is_never_negative(builders, num_active):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", rollout_s=2.0))
    (order,) = running(driver, Phase.ROLLOUT)
    driver.send(ChunkFinished(time_s=1.9, order=order.id, num_active=num_active, num_waiting=0, seconds=1.9))
    left = driver.scheduler.query.pipeline(PipelineId("a")).estimates.remaining_time(num_active, 50.0)
    assert 0.0 <= left.low_s <= left.median_s <= left.high_s


def test_rb13_an_end_of_something_that_does_not_run_is_refused_with_the_story(builders):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a"))
    with pytest.raises(IllegalTransitionError, match="recent events"):
        driver.scheduler.handle(StageFinished(time_s=1.0, order=999, seconds=1.0))


def test_rb14_the_same_report_again_orders_nothing_new(builders):
    driver = driver_of(builders, "jigsaw", rollout=2)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    order = running(driver, Phase.ROLLOUT)[0]
    for number in range(3):
        report = ChunkFinished(time_s=0.1, order=order.id, num_active=8, num_waiting=0, seconds=0.1)
        assert not [action for action in driver.send(report) if isinstance(action, RunStage | Pause)] or number == 0


def test_rb15_progress_is_kept_by_device_and_added_up(builders):
    driver = driver_of(builders, "gap-ratio", rollout=2)
    driver.submit(builders.pipeline("a"))
    first, second = running(driver, Phase.ROLLOUT)
    for order, num_active in ((first, 20), (second, 80)):
        driver.send(ChunkFinished(time_s=0.5, order=order.id, num_active=num_active, num_waiting=0, seconds=0.5))
    member = driver.scheduler.query.pipeline(PipelineId("a"))
    assert [member.live_shard(order.devices[0])[0] for order in (first, second)] == [20, 80]


@pytest.mark.parametrize("policy", SHARING)
def test_rb16_rb24_one_that_has_finished_weighs_nothing(builders, policy):
    """The makespan of two is that of one where the other ended before."""
    alone = driver_of(builders, policy)
    alone.submit(builders.pipeline("b", num_steps=4))
    after = driver_of(builders, policy)
    after.submit(builders.pipeline("a", num_steps=1))
    after.run()
    begun_s = after.now_s
    after.submit(builders.pipeline("b", num_steps=4))
    assert after.run() - begun_s == alone.run()


# ------------------------------------------------------------------ five defects that were seen elsewhere


@pytest.mark.parametrize("policy", SHARING)
@pytest.mark.parametrize(("num_pipelines", "num_devices"), [(3, 4), (6, 8), (5, 6), (8, 4)])
def test_rb19_rb22_no_device_idles_beside_ready_work_and_every_pipeline_gets_a_device(
    builders, policy, num_pipelines, num_devices
):
    """D1: rounding left devices idle for ever. D4: with more pipelines than devices some never ran."""
    driver = driver_of(builders, policy, rollout=num_devices, train=2)
    names = [f"p{number}" for number in range(num_pipelines)]
    driver.submit(*(builders.pipeline(name, num_steps=2, train_s=1.0) for name in names))
    placed = [action.pipeline for action in driver.actions(Admit)]
    for _ in range(400):
        if not driver.step():  # which checks what the policy promises of idle devices (core/steps/idle_check.py)
            break
    assert placed
    assert all(driver.scheduler.query.status(PipelineId(name)) is PipelineStatus.FINISHED for name in names)


@pytest.mark.parametrize("policy", SHARING)
def test_rb20_nothing_is_stopped_for_a_request_that_cannot_be_met_by_it(builders, policy):
    """D2: a request for two devices, one of them training, stopped and restarted the rollout on the other for ever."""
    driver = driver_of(builders, policy, rollout=2, train=2)
    driver.submit(
        builders.pipeline("a", num_steps=6),
        builders.pipeline("b", num_steps=6, num_train_nodes=2),
        builders.pipeline("c", num_steps=6, train_s=5.0),
    )
    driver.run()
    assert_stopped_only_to_move(driver)
    starts = Counter((name, stage, step) for _, name, stage, step in driver.starts())
    assert all(count == 1 for (_, stage, _), count in starts.items() if stage == Stage.UPDATE)


@pytest.mark.parametrize("policy", ["jigsaw", "rlmux"])
def test_rb21_training_on_all_devices_is_not_starved_by_short_work_on_each(builders, policy):
    """D3: one that needs two devices at once was never served while two others alternated on them."""
    pool = Pool(name="all", phase=Phase.TRAIN, num_nodes=2)
    driver = builders.Driver(Scheduler(Cluster(pools={"all": pool}), make_policy(policy)))
    driver.submit(
        builders.pipeline("wide", num_steps=3, num_train_nodes=2, rollout_s=1.0, train_s=2.0),
        builders.pipeline("x", num_steps=40, rollout_s=1.0, train_s=1.5),
        builders.pipeline("y", num_steps=40, rollout_s=1.5, train_s=1.0),
    )
    driver.run()
    ends = {name: max(t for t, who, _, _ in driver.starts() if who == name) for name in ("wide", "x", "y")}
    assert ends["wide"] < min(ends["x"], ends["y"])


@pytest.mark.parametrize("policy", SHARING)
def test_rb23_a_tail_is_never_stopped_to_begin_again_from_the_prompt(builders, policy):
    """D5: the last 2 of 256 answers were thrown away when another pipeline came."""
    driver = driver_of(builders, policy, rollout=4, train=1)
    driver.submit(builders.pipeline("a", rollout_s=50.0, num_steps=2))
    for order in running(driver, Phase.ROLLOUT):
        driver.send(ChunkFinished(time_s=1.0, order=order.id, num_active=2, num_waiting=0, seconds=1.0))
    driver.submit(builders.pipeline("b", num_steps=2))
    driver.run()
    generated = [(name, step) for _, name, stage, step in driver.starts() if stage == Stage.GENERATE and name == "a"]
    shares = Counter(generated)
    assert_stopped_only_to_move(driver)
    if not driver.actions(MigrateShard):
        assert len(set(shares.values())) == 1, "each share of each step was begun once"


# ------------------------------------------------------------------ logs, crashes, long lives


@pytest.mark.parametrize("policy", SHARING)
def test_rb25_rb26_the_events_alone_lead_to_the_same_state_from_any_moment(builders, policy):
    driver = driver_of(builders, policy, rollout=2)
    driver.submit(builders.pipeline("a"), builders.pipeline("b", num_steps=5))
    driver.run()
    live = Scheduler(driver.scheduler.cluster, make_policy(policy))
    for number, event in enumerate(driver.events):
        answered = live.handle(event)
        if number % 3 == 0:  # a crash here: a new scheduler is told what is in the log
            again = Scheduler(driver.scheduler.cluster, make_policy(policy))
            replayed = [again.handle(one) for one in driver.events[: number + 1]]
            assert repr(replayed[-1]) == repr(answered)
            invariants.check(again)
            live = again


@pytest.mark.parametrize("num_events", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("fifo", "gap-ratio", "jigsaw") else name
        for name in SHARING
    ],
)
def test_rb27_all_is_well_after_every_one_of_thousands_of_events(builders, policy, num_events):
    generator = random.Random(policy)
    driver = driver_of(builders, policy, rollout=3, train=2)
    number = 0
    while len(driver.events) < num_events:
        query = driver.scheduler.query
        alive = [name for name in query.pipelines() if query.status(name) is PipelineStatus.RUNNING]
        draw = generator.random()
        if len(alive) < 5 and draw < 0.1:
            seconds = {key: generator.uniform(0.5, 9.0) for key in ("rollout_s", "train_s")}
            slo = generator.choice([1.2, 2.0, float("inf")])
            driver.submit(builders.pipeline(f"p{number}", num_steps=30, slo_slowdown=slo, **seconds))
            number += 1
        elif alive and draw < 0.11:
            gone = generator.choice(alive)
            driver.send(PipelineCancelled(time_s=driver.now_s, pipeline=gone))
        elif not driver.step():
            driver.now_s += 1.0
    assert number > 20
