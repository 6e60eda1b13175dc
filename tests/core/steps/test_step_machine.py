"""The tables of legal moves: complete, drawn in the docs, and the only way through a step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlmux.core import invariants
from rlmux.core.actions import RunStage
from rlmux.core.decision.plan import GroupPlan, MigrateWork
from rlmux.core.decision.policy import Idling, Policy
from rlmux.core.decision.views import GroupView
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import (
    PipelineCancelled,
    PipelineFailed,
    PipelineSubmitted,
    ReplyArrived,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkerLost,
)
from rlmux.core.model import Cluster, DeviceId, OrderId, Phase, PipelineId, PipelineStatus, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.core.steps.step_machine import PIPELINE_MOVES, SHARD_MOVES, TRAINING_MOVES, WorkInput, diagrams
from rlmux.core.work import WorkState
from rlmux.policies import make_policy
from rlmux.policies.jigsaw import Jigsaw
from rlmux.policies.lookahead.dispatching import start_oldest_first

DESIGN = Path(__file__).parents[3] / "docs" / "how-it-works" / "design.md"
A, ORDER, DEVICE = PipelineId("a"), OrderId(1), DeviceId("gpu", 0, 0)


@pytest.fixture
def driver(builders):
    """Pipeline a rolls out by order 1, on the only device."""
    pool = Pool(name="gpu", phase=Phase.TRAIN, num_nodes=1)
    driver = builders.Driver(Scheduler(Cluster(pools={"gpu": pool}), make_policy("jigsaw")))
    driver.submit(builders.pipeline("a", num_steps=1, stages=(Stage.GENERATE, Stage.REWARD, Stage.UPDATE)))
    return driver


def shard_state(driver) -> WorkState | None:
    return driver.scheduler.query.shard_state(A, DEVICE)


def test_the_design_page_shows_the_tables_as_they_are():
    _, _, after = DESIGN.read_text(encoding="utf-8").partition("step_machine.diagrams -->\n")
    shown, _, _ = after.partition("<!-- /moves -->")
    assert shown.strip() == diagrams()


@pytest.mark.parametrize("table", [SHARD_MOVES, TRAINING_MOVES, PIPELINE_MOVES], ids=["shard", "training", "pipeline"])
def test_every_state_that_a_table_leads_to_has_a_row_of_its_own(table):
    assert {target for targets in table.values() for target in targets.values()} <= set(table)


def test_a_shard_has_a_row_for_every_state_and_may_lose_its_worker_in_each_of_them():
    assert set(SHARD_MOVES) == set(WorkState)
    assert all(WorkInput.WORKER_LOST in targets for targets in SHARD_MOVES.values())


def test_a_shard_that_has_an_order_can_leave_that_state_by_its_end():
    for state in (WorkState.RUNNING, WorkState.PAUSING, WorkState.MIGRATING):
        assert WorkState.DONE in SHARD_MOVES[state].values()


def test_a_shard_runs_is_paused_waits_for_its_environment_and_runs_again(driver):
    assert shard_state(driver) is WorkState.RUNNING
    driver.send(StagePaused(time_s=0.5, order=ORDER, seconds=0.5, is_waiting=True))
    assert shard_state(driver) is WorkState.WAITING_FOR_ENV
    driver.send(ReplyArrived(time_s=0.7, pipeline=A, device=DEVICE))
    assert shard_state(driver) is WorkState.RUNNING
    driver.send(StageFinished(time_s=1.0, order=OrderId(2), seconds=0.3))
    assert shard_state(driver) is WorkState.DONE


def test_a_reply_to_a_shard_that_runs_changes_nothing(driver):
    assert driver.send(ReplyArrived(time_s=0.2, pipeline=A, device=DEVICE)) == []
    assert shard_state(driver) is WorkState.RUNNING


def test_a_worker_that_is_lost_after_its_shard_is_done_changes_nothing(driver):
    driver.send(StageFinished(time_s=1.0, order=ORDER, seconds=1.0))
    assert driver.send(WorkerLost(time_s=1.1, pipeline=A, device=DEVICE)) == []
    assert shard_state(driver) is WorkState.DONE


def test_rewards_are_never_paused(driver):
    driver.send(StageFinished(time_s=1.0, order=ORDER, seconds=1.0))
    reward = driver.actions(RunStage)[-1]
    assert reward.stage is Stage.REWARD
    with pytest.raises(IllegalTransitionError, match="never paused"):
        driver.scheduler.handle(StagePaused(time_s=1.2, order=reward.order, seconds=0.2))


def test_a_move_that_the_table_lacks_says_what_it_accepts_and_shows_the_recent_events(driver):
    driver.step()
    driver.step()
    update = driver.actions(RunStage)[-1]
    assert update.stage is Stage.UPDATE
    paused = StagePaused(time_s=driver.now_s, order=update.order, seconds=0.1, is_waiting=True)
    accepted = "finished, pause ordered, paused"
    with pytest.raises(IllegalTransitionError, match=rf"does not fit; accepted: {accepted}(.|\n)*PipelineSubmitted"):
        driver.scheduler.handle(paused)


def test_trajectories_arrive_only_by_a_migration(driver):
    arrived = TrajectoriesMigrated(time_s=1.0, order=ORDER, num_trajectories=1, seconds=0.1)
    with pytest.raises(IllegalTransitionError, match="order 1 is no migration"):
        driver.scheduler.handle(arrived)


class Migrates(Policy):
    """Migrates shards that have not begun as it is told, once, and starts nothing meanwhile."""

    name = "migrates"
    place = Jigsaw().place
    rebalance = Jigsaw().rebalance

    def __init__(self, *pairs: tuple[int, ...]) -> None:
        self.pairs = pairs
        """Nodes of source and targets, in the order of the migrations."""
        self.allowed: list[bool] = []
        """What the view said of each, just before it."""

    def idling(self, view: GroupView) -> Idling:
        return Idling(patience_s=math.inf)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        pairs, self.pairs = self.pairs, ()
        for pair in pairs:
            source, target, *others = (DeviceId("gpu", node, 0) for node in pair)
            self.allowed.append(plan.can_migrate(A, source, target))
            plan.choose(MigrateWork(pipeline=A, source=source, target=target, others=tuple(others)))
        return plan if pairs else plan.choose(*start_oldest_first(plan))


def migrate(builders, *pairs: tuple[int, ...]) -> tuple[Migrates, Scheduler]:
    """The policy and the scheduler of a rollout on three devices, after these migrations at once."""
    pool = Pool(name="gpu", phase=Phase.TRAIN, num_nodes=3)
    policy = Migrates(*pairs)
    scheduler = Scheduler(Cluster(pools={"gpu": pool}), policy, raises_policy_faults=True)
    scheduler.handle(PipelineSubmitted(time_s=0.0, pipeline=builders.pipeline("a", num_steps=1)))
    return policy, scheduler


@pytest.mark.parametrize("pairs", [((0, 1), (1, 2)), ((1, 2), (0, 1))], ids=["source", "target"])
def test_no_shard_migrates_while_trajectories_are_on_their_way_to_it(builders, pairs):
    """They would arrive on a device whose shard counts as done: nothing would decode them."""
    with pytest.raises(IllegalTransitionError, match="on their way"):
        migrate(builders, *pairs)


def test_two_shards_migrate_to_a_third_at_once(builders):
    policy, scheduler = migrate(builders, (0, 2), (1, 2))
    assert policy.allowed == [True, True]
    invariants.check(scheduler)
    states = [scheduler.query.shard_state(A, DeviceId("gpu", node, 0)) for node in range(3)]
    assert states == [WorkState.MIGRATING, WorkState.MIGRATING, WorkState.READY]


def test_a_shard_is_spread_over_two_siblings_in_one_migration(builders):
    _, scheduler = migrate(builders, (0, 1, 2))
    invariants.check(scheduler)
    (order,) = scheduler.state.orders.values()
    assert order.devices == (DeviceId("gpu", 1, 0), DeviceId("gpu", 2, 0))
    scheduler.handle(TrajectoriesMigrated(time_s=1.0, order=order.id, num_trajectories=4, seconds=0.1))
    invariants.check(scheduler)
    states = [scheduler.query.shard_state(A, DeviceId("gpu", node, 0)) for node in range(3)]
    assert states == [WorkState.DONE, WorkState.RUNNING, WorkState.RUNNING]


@pytest.mark.parametrize("pair", [(0, 1, 1), (0, 1, 0), (0, 1, 7)], ids=["twice", "to itself", "of no shard"])
def test_a_shard_is_spread_over_other_shards_of_its_rollout_alone_each_once(builders, pair):
    with pytest.raises(IllegalTransitionError, match="migrates"):
        migrate(builders, pair)


def test_no_spread_shard_goes_where_one_of_its_targets_leaves(builders):
    with pytest.raises(IllegalTransitionError, match="on their way"):
        migrate(builders, (2, 1), (0, 1, 2))


def test_what_comes_too_late_changes_nothing_of_a_pipeline_that_is_over(driver):
    driver.run()
    now_s = driver.now_s
    assert driver.send(PipelineCancelled(time_s=now_s, pipeline=A)) == []
    assert driver.send(PipelineFailed(time_s=now_s, pipeline=A, reason="late")) == []
    assert driver.scheduler.query.status(A) is PipelineStatus.FINISHED
    assert driver.scheduler.query.reason(A) == ""


def test_the_invariants_notice_a_state_that_was_changed_past_the_tables(driver):
    driver.scheduler.state.runs[A].step.shards[DEVICE].state = WorkState.DONE
    with pytest.raises(AssertionError, match="has order 1"):
        invariants.check(driver.scheduler)
