"""Two of OpenRLHF's real command lines on one device: each ends as alone, never both in memory. `make test-openrlhf`.

OpenRLHF lives in an environment of its own; RLMUX_OPENRLHF_PYTHON names its Python. Without it these are left out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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

PYTHON = os.environ.get("RLMUX_OPENRLHF_PYTHON", "")
PROGRAM = "openrlhf_program.py"
STEPS = 4

pytestmark = pytest.mark.skipif(not PYTHON, reason="RLMUX_OPENRLHF_PYTHON names no Python: make test-openrlhf")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, POOLS["one"])
    (tmp_path / "go").touch()
    yield room
    room.end()


def test_two_openrlhf_scripts_take_turns_and_each_ends_with_what_it_has_alone(room):
    alone = {name: told(start(room, PYTHON, PROGRAM, name, "-", is_shared=False)) for name in "ab"}
    assert alone["a"] != alone["b"]
    assert [len(one.batches) for one in alone.values()] == [2 * STEPS, 2 * STEPS]
    room.record.unlink()
    room.start_broker()
    (room.folder / "go").unlink()
    programs = {name: start(room, PYTHON, PROGRAM, name, "-") for name in "ab"}
    room.until_noted("joined", 2)
    (room.folder / "go").touch()
    assert {name: told(program) for name, program in programs.items()} == alone
    room.until_noted("gone", 2)
    check_one_at_a_time(room)
    assert num_turns(room) > 2 * STEPS
    check_workers_are_named(room, 3)  # policy, reference and an engine
    for name in "ab":
        expected = ["0 train"]  # making engines and models
        for step in range(1, STEPS + 1):
            expected += [f"{step} {role}" for role in ("rollout", "train") * (2 if step % 2 == 0 else 1)]
        # An evaluation, and saving the best; a look for more prompts, and the script's own saving.
        assert permits(room, name) == [*expected, f"{STEPS + 1} rollout", "None train"]


@pytest.mark.parametrize("phase", ["generate", "fit", "broadcast", "evaluate"])
def test_one_that_is_killed_in_a_phase_leaves_the_other_to_finish(room, phase):
    alone = told(start(room, PYTHON, PROGRAM, "b", "-", is_shared=False))
    room.record.unlink()
    room.start_broker()
    killed = start(room, PYTHON, PROGRAM, "a", phase)
    room.until_recorded("a", phase)
    other = start(room, PYTHON, PROGRAM, "b", "-")
    room.until_noted("joined", 2)
    killed.send_signal(signal.SIGKILL)
    assert told(other) == alone


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["break fit"], 'KeyError: "of the framework\'s own"'),
        (
            ["-", "---ds.enable_sleep"],
            "TypeError: --ds.enable_sleep is not set: what lies on the device could not leave it; "
            "accepted: --ds.enable_sleep",
        ),
    ],
    ids=["own", "refused"],
)
def test_an_error_ends_the_script_as_it_is_and_gives_the_permit_back(room, words, error):
    room.start_broker()
    broken = start(room, PYTHON, PROGRAM, "a", *words)
    out, _ = broken.communicate(timeout=LIMIT_S)
    assert broken.returncode == 1
    assert error in out.splitlines()
    assert len(room.notes("ended")) == len(room.notes("granted")) > 0
