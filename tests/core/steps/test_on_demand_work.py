"""Pipelines whose work arrives: batches open, run, end and are taken back, under every policy, among planned steps."""

from __future__ import annotations

import random

import pytest
from tests.faults import BreakingBackend, Restless

from rlmux.core.actions import Admit, Park, Pause, Release, RunStage
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import (
    ClientFinished,
    NodeJoined,
    NodeLost,
    PipelineCancelled,
    PipelineRestarted,
    StageFinished,
    StagePaused,
    WorkArrived,
    WorkerLost,
    WorkWithdrawn,
)
from rlmux.core.model import Cluster, DeviceId, NodeId, Phase, Pipeline, PipelineId, PipelineStatus, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import POLICIES, make_policy

ROLLOUT, TRAIN, BOTH = (Phase.ROLLOUT,), (Phase.TRAIN,), (Phase.ROLLOUT, Phase.TRAIN)
CLIENT = PipelineId("client")
SECONDS = {Stage.GENERATE: 2.0, Stage.UPDATE: 1.0}


def client(name: str = "client", **fields) -> Pipeline:
    return Pipeline(id=PipelineId(name), num_steps=None, work_arrives=True, **fields)


@pytest.fixture
def driver(builders):
    def make(*pipelines: Pipeline, policy: str = "fifo", **nodes):
        driver = builders.Driver(Scheduler(builders.cluster(**nodes), make_policy(policy)), lambda a: SECONDS[a.stage])
        driver.submit(*pipelines)
        return driver

    return make


def arrive(driver, kind=ROLLOUT, units=0, name="client"):
    event = WorkArrived(time_s=driver.now_s, pipeline=PipelineId(name), phases=kind, units=units)
    return [action for action in driver.send(event) if isinstance(action, RunStage)]


def end(driver, action: RunStage, seconds: float = 1.0):
    """The order ends now; the orders that follow."""
    driver.now_s += seconds
    actions = driver.send(StageFinished(time_s=driver.now_s, order=action.order, seconds=seconds))
    return [action for action in actions if isinstance(action, RunStage)]


# --- the life of a batch


def test_a_batch_is_one_order_over_all_devices_of_its_phases(driver):
    run = driver(client(num_rollout_nodes=2), rollout=2)
    (rollout,) = arrive(run, ROLLOUT)
    assert (rollout.stage, rollout.step) == (Stage.GENERATE, 1)
    assert [device.pool for device in rollout.devices] == ["rollout", "rollout"]
    end(run, rollout)
    (both,) = arrive(run, BOTH)
    assert (both.stage, both.step) == (Stage.UPDATE, 1), "each kind has numbers of its own"
    assert [device.pool for device in both.devices] == ["rollout", "rollout", "train"]


def test_work_that_arrives_while_its_kind_runs_is_the_next_batch(driver):
    run = driver(client())
    (first,) = arrive(run)
    assert arrive(run) == []
    assert arrive(run) == []
    (second,) = end(run, first)
    assert second.step == 2
    assert end(run, second) == [], "both announcements were one batch"


def test_kinds_on_different_devices_run_at_once(driver):
    run = driver(client())
    assert len(arrive(run, ROLLOUT)) == len(arrive(run, TRAIN)) == 1
    assert arrive(run, BOTH) == [], "it waits for both"


def test_a_paused_batch_goes_on_under_its_number(driver):
    run = driver(client())
    (first,) = arrive(run)
    (again,) = run.send(StagePaused(time_s=1.0, order=first.order, seconds=1.0))
    assert (again.step, again.order) == (1, first.order + 1)


def test_work_that_does_not_run_can_be_withdrawn(driver, builders):
    run = driver(builders.pipeline("a", num_steps=1), client())
    assert arrive(run) == [], "a rolls out"
    run.send(WorkWithdrawn(time_s=0.0, pipeline=CLIENT, phases=ROLLOUT))
    run.run()
    assert ("client", "generate", 1) not in [start[1:] for start in run.starts()]
    (second,) = arrive(run)
    assert second.step == 2, "the number of withdrawn work is not used again"
    arrive(run)
    run.send(WorkWithdrawn(time_s=run.now_s, pipeline=CLIENT, phases=ROLLOUT))
    assert end(run, second) == [], "what waited behind the running batch was withdrawn"


