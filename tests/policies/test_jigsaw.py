"""What `jigsaw` decides, event by event, through the real scheduler."""

from __future__ import annotations

import pytest

from rlmux.core.actions import MigrateShard, Pause, RunStage, SetDeviceFraction
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.estimation.estimates import StepHistory
from rlmux.core.events import (
    ChunkFinished,
    ReplyArrived,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkerLost,
)
from rlmux.core.model import Cluster, DeviceId, Footprint, Phase, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.core.work import WorkState
from rlmux.policies.jigsaw import Jigsaw, overdue_first
from rlmux.policies.rlmux import RlMux
from rlmux.policies.static_sharing import mux_all, serial

HELPS = SharingTable.of(
    [
        SharingEntry(sub_stage_a="update", sub_stage_b="tail", device_fraction=0.75, slowdown_a=1.1, slowdown_b=1.2),
        SharingEntry(sub_stage_a="update", sub_stage_b="dense", device_fraction=0.75, slowdown_a=1.2, slowdown_b=1.3),
    ]
)
"""Of a device on which these pairs gain by sharing. The numbers are made up: what is decided by them is tested."""


def one_pool(num_nodes: int = 2) -> Cluster:
    pool = Pool(name="gpu", phase=Phase.TRAIN, num_nodes=num_nodes, device_memory_bytes=10.0)
    return Cluster(pools={"gpu": pool})


def started(actions) -> list[tuple[str, str, int]]:
    return [(a.pipeline, a.stage.value, a.devices[0].node) for a in actions if isinstance(a, RunStage)]


def order_of(scheduler: Scheduler, pipeline: str, node: int, stage: Stage = Stage.GENERATE):
    return next(
        order
        for order in scheduler.query.orders()
        if order.pipeline == pipeline and order.stage is stage and order.devices[0].node == node
    )


def finish(driver, order, at_s: float):
    return driver.send(StageFinished(time_s=at_s, order=order.id, seconds=at_s - order.started_s))


def report(driver, order, at_s: float, num_active: int):
    return driver.send(
        ChunkFinished(time_s=at_s, order=order.id, num_active=num_active, num_waiting=0, seconds=at_s - order.started_s)
    )


