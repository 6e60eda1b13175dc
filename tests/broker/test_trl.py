"""Two real TRL scripts on one device: the weights that each has alone, and never both in memory. `make test-trl`.

TRL lives in an environment of its own; RLMUX_TRL_PYTHON names its Python. Without it these tests are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.broker.room import HERE, SHARE_FOLDER, Room

PYTHON = os.environ.get("RLMUX_TRL_PYTHON", "")
LIMIT_S = 900
STEPS = 4

pytestmark = pytest.mark.skipif(not PYTHON, reason="RLMUX_TRL_PYTHON names no Python with TRL: make test-trl")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, {"gpu0": {"phase": "both", "device_memory_gb": 0.002}})
    yield room
    room.end()


def start(room: Room, name: str, seed: int, *, is_shared: bool) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(SHARE_FOLDER.parent), "OMP_NUM_THREADS": "1", "RLMUX_JOB": name}
    if is_shared:
        environ["RLMUX_BROKER"] = f"unix:{room.socket}"
    out = room.folder / f"{name}-{'shared' if is_shared else 'alone'}"
    words = [str(room.record), "--out", str(out), "--steps", str(STEPS), "--seed", str(seed)]
    program = subprocess.Popen(
        [PYTHON, str(HERE / "recorded_trl.py"), *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    room.programs.append(program)
    return program


class Told(NamedTuple):
    """What a script prints."""

    weights: str
    parameters: int
    """Bytes of the parameters of its model."""
    buffers: int


def told(program: subprocess.Popen[str]) -> Told:
    out, _ = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, out
    found = re.search(r"parameters (\d+), buffers (\d+)\n(?:.*\n)*weights (\w{64})", out)
    assert found is not None, out
    return Told(found[3], int(found[1]), int(found[2]))


def test_two_trl_scripts_end_with_the_weights_they_have_alone_and_are_never_both_in_memory(room):
    seeds = {"a": 1, "b": 2}
    alone = {name: told(start(room, name, seed, is_shared=False)) for name, seed in seeds.items()}
    assert alone["a"].weights != alone["b"].weights
    room.record.unlink()
    room.start_broker()
    programs = {name: start(room, name, seed, is_shared=True) for name, seed in seeds.items()}
    assert {name: told(program) for name, program in programs.items()} == alone
    room.until_noted("gone", 2)
    check_never_both(room)
    assert len(room.notes("left")) >= 2 * STEPS
    for name in seeds:
        freed = [note["freed_bytes"] for note in room.notes("left") if note["pipeline"] == name]
        assert freed == expected_bytes(room, name, alone[name])
    assert all(size == 0 for _, _, what, size in room.recorded() if what == "has left")


def expected_bytes(room: Room, name: str, model: Told) -> list[int]:
    """What each leaving frees: the model, and from its first step on both moments of Adam. No gradients: rewards
    come before the backward pass, and a step begins after they were cleared."""
    expected, has_stepped = [], False
    for _, other, what, _ in room.recorded():
        has_stepped = has_stepped or (other, what) == (name, "has stepped")
        if (other, what) == (name, "has left"):
            expected.append((3 if has_stepped else 1) * model.parameters + model.buffers)
    return expected


def check_never_both(room: Room) -> None:
    """By what each script measured of itself: between one's return and its leaving, the other has nothing there."""
    resident: dict[str, int] = {}
    last = {name: max(at_s for at_s, other, _, _ in room.recorded() if other == name) for name in ("a", "b")}
    for at_s, name, what, size in room.recorded():
        resident[name] = size
        assert sum(one > 0 for one in resident.values()) <= 1, (name, what, resident)
        if at_s == last[name]:  # its process ends, and its memory with it
            resident[name] = 0
