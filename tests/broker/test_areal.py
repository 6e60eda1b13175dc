"""Two jobs of AReaL's own trainer on shared pools: the numbers that each has alone. `make test-areal`.

AReaL lives in an environment of its own; RLMUX_AREAL_PYTHON names its Python. Without it these tests are left out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.room import HERE, PATIENCE_S, SHARE_FOLDER, SIZE, Room, check_never_both

PYTHON = os.environ.get("RLMUX_AREAL_PYTHON", "")
STEPS = 6
MEMORY_GB = 1.5 * SIZE / 1e9
"""There is room for the memory of one job's engine."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="RLMUX_AREAL_PYTHON names no Python with AReaL: make test-areal")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    pools = {phase: {"phase": phase, "device_memory_gb": MEMORY_GB} for phase in ("rollout", "train")}
    room = Room(tmp_path, pools)
    yield room
    room.end()


@pytest.fixture
def one_pool(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, {"one": {"phase": "both", "device_memory_gb": MEMORY_GB}})
    yield room
    room.end()


def start(room: Room, name: str, *words: str, is_shared: bool = True) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(SHARE_FOLDER.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if is_shared:
        environ["RLMUX_BROKER"] = room.address
    program = subprocess.Popen(
        [PYTHON, str(HERE / "areal_program.py"), name, str(STEPS), str(room.record), *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    room.programs.append(program)
    return program


def numbers(program: subprocess.Popen[str]) -> list[str]:
    """The weights after each step, and at the end."""
    out, _ = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, out
    found = re.findall(r"^(?:step \d+|weights) ([\d.e+-]+)$", out, re.MULTILINE)
    assert len(found) == STEPS + 1, out
    return found


def computed(room: Room, name: str) -> list[str]:
    return [what for _, _, what, _ in room.recorded_by(name) if what.startswith("computes")]


EXPECTED = [
    f"computes {what} {step}"
    for step in range(1, STEPS + 1)
    for what in ("rollout", "train", "update", *(["evaluation"] if step % 2 == 0 else []))
]


def test_two_jobs_interleave_and_have_the_numbers_that_each_has_alone(room):
    alone = numbers(start(room, "alone", is_shared=False))
    room.record.unlink()
    room.start_broker()
    programs = [start(room, name) for name in "ab"]
    assert [numbers(program) for program in programs] == [alone, alone]
    room.until_noted("gone", 2)
    check_never_both(room.recorded())
    for name in "ab":
        assert computed(room, name) == EXPECTED
    assert len(room.notes("left")) >= 2 * STEPS


def test_new_weights_take_both_pools_and_evaluation_the_rollout_pool(room):
    room.start_broker()
    numbers(start(room, "a"))
    pools = [tuple(note["pools"]) for note in room.notes("granted")]
    step = [("rollout",), ("train",), ("rollout", "train"), ("train",)]
    assert pools == [("rollout", "train"), ("train",), *(2 * step), *pools[10:]]


def test_the_local_workers_of_a_killed_job_keep_its_pools_until_they_are_gone(room):
    room.start_broker()
    job = start(room, "a", "workers", "hold=train")
    [named] = room.until_noted("workers", 1)
    workers = {int(what.split()[1]) for _, _, what, _ in room.recorded() if what.startswith("begins ")}
    try:
        assert {pid for pid, _ in named["processes"]} >= workers
        assert len(workers) == 2
        job.kill()
        job.wait()
        room.kill_broker()
        room.start_broker()
        assert not room.notes("gone")
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    room.until_noted("gone", 1)


@pytest.mark.parametrize("phase", ["rollout", "train", "update", "evaluation"])
def test_a_job_that_is_killed_in_any_phase_leaves_the_other_to_finish(room, phase):
    alone = numbers(start(room, "alone", is_shared=False))
    room.record.unlink()
    room.start_broker()
    killed, other = start(room, "a", f"hold={phase}"), start(room, "b")
    room.until_recorded("a", f"computes {phase} 2")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert numbers(other) == alone
    room.until_noted("gone", 2)
    check_never_both([line for line in room.recorded() if line[1].startswith("b@")])


def test_colocated_engines_share_one_pool_and_areals_own_offloading_goes_on(one_pool):
    alone = numbers(start(one_pool, "alone", "colocated", is_shared=False))
    one_pool.record.unlink()
    one_pool.start_broker()
    programs = [start(one_pool, name, "colocated") for name in "ab"]
    assert [numbers(program) for program in programs] == [alone, alone]


@pytest.mark.parametrize("key", ["enable_offload", "vllm.enable_sleep_mode"])
def test_what_keeps_memory_on_the_device_is_refused_before_any_engine_is_made(room, key):
    room.start_broker()
    out, _ = (refused := start(room, "a", f"{key}=false")).communicate(timeout=PATIENCE_S)
    assert refused.returncode == 1
    complaint = f"TypeError: {key} is not set: what lies on the device could not leave it; accepted: {key}=true"
    assert out.splitlines()[-1] == complaint
    assert room.recorded() == []
