"""A real pipeline that gives its devices back at step boundaries, again and again: the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from rlmux.core.events import HoldReleased, ParkRequested, PipelineParked, PipelineRestarted
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares
from rlmux.runtime.control.run_control import Requested
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend

LONG = PipelineId("long")


class ParksAtRandom:
    """Stands where the run API does: parks `long` in a step or after the next, at drawn moments, and lets it go on once
    its processes are gone."""

    is_kept_open = False

    def __init__(self, backend: Any, scheduler: Scheduler, num_parks: int) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self.draw = random.Random(3)
        self.num_left = num_parks
        self.next_s = 0.0
        self.next_step = 0
        self.pids: list[int] = []
        self.events: list[Any] = []
        self.notes: list[Any] = []

    def take_requests(self, now_s: float, upcoming: Sequence[Any]) -> Requested:
        query = self.scheduler.query
        if LONG not in query or now_s < self.next_s or self.num_steps < self.next_step:
            return Requested()
        is_held = query.is_held(LONG)
        if query.status(LONG) is PipelineStatus.RUNNING and self.num_left and not is_held:
            workers = self.backend.workers_by_pipeline.get(LONG)
            if workers is None or any(one.pid is None for one in workers.processes):
                return Requested()
            self.num_left -= 1
            self.pids = [one.pid for one in workers.processes]
            return Requested(events=[ParkRequested(time_s=now_s, pipeline=LONG)])
        if query.status(LONG) is PipelineStatus.WAITING and is_held:
            assert not [pid for pid in self.pids if lives(pid)], "devices and memory are given back"
            self.next_s = now_s + self.draw.uniform(0.0, 0.02)
            self.next_step = self.num_steps + self.draw.randint(0, 1)
            return Requested(events=[HoldReleased(time_s=now_s, pipeline=LONG)])
        return Requested()

    @property
    def num_steps(self) -> int:
        return sum(note.type == "step" and note.pipeline == LONG for note in self.notes)

    def update(self, now_s: float, events: Sequence[Any], actions: object, notes: Sequence[Any]) -> None:
        self.events += events
        self.notes += notes


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("num_parks", "staleness"), [(2, 1), (20, 0)], ids=["twice", "20 times"])
def test_a_pipeline_that_is_parked_again_and_again_trains_the_same_weights(real, tmp_path, num_parks, staleness):
    long = real.submission("long", num_steps=4 + 2 * num_parks, staleness=staleness)
    alone = real.run(tmp_path, [long], policy="solo")
    folder = tmp_path / "parked"
    folder.mkdir()
    scheduler = Scheduler(real.cluster(), make_policy("rollmux"), FairShares())
    backend = local_backend(real.cluster(), folder, options=None)
    asking = ParksAtRandom(backend, scheduler, num_parks)
    try:
        controller = Controller(scheduler, backend, None, run_api=asking)
        controller.run([long, real.submission("other", task="reverse", seed=2, num_steps=3)])
    finally:
        backend.close()
    assert scheduler.query.status(LONG) is PipelineStatus.FINISHED, asking.notes
    parked = [event for event in asking.events if isinstance(event, PipelineParked)]
    assert len(parked) >= num_parks - 1 > 0, "the last one may come behind the last step"
    assert len([event for event in asking.events if isinstance(event, PipelineRestarted)]) == len(parked)
    steps = [note.step for note in asking.notes if note.type == "step" and note.pipeline == LONG]
    assert steps == [*range(1, 5 + 2 * num_parks)], "none is left out or done twice"
    assert backend.weights_sha256(LONG) == alone.sha256[LONG]
