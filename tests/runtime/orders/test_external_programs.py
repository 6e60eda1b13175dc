"""Programs with engines of their own: they are granted devices and evicted, beside pipelines of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlmux.core.actions import Action, Release, RunStage
from rlmux.core.errors import UserError
from rlmux.core.events import (
    ClientFinished,
    Event,
    PipelineCancelled,
    PipelineFailed,
    StageFinished,
    WorkArrived,
)
from rlmux.core.model import DeviceId, Footprint, OrderId, Phase, Pipeline, PipelineId, PipelineStatus, Resident, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.controller import Controller
from rlmux.runtime.run import RunOptions, run_pipelines
from rlmux.runtime.worker_backend import WorkerBackend

ROLLOUT, TRAIN = (Phase.ROLLOUT,), (Phase.TRAIN,)


def pipeline_of(name: str, **fields: Any) -> Pipeline:
    return Pipeline(id=PipelineId(name), num_steps=None, work_arrives=True, **fields)


class Program:
    """Notes what it gets. `ends_itself`: its orders end as they begin."""

    def __init__(self, inbox: Inbox, *, ends_itself: bool = True, leaves_at_once: bool = True) -> None:
        self.inbox = inbox
        self.ends_itself, self.leaves_at_once = ends_itself, leaves_at_once
        self.begun: list[RunStage] = []
        self.leaving: list[tuple[Resident, Callable[[], None]]] = []
        """States that were evicted, and what to call once they have left."""

    def begin(self, order: RunStage) -> None:
        self.begun.append(order)
        if self.ends_itself:
            self.report(StageFinished(order=order.order, seconds=1.0))

    def evict(self, resident: Resident, devices: Any, on_left: Callable[[], None]) -> None:
        self.leaving.append((resident, on_left))
        if self.leaves_at_once:
            on_left()

    def report(self, event: Any) -> None:
        self.inbox.call_soon(lambda backend: backend.external.report(event))


class Run:
    """A controller over workers that nobody asks for, with programs."""

    def __init__(self, real: Any, folder: Any) -> None:
        cluster = real.cluster(rollout=1, train=1)
        self.inbox = Inbox()
        self.backend = WorkerBackend(cluster, folder, real.Workplace(), folder / "weights")
        self.backend.connect(self.inbox)
        self.scheduler = Scheduler(cluster, make_policy("fifo"))
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.controller = Controller(self.scheduler, self.backend, None, [self], has_news=self.inbox.has_commands)

    def add(self, name: str, **options: bool) -> Program:
        program = Program(self.inbox, **options)
        self.inbox.call_soon(lambda backend: backend.external.add(pipeline_of(name), program))
        return program

    def announce(self, name: str, phases: tuple[Phase, ...] = TRAIN, units: int = 0) -> None:
        event = WorkArrived(pipeline=PipelineId(name), phases=phases, units=units)
        self.inbox.call_soon(lambda backend: backend.external.report(event))

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        self.events += events
        self.actions += actions

    def go_on(self, passes: int = 8) -> None:
        left = iter(range(passes))
        self.controller.run((), until=lambda: next(left, None) is None)


@pytest.fixture
def run(real, tmp_path):
    run = Run(real, tmp_path)
    run.add("hold")  # without a pipeline the run would be over
    return run


def test_announced_work_is_granted_to_its_program_and_ends_when_that_says_so(run):
    program = run.add("a")
    run.announce("a", units=64)
    run.go_on()
    (order,) = program.begun
    assert (order.stage, order.step) == (Stage.UPDATE, 1)
    assert any(isinstance(event, StageFinished) and event.order == order.order for event in run.events)


def test_a_name_is_taken_once_and_free_again_where_what_it_was_taken_for_fails():
    inbox = Inbox()
    inbox.claim(PipelineId("a"))
    with pytest.raises(UserError, match="'a' is in this run already; accepted: a name of its own"):
        inbox.claim(PipelineId("a"))
    with pytest.raises(ZeroDivisionError), inbox.claiming(PipelineId("b")):
        _ = 1 // 0
    inbox.claim(PipelineId("b"))


def test_a_failed_program_is_released_and_what_it_reports_later_is_dropped(run):
    program = run.add("a", ends_itself=False)
    run.announce("a")
    run.go_on()
    (order,) = program.begun
    run.inbox.call_soon(lambda backend: backend.external.report(PipelineFailed(pipeline=PipelineId("a"), reason="x")))
    program.report(StageFinished(order=order.order, seconds=1.0))
    program.report(StageFinished(order=OrderId(99), seconds=1.0))
    run.announce("a")
    run.go_on()
    assert run.scheduler.query.status(PipelineId("a")) is PipelineStatus.FAILED
    assert Release(pipeline=PipelineId("a")) in run.actions
    assert not any(isinstance(event, StageFinished) for event in run.events)
    run.announce("a")
    num_events = len(run.events)
    run.go_on()
    assert len(run.events) == num_events


def test_an_order_waits_until_every_state_that_it_evicts_has_left(run):
    first, second = run.add("a", leaves_at_once=False), run.add("b")
    run.announce("a")
    run.go_on()
    run.announce("b")
    run.go_on()
    assert (len(first.begun), second.begun) == (1, []), "a's state is on the device still"
    ((resident, on_left),) = first.leaving
    assert resident == Resident(PipelineId("a"), Phase.TRAIN)
    on_left()
    run.go_on()
    assert len(second.begun) == 1


def test_an_order_waits_for_what_an_earlier_part_of_the_run_left_and_the_next_does_not(run):
    before, device = Program(run.inbox, leaves_at_once=False), DeviceId("train", 0, 0)
    leftover = Resident(PipelineId("p"), Phase.TRAIN)
    run.inbox.call_soon(lambda backend: backend.external.add_leftover(device, leftover, before))
    program = run.add("a")
    run.announce("a")
    run.go_on()
    ((resident, on_left),) = before.leaving
    assert (resident, program.begun) == (leftover, [])
    on_left()
    run.go_on()
    run.announce("a")
    run.go_on()
    assert (len(program.begun), len(before.leaving)) == (2, 1)


def test_a_program_that_is_over_has_left_whether_it_says_so_or_not(run):
    first, second = run.add("a", leaves_at_once=False), run.add("b")
    run.announce("a")
    run.go_on()
    run.announce("b")
    run.go_on()
    first.report(PipelineFailed(pipeline=PipelineId("a"), reason="its process is gone"))
    run.go_on()
    assert (len(first.leaving), len(second.begun)) == (1, 1)


def test_a_cancelled_program_whose_order_waits_for_room_begins_nothing(run):
    first, second = run.add("a", leaves_at_once=False), run.add("b")
    run.announce("a")
    run.go_on()
    run.announce("b")
    run.go_on()
    run.controller.run((), first=[PipelineCancelled(pipeline=PipelineId("b"))], until=lambda: True)
    first.leaving[0][1]()
    run.go_on()
    assert run.scheduler.query.status(PipelineId("b")) is PipelineStatus.CANCELLED
    assert second.begun == []


def test_a_program_in_another_thread_trains_beside_a_pipeline_of_our_own(real, tmp_path):
    """Real workers on one machine: the program's orders and ours take turns, and ours trains to the end."""
    inbox = Inbox()

    class Thread(Program):
        """Works in a thread of its own, three phases one after another, then is done."""

        def begin(self, order: RunStage) -> None:
            self.begun.append(order)
            threading.Thread(target=self._work, args=(order,)).start()

        def _work(self, order: RunStage) -> None:
            self.report(StageFinished(order=order.order, seconds=0.01))
            if len(self.begun) < 3:
                phases = TRAIN if len(self.begun) % 2 else ROLLOUT
                self.report(WorkArrived(pipeline=PipelineId("program"), phases=phases, units=1))
            else:
                self.report(ClientFinished(pipeline=PipelineId("program")))

    program = Thread(inbox)
    pipeline = pipeline_of("program", footprint=Footprint(rollout_device_bytes=1.0, train_device_bytes=1.0))
    inbox.call_soon(lambda backend: backend.external.add(pipeline, program))
    program.report(WorkArrived(pipeline=pipeline.id, phases=ROLLOUT))
    result = run_pipelines(
        real.cluster(rollout=1, train=1), [real.submission("own", num_steps=2)], make_policy("fifo"), tmp_path / "run",
        RunOptions(inbox=inbox), spec={},
    )  # fmt: skip
    assert result.is_complete
    assert {name: one["status"] for name, one in result.summary["pipelines"].items()} == {
        "own": "finished",
        "program": "finished",
    }
    assert [order.stage for order in program.begun] == [Stage.GENERATE, Stage.UPDATE, Stage.GENERATE]
    with LogReader(tmp_path / "run") as reader:
        ends = [entry.value for entry in reader.entries() if isinstance(entry.value, StageFinished)]
    assert {order.order for order in program.begun} <= {end.order for end in ends}
