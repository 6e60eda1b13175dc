"""A worker that stands still is named when it does, and its time is a gap with a name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmux.core.actions import RunStage
from rlmux.core.model import Stage
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.report.timeline.build import build_timeline
from rlmux.report.timeline.history import History
from rlmux.report.timeline.intervals import Cause
from rlmux.runtime.run import RunOptions, run_pipelines
from rlmux.runtime.workers.heartbeat import Activity
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.standstill import StandstillWatch


class StopsTrainer:
    """Stops the train worker as a stage begins, and lets it go on as soon as that was told."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.stopped: int | None = None
        self.told: list[str] = []
        self.notes: list[Any] = []

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        for note in notes:
            if note.type == "worker" and note.role == "train":
                self.pid = note.pid
            if note.type == "warning" and "stands still" in note.reason:
                self.told.append(note.reason)
                os.kill(self.stopped or 0, signal.SIGCONT)
            if note.type == "standstill":
                self.notes.append(note)
        for action in actions:
            is_due = isinstance(action, RunStage) and (action.stage, action.step) == (Stage.UPDATE, 2)
            if is_due and self.stopped is None and self.pid is not None:
                self.stopped = self.pid
                os.kill(self.pid, signal.SIGSTOP)


def test_a_worker_that_is_stopped_is_told_of_at_once_and_its_time_is_not_control(real: Any, tmp_path: Path) -> None:
    stops = StopsTrainer()
    given, folder = [real.submission("p", num_steps=3)], tmp_path / "run"
    options = RunOptions(listeners=[stops])
    result = run_pipelines(real.cluster(), given, make_policy("rollmux"), folder, options, spec={})
    assert result.is_complete
    assert len(stops.told) == 1
    assert f"p/train (process {stops.stopped}) stands still since" in stops.told[0]
    assert "it is stopped" in stops.told[0]
    assert "120 s (call_limit_s)" in stops.told[0]
    (noted,) = stops.notes
    with LogReader(folder) as log:
        timeline = build_timeline(History.of(log.header, log.entries()))
    seconds = timeline.seconds(Cause.STANDSTILL)
    assert noted.seconds >= 2.0
    assert seconds == pytest.approx(noted.seconds, abs=0.5)
    (pieces,) = [
        [one for one in device.intervals if one.cause is Cause.STANDSTILL]
        for device in timeline.devices.values()
        if device.pool == "train"
    ]
    assert all((one.pipeline, one.step, one.stage) == ("p", 2, Stage.UPDATE) for one in pieces)


class Busy:
    """A worker with a call under way, and what its process is doing as the test has it."""

    name, pid, call_limit_s = "p/train", 7, 30.0
    called_s: float | None = 0.0
    num_beats = 0
    now = Activity(state="R", cpu_s=0.0)

    def activity(self) -> Activity:
        return self.now


class Watch:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.outbox = Outbox(0.0, lambda: self.now_s)
        self.worker = Busy()
        self.watch = StandstillWatch(self.outbox)
        self.workers = SimpleNamespace(id="p", processes=[self.worker], devices_of=lambda _: ())

    def after(self, seconds: float, **activity: Any) -> list[Any]:
        """Notes of one look a second."""
        notes: list[Any] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.worker.now = Activity(**activity)
            self.watch.poll([self.workers])  # type: ignore[list-item]
            notes += self.outbox.take()[1]
        return notes


@pytest.mark.parametrize(("state", "why"), [("T", "stopped"), ("R", "no processor")])
def test_standing_still_is_told_once_and_noted_when_it_is_over(state: str, why: str) -> None:
    watch = Watch()
    (told,) = watch.after(10.0, state=state, cpu_s=0.0)
    assert (told.type, why in told.reason) == ("warning", True)
    (noted,) = watch.after(1.0, state="R", cpu_s=0.9)
    assert (noted.type, noted.seconds) == ("standstill", 11.0)
    assert watch.after(1.0, state="R", cpu_s=1.9) == []
    assert watch.after(1.0, state="S", cpu_s=1.9) == []


def test_a_worker_that_waits_or_computes_or_is_idle_does_not_stand_still() -> None:
    watch = Watch()
    assert watch.after(10.0, state="S", cpu_s=0.0) == []
    assert watch.after(10.0, state="D", cpu_s=0.0) == []
    for second in range(10):
        assert watch.after(1.0, state="R", cpu_s=0.5 * second) == []
    watch.worker.called_s = None
    assert watch.after(10.0, state="T", cpu_s=5.0) == []


def test_a_worker_that_shows_life_while_a_server_starts_does_not_stand_still() -> None:
    watch = Watch()
    for _ in range(10):  # it wakes up to look at the server, which has the processor
        watch.worker.num_beats += 1
        assert watch.after(1.0, state="R", cpu_s=0.0) == []


def test_a_standstill_ends_with_its_call() -> None:
    watch = Watch()
    watch.after(5.0, state="T", cpu_s=0.0)
    watch.worker.called_s = None
    (noted,) = watch.after(1.0, state="S", cpu_s=0.0)
    assert (noted.type, noted.began_s, noted.seconds) == ("standstill", 0.0, 6.0)
