"""Real GRPO trainers with vLLM in the process, and as a server on one pool and on two. `make test-trl`.

vLLM itself needs a GPU: trl_vllm_program.py says what stands in its place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.room import Room
from tests.broker.trainer_room import LIMIT_S, POOLS, check_one_at_a_time, num_turns, start, told

PYTHON = os.environ.get("RLMUX_TRL_PYTHON", "")
PROGRAM = "trl_vllm_program.py"
STEPS = 4
MODES = ("colocate", "one", "two")

pytestmark = pytest.mark.skipif(not PYTHON, reason="RLMUX_TRL_PYTHON names no Python with TRL: make test-trl")


@pytest.fixture
def make_room(tmp_path: Path) -> Iterator[Callable[[str], Room]]:
    rooms: list[Room] = []

    def make(mode: str) -> Room:
        rooms.append(Room(tmp_path, POOLS["two" if mode == "two" else "one"]))
        (tmp_path / "go").touch()
        return rooms[-1]

    yield make
    for room in rooms:
        room.end()


@pytest.mark.parametrize("mode", MODES)
def test_two_trl_trainers_with_vllm_end_as_alone_and_an_engine_is_awake_only_with_its_pool(make_room, mode):
    room = make_room(mode)
    alone = {name: told(start(room, PYTHON, PROGRAM, name, mode, "-", is_shared=False)) for name in "ab"}
    assert alone["a"] != alone["b"]
    assert len(set(alone["a"].batches)) == STEPS * 3 // 2  # an evaluation after each second step
    room.record.unlink()
    room.start_broker()
    (room.folder / "go").unlink()
    programs = {name: start(room, PYTHON, PROGRAM, name, mode, "-") for name in "ab"}
    room.until_noted("joined", 2)
    (room.folder / "go").touch()
    assert {name: told(program) for name, program in programs.items()} == alone
    room.until_noted("gone", 2)
    check_one_at_a_time(room)
    assert num_turns(room) > STEPS
    if mode == "two":
        for name in "ab":
            assert permits_by_step(room, name) == expected_permits()


def permits_by_step(room: Room, name: str) -> list[str]:
    """Permits that change the pools or the step, without those that only return from rewards."""
    asked = [what for _, one, what, _ in room.recorded() if one == f"{name}@phases"]
    return [what for what in asked if not what.endswith("None")]


def expected_permits() -> list[str]:
    expected = ["None train rollout", "1 train"]  # making the trainer; until the first weights are sent
    for step in range(1, STEPS + 1):
        has_weights = step % 2 == 1 and step > 1  # an evaluation has sent them
        expected += [] if has_weights else [f"{step} train rollout"]
        expected += [f"{step} rollout", f"{step} train"]
        if step % 2 == 0:
            expected += [f"{step} train rollout", f"{step} rollout", f"{step} train"]
    return expected


@pytest.mark.parametrize(("mode", "phase"), [("colocate", "generate"), ("two", "receive"), ("two", "step")])
def test_a_trl_trainer_with_vllm_that_is_killed_leaves_the_other_to_finish(make_room, mode, phase):
    room = make_room(mode)
    alone = told(start(room, PYTHON, PROGRAM, "b", mode, "-", is_shared=False))
    room.record.unlink()
    room.start_broker()
    killed = start(room, PYTHON, PROGRAM, "a", mode, phase)
    room.until_recorded("a", phase)
    other = start(room, PYTHON, PROGRAM, "b", mode, "-")
    room.until_noted("joined", 2)
    killed.send_signal(signal.SIGKILL)
    assert told(other) == alone


def test_an_engine_that_a_failed_generation_left_awake_sleeps_before_another_has_its_pool(make_room):
    room = make_room("colocate")
    room.start_broker()
    program = start(room, PYTHON, PROGRAM, "a", "colocate", "break generate")
    room.until_recorded("a", "failed")  # it has caught the error, and waits between two phases
    other = start(room, PYTHON, PROGRAM, "b", "colocate", "-")
    told(other)
    program.kill()
    check_one_at_a_time(room)
    assert [what for _, _, what, _ in room.recorded_by("a")][-2:] == ["engine's kv_cache leaves", "model leaves"]


def test_a_server_that_cannot_sleep_is_refused_in_one_line(make_room):
    room = make_room("two")
    room.start_broker()
    refused = start(room, PYTHON, PROGRAM, "a", "two", "cannot sleep")
    out, _ = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 1
    assert out.splitlines()[-1].endswith(
        "cannot sleep: its memory could not leave; accepted: vllm serve with VLLM_SERVER_DEV_MODE=1 and "
        "--enable-sleep-mode"
    )
