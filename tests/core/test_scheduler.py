"""The scheduler under policy `rollmux`: exact decisions in virtual time."""

from __future__ import annotations

import pytest

from rlmux.core.actions import Admit, Release, RunStage, Switch
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import (
    ChunkFinished,
    PipelineCancelled,
    PipelineFailed,
    PipelineRestarted,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    WorkerLost,
)
from rlmux.core.model import OrderId, Phase, PipelineId, PipelineStatus, Resident, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.core.settle import placer
from rlmux.policies import make_policy
from rlmux.policies.baselines import Colocated
from rlmux.policies.rollmux import RollMux

REAL_STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)


@pytest.fixture
def driver(builders):
    return builders.Driver(Scheduler(builders.cluster(), RollMux()))


def test_two_balanced_pipelines_fill_each_others_bubbles(driver, builders):
    driver.submit(builders.pipeline("a", rollout_s=1, train_s=1), builders.pipeline("b", rollout_s=1, train_s=1))
    assert driver.run() == 7.0  # 3 steps of 2 s each, the second one second behind the first
    assert driver.starts()[:5] == [
        (0.0, "a", "generate", 1),
        (1.0, "b", "generate", 1),
        (1.0, "a", "update", 1),
        (2.0, "b", "update", 1),
        (2.0, "a", "generate", 2),
    ]


def test_a_step_runs_its_stages_in_order_and_only_some_hold_a_device(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=1, stages=REAL_STAGES, has_sft_warmup=True))
    driver.run()
    runs = driver.actions(RunStage)
    assert [run.stage.value for run in runs] == [
        "sft_warmup", "publish", "generate", "reward", "old_logprobs", "update", "publish",
    ]  # fmt: skip
    assert [len(run.devices) for run in runs] == [1, 0, 1, 0, 1, 1, 0]
    assert [run.weight_version for run in runs] == [0, 0, 0, 1, 0, 0, 1]
    assert isinstance(driver.log[-1][1], Release)


def test_no_other_pipeline_slips_in_between_two_training_stages(driver, builders):
    stages = (Stage.GENERATE, Stage.OLD_LOGPROBS, Stage.UPDATE)
    driver.submit(*(builders.pipeline(name, stages=stages) for name in "abc"))
    driver.run()
    training = [(name, step) for _, name, stage, step in driver.starts() if stage != "generate"]
    assert training[0::2] == training[1::2]


def test_in_a_strict_cycle_a_short_pipeline_never_laps_a_long_one(driver, builders):
    driver.submit(
        builders.pipeline("long", num_steps=5, rollout_s=9, train_s=1),
        builders.pipeline("short", num_steps=5, rollout_s=1, train_s=1),
    )
    driver.run()
    rollouts = [name for _, name, stage, _ in driver.starts() if stage == "generate"]
    assert rollouts == ["long", "short"] * 5


def test_a_newcomer_takes_one_slot_per_cycle_however_late_it_comes(driver, builders):
    driver.submit(builders.pipeline("old", num_steps=20, rollout_s=1, train_s=1))
    for _ in range(16):
        driver.step()
    driver.submit(builders.pipeline("new", num_steps=5, rollout_s=1, train_s=1))
    seen = len(driver.starts())
    driver.run()
    rollouts = [name for _, name, stage, _ in driver.starts()[seen:] if stage == "generate"]
    assert rollouts[:6] in (["old", "new"] * 3, ["new", "old"] * 3)


def test_one_step_off_policy_overlaps_its_own_phases_with_a_constant_lag(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=4, rollout_s=1, train_s=1, staleness=1))
    assert driver.run() == 5.0
    versions = [run.weight_version for run in driver.actions(RunStage) if run.stage is Stage.GENERATE]
    assert versions == [0, 0, 1, 2]


def test_a_paused_shard_is_ready_again_and_goes_on(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=1))
    driver.send(StagePaused(time_s=0.5, order=OrderId(1), seconds=0.5))
    runs = driver.actions(RunStage)
    assert [(run.order, run.stage.value, run.step) for run in runs] == [(1, "generate", 1), (2, "generate", 1)]


def test_a_failed_pipeline_frees_its_device_and_the_other_goes_on_as_alone(driver, builders):
    driver.submit(builders.pipeline("bad"), builders.pipeline("good"))
    driver.send(PipelineFailed(time_s=0.5, pipeline=PipelineId("bad"), reason="reward raised"))
    assert driver.run() == 0.5 + 3 * 3.0
    assert driver.scheduler.query.status(PipelineId("bad")) is PipelineStatus.FAILED
    assert driver.scheduler.query.status(PipelineId("good")) is PipelineStatus.FINISHED


def test_a_failed_pipeline_may_be_submitted_again_and_goes_on_once_it_is_its_turn(builders):
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("solo")))
    a = PipelineId("a")
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    while driver.scheduler.query.pipeline(a).published_version < 2:
        driver.step()
    driver.send(PipelineFailed(time_s=driver.now_s, pipeline=a, reason="its reward raised"))
    driver.submit(builders.pipeline("a", first_step=3))
    assert driver.scheduler.query.status(a) is PipelineStatus.WAITING
    assert driver.scheduler.query.pipelines() == ("a", "b"), "it keeps its place"
    driver.run()
    generated = [step for _, name, stage, step in driver.starts() if (name, stage) == ("a", "generate")]
    assert generated == [1, 2, 3, 3]
    assert [driver.scheduler.query.status(PipelineId(name)).value for name in "ab"] == ["finished"] * 2


