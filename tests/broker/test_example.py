"""The example that users copy: a loop of their own takes turns with another, and learns what it learns alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.room import PATIENCE_S, Room

from rlmux.config.broker_file import load_broker_spec
from rlmux.core.errors import SpecError
from rlmux.policies import POLICIES

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "examples" / "09_permits.yaml"


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, {"gpu0": {"phase": "both", "device_memory_gb": 0.00015}})
    yield room
    room.end()


def start(room: Room, name: str | None) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if name is not None:
        environ |= {"RLMUX_BROKER": f"unix:{room.socket}", "RLMUX_JOB": name}
    command = [sys.executable, str(ROOT / "examples" / "own_trainer.py"), "--steps", "15"]
    program = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    room.programs.append(program)
    return program


def weights(program: subprocess.Popen[str]) -> str:
    out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, err
    found = re.search(r"weights (\w{64})", out)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_the_example_learns_beside_another_what_it_learns_alone(room):
    room.start_broker()
    started = [start(room, name) for name in (None, "a", "b")]
    alone, *shared = [weights(program) for program in started]
    assert shared == [alone, alone]
    assert len(room.notes("left")) > 5
    assert all(note["freed_bytes"] > 40_000 for note in room.notes("left"))


def test_the_file_of_the_example_names_one_pool_for_both_phases():
    spec = load_broker_spec(FILE, policies=list(POLICIES))
    pool = spec.cluster.pools["gpu0"]
    assert (pool.serves_both_phases, pool.num_nodes, pool.device_memory_bytes) == (True, 1, 1.5e6)


def test_devices_of_a_pool_are_one_and_their_memory_adds_up(tmp_path):
    (tmp_path / "b.yaml").write_text("cluster: {pools: {all: {phase: both, devices: 8, device_memory_gb: 80}}}")
    pool = load_broker_spec(tmp_path / "b.yaml", policies=list(POLICIES)).cluster.pools["all"]
    assert (pool.num_nodes, pool.devices_per_node, pool.gpus_per_node) == (1, 1, 8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("cluster: {pools: {gpu0: {phase: both}}}\npipelines: []", "pipelines"),
        ("cluster: {pools: {gpu0: {}}}", "no phase"),
        ("cluster: {pools: {gpu0: {phase: both}}}\npolicy: fofo", "no such policy"),
        ("cluster: {pools: {gpu0: {phase: both}}}\nleave_limit_s: 0", "leave_limit_s"),
        ("cluster: {pools: {gpu0: {phase: both}}}\nmax_hold_s: -1", "max_hold_s"),
        ("cluster: {pools: {gpu0: {phase: both, devices: 1, nodes: 2}}}", "accepted: one of them"),
        (
            "cluster: {pools: {a: {phase: rollout, devices: 1, gpus_per_device: 2}, train: {}}}",
            "a permit is for a whole",
        ),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, text, told):
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(SpecError, match=told) as wrong:
        load_broker_spec(tmp_path / "b.yaml", policies=list(POLICIES))
    assert "\n" not in str(wrong.value)