def test_each_pipeline_rolls_out_on_all_nodes_and_trains_on_the_least_loaded(builders):
    scheduler = Scheduler(builders.cluster(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    a, b = (scheduler.query.pipeline(name) for name in "ab")
    assert a.rollout_devices == b.rollout_devices
    assert len(a.rollout_devices) == 2
    assert a.train_devices != b.train_devices


def test_no_pipeline_joins_where_one_after_another_would_break_an_slo(builders):
    scheduler = Scheduler(one_pool(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", slo_slowdown=1.5), builders.pipeline("b"))
    assert scheduler.query.status("b") == "waiting"
    assert "SLO" in scheduler.query.reason("b")
    driver.run()
    assert scheduler.query.status("b") == "finished"


@pytest.mark.parametrize("policy", [Jigsaw(), Jigsaw(looks_ahead=False), serial(), mux_all(), RlMux()])
def test_two_pipelines_end_whatever_shares_their_devices(builders, policy):
    scheduler = Scheduler(one_pool(), policy)
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", staleness=1), builders.pipeline("b", rollout_s=3.0))
    driver.run()
    assert scheduler.query.is_idle()
    assert driver.now_s < 3 * (2 + 1 + 3 + 1)


def waiting_behind_a_tail(builders, policy: Jigsaw, *, num_steps: int = 1):
    """b's long training is ready on node 0, where a's share is in its tail; a's share on node 1 has more to do."""
    scheduler = Scheduler(one_pool(), policy)
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("b", rollout_s=10.0, train_s=20.0, num_steps=1))
    driver.submit(builders.pipeline("a", rollout_s=10.0, train_s=2.0, num_steps=num_steps))
    finish(driver, order_of(scheduler, "b", 0), 4.0)
    report(driver, order_of(scheduler, "a", 0), 4.1, 64)
    finish(driver, order_of(scheduler, "b", 1), 11.0)
    return scheduler, driver


def test_a_tail_leaves_for_its_sibling_so_that_another_pipeline_can_train(builders):
    scheduler, driver = waiting_behind_a_tail(builders, Jigsaw())
    tail = order_of(scheduler, "a", 0)
    actions = report(driver, tail, 11.5, 4)
    paused = [a for a in (*driver.actions(Pause), *actions) if isinstance(a, Pause)]
    assert [a.order for a in paused[:1]] == [tail.id]
    if scheduler.query.has_order(tail.id):
        driver.send(StagePaused(time_s=11.6, order=tail.id, seconds=7.5))
    moves = driver.actions(MigrateShard)
    assert [(move.source.node, move.target.node) for move in moves] == [(0, 1)]
    driver.send(TrajectoriesMigrated(time_s=11.7, order=moves[0].order, num_trajectories=4, seconds=0.1))
    assert order_of(scheduler, "b", 0, Stage.UPDATE)
    states = [scheduler.query.shard_state("a", DeviceId("gpu", node, 0)) for node in (0, 1)]
    assert [state is WorkState.DONE for state in states] == [True, False]
    driver.run()
    assert scheduler.query.is_idle()


def test_no_tail_migrates_where_contexts_make_it_too_dear(builders):
    scheduler, driver = waiting_behind_a_tail(builders, Jigsaw(migration_part=5.0))
    report(driver, order_of(scheduler, "a", 0), 11.5, 4)
    assert not driver.actions(Pause, MigrateShard)


def test_no_tail_migrates_while_no_other_work_waits(builders):
    scheduler = Scheduler(one_pool(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", rollout_s=10.0))
    for num_active in (64, 16, 4, 1):
        report(driver, order_of(scheduler, "a", 0), 9.0 - num_active / 10, num_active)
    driver.run()
    assert not driver.actions(Pause, MigrateShard)


def test_training_joins_a_tail_at_the_fraction_of_the_table_and_leaves_it_the_whole_device(builders):
    scheduler = Scheduler(one_pool(1), Jigsaw(sharing=HELPS))
    driver = builders.Driver(scheduler)
    small = Footprint(rollout_device_bytes=4.0, train_device_bytes=4.0)
    driver.submit(builders.pipeline("a", rollout_s=4.0, train_s=4.0, footprint=small))
    driver.submit(builders.pipeline("b", rollout_s=9.0, train_s=4.0, footprint=small))
    actions = finish(driver, order_of(scheduler, "a", 0), 4.0)
    levels = {a.pipeline: a.device_fraction for a in actions if isinstance(a, RunStage)}
    assert levels == {"a": 0.75, "b": 0.25}
    ended = finish(driver, order_of(scheduler, "a", 0, Stage.UPDATE), 9.0)
    assert [a.device_fraction for a in ended if isinstance(a, SetDeviceFraction)] == [1.0] or started(ended)


def test_states_of_unknown_size_never_share_a_device(builders):
    scheduler = Scheduler(one_pool(1), Jigsaw(sharing=HELPS))
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.run()
    assert {a.device_fraction for a in driver.actions(RunStage)} == {1.0}


def test_reports_that_change_nothing_are_not_planned_anew(builders):
    scheduler = Scheduler(one_pool(1), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    order = scheduler.query.orders()[0]
    (group,) = scheduler.query.groups()
    report(driver, order, 0.5, 40)
    planned = group.planned
    report(driver, order, 0.6, 39)
    assert group.planned is planned
    report(driver, order, 0.7, 9)
    assert group.planned not in (None, planned)


def test_rlmux_keeps_the_cycle_where_pools_are_apart_and_sub_stages_where_they_are_not(builders):
    apart = Scheduler(builders.cluster(), RlMux())
    builders.Driver(apart).submit(builders.pipeline("a"))
    shared = Scheduler(one_pool(), RlMux())
    builders.Driver(shared).submit(builders.pipeline("a"), builders.pipeline("b"))
    alone = apart.query.pipeline("a")
    assert set(alone.train_devices).isdisjoint(alone.rollout_devices)
    assert shared.query.pipeline("b").train_devices[0] in shared.query.pipeline("a").rollout_devices


def test_what_a_whole_shard_adds_to_its_sibling_is_learned(builders):
    history = StepHistory(builders.pipeline("a"))
    left, right = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)
    history.open_rollout(1, (left, right), 0.0)
    for device in (left, right):
        history.add_progress(device, 16, 0.1)
        history.add_progress(device, 2, 3.0)
        history.end_shard(device, 4.0)
    assert history.estimates().whole_migration_s() == pytest.approx(3.0)
    history.open_rollout(2, (left, right), 10.0)
    history.add_migration(left, (right,), 16, 0.0, is_fresh=True)
    history.end_shard(right, 5.0)
    estimates = history.estimates()
    assert estimates.whole_migration_s() == pytest.approx(1.0)
    assert estimates.shard_s == pytest.approx(4.0)
    assert estimates.migrate_s is None


def test_a_whole_shard_adds_at_most_its_own_seconds_however_long_the_answers_were(builders):
    history = StepHistory(builders.pipeline("a"))
    left, right = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)
    history.open_rollout(1, (left, right), 0.0)
    for device in (left, right):
        history.add_progress(device, 16, 0.1)
        history.end_shard(device, 4.0)
    history.open_rollout(2, (left, right), 10.0)
    history.add_migration(left, (right,), 16, 0.0, is_fresh=True)
    history.end_shard(right, 60.0)
    assert history.estimates().whole_migration_s() == pytest.approx(4.0)


def waiting_for_tools(builders):
    """Two pipelines on one device: a's share decodes nothing, all its trajectories wait for their tools."""
    scheduler = Scheduler(one_pool(1), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", rollout_s=4.0), builders.pipeline("b", rollout_s=4.0))
    share = order_of(scheduler, "a", 0)
    report = ChunkFinished(time_s=1.0, order=share.id, num_active=0, num_waiting=0, num_waiting_for_env=8, seconds=0.5)
    return scheduler, driver, share, driver.send(report)


def test_a_shard_that_waits_for_tools_leaves_its_device_to_another_pipeline(builders):
    _, driver, share, actions = waiting_for_tools(builders)
    assert [a.order for a in actions if isinstance(a, Pause)] == [share.id]
    actions = driver.send(StagePaused(time_s=1.0, order=share.id, seconds=0.5, is_waiting=True))
    assert started(actions) == [("b", "generate", 0)]


def test_a_waiting_shard_starts_when_a_reply_has_come_not_before(builders):
    scheduler, driver, share, _ = waiting_for_tools(builders)
    driver.send(StagePaused(time_s=1.0, order=share.id, seconds=0.5, is_waiting=True))
    of_b = order_of(scheduler, "b", 0)
    idle = ChunkFinished(time_s=1.5, order=of_b.id, num_active=0, num_waiting=0, num_waiting_for_env=8, seconds=0.5)
    assert driver.send(idle) == [], "there is nobody to yield to"
    actions = driver.send(ReplyArrived(time_s=2.0, pipeline="a", device=share.devices[0]))
    assert [a.order for a in actions if isinstance(a, Pause)] == [of_b.id]
    actions = driver.send(StagePaused(time_s=2.0, order=of_b.id, seconds=0.5, is_waiting=True))
    assert started(actions) == [("a", "generate", 0)]


def test_a_reply_that_comes_when_the_shard_is_over_changes_nothing(builders):
    _, driver, share, _ = waiting_for_tools(builders)
    driver.send(StageFinished(time_s=1.5, order=share.id, seconds=1.0))
    assert driver.send(ReplyArrived(time_s=2.0, pipeline="a", device=share.devices[0])) == []


def test_a_waiting_shard_whose_worker_dies_is_ready_at_once(builders):
    scheduler, driver, share, _ = waiting_for_tools(builders)
    driver.send(StagePaused(time_s=1.0, order=share.id, seconds=0.5, is_waiting=True))
    driver.send(WorkerLost(time_s=1.5, pipeline="a", device=share.devices[0]))
    assert scheduler.query.shard_state("a", share.devices[0]) is WorkState.READY


def test_no_device_is_kept_for_a_shard_that_waits_for_tools(builders):
    """By the plan b's few seconds would come first: they hold up 30 s of its training."""
    scheduler = Scheduler(one_pool(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", rollout_s=1.0, train_s=9.0, num_steps=1))
    driver.submit(builders.pipeline("b", rollout_s=5.0, train_s=30.0, num_steps=1))
    finish(driver, order_of(scheduler, "a", 0), 1.0)
    finish(driver, order_of(scheduler, "a", 1), 1.0)
    share = order_of(scheduler, "b", 0)
    idle = ChunkFinished(time_s=4.1, order=share.id, num_active=0, num_waiting=0, num_waiting_for_env=4, seconds=3.0)
    assert [a.order for a in driver.send(idle) if isinstance(a, Pause)] == [share.id]
    actions = driver.send(StagePaused(time_s=4.1, order=share.id, seconds=3.0, is_waiting=True))
    assert started(actions) == [("a", "update", 0)]


def test_a_ready_shard_whose_device_is_held_begins_on_a_free_one(builders):
    scheduler = Scheduler(one_pool(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", rollout_s=1.0, train_s=9.0, num_steps=2))
    finish(driver, order_of(scheduler, "a", 0), 1.0)
    finish(driver, order_of(scheduler, "a", 1), 1.0)
    driver.submit(builders.pipeline("b", rollout_s=20.0, train_s=1.0, num_steps=2))
    assert started(driver.actions(RunStage)[-2:]) == [("a", "update", 0), ("b", "generate", 1)]
    finish(driver, order_of(scheduler, "b", 1), 2.0)
    (move,) = driver.actions(MigrateShard)
    assert (move.pipeline, move.source.node, move.target.node) == ("b", 0, 1)
    actions = driver.send(TrajectoriesMigrated(time_s=2.0, order=move.order, num_trajectories=8, seconds=0.0))
    assert started(actions) == [("b", "generate", 1)]
    driver.run()
    assert scheduler.query.is_idle()


def test_a_running_shard_makes_room_for_training_where_another_device_is_free(builders):
    scheduler = Scheduler(one_pool(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a", rollout_s=5.0, train_s=9.0, num_steps=1))
    driver.submit(builders.pipeline("b", rollout_s=4.0, train_s=1.0, num_steps=1))
    finish(driver, order_of(scheduler, "a", 0), 0.5)
    finish(driver, order_of(scheduler, "a", 1), 1.0)
    share = order_of(scheduler, "b", 0)
    assert not driver.actions(Pause), "nowhere to go"
    finish(driver, order_of(scheduler, "b", 1), 1.5)
    (pause,) = driver.actions(Pause)
    assert pause.order == share.id
    actions = driver.send(StagePaused(time_s=1.5, order=share.id, seconds=1.0))
    (move,) = [action for action in actions if isinstance(action, MigrateShard)]
    assert (move.source.node, move.target.node) == (0, 1)
    assert started(actions) == [("a", "update", 0)]
    driver.run()
    assert scheduler.query.is_idle()


def test_the_curve_of_a_shard_that_migrated_to_an_idle_device_is_that_of_a_whole_one(builders):
    history = StepHistory(builders.pipeline("a"))
    left, right = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)
    history.open_rollout(1, (left, right), 0.0)
    history.end_shard(right, 4.0)
    history.add_migration(left, (right,), 16, 0.0, is_fresh=True)
    history.add_progress(right, 16, 0.1)
    history.end_shard(right, 6.0)
    assert history.estimates().shard_s == pytest.approx(5.0), "the median of both"
    assert history.estimates().whole_migration_growth is None


def test_what_is_known_of_a_shard_goes_with_it_to_a_device_that_gave_its_own_away(builders):
    history = StepHistory(builders.pipeline("a"))
    left, right = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)
    history.open_rollout(1, (left, right), 0.0)
    history.add_migration(left, (right,), 16, 0.0, is_fresh=True)
    history.add_progress(right, 5, 1.0)
    history.add_pause(right, 2.0)
    history.add_migration(right, (left,), 5, 0.1)
    assert history.live_shard(left) == (5, 2.0)
    assert history.live_shard(right) == (None, 0.0)


def asked_migrations(scheduler) -> list[int]:
    """The node that each shard was asked to migrate to, pausing and paused ones."""
    work = (*scheduler.query.orders(), *scheduler.query.ready_work())
    return [one.migrate_to.node for one in work if one.migrate_to is not None]


def test_a_migration_that_comes_to_nothing_is_forgotten_with_its_order(builders):
    scheduler, driver = waiting_behind_a_tail(builders, Jigsaw(), num_steps=2)
    report(driver, tail := order_of(scheduler, "a", 0), 11.5, 4)
    assert asked_migrations(scheduler) == [1]
    finish(driver, tail, 11.6)  # it ended before it could pause
    assert asked_migrations(scheduler) == []


def test_two_schedulers_with_one_policy_decide_as_with_one_each(builders):
    shared = Jigsaw()
    runs = [waiting_behind_a_tail(builders, shared) for _ in range(2)]
    alone = waiting_behind_a_tail(builders, Jigsaw())
    for scheduler, driver in (*runs, alone):
        report(driver, order_of(scheduler, "a", 0), 11.5, 4)
    (first, second), expected = [driver.actions(Pause) for _, driver in runs], alone[1].actions(Pause)
    assert first == second == expected != []


def test_every_shard_that_has_waited_too_long_is_started_not_only_the_first(builders):
    scheduler = Scheduler(one_pool(), Jigsaw())
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    report(driver, order_of(scheduler, "a", 0), 1000.0, num_active=4)
    (view,) = scheduler.query.groups()
    assert [work.pipeline for work in view.ready] == ["b", "b"]
    assert overdue_first(view, []) == list(view.ready)
    assert overdue_first(view, list(view.ready)) == list(view.ready), "none twice"