def test_withdrawing_what_is_not_there_changes_nothing(driver):
    run = driver(client())
    assert run.send(WorkWithdrawn(time_s=0.0, pipeline=CLIENT, phases=TRAIN)) == []


def test_a_planned_pipeline_has_no_client(driver, builders):
    run = driver(builders.pipeline("a"))
    with pytest.raises(IllegalTransitionError, match="a has planned steps"):
        arrive(run, name="a")


def test_steps_and_arriving_work_exclude_each_other():
    with pytest.raises(ValueError, match="its work arrives, so nothing of it is planned: its num_steps is"):
        Pipeline(id=CLIENT, num_steps=3, work_arrives=True)
    with pytest.raises(ValueError, match=r"phases are env; accepted: rollout, train, rollout\+train"):
        WorkArrived(time_s=0.0, pipeline=CLIENT, phases=(Phase.ENV,))


# --- the end


def test_a_client_that_is_done_is_finished_and_its_running_order_paused(driver):
    run = driver(client())
    (order,) = arrive(run)
    actions = run.send(ClientFinished(time_s=0.5, pipeline=CLIENT))
    assert actions == [Pause(order=order.order)]
    assert run.scheduler.query.status(CLIENT) is PipelineStatus.FINISHED
    run.run()
    assert run.actions(Release)
    assert run.scheduler.query.is_idle()
    assert arrive(run) == [], "what was on its way changes nothing"


def test_a_cancelled_client_drops_what_is_ready(driver, builders):
    run = driver(builders.pipeline("a", num_steps=1), client())
    arrive(run)
    assert [type(action) for action in run.send(PipelineCancelled(time_s=0.0, pipeline=CLIENT))] == [Release]
    run.run()
    assert run.scheduler.query.is_idle()


# --- faults


def test_a_lost_worker_and_a_restart_make_the_batch_ready_again(driver):
    run = driver(client())
    (order,) = arrive(run)
    (again,) = run.send(WorkerLost(time_s=0.5, pipeline=CLIENT, device=order.devices[0]))
    assert (again.step, again.order) == (1, order.order + 1)
    (third,) = run.send(PipelineRestarted(time_s=0.6, pipeline=CLIENT, restored_step=0))
    assert (third.step, third.order) == (1, order.order + 2)


def test_work_is_kept_while_its_pipeline_has_no_nodes(driver):
    run = driver(client())
    arrive(run, TRAIN, units=5)
    lost = run.send(NodeLost(time_s=0.5, node=NodeId("train", 0)))
    assert not any(isinstance(action, Park) for action in lost), "a node that is lost takes its processes along"
    assert arrive(run, ROLLOUT) == []
    back = run.send(NodeJoined(time_s=1.0, node=NodeId("train", 0)))
    assert [type(action) for action in back] == [Admit, RunStage, RunStage]
    assert {(action.stage, action.step) for action in back[1:]} == {(Stage.GENERATE, 1), (Stage.UPDATE, 1)}


# --- turns


def test_a_strict_cycle_does_not_wait_for_a_client_that_thinks(driver, builders):
    run = driver(builders.pipeline("a", num_steps=20), client(), policy="rollmux")
    assert run.run() == 60.0, "as long as alone"


def test_a_client_that_comes_back_gets_one_slot_not_all_that_it_let_pass(driver, builders):
    run = driver(builders.pipeline("a", num_steps=20), client(), policy="rollmux")
    while run.now_s < 30.0:
        run.step()
    for _ in range(30):
        if not any(o.pipeline == CLIENT for o in run.scheduler.query.orders()) and not run.scheduler.query.ready_work():
            arrive(run, TRAIN)
        if not run.step():
            break
    turns = [start[1] for start in run.starts() if start[0] >= 30.0 and start[2] == "update"]
    assert "client client client" not in " ".join(turns), turns
    assert turns.count("client") > 3