@pytest.mark.parametrize("how", [None, PipelineCancelled])
def test_no_other_pipeline_is_submitted_twice(driver, builders, how):
    driver.submit(builders.pipeline("a"))
    if how is not None:
        driver.send(how(time_s=0.5, pipeline=PipelineId("a")))
    with pytest.raises(IllegalTransitionError, match="was submitted before"):
        driver.submit(builders.pipeline("a"))


def test_a_cancelled_pipeline_ends_its_orders_before_it_is_released(driver, builders):
    driver.submit(builders.pipeline("a"))
    driver.send(PipelineCancelled(time_s=0.5, pipeline=PipelineId("a")))
    assert not driver.actions(Release)
    driver.run()
    assert driver.actions(Release)
    assert driver.scheduler.query.is_idle()


@pytest.mark.parametrize("how", ["worker lost", "restarted", "failed"])
def test_a_cancelled_pipeline_whose_worker_dies_before_its_order_ends_is_released(driver, builders, how):
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    a, device = PipelineId("a"), driver.actions(RunStage)[0].devices[0]
    driver.send(PipelineCancelled(time_s=0.5, pipeline=a))
    ends = {
        "worker lost": WorkerLost(time_s=0.6, pipeline=a, device=device),
        "restarted": PipelineRestarted(time_s=0.6, pipeline=a, restored_step=0),
        "failed": PipelineFailed(time_s=0.6, pipeline=a, reason="its worker died too often"),
    }
    driver.send(ends[how])
    assert driver.actions(Release) == [Release(pipeline=a)]
    assert driver.scheduler.query.status(a) is PipelineStatus.CANCELLED
    driver.run()
    assert driver.scheduler.query.status(PipelineId("b")) is PipelineStatus.FINISHED


def test_the_shard_of_a_lost_rollout_worker_is_run_again(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=1))
    device = driver.actions(RunStage)[0].devices[0]
    driver.send(WorkerLost(time_s=1.0, pipeline=PipelineId("a"), device=device))
    runs = driver.actions(RunStage)
    assert [(run.stage.value, run.step, run.switch) for run in runs] == [
        ("generate", 1, Switch.COLD),
        ("generate", 1, Switch.COLD),
    ]
    driver.run()
    assert driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.FINISHED


def test_a_restarted_pipeline_goes_on_from_its_restored_step(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=3))
    while driver.scheduler.query.pipeline(PipelineId("a")).published_version < 2:
        driver.step()
    driver.send(PipelineRestarted(time_s=driver.now_s, pipeline=PipelineId("a"), restored_step=1))
    assert driver.starts()[-1][2:] == ("generate", 2)
    driver.run()
    assert driver.scheduler.query.status(PipelineId("a")) is PipelineStatus.FINISHED


def test_states_of_unknown_size_alternate_on_a_device_by_warm_switches(driver, builders):
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.run()
    switches = [run.switch for run in driver.actions(RunStage) if run.stage is Stage.GENERATE]
    assert switches == [Switch.COLD, Switch.COLD, Switch.WARM, Switch.WARM, Switch.WARM, Switch.WARM]


def test_on_a_colocated_device_the_state_that_must_leave_is_named_with_its_phase(builders):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=1, train=1), Colocated()))
    driver.submit(builders.pipeline("a", num_steps=1))
    driver.run()
    update = next(run for run in driver.actions(RunStage) if run.stage is Stage.UPDATE)
    assert update.evicted == (Resident(PipelineId("a"), Phase.ROLLOUT),)


def test_a_pipeline_alone_is_loaded_once(driver, builders):
    driver.submit(builders.pipeline("a"))
    driver.run()
    switches = {run.switch for run in driver.actions(RunStage)[2:]}
    assert switches == {Switch.NONE}


def test_a_third_pipeline_just_works(driver, builders):
    driver.submit(*(builders.pipeline(name) for name in "abc"))
    driver.run()
    assert len(driver.actions(Admit)) == 3
    assert driver.scheduler.query.is_idle()


def test_an_event_that_does_not_fit_raises_and_shows_the_recent_events(driver, builders):
    driver.submit(builders.pipeline("a"))
    with pytest.raises(IllegalTransitionError, match=r"order 99 is not running(.|\n)*PipelineSubmitted"):
        driver.scheduler.handle(StageFinished(time_s=1.0, order=OrderId(99), seconds=1.0))


def test_time_never_goes_back(driver, builders):
    driver.submit(builders.pipeline("a"))
    driver.send(ChunkFinished(time_s=2.0, order=OrderId(1), num_active=3, num_waiting=0))
    with pytest.raises(IllegalTransitionError, match=r"time goes from 2\.0 to 1\.0"):
        driver.scheduler.handle(ChunkFinished(time_s=1.0, order=OrderId(1), num_active=3, num_waiting=0))


def test_the_same_events_give_the_same_actions_byte_for_byte(driver, builders):
    driver.submit(*(builders.pipeline(name, rollout_s=len(name), num_steps=9) for name in ("a", "bb", "ccc")))
    driver.run()
    again = Scheduler(builders.cluster(), RollMux())
    replayed = [action for event in driver.events for action in again.handle(event)]
    assert repr(replayed) == repr(driver.actions())


def test_settling_that_does_not_end_is_an_error_with_the_last_marks(builders, monkeypatch):
    def marks_itself(parts):
        parts.state.dirty.balance = True

    monkeypatch.setattr(placer, "rebalance", marks_itself)
    scheduler = Scheduler(builders.cluster(rollout=1), RollMux())
    with pytest.raises(IllegalTransitionError, match=r"settling has not ended after 200 rounds; .*balance, admitted a"):
        scheduler.handle(PipelineSubmitted(time_s=0.0, pipeline=builders.pipeline("a")))
