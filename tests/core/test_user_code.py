"""A pipeline that only waits for its own user code keeps no other waiting."""

from __future__ import annotations

from collections import Counter

import pytest

from rlmux.core.actions import RunStage
from rlmux.core.events import ReplyArrived, RewardOverdue, StageFinished, StagePaused
from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

STAGES = (Stage.GENERATE, Stage.REWARD, Stage.UPDATE, Stage.PUBLISH)


@pytest.fixture
def pair(builders):
    """`slow` and `busy` share both nodes in a strict cycle; both want ten steps of 2 s + 1 s."""
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux")), seconds=seconds)
    driver.submit(*(builders.pipeline(name, num_steps=10, stages=STAGES) for name in ("slow", "busy")))
    return driver


def seconds(action: RunStage) -> float:
    is_hanging = (action.pipeline, action.stage, action.step) == ("slow", Stage.REWARD, 2)
    return {Stage.GENERATE: 2.0, Stage.UPDATE: 1.0, Stage.REWARD: 1000.0 if is_hanging else 0.0}.get(action.stage, 0.0)


def run_until(driver, is_there) -> RunStage:
    """The first order of which that is true, once it is given."""
    while not (found := [action for action in driver.actions(RunStage) if is_there(action)]):
        assert driver.step()
    return found[0]


def hanging(action: RunStage) -> bool:
    return (action.pipeline, action.stage, action.step) == ("slow", Stage.REWARD, 2)


def test_a_group_does_not_wait_for_rewards_that_are_overdue(pair):
    order = run_until(pair, hanging).order
    while pair.next_end_s() < 900:
        pair.step()
    assert pair.scheduler.query.pipeline(PipelineId("busy")).published_version < 10, "the cycle is strict"
    pair.send(RewardOverdue(time_s=pair.now_s, order=order))
    while pair.next_end_s() < 900:
        pair.step()
    assert pair.scheduler.query.status(PipelineId("busy")) == "finished"
    pair.run()
    assert pair.scheduler.query.status(PipelineId("slow")) == "finished"


def test_a_member_that_was_passed_over_takes_turns_again_and_has_nothing_to_catch_up(pair):
    order = run_until(pair, hanging).order
    pair.send(RewardOverdue(time_s=pair.now_s + 1.0, order=order))
    run_until(pair, lambda action: (action.pipeline, action.step) == ("busy", 6))
    while pair.next_end_s() < 900:
        if pair.scheduler.query.pipeline(PipelineId("busy")).published_version == 6:
            break
        pair.step()
    num_before = len(pair.log)
    end_now(pair, order)
    pair.run()
    updates = [a.pipeline for _, a in pair.log[num_before:] if isinstance(a, RunStage) and a.stage is Stage.UPDATE]
    assert updates[0] == "slow", "its slot is next"
    assert Counter(updates[:6]) == {"slow": 3, "busy": 3}


def end_now(driver, order) -> None:
    """End one order before its time."""
    driver.send(StageFinished(time_s=driver.now_s, order=order, seconds=0.0))


def test_a_shard_without_anything_to_compute_starts_with_its_first_reply(pair):
    def generates(action: RunStage) -> bool:
        return (action.pipeline, action.stage, action.step) == ("slow", Stage.GENERATE, 2)

    order = run_until(pair, generates).order
    pair.send(StagePaused(time_s=pair.now_s, order=order, seconds=0.5, is_waiting=True))
    pair.run()
    assert pair.scheduler.query.status(PipelineId("busy")) == "finished", "its device and its slots went to the other"
    assert not [a for a in pair.actions(RunStage) if generates(a) and a.order != order]
    pair.send(ReplyArrived(time_s=pair.now_s, pipeline=PipelineId("slow"), device=DeviceId("rollout", 0, 0)))
    pair.run()
    assert pair.scheduler.query.status(PipelineId("slow")) == "finished"
