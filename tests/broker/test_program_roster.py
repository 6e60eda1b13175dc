"""Programs that know nothing but share.py take turns under a broker: real processes, and real kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from tests.broker.room import ONE_POOL, PATIENCE_S, SIZE, Room, check_never_both, result

from rlmux.cli import what_if
from rlmux.log.run_log import LogReader
from rlmux.runtime.control.control_requests import Cancel
from rlmux.runtime.control.control_socket import send_request

STEPS = 12
TWO_POOLS = {"rollout": {"device_memory_gb": 1.5 * SIZE / 1e9}, "train": {"device_memory_gb": 1.5 * SIZE / 1e9}}


@pytest.fixture
def make_room(tmp_path: Path) -> Iterator[object]:
    rooms: list[Room] = []

    def make(pools: dict, **keys) -> Room:
        rooms.append(Room(tmp_path, pools, **keys))
        return rooms[-1]

    yield make
    for room in rooms:
        room.end()


def alone(room: Room, name: str, steps: int = STEPS, *words: str) -> list[str]:
    """The weights of a program that shares with none, and that had neither thread nor socket for it."""
    told = result(room.program(name, steps, *words, is_shared=False))
    assert told["threads"] == ["MainThread"]
    assert not told["is_shared"]
    room.record.unlink()
    return told["sha256"]


@pytest.mark.parametrize(
    "policy", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fifo", "rollmux")), "rlmux"]
)
def test_two_programs_on_one_device_end_with_the_weights_they_have_alone(room, policy):
    expected = {name: alone(room, name) for name in "ab"}
    room.start_broker(policy)
    go = room.folder / "go"
    programs = {name: room.program(name, STEPS, f"start={go}") for name in "ab"}
    room.until_noted("joined", 2)
    go.touch()
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    left = sum(what == "leaves" for _, _, what, _ in room.recorded())
    assert left > 0
    room.until_noted("gone", 2)
    assert len(room.notes("left")) == left
    assert all(note["freed_bytes"] == SIZE for note in room.notes("left"))
    fences = [note["fence"] for note in room.notes("granted")]
    assert fences == sorted(set(fences))
    assert {name: one["status"] for name, one in room.status().items()} == {"a": "finished", "b": "finished"}


@pytest.mark.parametrize("policy", [pytest.param("fifo", marks=pytest.mark.slow), "rollmux"])
def test_programs_take_turns_in_proportion_to_their_weights_and_end_as_they_do_alone(room, policy):
    steps = {"a": 60, "b": 20, "c": 30}
    expected = {name: alone(room, name, count, "safe") for name, count in steps.items()}
    room.start_broker(policy)
    go = room.folder / "go"
    programs = {
        name: room.program(name, steps[name], "safe", f"start={go}", environ={"RLMUX_WEIGHT": weight})
        for name, weight in (("a", "3"), ("b", ""), ("c", "1.5"))
    }
    room.until_noted("joined", 3)
    go.touch()
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    turns = [(name[0], len(list(steps))) for name, steps in groupby(computed(room))]
    places = {name: [state for state, (one, _) in enumerate(turns) if one == name] for name in "abc"}
    all_there = turns[max(each[1] for each in places.values()) : min(each[-1] for each in places.values())]
    assert len(all_there) > 20
    assert {count for name, count in all_there if name == "a"} == {3}
    assert {count for name, count in all_there if name == "b"} == {1}
    assert sorted(Counter(count for name, count in all_there if name == "c")) == [1, 2]
    assert {note["pipeline"]: note["weight"] for note in room.notes("program")} == {"a": 3.0, "b": 1.0, "c": 1.5}


def computed(room: Room) -> list[str]:
    """Which program computed, in the order of time."""
    return [name for _, name, what, _ in room.recorded() if what == "begins"]


def test_where_both_have_room_no_program_leaves_and_one_computes_at_a_time(make_room):
    room = make_room({"gpu0": {"phase": "both", "device_memory_gb": 2 * SIZE / 1e9}})
    room.start_broker()
    programs = [room.program(name, STEPS, f"need={SIZE}") for name in "ab"]
    for program in programs:
        result(program)
    check_never_both(room.recorded(), room_for=2 * SIZE)
    assert room.notes("told_to_leave") == []


def test_programs_that_need_both_pools_from_either_side_do_not_lock_each_other_up(make_room):
    room = make_room(TWO_POOLS)
    sides = {"a": {"rollout": "rollout", "train": "train"}, "b": {"rollout": "train", "train": "rollout"}}
    words = {name: ["also", f"pools={json.dumps(pools)}"] for name, pools in sides.items()}
    expected = {name: alone(room, name, STEPS, *words[name]) for name in "ab"}
    room.start_broker()
    programs = {name: room.program(name, STEPS, *words[name]) for name in "ab"}
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    both = [note for note in room.notes("granted") if len(note["pools"]) == 2]
    assert len(both) == 2 * STEPS


def test_when_a_holder_is_killed_the_other_goes_on_and_the_log_says_why(room):
    expected = alone(room, "b")
    room.start_broker()
    holder = room.program("a", 1, "sleep=3600")
    room.until_recorded("a", "begins")
    waiting = room.program("b", STEPS)
    room.until_noted("joined", by="b")
    holder.kill()
    assert result(waiting)["sha256"] == expected
    room.until_status(a="failed")
    assert "ended while it held gpu0" in room.status()["a"]["reason"]


def test_when_a_waiting_program_is_killed_the_holder_is_not_disturbed(room):
    expected = alone(room, "a", 60)
    room.start_broker()
    holder = room.program("a", 60)
    room.until_recorded("a", "begins")
    waiting = room.program("b", STEPS)
    room.until_noted("joined", by="b")
    waiting.kill()
    assert result(holder)["sha256"] == expected
    room.until_noted("gone", 2)
    check_never_both(room.recorded_by("a"))


def test_programs_go_on_under_a_broker_that_was_killed_and_started_again(room):
    expected = {name: alone(room, name, 24) for name in "ab"}
    room.start_broker()
    end = room.folder / "end"  # one that ends while no broker runs cannot say that it did
    programs = {name: room.program(name, 24, f"end={end}") for name in "ab"}
    for times in (3, 20):
        room.until_recorded("b", "begins", times)
        room.kill_broker()
        room.start_broker()
    end.touch()
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    fences = [note["fence"] for note in room.notes("granted")]
    assert fences == sorted(set(fences))
    room.until_status(a="finished", b="finished")


@pytest.mark.slow
def test_a_program_that_ends_while_it_tries_to_connect_tries_once_more_and_finishes(room):
    room.start_broker()
    end = room.folder / "end"
    program = room.program("a", 1, f"end={end}")
    room.until_noted("ended", 2)
    room.kill_broker()
    time.sleep(2.0)  # its pauses between two tries have grown to a second
    room.start_broker()
    end.touch()
    result(program)
    room.until_status(a="finished")


def test_a_broker_started_again_grants_nothing_while_an_earlier_holder_still_computes(room):
    room.start_broker()
    holder = room.program("a", 1, "sleep=3600")
    room.until_recorded("a", "begins")
    room.kill_broker()
    os.kill(holder.pid, signal.SIGSTOP)  # it cannot say that it holds the device: the log does
    room.start_broker()
    other = room.program("b", 1)
    room.until_noted("joined", by="b")
    assert not room.has_recorded("b", "begins")
    holder.kill()
    result(other)
    check_never_both(room.recorded_by("b"))


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ("raise", "it cannot leave gpu0: RuntimeError('the device is lost')"),
        ("hang", "it was told to leave gpu0 0.2 s ago and has not"),
        ("free_nothing", "it left gpu0 and freed nothing"),
    ],
)
def test_a_program_that_cannot_leave_is_marked_and_no_other_gets_the_pool(make_room, hook, reason):
    room = make_room(ONE_POOL, leave_limit_s=0.2)
    room.start_broker()
    bad = room.program("a", 1000, f"hook={hook}", "sleep=0.02")
    room.until_recorded("a", "begins")
    other = room.program("b", 1)
    room.until(lambda: reason in room.status()["a"]["reason"] or bad.poll() is not None, f"the reason {reason!r}")
    assert any(reason in note["reason"] for note in room.notes("marked"))
    if bad.poll() is None:
        assert not room.has_recorded("b", "begins")
        bad.kill()
        bad.wait()
    result(other)
    check_never_both(room.recorded_by("b"))


def test_a_gang_is_granted_together_and_leaves_together(room):
    room.start_broker()
    ranks = [room.program("gang", STEPS, environ={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    other = room.program("b", STEPS)
    for program in [*ranks, other]:
        result(program)
    assert len([note for note in room.notes("granted") if note["pipeline"] == "gang"]) >= STEPS
    with_b, at_work = 0, set()
    for _, name, what, _ in room.recorded():
        if what in ("begins", "ends"):
            (at_work.add if what == "begins" else at_work.discard)(name)
            with_b += len(at_work) > 1
    assert with_b == 0


def test_the_log_of_a_broker_gives_a_report_with_every_switch(room):
    room.start_broker()
    for program in [room.program(name, 4) for name in "ab"]:
        result(program)
    room.until_noted("gone", 2)
    room.stop_broker()
    summary = json.loads((room.out / "summary.json").read_text())
    assert set(summary["pipelines"]) == {"a", "b"}
    assert summary["devices"]["gpu0-0.0"]["busy_s"] > 0
    with LogReader(room.out) as log:
        assert log.header["backend"] == "permits"
    assert (room.out / "timeline.html").exists()


def test_a_program_that_holds_its_permit_for_longer_than_it_may_is_ended_and_the_log_says_so(make_room):
    room = make_room(ONE_POOL, max_hold_s=0.5)
    room.start_broker()
    bad = room.program("a", 1, "sleep=3600")
    room.until_recorded("a", "begins")
    other = room.program("b", 1)
    assert bad.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    result(other)
    room.until_status(a="failed")
    assert room.status()["a"]["reason"] == "it held gpu0 for longer than max_hold_s, 0.5 s, and was ended"
    assert room.status()["b"]["status"] in ("running", "finished")


def test_over_tcp_programs_with_the_token_take_turns_and_one_without_is_refused(make_room):
    room = make_room(ONE_POOL, lease_s=0.3)
    expected = {name: alone(room, name) for name in "ab"}
    room.start_broker(token="s3cret")
    assert room.address.startswith("tcp://127.0.0.1:")
    stranger = room.program("stranger", 1, environ={"RLMUX_TOKEN": "guess"})
    _, err = stranger.communicate(timeout=PATIENCE_S)
    assert stranger.returncode != 0
    assert "the token is not this broker's; accepted: RLMUX_TOKEN as the broker has it" in err
    programs = {name: room.program(name, STEPS, environ={"RLMUX_TOKEN": "s3cret"}) for name in "ab"}
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    room.until_status(a="finished", b="finished")


def test_over_tcp_a_killed_holder_keeps_its_pool_for_the_lease_and_no_longer(make_room):
    room = make_room(ONE_POOL, lease_s=0.3)
    room.start_broker(token="s3cret")
    environ = {"RLMUX_TOKEN": "s3cret"}
    holder = room.program("a", 1, "sleep=3600", environ=environ)
    room.until_recorded("a", "begins")
    holder.kill()
    result(room.program("b", 1, environ=environ))
    room.until_status(a="failed")
    assert "ended while it held gpu0" in room.status()["a"]["reason"]


@pytest.mark.parametrize(
    "first", ["a", pytest.param("b", marks=pytest.mark.slow)], ids=["while it holds", "while it waits"]
)
def test_a_program_that_is_cancelled_is_told_so_at_its_next_phase_and_the_other_goes_on(room, first):
    expected = alone(room, "b", 4, "sleep=0.05")
    room.start_broker()
    programs = {}
    for name in sorted("ab", key=lambda name: name != first):
        programs[name] = room.program(name, 1000 if name == "a" else 4, "sleep=0.05")
        room.until_noted("joined", by=name)
        room.until_recorded(first, "begins")
    assert send_request(room.out, Cancel(name="a"))["outcome"]
    if first == "a":  # it stays cancelled under the next broker
        room.kill_broker()
        room.start_broker()
    _, err = programs["a"].communicate(timeout=PATIENCE_S)
    assert "ShareError: the broker answers: this program gets no permit any more: rlmux status has the reason" in err
    assert result(programs["b"])["sha256"] == expected
    room.until_noted("gone", 2)
    assert {name: one["status"] for name, one in room.status().items()} == {"a": "cancelled", "b": "finished"}
    check_never_both(room.recorded_by("b"))


@pytest.mark.slow
def test_a_program_told_to_leave_while_it_was_not_connected_is_told_again(room):
    expected = {name: alone(room, name, 2) for name in "ab"}
    room.start_broker()
    go_on = room.folder / "go on"
    idle = room.program("a", 2, f"between={go_on}")
    room.until_noted("ended")  # between two phases, its weights on the device
    os.kill(idle.pid, signal.SIGSTOP)
    room.kill_broker()
    room.start_broker()
    other = room.program("b", 2)
    room.until_noted("told_to_leave")
    go_on.touch()
    os.kill(idle.pid, signal.SIGCONT)
    assert {"a": result(idle)["sha256"], "b": result(other)["sha256"]} == expected
    check_never_both(room.recorded())


def test_a_killed_driver_keeps_its_pool_until_its_workers_are_gone_too(room):
    room.start_broker()
    room.program("a", STEPS, "worker", f"between={room.folder / 'never'}")
    [named] = room.until_noted("workers", 1)
    room.until_recorded("a", "ends")
    assert room.status()["a"]["hosts"] == [socket.gethostname()]
    ((worker, _),) = named["processes"]
    try:
        room.program("b", STEPS)
        room.programs[0].kill()
        room.programs[0].wait()
        room.kill_broker()
        room.start_broker()
        room.until_noted("joined", 2)
        assert not room.has_recorded("b", "begins")
        assert not room.notes("gone")
    finally:
        os.kill(worker, signal.SIGKILL)
    result(room.programs[1])
    [gone] = [note for note in room.notes("gone") if note["pipeline"] == "a"]
    assert not gone["said_bye"]


def test_what_if_counts_programs_by_the_steps_that_they_name(make_room):
    room = make_room({"r": {"phase": "rollout"}, "t": {"phase": "train"}})
    room.start_broker("rollmux")
    roles = 'pools={"rollout": "r", "train": "t"}'
    for name in "ab":
        room.program(name, STEPS, roles, "sleep=0.02", f"end={room.folder / 'end'}")
    learned = room.until(
        lambda: [each for each in room.status().values() if (each["estimate"] or {}).get("num_steps", 0) >= 3],
        "learned steps",
    )
    assert all(each["estimate"]["rollout_s"] >= 0.02 for each in learned), "two permits a step, of 0.02 s and of none"
    room.until(lambda: all(each["step"] == STEPS for each in room.status().values()), "all steps")
    answer = what_if.answer(room.out, file=None, like="a", number=1, removed=[], policy=None, sets=[])
    assert room.status()["a"]["step"] == STEPS
    assert set(answer["then"]["pipelines"]) == {"a", "b", "a-2"}
