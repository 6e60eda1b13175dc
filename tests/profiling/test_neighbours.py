"""What busy neighbours cost: measured without phantoms, kept in a profile and read back."""

from __future__ import annotations

import json
import random

import pytest

from rlmux.profiling.micro_benchmarks import BenchmarkSizes
from rlmux.profiling.neighbours import measure_neighbours, missing_neighbours, neighbours_of, slowdown_of
from rlmux.profiling.profile_file import Profile
from rlmux.rl.config import ModelConfig
from rlmux.sim.models.interference import FractionGrid, InterferenceTable
from rlmux.sim.models.neighbour_slowdown import MEASURED_SUB_STAGES, Neighbours, load_neighbours

TINY = BenchmarkSizes(
    model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64),
    num_slots=8, num_tail=2, prompt_tokens=16, new_tokens=32, num_prompts=4, micro_batch_size=4, train_tokens=16,
)  # fmt: skip
DEVICE = "a cpu"
COSTS = {("dense", "dense"): 1.1, ("dense", "update"): 1.05, ("update", "dense"): 1.0, ("update", "update"): 1.2}


def save(folder, neighbours):
    path = folder / "profile.json"
    table = InterferenceTable(device=DEVICE, grid=FractionGrid(device=DEVICE, num_units=20))
    Profile(table=table, neighbours=neighbours).save(path)
    return path


def test_every_pair_is_measured_on_two_devices_as_often_from_either_side():
    if missing_neighbours("cpu"):
        pytest.skip("one core")
    ratios = measure_neighbours("cpu", sizes=TINY, window_s=0.02, num_rounds=1, num_windows=1)
    assert {pair: len(values) for pair, values in ratios.items()} == {
        (a, b): 2 for a in MEASURED_SUB_STAGES for b in MEASURED_SUB_STAGES
    }
    assert all(value > 0.0 for values in ratios.values() for value in values)
    neighbours = neighbours_of("cpu", ratios)
    assert min(neighbours.measured.values()) >= 1.0


def test_with_one_core_there_is_nothing_and_a_reason(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert measure_neighbours("cpu") == {}
    assert neighbours_of("cpu", {}) is None
    assert "left out, since there is one core" in missing_neighbours("cpu")


def test_noise_makes_no_phantoms_and_hides_no_slowdown():
    """Ratios of a machine that drifts by a tenth from one moment to the next, 36 of them."""
    rng = random.Random(1)

    def found(slowdown):
        return [slowdown_of([slowdown * rng.gauss(1.0, 0.1) for _ in range(36)]) for _ in range(300)]

    assert sum(value > 1.0 for value in found(1.0)) < 0.25 * 300
    assert sum(found(1.0)) / 300 < 1.01
    assert sum(found(1.1)) / 300 == pytest.approx(1.1, abs=0.01)


def test_faster_beside_another_is_noise():
    assert slowdown_of([0.8, 0.85, 0.9]) == 1.0


def test_the_profile_keeps_them_and_gives_them_back(tmp_path):
    neighbours = Neighbours(device=DEVICE, measured=COSTS)
    assert load_neighbours(save(tmp_path, neighbours), DEVICE) == (neighbours, [])
    assert "neighbours" not in json.loads(save(tmp_path, None).read_text())
