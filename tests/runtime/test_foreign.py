"""Pipelines of other programs: their drivers are asked, their threads are heard, devices are shared with our own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlmux.core.actions import Action, Pause, RunStage
from rlmux.core.errors import UserError
from rlmux.core.events import Event, StageFinished
from rlmux.core.model import DeviceId, Footprint, OrderId, Phase, Pipeline, PipelineId, PipelineStatus, Resident, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.report.log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.runtime.foreign import ForeignBackend, ForeignFront, News
from rlmux.runtime.run import RunOptions, run_pipelines

ROLLOUT, TRAIN = (Phase.ROLLOUT,), (Phase.TRAIN,)


def client(name: str, **fields: Any) -> Pipeline:
    return Pipeline(id=PipelineId(name), num_steps=None, work_arrives=True, **fields)


class Driver:
    """Does what it is told at once, and notes it. `ends_itself`: its orders end as they begin."""

    def __init__(self, front: ForeignFront, *, ends_itself: bool = True, leaves_at_once: bool = True) -> None:
        self.front = front
        self.ends_itself, self.leaves_at_once = ends_itself, leaves_at_once
        self.begun: list[RunStage] = []
        self.said: list[str] = []
        self.asked_to_leave: list[tuple[Resident, OrderId]] = []

    def begin(self, order: RunStage) -> None:
        self.begun.append(order)
        if self.ends_itself:
            self.front.finished(order.order, seconds=1.0)

    def pause(self, order: OrderId) -> None:
        self.said.append("pause")
        self.front.paused(order, seconds=0.5)

    def evict(self, resident: Resident, devices: object, order: OrderId) -> None:
        self.said.append("evict")
        self.asked_to_leave.append((resident, order))
        if self.leaves_at_once:
            self.front.left(resident, order)

    def park(self) -> None:
        self.said.append("park")

    def release(self) -> None:
        self.said.append("release")

    def tell(self, news: News) -> None:
        self.said.append(type(news).__name__)

    def weights_sha256(self) -> str | None:
        return "f00d"


class Run:
    """A controller in virtual time, with planned pipelines of a fake backend beside a front's."""

    def __init__(self, cluster: Any, policy: str = "fifo") -> None:
        self.front = ForeignFront()
        self.own = FakeBackend(lambda action: 1.0 if action.devices else 0.0)
        self.backend = ForeignBackend(self.own, self.front)
        self.scheduler = Scheduler(cluster, make_policy(policy))
        self.events: list[Event] = []
        self.actions: list[Action] = []
        listeners = [self, self.backend]
        self.controller = Controller(self.scheduler, self.backend, None, listeners, has_news=self.front.has_news)

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        self.events += events
        self.actions += actions

    def go_on(self, passes: int = 8, submissions: tuple[Submission, ...] = ()) -> None:
        left = iter(range(passes))
        self.controller.run(submissions, until=lambda: next(left, None) is None)


@pytest.fixture
def run(real):
    run = Run(real.cluster(rollout=1, train=1))
    run.front.submit(client("hold"), Driver(run.front))  # without a pipeline the run would be over
    return run


def test_announced_work_is_granted_to_its_driver_and_ends_by_its_word(run):
    driver = Driver(run.front)
    run.front.submit(client("a"), driver)
    run.front.arrived(PipelineId("a"), TRAIN, units=64)
    run.go_on()
    (order,) = driver.begun
    assert (order.stage, order.step) == (Stage.UPDATE, 1)
    assert any(isinstance(event, StageFinished) and event.order == order.order for event in run.events)
    assert driver.said == ["Admit"]


def test_a_name_is_taken_once(run):
    with pytest.raises(UserError, match="'hold' is in this run already; accepted: a name of its own"):
        run.front.submit(client("hold"), Driver(run.front))


