"""Notices in real runs: pipelines leave a node before it goes, or lose their open step; weights stay the same."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import command_line

from rlmux.core.errors import UserError
from rlmux.core.events import NodeJoined, NodeLost, NoticeGiven, PipelineParked
from rlmux.core.model import NodeId, PipelineId
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.runtime.control.notices import node_of, notice_of, return_of
from rlmux.runtime.control.run_control import Requested
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend

FIRST, SECOND = NodeId("rollout", 0), NodeId("rollout", 1)
SORT = PipelineId("sort")


class GivesNotice:
    """Stands where the run API does: gives notice of whichever node the pipeline is on, as soon as a step is over, and
    has the node before it back."""

    is_kept_open = False

    def __init__(self, scheduler: Scheduler, after_steps: Sequence[int], seconds: float) -> None:
        self.scheduler = scheduler
        self.after_steps = list(after_steps)
        self.seconds = seconds
        self.gone: list[NodeId] = []
        self.events: list[Any] = []
        self.notes: list[Any] = []

    def take_requests(self, now_s: float, upcoming: Sequence[Any]) -> Requested:
        query = self.scheduler.query
        if SORT not in query or SORT not in query.placement or not self.after_steps:
            return Requested()
        if query.pipeline(SORT).published_version < self.after_steps[0]:
            return Requested()
        self.after_steps.pop(0)
        (node,) = query.placement.placement(SORT).rollout_nodes
        back = [NodeJoined(time_s=now_s, node=one) for one in self.gone if query.placement.is_lost(one)]
        self.gone = [node]
        return Requested(events=[*back, NoticeGiven(time_s=now_s, node=node, gone_at_s=now_s + self.seconds)])

    def update(self, now_s: float, events: Sequence[Any], actions: object, notes: Sequence[Any]) -> None:
        self.events += events
        self.notes += notes

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def run_with_notices(real, folder: Path, after_steps: Sequence[int], seconds: float) -> tuple[str | None, GivesNotice]:
    on = real.cluster(rollout=2)
    folder.mkdir()
    scheduler = Scheduler(on, make_policy("rollmux"))
    backend = local_backend(on, folder)
    gives = GivesNotice(scheduler, after_steps, seconds)
    try:
        Controller(scheduler, backend, None, [], gives).run([real.submission("sort", num_steps=4)])
    finally:
        backend.close()
    return backend.weights_sha256(SORT), gives


@pytest.fixture(scope="module")
def undisturbed(real, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return real.run(folder, [real.submission("sort", num_steps=4)], on=real.cluster(rollout=2)).sha256["sort"]


@pytest.mark.slow
def test_with_notice_enough_it_moves_twice_and_trains_the_same_weights(real, tmp_path, undisturbed):
    sha256, gives = run_with_notices(real, tmp_path / "run", [1, 3], 60.0)
    assert gives.count(PipelineParked) == 2
    assert sha256 == undisturbed
    assert [note for note in gives.notes if note.type == "loss"] == []


def test_with_none_it_loses_its_open_step_says_so_and_trains_the_same_weights(real, tmp_path, undisturbed):
    sha256, gives = run_with_notices(real, tmp_path / "run", [2], 0.0)
    assert gives.count(NodeLost) == 1
    assert sha256 == undisturbed
    losses = [note.reason for note in gives.notes if note.type == "loss"]
    if not gives.count(PipelineParked):  # else it stood at a step boundary when the notice came
        assert len(losses) == 1
        assert losses[0].startswith("node rollout-0 is gone; what came after step ")


def test_what_cannot_be_said_of_a_node_is_told(real):
    scheduler = Scheduler(real.cluster(rollout=2), make_policy("rollmux"))
    with pytest.raises(UserError, match="no node 'rollout-2'; accepted: rollout-0 to rollout-1, train-0"):
        node_of(scheduler.cluster, "rollout-2")
    with pytest.raises(UserError, match="no node 'gpu'; accepted"):
        notice_of(scheduler, "gpu", 1.0, 0.0)
    with pytest.raises(UserError, match="a notice of -1 seconds; accepted: 0 or more"):
        notice_of(scheduler, "rollout-0", -1.0, 0.0)
    with pytest.raises(UserError, match="node 'rollout-0' is there; accepted: one that is gone, or about to go"):
        return_of(scheduler, "rollout-0")
    event, _ = notice_of(scheduler, "rollout-0", 5.0, 1.0)
    assert event == NoticeGiven(node=FIRST, gone_at_s=6.0)
    scheduler.handle(replace(event, time_s=1.0))
    assert notice_of(scheduler, "rollout-0", 2.0, 2.0)[0].gone_at_s == 4.0, "it may be told again"
    scheduler.handle(NodeLost(time_s=6.0, node=FIRST))
    with pytest.raises(UserError, match="node 'rollout-0' is gone already; accepted: one that is there"):
        notice_of(scheduler, "rollout-0", 5.0, 7.0)
    scheduler.handle(replace(return_of(scheduler, "rollout-0")[0], time_s=7.0))


def test_the_command_needs_a_run_that_goes_on(tmp_path):
    words = command_line.command("notice", str(tmp_path), "rollout-0")
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
