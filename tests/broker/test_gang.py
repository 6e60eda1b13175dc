"""A program of two ranks that compute together (torch.distributed, gloo) takes turns with another one."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
from tests.broker.gang_program import weights_alone
from tests.broker.room import HERE, SHARE_FOLDER, Room, result

WORLD = 2


def start_rank(room: Room, rank: int, steps: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "SHARE_FOLDER": str(SHARE_FOLDER),
        "RLMUX_BROKER": f"unix:{room.socket}",
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    words = ["gang", str(steps), str(room.record), str(room.folder / "store"), str(room.folder / "go")]
    program = subprocess.Popen(
        [sys.executable, str(HERE / "gang_program.py"), *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    room.programs.append(program)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, 200])
def test_ranks_that_compute_together_are_granted_together_and_never_lock_up(room, steps):
    room.start_broker()
    ranks = [start_rank(room, rank, steps) for rank in range(WORLD)]
    go = room.folder / "go"
    other = room.program("b", 2 * steps, f"start={go}")
    room.until_noted("joined", WORLD + 1)
    go.touch()
    told = [result(program) for program in ranks]
    result(other)
    assert told == [{"weights": told[0]["weights"], "is_shared": True}] * WORLD
    expected = weights_alone(steps, WORLD)
    assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(told[0]["weights"], expected, strict=True))
    check_apart(room)
    left = [note for note in room.notes("left") if note["pipeline"] == "gang"]
    assert left
    granted = [note for note in room.notes("granted") if note["pipeline"] == "gang"]
    assert len(granted) == 2 * steps + 1


def check_apart(room: Room) -> None:
    """While a rank of the gang computes, the other program does not, and the other way round."""
    at_work: set[str] = set()
    for _, name, what, _ in room.recorded():
        if what == "begins":
            at_work.add(name)
            assert len({one.startswith("gang") for one in at_work}) == 1, at_work
        elif what == "ends":
            at_work.discard(name)
