"""What the desk of a server tells a program, and the scheduler of it; message by message, without processes."""

from __future__ import annotations

import json
import socket
from itertools import count

import pytest

from rlmux.broker.permit_manager import PermitManager
from rlmux.broker.server import ProgramConnection
from rlmux.core.actions import RunStage
from rlmux.core.errors import UserError
from rlmux.core.events import ClientFinished, PipelineFailed, WorkArrived
from rlmux.core.model import Cluster, DeviceId, OrderId, Phase, PipelineId, Pool, Stage

NAME = PipelineId("p")


def refuse_taken(name: PipelineId) -> None:
    if name == "taken":
        raise UserError(f"pipeline {name!r} is in this run already; accepted: a name of its own")


@pytest.fixture
def connection():
    with socket.socket() as one:
        yield ProgramConnection(one, pid=None)


@pytest.fixture
def manager(connection) -> PermitManager:
    """A pool whose file says nothing of memory, and a program that has joined."""
    cluster = Cluster(pools={"gpu0": Pool(name="gpu0", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=1)})
    clock = map(float, count())
    manager = PermitManager(
        cluster,
        refuse_taken,
        policy="fifo",
        now_s=lambda: next(clock),
        is_allowed=lambda connection, proof: True,
        leave_limit_s=1e9,
        lease_s=0.0,
    )
    say_hello(manager, connection, NAME)
    return manager


def say_hello(manager: PermitManager, connection: ProgramConnection, job: str) -> None:
    hello = {"t": "hello", "v": 1, "job": job, "rank": 0, "world": 1, "pid": 1, "host": "h", "session": f"s-{job}"}
    manager.take_message(connection, {**hello, "pools": {"train": "gpu0"}})


def ask(manager: PermitManager, connection: ProgramConnection) -> None:
    manager.take_message(connection, {"t": "ask", "id": 1, "pools": ["gpu0"], "phase": "train"})


def test_a_program_named_like_a_pipeline_of_the_server_is_refused_and_disturbs_nobody(manager, connection):
    with socket.socket() as another:
        late = ProgramConnection(another, pid=None)
        say_hello(manager, late, "taken")
        (line,) = [line for to, line in manager.outgoing if to is late]
        assert json.loads(line) == {
            "t": "refused",
            "reason": "pipeline 'taken' is in this run already; accepted: a name of its own",
        }
        say_hello(manager, late, "free")
    ask(manager, connection)
    assert list(manager.roster.programs) == [NAME, "free"]
    assert [event.pipeline for event in manager.events if isinstance(event, WorkArrived)] == [NAME]


def test_a_program_that_has_room_beside_others_ends_its_permit_for_them_and_does_not_leave(manager, connection):
    ask(manager, connection)
    devices = (DeviceId("gpu0", 0, 0),)
    manager.begin(
        RunStage(order=OrderId(1), pipeline=NAME, step=1, stage=Stage.UPDATE, devices=devices, weight_version=0)
    )
    called: list[str] = []
    manager.evict(NAME, "gpu0", lambda: called.append("while it held"))
    assert called == []
    manager.take_message(connection, {"t": "done", "fence": 1, "used_s": 1.0})
    assert called == ["while it held"]
    manager.evict(NAME, "gpu0", lambda: called.append("between two permits"))
    assert called == ["while it held", "between two permits"]
    assert "told_to_leave" not in [note.what for note in manager.notes]


@pytest.mark.parametrize(("asks", "end"), [(False, ClientFinished), (True, PipelineFailed)])
def test_a_program_that_says_bye_and_asks_again_has_not_finished(manager, connection, asks, end):
    manager.take_message(connection, {"t": "bye"})
    if asks:
        ask(manager, connection)
    manager.lose_connection(connection)
    manager.poll_programs()
    assert isinstance(manager.events[-1], end)
