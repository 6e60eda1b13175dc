"""Clients written for the time-slice orchestrator join the broker: generated stubs, real channels, real kills."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.grpc_room import SERVICES, GrpcRoom, make_stubs
from tests.broker.room import SIZE, check_never_both, result, until

from rlmux.broker.loopback import find_process, find_socket
from rlmux.broker.processes import process_of
from rlmux.cli.main import run_command_line
from rlmux.core.events import WorkArrived
from rlmux.report.log import LogReader
from rlmux.runtime.run_status import StatusReader

pytest.importorskip("grpc")
pytest.importorskip("grpc_tools")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stubs")
    return {kind: make_stubs(folder / kind, *names) for kind, names in SERVICES.items()}


@pytest.fixture
def make_room(tmp_path: Path, stubs: dict[str, Path]) -> Iterator[object]:
    rooms: list[GrpcRoom] = []

    def make(pools: dict | None = None, **keys) -> GrpcRoom:
        rooms.append(GrpcRoom(tmp_path, stubs, pools, **keys))
        return rooms[-1]

    yield make
    for room in rooms:
        room.end()


@pytest.fixture
def room(make_room) -> GrpcRoom:
    room = make_room()
    room.start()
    return room


def statuses(room: GrpcRoom) -> dict[str, dict]:
    reader = StatusReader(room.out)
    try:
        return reader.read()["pipelines"]
    finally:
        reader.close()


def test_acquire_blocks_until_the_other_yields_which_hears_who_waits(room):
    a, b = room.client("a"), room.client("b", kind="accelerator")
    granted = a.ask("acquire")
    assert (granted["success"], granted["contextRestored"]) == (True, False)
    assert a.ask("acquire")["success"], "it has it already"
    b.tell("acquire")
    room.waits(1)
    assert a.ask("yield") == {"success": True, "pendingWaiters": "1", "snapshotDeferred": False}
    granted = b.answer()
    assert granted["success"]
    assert int(granted["waitedMs"]) > 0
    assert b.ask("yield") == {"success": True, "pendingWaiters": "0", "snapshotDeferred": True}
    assert b.ask("groups") == {"groupIds": ["gpu0"]}
    a.leave()
    b.leave()
    until(lambda: {one["status"] for one in statuses(room).values()} == {"finished"})
    assert set(statuses(room)) == {"a.gpu0", "b.gpu0"}


def test_the_status_of_a_group_says_who_holds_it_and_who_waits(room):
    a, b = room.client("a"), room.client("b")
    assert b.ask("status")["group"]["groupState"] == "STATE_IDLE"
    a.ask("acquire")
    b.tell("acquire")
    room.waits(1)
    told = room.client("c").ask("status")
    group, states = told["group"], {one["jobId"]: one["jobState"] for one in told["agentJobStates"]}
    assert (group["groupState"], group["lockingJob"], group["activeJob"]) == ("STATE_LOCKED", "a", "a")
    assert group["stateTimestamp"].startswith("20")
    assert states == {"a": "STATE_RUNNING", "b": "STATE_IDLE"}
    a.ask("yield")
    b.answer()
    b.ask("yield")
    group = a.ask("status")["group"]
    assert (group["groupState"], group["lockingJob"], group["loadedJob"]) == ("STATE_IDLE_YIELDED", "", "b")


@pytest.mark.parametrize("policy", ["fifo", "rollmux"])
def test_jobs_of_either_kind_take_turns_with_each_other_and_with_a_program_of_ours(make_room, policy):
    room = make_room()
    expected = result(room.program("p", 20, "safe", "sleep=0.01", is_shared=False))["sha256"]
    room.record.unlink()
    room.start(policy)
    go, end = room.folder / "go", room.folder / "end"
    program = room.program("p", 20, "safe", "sleep=0.01", f"start={go}", f"end={end}")
    clients = [room.client("a"), room.client("b", kind="accelerator")]
    until(lambda: len(room.notes("joined")) == 1)
    assert clients[0].ask("acquire")["success"]
    for client in clients:
        client.tell(f"turns 20 0.01 {room.record}")
    go.touch()
    assert [client.answer() for client in clients] == [{}, {}]
    until(lambda: room.has_recorded("p", "ends", 20))
    end.touch()
    assert result(program)["sha256"] == expected
    check_never_both(room.recorded(), room_for=SIZE)
    turns = [note["pipeline"] for note in room.notes("granted")]
    assert set(turns) == {"a.gpu0", "b.gpu0", "p"}
    if policy == "fifo":
        assert turns == arrivals(room), "each is granted in the order in which it asked"


def test_a_job_that_asks_again_is_granted_after_those_that_waited(room):
    a, b, c = (room.client(name) for name in "abc")
    assert a.ask("acquire")["success"]
    for number, client in enumerate((b, c), start=1):
        client.tell("acquire")
        room.waits(number)
    a.ask("yield")
    a.tell("acquire")
    for client in (b, c):
        assert client.answer()["success"]
        client.ask("yield")
    assert a.answer()["success"]
    assert [note["pipeline"] for note in room.notes("granted")] == ["a.gpu0", "b.gpu0", "c.gpu0", "a.gpu0"]


def arrivals(room: GrpcRoom) -> list[str]:
    """Programs in the order in which they asked."""
    with LogReader(room.out) as log:
        return [entry.value.pipeline for entry in log.entries() if isinstance(entry.value, WorkArrived)]


def test_a_holder_that_is_killed_gives_way_and_its_name_is_free_again(room):
    a, b = room.client("a"), room.client("b")
    a.ask("acquire")
    b.tell("acquire")
    room.waits(1)
    a.process.kill()
    assert b.answer()["success"]
    assert "ended while it held gpu0" in statuses(room)["a.gpu0"]["reason"]
    again = room.client("a")
    again.tell("acquire")
    room.waits(1)
    b.ask("yield")
    assert again.answer()["success"]
    assert {note["pipeline"] for note in room.notes("granted")} == {"a.gpu0", "b.gpu0", "a.gpu0-2"}


def test_a_holder_that_is_stopped_keeps_the_group_and_one_that_waits_may_be_killed(room):
    a, b, c = (room.client(name) for name in "abc")
    a.ask("acquire")
    for client in (b, c):
        client.tell("acquire")
    room.waits(2)
    a.process.send_signal(signal.SIGSTOP)
    b.process.kill()
    room.waits(1)
    assert room.client("d").ask("status")["group"]["lockingJob"] == "a"
    a.process.send_signal(signal.SIGCONT)
    assert a.ask("yield")["pendingWaiters"] == "1"
    assert c.answer()["success"]


def test_a_call_that_reaches_its_deadline_waits_no_longer(room):
    a, b = room.client("a"), room.client("b")
    a.ask("acquire")
    assert b.ask("acquire 0.3")["code"] == "DEADLINE_EXCEEDED"
    room.waits(0)
    assert a.ask("yield")["pendingWaiters"] == "0"
    assert b.ask("yield")["code"] == "PERMISSION_DENIED"
    assert a.ask("acquire")["success"]
    b.tell("acquire")
    room.waits(1)
    a.ask("yield")
    assert b.answer()["success"]


def test_after_a_storm_of_deadlines_and_kills_the_group_is_free(room):
    chance = random.Random(3)
    clients = [room.client(name) for name in "abcd"]
    for _ in range(12):
        for client in clients:
            client.tell(f"acquire {chance.uniform(0.001, 0.05)}")
        for place, client in enumerate(clients):
            if chance.random() < 0.2:
                client.end()
                clients[place] = room.client("abcd"[place])
            elif client.answer().get("success"):
                client.ask("yield")
    for client in clients:
        assert client.ask("acquire 30")["success"]
        assert client.ask("yield")["pendingWaiters"] == "0"
    until(lambda: len(room.notes("ended")) + len(room.notes("gone")) >= len(room.notes("granted")))


def test_a_job_in_two_groups_has_a_permit_of_each(make_room):
    room = make_room({"rollout": {}, "train": {}})
    room.start()
    first, second = room.client("a", "rollout"), room.client("a", "train")
    assert first.ask("acquire")["success"]
    assert second.ask("acquire")["success"]
    assert first.ask("yield")["success"]
    assert second.ask("yield")["success"]
    assert {note["pipeline"]: note["phase"] for note in room.notes("granted")} == {
        "a.rollout": "rollout",
        "a.train": "train",
    }


def test_what_cannot_be_is_refused_with_a_status_that_says_what_can(room, make_room):
    told = room.client("a", "gpu9").ask("acquire")
    assert (told["code"], told["details"]) == ("NOT_FOUND", "group 'gpu9'; accepted: the file's pools, gpu0")
    assert room.client("a", "gpu9").ask("status")["code"] == "NOT_FOUND"
    told = room.client("a").ask("yield")
    assert (told["code"], told["details"]) == (
        "PERMISSION_DENIED",
        "job 'a' does not hold group 'gpu0'; accepted: Acquire first",
    )
    assert room.client("").ask("acquire")["code"] == "INVALID_ARGUMENT"
    told = room.client("a/b").ask("acquire")
    assert told["code"] == "INVALID_ARGUMENT"
    assert "accepted: 1 to 64 letters" in told["details"]
    told = room.client("a").ask("acquire-as 2")
    assert (told["code"], "accepted: ROLE_FOREGROUND" in told["details"]) == ("UNIMPLEMENTED", True)
    assert room.notes("joined") == []


def test_a_pool_that_programs_have_to_leave_takes_no_client_that_cannot(make_room):
    room = make_room({"rollout": {"device_memory_gb": 1}, "train": {}})
    room.start()
    assert room.client("a", "train").ask("acquire")["success"]
    told = room.client("a", "rollout").ask("acquire")
    assert told["code"] == "FAILED_PRECONDITION"
    assert "accepted: a pool without it, or rlmux.share" in told["details"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_client_of_another_user_is_refused(room):
    stranger = room.client("a", uid="65534")
    for call in ("acquire", "yield", "status", "groups"):
        told = stranger.ask(call)
        assert (told["code"], "of the broker's own user" in told["details"]) == ("PERMISSION_DENIED", True)
    assert room.notes("joined") == []


def test_a_cancelled_job_is_told_so(room):
    a, b = room.client("a"), room.client("b")
    a.ask("acquire")
    b.tell("acquire")
    room.waits(1)
    assert run_command_line(["cancel", str(room.out), "b.gpu0"]) == 0
    told = b.answer()
    assert (told["code"], "gets no permit any more" in told["details"]) == ("FAILED_PRECONDITION", True)
    assert a.ask("yield")["success"]


def test_a_broker_that_was_killed_knows_who_holds_the_group(room):
    a, b = room.client("a"), room.client("b")
    a.ask("acquire")
    b.tell("acquire")
    room.waits(1)
    room.kill_broker()
    assert b.answer()["code"] == "UNAVAILABLE"
    room.start()
    b.tell("acquire")
    room.waits(1)
    assert room.client("c").ask("status")["group"]["lockingJob"] in ("a", "a.gpu0")
    assert a.ask("yield")["pendingWaiters"] == "1"
    assert b.answer()["success"]
    assert len(room.notes("granted")) == 2


def test_a_hold_that_is_longer_than_the_file_allows_ends_the_process(make_room):
    room = make_room(max_hold_s=0.5)
    room.start()
    a, b = room.client("a"), room.client("b")
    a.ask("acquire")
    assert b.ask("acquire")["success"]
    assert a.process.wait(30) == -signal.SIGKILL
    assert "longer than max_hold_s" in statuses(room)["a.gpu0"]["reason"]


def test_the_process_behind_a_connection_is_found_and_its_user():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            host, own_port = client.getsockname()
            found = find_socket(host, own_port, port)
            assert found is not None
            assert found.uid == os.getuid()
            assert find_process(found.inode) == process_of(os.getpid())
            assert find_socket("127.0.0.2", own_port, port) is None
        assert find_socket(host, own_port, port) is None


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("0.0.0.0:50051", "--grpc 0.0.0.0:50051: accepted: 127.0.0.1:PORT"),
        ("50051", "--grpc 50051: accepted: 127.0.0.1:PORT"),
        ("127.0.0.1:TAKEN", "cannot listen there; accepted: a free port"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused_before_anything_is_made(room, tmp_path, capfd, address, told):
    address = address.replace("TAKEN", room.grpc_address.rpartition(":")[2])
    words = ["broker", str(room.folder / "broker.yaml"), "--grpc", address, "--out", str(tmp_path / "new")]
    assert run_command_line(words) == 2
    err = capfd.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1, "gRPC's own lines, too, go there"
    assert not (tmp_path / "new").exists()


def test_a_file_whose_pools_all_have_to_be_left_is_refused_as_the_broker_starts(tmp_path, capsys):
    pools = {name: {"phase": name, "device_memory_gb": 1} for name in ("rollout", "train")}
    (tmp_path / "broker.yaml").write_text(json.dumps({"cluster": {"pools": pools}}))
    words = ["broker", str(tmp_path / "broker.yaml"), "--grpc", "127.0.0.1:0", "--out", str(tmp_path / "new")]
    assert run_command_line(words) == 2
    told = capsys.readouterr().err
    assert "--grpc 127.0.0.1:0: no client of it could acquire a group" in told
    assert "--set cluster.pools.rollout.device_memory_gb=null" in told
    assert not (tmp_path / "new").exists()


def test_without_grpc_the_option_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    (tmp_path / "broker.yaml").write_text(json.dumps({"cluster": {"pools": {"gpu0": {"phase": "both"}}}}))
    words = ["broker", str(tmp_path / "broker.yaml"), "--grpc", "127.0.0.1:0", "--out", str(tmp_path / "new")]
    assert run_command_line(words) == 2
    assert "grpcio is not installed; install it with: pip install 'rlmux[grpc]'" in capsys.readouterr().err
