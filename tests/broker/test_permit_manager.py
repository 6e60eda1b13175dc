"""What the desk of a server tells a program, and the scheduler of it; message by message, without processes."""

from __future__ import annotations

import json
import socket
from itertools import count

import pytest

from rlmux.broker.permit_manager import Desk
from rlmux.broker.server import Connection
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
        yield Connection(one, pid=None)


@pytest.fixture
def desk(connection) -> Desk:
    """A pool whose file says nothing of memory, and a program that has joined."""
    cluster = Cluster(pools={"gpu0": Pool(name="gpu0", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=1)})
    clock = map(float, count())
    desk = Desk(
        cluster,
        refuse_taken,
        policy="fifo",
        now_s=lambda: next(clock),
        is_allowed=lambda connection, proof: True,
        leave_limit_s=1e9,
        lease_s=0.0,
    )
    say_hello(desk, connection, NAME)
    return desk


def say_hello(desk: Desk, connection: Connection, job: str) -> None:
    hello = {"t": "hello", "v": 1, "job": job, "rank": 0, "world": 1, "pid": 1, "host": "h", "session": f"s-{job}"}
    desk.take_message(connection, {**hello, "pools": {"train": "gpu0"}})


def ask(desk: Desk, connection: Connection) -> None:
    desk.take_message(connection, {"t": "ask", "id": 1, "pools": ["gpu0"], "phase": "train"})


def test_a_program_named_like_a_pipeline_of_the_server_is_refused_and_disturbs_nobody(desk, connection):
    with socket.socket() as another:
        late = Connection(another, pid=None)
        say_hello(desk, late, "taken")
        (line,) = [line for to, line in desk.outgoing if to is late]
        assert json.loads(line) == {
            "t": "refused",
            "reason": "pipeline 'taken' is in this run already; accepted: a name of its own",
        }
        say_hello(desk, late, "free")
    ask(desk, connection)
    assert list(desk.roster.programs) == [NAME, "free"]
    assert [event.pipeline for event in desk.events if isinstance(event, WorkArrived)] == [NAME]


def test_a_program_that_has_room_beside_others_ends_its_permit_for_them_and_does_not_leave(desk, connection):
    ask(desk, connection)
    devices = (DeviceId("gpu0", 0, 0),)
    desk.begin(RunStage(order=OrderId(1), pipeline=NAME, step=1, stage=Stage.UPDATE, devices=devices, weight_version=0))
    called: list[str] = []
    desk.evict(NAME, "gpu0", lambda: called.append("while it held"))
    assert called == []
    desk.take_message(connection, {"t": "done", "fence": 1, "used_s": 1.0})
    assert called == ["while it held"]
    desk.evict(NAME, "gpu0", lambda: called.append("between two permits"))
    assert called == ["while it held", "between two permits"]
    assert "told_to_leave" not in [note.fields["what"] for note in desk.notes]


@pytest.mark.parametrize(("asks", "end"), [(False, ClientFinished), (True, PipelineFailed)])
def test_a_program_that_says_bye_and_asks_again_has_not_finished(desk, connection, asks, end):
    desk.take_message(connection, {"t": "bye"})
    if asks:
        ask(desk, connection)
    desk.lose_connection(connection)
    desk.look_around()
    assert isinstance(desk.events[-1], end)
