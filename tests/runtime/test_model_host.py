"""Real workers of several pipelines: a sampling worker that adapters have in common may be lost."""

from __future__ import annotations

import os
import queue
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_sampling import config, random_adapters, requests, sampled

from rlmux.core.actions import RunStage, Switch
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, Stage
from rlmux.runtime.burst_workers import Answer
from rlmux.runtime.bursts import BurstOptions
from rlmux.runtime.local import LocalProcesses
from rlmux.runtime.model_host import ModelHost, PipelineDriver

DEVICE = DeviceId("rollout", 0, 0)
LIMIT_S = 120


class Place:
    """One device, which pipelines get in the order in which they ask; hears of answers."""

    def __init__(self) -> None:
        self.drivers: dict[PipelineId, PipelineDriver] = {}
        self.answers: queue.SimpleQueue[tuple[PipelineId, Answer]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.shared: list[dict[str, int]] = []
        self.failed_pipelines: list[str] = []
        self.num_lost = 0
        self._waiting: deque[PipelineId] = deque()
        self._running: tuple[OrderId, PipelineId] | None = None
        self._num_orders = 0

    def arrived(self, pipeline: PipelineId, phases: tuple[Phase, ...], units: int = 0) -> None:
        if pipeline not in self._waiting:
            self._waiting.append(pipeline)
        self._begin()

    def finished(self, order: OrderId, **fields: Any) -> None:
        assert self._running is not None
        assert self._running[0] == order
        self._running = None
        self._begin()

    def worker_lost(self, pipeline: PipelineId, device: DeviceId) -> None:
        self.num_lost += 1
        if self._running is not None and self._running[1] == pipeline:
            self._running = None
        self.arrived(pipeline, (Phase.ROLLOUT,))

    def failed(self, pipeline: PipelineId, reason: str) -> None:
        self.failed_pipelines.append(f"{pipeline}: {reason}")

    def note(self, type: str, **fields: Any) -> None:
        self.shared.append(fields["tokens"])

    def answered(self, pipeline: PipelineId, answer: Answer) -> None:
        self.answers.put((pipeline, answer))

    def over(self, pipeline: PipelineId, reason: str) -> None:
        self.ended.put(reason)

    def _begin(self) -> None:
        if self._running is None and self._waiting:
            self._num_orders += 1
            self._running = OrderId(self._num_orders), self._waiting.popleft()
            order = RunStage(
                order=self._running[0], pipeline=self._running[1], step=self._num_orders, stage=Stage.GENERATE,
                devices=(DEVICE,), weight_version=0, switch=Switch.WARM,
            )  # fmt: skip
            self.drivers[self._running[1]].begin(order)


class Processes(LocalProcesses):
    """Workers of this machine, and the process of each, which a call may be the death of."""

    pids: list[int]
    deadly_call: str | None = None

    def kill_upon(self, worker: Any) -> None:
        ask = worker.call

        def call(now_s: float, method: str, *rest: Any) -> None:
            ask(now_s, method, *rest)
            if method == self.deadly_call:
                os.kill(worker.pid, signal.SIGKILL)

        worker.call = call

    def spawn(self, *args: Any, **options: Any) -> Any:
        worker = super().spawn(*args, **options)
        self.pids.append(worker.pid or 0)
        self.kill_upon(worker)
        return worker


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    return random_adapters(tmp_path)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    made = Processes({}, None, bases=tmp_path / "bases")
    made.pids = []
    return made


@pytest.fixture
def host(processes: Processes) -> Iterator[tuple[ModelHost, Place]]:
    place = Place()
    options = BurstOptions(chunk_s=0.02, burst_s=0.05)  # so that the second one joins while the first has work left
    made = ModelHost(processes, place, place, wake=processes.wake, options=options)  # type: ignore[arg-type]
    made.start()
    yield made, place
    made.close()


@pytest.mark.slow
def test_pipelines_whose_common_sampling_worker_is_killed_go_on_alone_to_the_same_sequences(
    host, processes, tmp_path, weights
):
    models, place = host
    names = [PipelineId("a"), PipelineId("b")]
    for name in names:
        place.drivers[name] = models.open(name, config(name), tmp_path / name)
    asked = {(name, one.id): one for name in names for one in requests(name, 240)}
    for (name, _), request in asked.items():
        models.sample(name, request, weights[name])
    found = dict([first := taken(place)])
    assert len(processes.pids) == 1, f"{first[0]} was sampled by a worker that both are to have"
    while not place.shared:
        assert len(found) < len(asked), "they were sampled by turns"
        found.update([taken(place)])
    os.kill(processes.pids[0], signal.SIGKILL)
    while len(found) < len(asked):
        found.update([taken(place)])
    assert (len(processes.pids), place.num_lost, place.failed_pipelines) == (3, 2, [])
    alone = {**sampled(tmp_path, weights, "a", 240)[0], **sampled(tmp_path, weights, "b", 240)[0]}
    assert found == alone


def test_a_request_that_ends_every_worker_is_given_up_after_four(host, processes, tmp_path, weights):
    models, place = host
    processes.deadly_call = "run_chunk"
    name = PipelineId("a")
    place.drivers[name] = models.open(name, config(name), tmp_path / name)
    models.sample(name, requests(name, 1)[0], weights[name])
    assert place.ended.get(timeout=LIMIT_S).endswith(", 4 times in a row")
    assert (len(processes.pids), len(place.failed_pipelines), place.answers.empty()) == (4, 1, True)


def taken(place: Place) -> tuple[tuple[str, str], Any]:
    pipeline, answer = place.answers.get(timeout=LIMIT_S)
    assert answer.error is None
    return (str(pipeline), answer.id), answer.value