def test_a_driver_is_made_for_a_free_name_alone_and_leaves_it_free_where_that_fails(run):
    made: list[str] = []
    with pytest.raises(UserError, match="in this run already"):
        run.front.submit_made(client("hold"), lambda: made.append("hold"))
    assert made == []
    with pytest.raises(ZeroDivisionError):
        run.front.submit_made(client("a"), lambda: 1 // 0)
    run.front.submit(client("a"), Driver(run.front))


def test_a_reserved_name_is_its_programs_alone(run):
    run.front.reserve(PipelineId("late"))
    with pytest.raises(UserError, match="'late' is in this run already"):
        run.front.reserve(PipelineId("late"))
    run.front.submit(client("late"), Driver(run.front))
    with pytest.raises(UserError, match="'late' is in this run already"):
        run.front.submit(client("late"), Driver(run.front))


def test_a_cancelled_client_is_paused_told_and_released(run):
    driver = Driver(run.front, ends_itself=False)
    run.front.submit(client("a"), driver)
    run.front.arrived(PipelineId("a"), TRAIN)
    run.go_on()
    run.front.cancelled(PipelineId("a"))
    run.go_on()
    assert driver.said == ["Admit", "pause", "PipelineCancelled", "release"]
    assert run.scheduler.query.status(PipelineId("a")) is PipelineStatus.CANCELLED


def test_what_is_said_of_an_order_that_has_ended_is_dropped(run):
    driver = Driver(run.front, ends_itself=False)
    run.front.submit(client("a"), driver)
    run.front.arrived(PipelineId("a"), TRAIN)
    run.go_on()
    (order,) = driver.begun
    run.front.failed(PipelineId("a"), "its process is gone")
    run.front.finished(order.order, seconds=1.0)
    run.front.arrived(PipelineId("a"), TRAIN)
    run.front.finished(OrderId(99), seconds=1.0)
    run.go_on()
    assert driver.said == ["Admit", "release", "PipelineFailed"]
    assert not any(isinstance(event, StageFinished) for event in run.events)


def test_an_order_waits_until_every_state_that_it_evicts_has_left(run):
    first, second = Driver(run.front, leaves_at_once=False), Driver(run.front)
    run.front.submit(client("a"), first)
    run.front.arrived(PipelineId("a"), TRAIN)
    run.front.submit(client("b"), second)
    run.go_on()
    run.front.arrived(PipelineId("b"), TRAIN)
    run.go_on()
    assert (len(first.begun), second.begun) == (1, []), "a's state is on the device still"
    ((resident, order),) = first.asked_to_leave
    assert resident == Resident(PipelineId("a"), Phase.TRAIN)
    run.front.left(resident, order)
    run.go_on()
    assert [one.order for one in second.begun] == [order]


def test_an_order_waits_for_what_an_earlier_part_of_the_run_left_and_the_next_does_not(run):
    before, driver = Driver(run.front, leaves_at_once=False), Driver(run.front)
    device, left_over = DeviceId("train", 0, 0), Resident(PipelineId("p"), Phase.TRAIN)
    run.front.leave_over(device, left_over, before)
    run.front.submit(client("a"), driver)
    run.front.arrived(PipelineId("a"), TRAIN)
    run.go_on()
    ((resident, order),) = before.asked_to_leave
    assert (resident, driver.begun) == (left_over, [])
    run.front.left(resident, order)
    run.go_on()
    run.front.arrived(PipelineId("a"), TRAIN)
    run.go_on()
    assert len(driver.begun) == 2
    assert len(before.asked_to_leave) == 1


def test_a_client_that_is_over_leaves_whether_it_says_so_or_not(run):
    first, second = Driver(run.front, leaves_at_once=False), Driver(run.front)
    run.front.submit(client("a"), first)
    run.front.arrived(PipelineId("a"), TRAIN)
    run.front.submit(client("b"), second)
    run.go_on()
    run.front.arrived(PipelineId("b"), TRAIN)
    run.go_on()
    run.front.failed(PipelineId("a"), "its process is gone")
    run.go_on()
    assert len(second.begun) == 1


def test_states_of_our_own_workers_leave_for_a_client(run, real):
    own = real.submission("own", num_steps=50)
    driver = Driver(run.front)
    run.front.submit(client("a"), driver)
    run.go_on()
    run.go_on(12, (own,))
    run.front.arrived(PipelineId("a"), TRAIN)
    run.go_on(12)
    (order,) = driver.begun
    assert order.evicted == (Resident(PipelineId("own"), Phase.TRAIN),)
    assert order in run.own.executed, "they were asked to make room"


def test_a_client_in_another_thread_trains_beside_a_pipeline_of_our_own(real, tmp_path):
    """Real workers on one machine: the client's orders and ours take turns, and ours trains to the end."""
    front = ForeignFront()

    class Thread(Driver):
        """Works in a thread of its own, three bursts one after another, then is done."""

        def begin(self, order: RunStage) -> None:
            self.begun.append(order)
            threading.Thread(target=self._work, args=(order,)).start()

        def _work(self, order: RunStage) -> None:
            self.front.finished(order.order, seconds=0.01)
            if len(self.begun) < 3:
                self.front.arrived(PipelineId("client"), TRAIN if len(self.begun) % 2 else ROLLOUT, units=1)
            else:
                self.front.client_finished(PipelineId("client"))

    driver = Thread(front)
    front.submit(client("client", footprint=Footprint(rollout_device_bytes=1.0, train_device_bytes=1.0)), driver)
    front.arrived(PipelineId("client"), ROLLOUT)
    result = run_pipelines(
        real.cluster(rollout=1, train=1), [real.submission("own", num_steps=2)], make_policy("fifo"), tmp_path / "run",
        RunOptions(front=front), spec={},
    )  # fmt: skip
    assert result.is_complete
    assert result.summary["pipelines"]["own"]["status"] == "finished"
    assert result.summary["pipelines"]["client"]["status"] == "finished"
    assert [order.stage for order in driver.begun] == [Stage.GENERATE, Stage.UPDATE, Stage.GENERATE]
    assert driver.said[-1] == "release"
    with LogReader(tmp_path / "run") as reader:
        ends = [entry.value for entry in reader.entries() if isinstance(entry.value, StageFinished)]
    assert {order.order for order in driver.begun} <= {end.order for end in ends}
    assert not any(isinstance(action, Pause) for action in driver.begun)
