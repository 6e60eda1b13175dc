"""Events get their time in one place, as they enter a tick: it never goes back, whatever backend, thread or order."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmux.core.actions import Action, Admit, Pause, RunStage
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.estimation.cycles import USER_CODE_PATIENCE_S
from rlmux.core.events import Event, RewardOverdue, StagePaused, TimeReached, WorkArrived, WorkWithdrawn
from rlmux.core.model import (
    AdmissionKind,
    DeviceId,
    GroupId,
    NodeId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    Placement,
    Stage,
)
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.rl.packed_turns import PackedTurns
from rlmux.rl.types import ChunkReport, FinishedTurn
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.controller import Controller
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.worker_calls import RolloutChunkResult


class MovingClock:
    """Every reading is later than the one before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lock = threading.Lock()
        self.time_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            self.time_s += self._rng.uniform(1e-6, 1e-3)
            return self.time_s


class Dates:
    """Stands in for a scheduler: keeps events as they come, and decides nothing."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.query = SimpleNamespace(is_idle=lambda: False, has_orders=lambda: True, has_order=lambda order: True)

    def handle(self, event: Event) -> list[Action]:
        self.events.append(event)
        return []

    def never_go_back(self) -> bool:
        times = [event.time_s for event in self.events]
        return not any(math.isnan(each) for each in times) and times == sorted(times)


def tick(controller: Controller) -> None:
    left = iter((False, True))
    controller.run((), until=lambda: next(left))


class OwnPipeline:
    """One pipeline of a real WorkerBackend; its workers answer when the test says so."""

    def __init__(self, real: Any, backend: WorkerBackend, workplace: Any, name: str, number: int) -> None:
        self._backend, self._workplace, self._name = backend, workplace, name
        self._orders = iter(range(1000 * number, 1000 * number + 1000))
        submission = real.submission(name, task="guess")
        backend.add_pipeline(submission)
        self.device = DeviceId("rollout", number - 1, 0)
        placement = Placement(
            group=GroupId(number),
            rollout_nodes=(NodeId("rollout", number - 1),),
            train_nodes=(NodeId("train", number - 1),),
        )
        backend.execute(Admit(pipeline=PipelineId(name), placement=placement, kind=AdmissionKind.NEW))
        env = PipelineEnv(submission.config)
        self._begun = env.begin_step(1), env.is_single_turn
        self.requests = list(self._begun[0])
        self.order: OrderId | None = None
        self.is_scored = False

    def worker(self, role: str) -> Any:
        return self._workplace.workers[f"{self._name}/{role}"]

    def next_call(self, role: str) -> str | None:
        calls = self.worker(role).asked()
        return calls[0] if calls else None

    def run(self, stage: Stage) -> None:
        order = OrderId(next(self._orders))
        if stage is Stage.GENERATE:
            self.order = order
        devices = (self.device,) if stage is Stage.GENERATE else ()
        pipeline = PipelineId(self._name)
        self._backend.execute(
            RunStage(order=order, pipeline=pipeline, step=1, stage=stage, devices=devices, weight_version=0)
        )

    def assign_prompts(self) -> None:
        self.worker("env").answer("begin_step", self._begun)

    def score(self) -> None:
        self.is_scored = True
        self.run(Stage.REWARD)

    def end_chunk(self, *, active: int, finished: list[FinishedTurn]) -> None:
        report = ChunkReport(
            finished=(), num_active=active, num_waiting=0, num_waiting_for_env=len(finished), sampled_tokens=0,
            prefill_tokens=0, decode_steps=0, seconds=0.1,
        )  # fmt: skip
        result = RolloutChunkResult(report=report, turns=PackedTurns.pack(finished), load_s=0.0)
        self.worker(f"rollout-{self.device}").answer("run_chunk", result)

    def meddle(self, rng: random.Random) -> None:
        """Something that may happen now: an order, a pause, an answer, a loss. Too many losses fail the pipeline."""
        if PipelineId(self._name) not in self._backend.workers_by_pipeline:
            return
        sampler = f"rollout-{self.device}"
        choices = []
        if self.order is None:
            choices.append(lambda: self.run(Stage.GENERATE))
        else:
            choices.append(lambda: self._backend.execute(Pause(order=self.order)))
        if self.next_call("env") == "begin_step":
            choices.append(self.assign_prompts)
        elif not self.is_scored and self.order is not None:
            choices.append(self.score)
        if self.next_call("env") == "on_turns":
            choices.append(lambda: self.worker("env").answer("on_turns", ([], [])))
        if self.next_call(sampler) == "run_chunk":
            turns = [turn_of(self.requests.pop()) for _ in range(min(len(self.requests), 2))]
            choices.append(lambda: self.end_chunk(active=rng.randrange(2), finished=turns))
            choices.append(lambda: self._workplace.lost.append(self.worker(sampler)))
        rng.choice(choices)()

    def note_ends(self, events: list[Event]) -> None:
        if any(getattr(event, "order", None) == self.order and not _goes_on(event) for event in events) or any(
            getattr(event, "device", None) == self.device for event in events
        ):
            self.order = None


def _goes_on(event: Event) -> bool:
    return type(event).__name__ in ("ChunkFinished", "RewardOverdue")


def turn_of(request: Any) -> FinishedTurn:
    return FinishedTurn(
        id=request.id, tokens=(3,), is_sampled=(True,), logprobs=(-1.0,), versions=(0,), stop_reason="stop", num_turns=1
    )


@pytest.fixture
def own(real: Any, tmp_path: Path) -> Any:
    """(backend, its two pipelines, its clock) of real code over workers that answer when told."""

    def make(seed: int) -> tuple[WorkerBackend, list[OwnPipeline], MovingClock]:
        clock, workplace = MovingClock(random.Random(seed)), real.Workplace()
        folder = tmp_path / str(seed)
        (folder / "weights").mkdir(parents=True)
        backend = WorkerBackend(real.cluster(rollout=2, train=2), folder, workplace, folder / "weights", clock=clock)
        return backend, [OwnPipeline(real, backend, workplace, name, 1 + i) for i, name in enumerate("pq")], clock

    return make


def test_a_rollout_and_a_reward_that_both_wait_too_long_are_told_of_in_one_poll(own: Any) -> None:
    backend, (p, q), clock = own(0)
    controller, dates = controller_of(backend)
    p.run(Stage.GENERATE)
    q.run(Stage.GENERATE)
    q.assign_prompts()
    q.run(Stage.REWARD)
    clock.time_s += 2 * USER_CODE_PATIENCE_S
    for _ in range(3):
        tick(controller)
    assert {StagePaused, RewardOverdue} <= {type(event) for event in dates.events}
    assert dates.never_go_back()


def controller_of(backend: Any) -> tuple[Controller, Dates]:
    dates = Dates()
    return Controller(dates, backend, None), dates  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_dates_never_decrease_under_random_orders_waits_losses_and_clients(own: Any, seed: int) -> None:
    backend, pipelines, clock = own(seed)
    inbox = Inbox()
    backend.connect(inbox)
    controller, dates = controller_of(backend)
    rng = random.Random(seed)
    client = PipelineId("client")
    pipeline = Pipeline(id=client, num_steps=None, work_arrives=True)
    inbox.call_soon(lambda backend: backend.external.add(pipeline, SimpleNamespace()))
    arrived = WorkArrived(pipeline=client, phases=(Phase.TRAIN,))
    withdrawn = WorkWithdrawn(pipeline=client, phases=(Phase.TRAIN,))
    is_over = threading.Event()

    def speak() -> None:
        while not is_over.wait(0.001):
            for event in (arrived, withdrawn):
                inbox.call_soon(lambda backend, event=event: backend.external.report(event))

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        for _ in range(60):
            for _ in range(rng.randrange(3)):
                rng.choice(pipelines).meddle(rng)
            if rng.random() < 0.3:
                clock.time_s += USER_CODE_PATIENCE_S
            num_before = len(dates.events)
            tick(controller)
            for pipeline in pipelines:
                pipeline.note_ends(dates.events[num_before:])
    finally:
        is_over.set()
        thread.join()
    assert len(dates.events) > 10
    assert dates.never_go_back()


def test_an_event_without_a_date_is_refused(real: Any) -> None:
    scheduler = Scheduler(real.cluster(), make_policy("fifo"))
    with pytest.raises(IllegalTransitionError, match="it has no date"):
        scheduler.handle(TimeReached())
