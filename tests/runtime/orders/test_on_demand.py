"""On-demand pipelines with real workers: a process that adapters have in common may be lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.orders.test_shared_sampling import config, random_adapters, requests, sampled
from tests.runtime.workers.test_tenant_hosts import STEP, loss, trained_alone, values
from tests.waiting import until

from rlmux.core.events import PipelineFailed, WorkerLost
from rlmux.core.model import Footprint, Pipeline, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.rl.client_requests import PackedLoss, TrainRequest
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import LocalProcesses
from rlmux.runtime.orders.request_batches import BatchOptions
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.request_workers import RequestResult


class Processes(LocalProcesses):
    """Workers of this machine, and the process of each, which a call may be the death of."""

    pids: list[int]
    deadly_call: str | None = None

    def kill_upon(self, worker: Any) -> None:
        ask = worker.call

        def call(now_s: float, method: str, *rest: Any) -> None:
            if method == self.deadly_call:  # it stands still first: a quick one would have answered
                os.kill(worker.pid, signal.SIGSTOP)
            ask(now_s, method, *rest)
            if method == self.deadly_call:
                os.kill(worker.pid, signal.SIGKILL)

        worker.call = call

    def spawn(self, *args: Any, **options: Any) -> Any:
        worker = super().spawn(*args, **options)
        self.pids.append(worker.pid or 0)
        self.kill_upon(worker)
        return worker


class Run:
    """A controller with real workers, and the client of its on-demand pipelines."""

    def __init__(self, cluster: Any, folder: Path, processes: Processes) -> None:
        self.inbox, self.folder = Inbox(), folder
        options = BatchOptions(chunk_s=0.02, batch_s=0.05)  # so that the second one joins while the first has work left
        self.backend = WorkerBackend(cluster, folder, processes, folder / "weights", batch_options=options)
        self.backend.connect(self.inbox)
        self.scheduler = Scheduler(cluster, make_policy("fifo"))
        self.controller = Controller(self.scheduler, self.backend, None, [self], has_news=lambda: True)
        self.results: dict[tuple[str, str], RequestResult] = {}
        self.shared: list[Any] = []
        self.events: list[Any] = []
        self.checkpoints: list[tuple[str, str, str]] = []

    def open(self, name: str) -> PipelineId:
        pipeline = Pipeline(
            id=PipelineId(name), num_steps=None, work_arrives=True,
            footprint=Footprint(rollout_device_bytes=1.0, train_device_bytes=1.0),
        )  # fmt: skip
        folder = self.folder / name
        folder.mkdir()
        self.inbox.call_soon(lambda backend: backend.on_demand.open(pipeline, config(name), folder, self, None))
        return pipeline.id

    def sample(self, name: PipelineId, request: Any, weights: Path) -> None:
        self.inbox.call_soon(lambda backend: backend.on_demand.sample(name, request, weights))

    def train(self, name: PipelineId, requests: Iterable[tuple[str, TrainRequest]]) -> None:
        for id, request in requests:
            self.inbox.call_soon(lambda backend, id=id, request=request: backend.on_demand.train(name, id, request))

    def go_on(self, is_so: Callable[[], bool]) -> None:
        def is_so_after_a_pass() -> bool:
            passes = iter((False, True))
            self.controller.run([], until=lambda: next(passes))
            return is_so()

        until(is_so_after_a_pass, "the run", seen=lambda: (len(self.results), self.events[-5:]), poll_s=0.0)

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        self.events += events
        self.shared += [note.tokens for note in notes if note.type == "shared_batch"]

    def on_result(self, pipeline: PipelineId, result: RequestResult) -> None:
        assert result.error is None
        self.results[pipeline, result.id] = result.value

    def on_checkpoint(self, pipeline: PipelineId, request_id: str, folder: Path, sha256: str) -> None:
        self.checkpoints.append((pipeline, request_id, sha256))

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    return random_adapters(tmp_path)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    made = Processes({}, None, bases=tmp_path / "bases")
    made.pids = []
    return made


@pytest.fixture
def run(processes: Processes, real: Any, tmp_path: Path) -> Iterator[Run]:
    made = Run(real.cluster(), tmp_path, processes)
    yield made
    made.backend.close()


@pytest.mark.slow
def test_pipelines_whose_common_sampling_worker_is_killed_go_on_alone_to_the_same_sequences(
    run, processes, tmp_path, weights
):
    names = [run.open("a"), run.open("b")]
    asked = [(name, one) for name in names for one in requests(name, 240)]
    for name, request in asked:
        run.sample(name, request, weights[name])
    run.go_on(lambda: bool(run.shared))
    assert (len(processes.pids), len(run.results) < len(asked)) == (1, True)
    os.kill(processes.pids[0], signal.SIGKILL)
    run.go_on(lambda: len(run.results) == len(asked))
    assert (len(processes.pids), len(run.events_of(WorkerLost)), run.events_of(PipelineFailed)) == (3, 2, [])
    alone = tmp_path / "alone"
    alone.mkdir()
    assert run.results == {**sampled(alone, weights, "a", 240)[0], **sampled(alone, weights, "b", 240)[0]}


def test_a_request_that_ends_every_worker_is_given_up_after_four(run, processes, weights):
    processes.deadly_call = "run_chunk"
    name = run.open("a")
    run.sample(name, requests(name, 1)[0], weights[name])
    run.go_on(lambda: bool(run.events_of(PipelineFailed)))
    (failed,) = run.events_of(PipelineFailed)
    assert failed.reason.endswith(", 4 times in a row")
    assert (len(processes.pids), run.results) == (4, {})
    run.sample(name, requests(name, 1)[0], weights[name])
    run.go_on(lambda: not run.inbox.has_commands())
    assert run.scheduler.query.status(name) is PipelineStatus.FAILED, "a request of a pipeline that is over is dropped"


def test_a_worker_whose_call_shows_no_life_is_replaced(run, processes, weights):
    name = run.open("a")
    run.sample(name, requests(name, 1)[0], weights[name])
    run.go_on(lambda: bool(processes.pids))
    (worker,) = run.backend.on_demand.find(name).workers
    worker.call_limit_s = 1.0
    os.kill(processes.pids[0], signal.SIGSTOP)
    run.go_on(lambda: bool(run.results))
    assert [event.pipeline for event in run.events_of(WorkerLost)] == ["a"]
    assert len(processes.pids) == 2


@pytest.mark.slow
def test_requests_of_a_common_training_process_that_is_killed_are_repeated_to_the_same_bits(run, processes):
    names = [run.open("a"), run.open("b")]
    first = {name: [("s0", loss(ord(name), 3)), ("s1", STEP)] for name in names}
    then = {name: [(f"l{number}", loss(number, 60)) for number in range(6)] + [("u", STEP)] for name in names}
    for name in names:
        run.train(name, first[name])
    run.go_on(lambda: len(run.checkpoints) == 2)
    assert len(processes.pids) == 1
    for name in names:
        run.train(name, then[name])
    run.go_on(lambda: any(len(tokens) == 2 for tokens in run.shared))
    assert len(run.results) < 14
    os.kill(processes.pids[0], signal.SIGKILL)
    run.go_on(lambda: len(run.checkpoints) == 4)
    assert (len(processes.pids), len(run.events_of(WorkerLost)), run.events_of(PipelineFailed)) == (2, 2, [])
    for name in names:
        found = [RequestResult(id=id, value=value) for (of, id), value in run.results.items() if of == name]
        assert values(found) == trained_alone(config(name), first[name] + then[name])


def test_a_request_that_ends_every_training_process_fails_its_pipeline_and_the_other_goes_on(run, processes):
    names = [run.open("a"), run.open("b")]
    first = [("s0", loss(1, 3)), ("s1", STEP)]
    for name in names:
        run.train(name, first)
    run.go_on(lambda: len(run.checkpoints) == 2)
    deadly = PackedLoss(body=1, read=os._exit, write=bytes, is_forward_only=True, num_tokens=1)  # type: ignore[arg-type]
    then = [("s2", loss(2, 3)), ("s3", STEP)]
    run.train(names[0], [("s2", deadly)])
    run.train(names[1], then)
    run.go_on(lambda: bool(run.events_of(PipelineFailed)) and ("b", "s3") in run.results)
    (failed,) = run.events_of(PipelineFailed)
    assert (failed.pipeline, failed.reason.endswith(", 4 times in a row")) == ("a", True)
    found = [RequestResult(id=id, value=value) for (of, id), value in run.results.items() if of == "b"]
    assert values(found) == trained_alone(config("b"), first + then)
