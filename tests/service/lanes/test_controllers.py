"""A lane whose controller hangs, or ends again and again, says so: it is no lane that runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.lane_here import LANE, Lane
from tests.waiting import until

from rlmux.config.load import parse_spec
from rlmux.config.service_file import Lane as ServiceLane
from rlmux.log.folder_lock import FolderLock
from rlmux.service.dashboard.auth.access import SERVER
from rlmux.service.dashboard.control import Control
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import CallerContext
from rlmux.service.index.indexer import LaneIndexer
from rlmux.service.index.lanes import Root
from rlmux.service.lanes import controllers
from rlmux.service.lanes.controllers import MAX_DEATHS, LaneController
from rlmux.service.problems import ProblemError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 100.0
        return self.now_s


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path)
    yield made
    made.close()


@pytest.fixture
def hung(lane: Lane) -> Iterator[LaneController]:
    """A lane whose socket nothing reads, though its process lives."""
    lane.hang()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controllers, "ANSWER_LIMIT_S", 0.05)
        yield LaneController(lane.folder.parent, lane.name, ServiceLane(spec=lane.spec), now_s=Clock())


def test_a_lane_that_answers_is_not_down(lane):
    controller = LaneController(lane.folder.parent, lane.name, ServiceLane(spec=lane.spec), now_s=Clock())
    for _ in range(4):
        controller.poll()
    assert (controller.trouble(), controller.down()) == (None, None)


def test_a_controller_that_lives_and_does_not_answer_is_told_of_and_is_left_alone(hung):
    hung.poll()
    assert hung.down() is None, "one answer may be late"
    hung.poll()
    assert hung.trouble() == hung.down()
    assert hung.down().endswith(" lives, and does not answer: it is stopped or hangs")


def test_a_lane_that_does_not_answer_is_an_alert_and_refuses_at_once(hung):
    indexer = LaneIndexer(hung.folder, hung.folder / "index.db")
    indexer.catch_up()
    indexer.close()
    reads = Reads(Root(hung.folder, hung.folder), lambda folder: hung.trouble(), lambda folder: hung.down())
    assert reads.lane_row("cpu", SERVER)["state"] == "running"
    hung.poll()
    hung.poll()
    row = reads.lane_row("cpu", SERVER)
    assert (row["state"], row["banner"]) == ("not_answering", hung.down())
    caller = CallerContext(path={"lane": "cpu"}, principal=SERVER, address="", headers={}, cookie="", is_https=False)
    (alert,) = reads.alerts(caller, "cpu").items
    assert (alert.rule, alert.level, alert.text) == ("lane_down", "critical", hung.down())
    assert not reads.health(caller).lanes["cpu"].up
    with pytest.raises(ProblemError, match="does not answer"):
        Control(reads)._request(caller, "queue")


def test_a_controller_that_ends_again_and_again_is_started_a_bounded_number_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    spec = parse_spec(LANE, source="lanes", folder=tmp_path, may_be_empty=True)
    controller = LaneController(tmp_path, "cpu", ServiceLane(spec=spec), now_s=Clock())
    starts = 0

    def is_down() -> bool:
        nonlocal starts
        before = controller._process
        controller.poll()
        starts += controller._process is not None and controller._process is not before
        return controller.down() is not None

    until(is_down, "the end of all attempts")
    assert starts == MAX_DEATHS
    controller.poll()
    assert controller._process is None
    assert (
        controller.trouble()
        == controller.down()
        == (
            "the controller of cpu has ended 5 times within an hour, and is started no more; the one before ended with "
            "code 1: it printed nothing; to try again, start the service again"
        )
    )
    (tmp_path / "cpu").mkdir()
    with FolderLock.take(tmp_path / "cpu") as lock:  # a person resumes the run
        lock.sign()
        assert controller.down() is None
