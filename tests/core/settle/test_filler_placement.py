"""Fillers: they take only what no other pipeline wants, and leave at the next safe point."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.actions import Admit, Park, Pause, Refuse, RunStage
from rlmux.core.events import (
    NodeJoined,
    NodeLost,
    PipelineCancelled,
    PipelineFailed,
    PipelineRestarted,
    StagePaused,
    WorkerLost,
)
from rlmux.core.model import Cluster, Footprint, NodeId, Pipeline, PipelineId, PipelineStatus, Stage, Urgency
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares


def filler_of(builders, name: str = "eval", **fields) -> Pipeline:
    stages = (Stage.GENERATE, Stage.REWARD)
    return builders.pipeline(name, **{"urgency": Urgency.FILLER, "stages": stages, "train_s": 0.0, **fields})


def driver_of(builders, policy: str = "solo", *, cluster: Cluster | None = None, **sizes):
    return builders.Driver(Scheduler(cluster or builders.cluster(**sizes), make_policy(policy), FairShares()))


@pytest.fixture
def driver(builders):
    """One node of each pool, each pipeline alone on its nodes."""
    return driver_of(builders)


def status(driver, name: str) -> PipelineStatus:
    return driver.scheduler.query.status(PipelineId(name))


def starts_of(driver, name: str) -> list[tuple[float, str, int]]:
    return [(time_s, stage, step) for time_s, pipeline, stage, step in driver.starts() if pipeline == name]


def test_alone_it_goes_through_its_steps_without_training(driver, builders):
    driver.submit(filler_of(builders, num_steps=2))
    assert driver.run() == 4.0
    assert status(driver, "eval") is PipelineStatus.FINISHED
    assert starts_of(driver, "eval") == [
        (0.0, "generate", 1),
        (2.0, "reward", 1),
        (2.0, "generate", 2),
        (4.0, "reward", 2),
    ]


def test_every_rollout_of_it_samples_from_the_model_that_it_was_given(driver, builders):
    driver.submit(filler_of(builders, num_steps=3))
    driver.run()
    orders = [one for one in driver.actions(RunStage) if one.stage is Stage.GENERATE]
    assert [order.weight_version for order in orders] == [0, 0, 0]


def test_a_pipeline_is_placed_where_a_filler_computes_and_starts_when_it_has_left(driver, builders):
    driver.submit(filler_of(builders, num_steps=1, rollout_s=9.0))
    driver.submit(builders.pipeline("a", num_steps=1))
    assert [action.pipeline for action in driver.actions(Admit)] == ["eval", "a"]
    assert len(driver.actions(Pause)) == 1
    assert starts_of(driver, "a") == []
    (order,) = [one.id for one in driver.scheduler.query.orders()]
    driver.send(StagePaused(time_s=0.25, order=order, seconds=0.25))
    assert starts_of(driver, "a") == [(0.25, "generate", 1)]
    driver.run()
    assert (status(driver, "a"), status(driver, "eval")) == ("finished", "finished")


def test_it_computes_while_others_train_and_waits_while_they_roll_out(driver, builders):
    driver.submit(builders.pipeline("a", num_steps=2), filler_of(builders, num_steps=1, rollout_s=0.5))
    driver.run()
    assert starts_of(driver, "a") == [
        (0.0, "generate", 1),
        (2.0, "update", 1),
        (3.0, "generate", 2),
        (5.0, "update", 2),
    ]
    assert starts_of(driver, "eval") == [(2.0, "generate", 1), (2.5, "reward", 1)]


def test_others_have_the_same_starts_with_it_and_without(builders):
    def starts(*fillers: Pipeline):
        driver = driver_of(builders, "rollmux", rollout=2, train=1)
        driver.submit(*fillers, *(builders.pipeline(name, num_steps=4, rollout_s=3.0) for name in "abc"))
        driver.run()
        return [start for start in driver.starts() if start[1] in "abc"]

    assert starts(filler_of(builders, num_steps=9)) == starts()


def test_it_is_in_no_queue_and_starts_beside_a_pipeline_that_waits(driver, builders):
    driver.submit(builders.pipeline("a"), builders.pipeline("b"), filler_of(builders, num_steps=1, rollout_s=0.5))
    assert (status(driver, "b"), status(driver, "eval")) == ("waiting", "running")
    assert driver.scheduler.query.first_in_queue == "b"
    driver.run()
    assert status(driver, "b") is PipelineStatus.FINISHED


def test_two_of_them_take_turns(driver, builders):
    driver.submit(filler_of(builders, "one", num_steps=2), filler_of(builders, "two", num_steps=2))
    driver.run()
    turns = [name for _, name, stage, _ in driver.starts() if stage == "generate"]
    assert turns == ["one", "two", "one", "two"]


def test_its_state_lies_only_beside_those_of_others(builders):
    base = builders.cluster()
    small = {name: replace(pool, device_memory_bytes=10.0) for name, pool in base.pools.items()}
    driver = driver_of(builders, cluster=Cluster(pools=small))
    sizes = {"rollout_host_bytes": 1.0, "train_host_bytes": 1.0, "train_device_bytes": 6.0}
    driver.submit(
        builders.pipeline("a", num_steps=2, footprint=Footprint(rollout_device_bytes=6.0, **sizes)),
        filler_of(builders, "fits", num_steps=1, rollout_s=0.5, footprint=Footprint(rollout_device_bytes=4.0, **sizes)),
        filler_of(builders, "large", num_steps=1, footprint=Footprint(rollout_device_bytes=5.0, **sizes)),
    )
    driver.run()
    ends = {
        name: next(time_s for time_s, pipeline, _, _ in driver.starts() if pipeline == name)
        for name in ("fits", "large")
    }
    assert ends == {"fits": 2.0, "large": 6.0}, "the large one waits until the other pipeline is over"
    evicted = [one.evicted for one in driver.actions(RunStage) if one.pipeline == "a"]
    assert not any(evicted)


def hosts(builders, host_bytes: float, **sizes) -> Cluster:
    base = builders.cluster(**sizes)
    return Cluster(pools={name: replace(pool, host_memory_bytes=host_bytes) for name, pool in base.pools.items()})


def test_its_processes_end_when_others_need_their_host_memory_and_come_back_when_they_do_not(builders):
    driver = driver_of(builders, cluster=hosts(builders, 10.0))
    need = Footprint(rollout_host_bytes=6.0, train_host_bytes=6.0)
    driver.submit(filler_of(builders, num_steps=9, footprint=need))
    assert status(driver, "eval") is PipelineStatus.RUNNING
    driver.submit(builders.pipeline("a", num_steps=1, footprint=need))
    assert [(one.pipeline, one.is_awaited) for one in driver.actions(Park)] == [("eval", False)]
    assert starts_of(driver, "a") == [(0.0, "generate", 1)], "the pipeline does not wait for it"
    assert status(driver, "eval") is PipelineStatus.WAITING
    assert "of 1 nodes 0 have host memory to spare" in driver.scheduler.query.reason(PipelineId("eval"))
    driver.run()
    assert status(driver, "eval") is PipelineStatus.FINISHED


def test_one_that_no_node_has_memory_for_is_refused_with_the_numbers(builders):
    driver = driver_of(builders, cluster=hosts(builders, 5e9))
    driver.submit(filler_of(builders, footprint=Footprint(rollout_host_bytes=6e9)))
    (refused,) = driver.actions(Refuse)
    assert refused.reason == "eval requests 1 nodes with 6.000 GB each; pool rollout has 1 nodes of 5.000 GB"


def test_on_an_unlimited_pool_it_takes_no_node_that_nobody_has(builders):
    driver = driver_of(builders, rollout=None, train=None)
    driver.submit(filler_of(builders, num_steps=1))
    assert status(driver, "eval") is PipelineStatus.WAITING
    driver.submit(builders.pipeline("a", num_steps=2))
    driver.run()
    assert status(driver, "eval") is PipelineStatus.FINISHED
    assert driver.scheduler.query.placement.num_nodes_in_use("rollout") == 0


def test_it_prefers_nodes_that_no_pipeline_is_pinned_to(builders):
    driver = driver_of(builders, rollout=2, train=1)
    driver.submit(builders.pipeline("a"), filler_of(builders))
    placements = {one.pipeline: one.placement.rollout_nodes for one in driver.actions(Admit)}
    assert placements == {"a": (NodeId("rollout", 0),), "eval": (NodeId("rollout", 1),)}


def test_a_lost_node_sends_it_elsewhere_and_its_step_begins_anew(builders):
    driver = driver_of(builders, rollout=2, train=1)
    driver.submit(filler_of(builders, num_steps=2))
    driver.step()
    driver.send(NodeLost(time_s=driver.now_s, node=NodeId("rollout", 0)))
    assert [one.placement.rollout_nodes[0].index for one in driver.actions(Admit)] == [0, 1]
    driver.send(PipelineRestarted(time_s=driver.now_s, pipeline=PipelineId("eval"), restored_step=0))
    driver.send(NodeJoined(time_s=driver.now_s, node=NodeId("rollout", 0)))
    driver.run()
    assert status(driver, "eval") is PipelineStatus.FINISHED


def test_a_lost_worker_has_its_shard_done_again(driver, builders):
    driver.submit(filler_of(builders, num_steps=1), builders.pipeline("a", num_steps=1))
    driver.step()
    device = driver.scheduler.query.devices()[0]
    driver.send(WorkerLost(time_s=driver.now_s, pipeline=PipelineId("eval"), device=device))
    driver.run()
    assert status(driver, "eval") is PipelineStatus.FINISHED


@pytest.mark.parametrize("end", [PipelineCancelled, PipelineFailed])
def test_one_that_ends_while_it_is_told_to_leave_gives_its_device_back(driver, builders, end):
    driver.submit(filler_of(builders, rollout_s=9.0), builders.pipeline("a", num_steps=1))
    fields = {"reason": "its task raised"} if end is PipelineFailed else {}
    driver.send(end(time_s=0.0, pipeline=PipelineId("eval"), **fields))
    driver.run()
    assert (status(driver, "a"), driver.scheduler.query.is_idle()) == ("finished", True)


def test_it_is_billed_for_what_it_computes_and_counts_for_no_share(builders):
    driver = driver_of(builders)
    driver.submit(
        builders.pipeline("a", num_steps=2, user="ann"), filler_of(builders, num_steps=1, rollout_s=0.5, user="bob")
    )
    driver.run()
    rows = {row.account.user: row for row in driver.scheduler.accounts()}
    assert rows["bob"].charged_by_pool == {"rollout": 0.5}
    assert rows["bob"].used_by_pool == {}
    charged = [sum(row.charged_by_pool.get(pool, 0.0) for row in rows.values()) for pool in ("rollout", "train")]
    assert charged == pytest.approx([6.0, 6.0])
    assert driver.scheduler.bill().held_by_pool == pytest.approx({"rollout": 6.0, "train": 6.0})


def test_on_a_free_node_it_is_billed_for_all_that_is_held(builders):
    driver = driver_of(builders, rollout=2)
    driver.submit(builders.pipeline("a", num_steps=1, user="ann"), filler_of(builders, num_steps=2, rollout_s=1.5))
    driver.run()
    total = sum(seconds for row in driver.scheduler.accounts() for seconds in row.charged_by_pool.values())
    assert total == pytest.approx(sum(driver.scheduler.bill().held_by_pool.values()))
    assert total == pytest.approx(3.0 + 3.0 + 3.0)


def test_why_names_it(builders):
    driver = driver_of(builders, rollout=None, train=None)
    driver.submit(filler_of(builders))
    wait = driver.scheduler.wait_of(PipelineId("eval"))
    assert (wait.token, wait.position, wait.would_start_now_if) == ("filler", 0, ())
    assert [name for name, _ in driver.scheduler.waits(10)] == ["eval"]


def test_it_is_promised_nothing_and_trains_nothing():
    common = {"id": PipelineId("x"), "num_steps": 1}
    with pytest.raises(ValueError, match="a filler trains nothing"):
        Pipeline(**common, urgency=Urgency.FILLER)
    with pytest.raises(ValueError, match="is promised nothing"):
        Pipeline(**common, urgency=Urgency.FILLER, stages=(Stage.GENERATE,), slo_slowdown=2.0)
    with pytest.raises(ValueError, match="its slo_probability is"):
        Pipeline(**common, urgency=Urgency.FILLER, stages=(Stage.GENERATE,), slo_probability=0.9)
    with pytest.raises(ValueError, match="no training stage; accepted with urgency filler"):
        Pipeline(**common, stages=(Stage.GENERATE, Stage.REWARD))
