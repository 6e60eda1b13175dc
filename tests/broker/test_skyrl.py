"""Two of SkyRL's real loops on one pool and on two: each ends as alone, never both in memory. `make test-skyrl`.

SkyRL lives in an environment of its own; RLMUX_SKYRL_PYTHON names its Python. Without it these tests are left out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.room import Room
from tests.broker.trainer_room import (
    LIMIT_S,
    POOLS,
    check_one_at_a_time,
    check_workers_are_named,
    num_turns,
    permits,
    start,
    told,
)

PYTHON = os.environ.get("RLMUX_SKYRL_PYTHON", "")
PROGRAM = "skyrl_program.py"
STEPS = 4
PERMITS = {"one": ["rollout", "train"], "two": ["rollout", "train", "train rollout"]}
"""Of a step: in two pools the weights are sent with a permit for both."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="RLMUX_SKYRL_PYTHON names no Python with SkyRL: make test-skyrl")


@pytest.fixture
def make_room(tmp_path: Path) -> Iterator[Callable[[str], Room]]:
    rooms: list[Room] = []

    def make(pools: str) -> Room:
        rooms.append(Room(tmp_path, POOLS[pools]))
        (tmp_path / "go").touch()
        return rooms[-1]

    yield make
    for room in rooms:
        room.end()


@pytest.mark.parametrize("pools", ["one", "two"])
def test_two_skyrl_loops_take_turns_and_each_ends_with_what_it_has_alone(make_room, pools):
    room = make_room(pools)
    alone = {name: told(start(room, PYTHON, PROGRAM, name, pools, "-", is_shared=False)) for name in "ab"}
    assert alone["a"] != alone["b"]
    assert [len(one.batches) for one in alone.values()] == [STEPS, STEPS]
    room.record.unlink()
    room.start_broker()
    (room.folder / "go").unlink()
    programs = {name: start(room, PYTHON, PROGRAM, name, pools, "-") for name in "ab"}
    room.until_noted("joined", 2)
    (room.folder / "go").touch()
    assert {name: told(program) for name, program in programs.items()} == alone
    room.until_noted("gone", 2)
    check_one_at_a_time(room)
    assert num_turns(room) > 2 * STEPS
    check_workers_are_named(room, 3)  # policy, reference and a server of the engine
    for name in "ab":
        expected = ["0 train rollout", "0 train rollout"]  # making the models; connecting them, and the first weights
        for step in range(1, STEPS + 1):
            phases = PERMITS[pools] + ["rollout"] * (step % 2 == 0)  # an evaluation
            expected += [f"{step} {phase}" for phase in phases]
        assert permits(room, name) == expected


@pytest.mark.parametrize(
    ("pools", "phase"),
    [("one", "generate"), ("one", "optim_step"), ("one", "broadcast"), ("one", "evaluate"), ("two", "broadcast")],
)
def test_one_that_is_killed_in_a_phase_leaves_the_other_to_finish(make_room, pools, phase):
    room = make_room(pools)
    alone = told(start(room, PYTHON, PROGRAM, "b", pools, "-", is_shared=False))
    room.record.unlink()
    room.start_broker()
    killed = start(room, PYTHON, PROGRAM, "a", pools, phase)
    room.until_recorded("a", phase)
    other = start(room, PYTHON, PROGRAM, "b", pools, "-")
    room.until_noted("joined", 2)
    killed.send_signal(signal.SIGKILL)
    assert told(other) == alone


def test_an_error_of_skyrls_own_ends_the_loop_as_it_is_and_gives_the_permit_back(make_room):
    room = make_room("one")
    room.start_broker()
    broken = start(room, PYTHON, PROGRAM, "a", "one", "break forward")
    out, _ = broken.communicate(timeout=LIMIT_S)
    assert broken.returncode == 1
    assert 'KeyError: "of the framework\'s own"' in out.splitlines()
    assert len(room.notes("ended")) == len(room.notes("granted")) > 0