@pytest.mark.parametrize("policy", ["fifo", "rollmux", "rlmux", "gap-ratio"])
def test_a_batch_of_both_phases_starts_while_others_alternate(driver, builders, policy):
    planned = [builders.pipeline(name, num_steps=30, rollout_s=1.0) for name in "ab"]
    run = driver(*planned, client(), policy=policy)
    for _ in range(7):
        run.step()
    arrived_s = run.now_s
    arrive(run, BOTH)
    run.run()
    (start,) = [start for start in run.starts() if start[1] == "client"]
    assert start[0] - arrived_s <= 3.0, "after the orders that ran"


# --- durations


def test_seconds_are_learned_by_units_and_kind(driver):
    run = driver(client())
    for units in (10, 20, 40):
        (order,) = arrive(run, TRAIN, units=units)
        end(run, order, seconds=units / 10)
    arrive(run, TRAIN, units=100)
    assert run.scheduler.query.pipeline(CLIENT).estimates.train_s == pytest.approx(10.0)


def test_a_client_is_placed_by_what_its_batches_took(driver):
    run = driver(client())
    for _ in range(3):
        end(run, arrive(run, ROLLOUT)[0], seconds=2.0)
        run.now_s += 3.0
        end(run, arrive(run, TRAIN)[0], seconds=1.0)
    estimate = run.scheduler.query.pipeline(CLIENT).pipeline.estimate
    assert estimate is not None
    assert (estimate.rollout_s, estimate.train_s, estimate.sync_s) == (2.0, 1.0, 3.0)


# --- any order of anything


def play(policy: str, seed: int) -> None:
    """Planned pipelines and clients, whose work and faults come in any order; then what is left, to its end."""
    draw = random.Random(f"arriving/{policy}/{seed}")
    num_nodes = draw.choice([1, 2, 3]) + 2 * (policy == "restless")
    pools = [
        Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=num_nodes + 1, usd_per_gpu_hour=1.0),
        Pool(name="train", phase=Phase.TRAIN, num_nodes=num_nodes, usd_per_gpu_hour=3.0),
    ]
    if draw.random() < 0.3:
        pools = [Pool(name="all", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=num_nodes + 1)]
    chosen = Restless() if policy == "restless" else make_policy(policy, seed=seed)
    backend = BreakingBackend(Scheduler(Cluster(pools={pool.name: pool for pool in pools}), chosen), draw)
    for _ in range(draw.choice([0, 1, 2])):
        backend.submit_another()
    for _ in range(draw.choice([1, 2])):
        backend.submit_client()
    for _ in range(60):
        if draw.random() < 0.4:
            draw.choice(list(backend.client_acts().values()))()
        elif draw.random() < 0.1:
            draw.choice(list(backend.faults().values()))()
        else:
            backend.go_on()
    backend.settle_clients()
    backend.settle()


@pytest.mark.parametrize("policy", [*POLICIES, "restless"])
def test_work_in_any_order_is_done_or_taken_back_under_every_policy(policy):
    for seed in range(12):
        try:
            play(policy, seed)
        except Exception as error:
            raise AssertionError(f"sequence {seed} of {policy}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(("policy", "seed"), [("gap-ratio", 107), ("rollmux", 144)])
def test_no_work_waits_beside_a_free_device_where_some_once_did(policy, seed):
    """A shard that an older batch keeps from a device hid another that it does not; and a client that only trains was
    four cycles ahead once its neighbour took several steps in each."""
    play(policy, seed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "restless"])
def test_ten_thousand_sequences_of_arriving_work(policy):
    for seed in range(12, 640):
        try:
            play(policy, seed)
        except Exception as error:
            raise AssertionError(f"sequence {seed} of {policy}: {type(error).__name__}: {error}") from error


def test_device_ids_of_a_batch_are_each_named_once(driver):
    pool = Pool(name="gpu", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=2)
    scheduler = Scheduler(Cluster(pools={"gpu": pool}), make_policy("fifo"))
    driver = type(driver(client()))(scheduler, lambda action: 1.0)
    driver.submit(client())
    (order,) = arrive(driver, BOTH)
    assert order.devices == (DeviceId("gpu", 1, 0), DeviceId("gpu", 0, 0))
