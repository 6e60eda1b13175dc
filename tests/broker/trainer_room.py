"""Two programs with a framework's real trainer under one broker: started, killed in a phase, checked."""

from __future__ import annotations

import itertools
import os
import subprocess
from typing import NamedTuple

from tests.broker.room import HERE, SHARE_FOLDER, Room, check_never_both

LIMIT_S = 900
POOLS = {
    "one": {"gpu0": {"phase": "both", "device_memory_gb": 0.002}},
    "two": {name: {"phase": name, "device_memory_gb": 0.002} for name in ("rollout", "train")},
}


def start(
    room: Room, python: str, program: str, name: str, *words: str, is_shared: bool = True
) -> subprocess.Popen[str]:
    """NAME RECORD and the words, with the files that are free to copy on its path and none of our packages."""
    environ = {**os.environ, "PYTHONPATH": str(SHARE_FOLDER), "OMP_NUM_THREADS": "1", "RLMUX_JOB": name}
    environ.pop("RLMUX_BROKER", None)
    if is_shared:
        environ["RLMUX_BROKER"] = room.address
    started = subprocess.Popen(
        [python, str(HERE / program), name, str(room.record), *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    room.programs.append(started)
    return started


class Told(NamedTuple):
    """What a program prints at its end."""

    weights: str
    batches: list[str]


def told(program: subprocess.Popen[str]) -> Told:
    out, _ = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, out[-4000:]
    return told_of(out)


def told_of(out: str) -> Told:
    words = next(line for line in out.splitlines() if line.startswith("ENDS ")).split()
    return Told(words[1], words[2:])


def check_one_at_a_time(room: Room) -> None:
    """On no pool do two compute at once, or have anything at all of two programs; what ended has nothing there."""
    recorded = room.recorded()
    check_never_both(recorded, room_for=1 << 40)
    last = {name: at_s for at_s, name, _, _ in recorded}
    resident: dict[str, dict[str, int]] = {}
    for at_s, name, what, size in recorded:
        pool = resident.setdefault(name.partition("@")[2], {})
        pool[name] = size
        assert sum(one > 0 for one in pool.values()) <= 1, (name, what, resident)
        if at_s == last[name]:
            pool[name] = 0


def permits(room: Room, name: str) -> list[str]:
    """ "STEP ROLES" of the phases that a program asked for, each of which it was granted."""
    asked = [what for _, one, what, _ in room.recorded() if one == f"{name}@phases"]
    granted = [note["phase"] for note in room.notes("granted") if note["pipeline"] == name]
    assert [what.split()[1] for what in asked] == granted
    return asked


def num_turns(room: Room) -> int:
    """How often the pools went from one program to another."""
    granted = [note["pipeline"] for note in room.notes("granted")]
    return sum(one != other for one, other in itertools.pairwise(granted))


def check_workers_are_named(room: Room, count: int) -> None:
    """The broker knows the actors of each program, which here are all in its own process."""
    named = {note["pipeline"]: [pid for pid, _ in note["processes"]] for note in room.notes("workers")}
    assert sorted(named) == ["a", "b"]
    ids = {program.pid for program in room.programs}
    for found in named.values():
        assert len(found) == count
        assert len(set(found)) == 1
        assert set(found) <= ids
