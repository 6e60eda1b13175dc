"""The one command for a GPU, on a core: its code is run before any GPU sees it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*options):
    return subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_it_measures_switches_and_real_pipelines_and_says_on_what(tmp_path):
    out = tmp_path / "result.json"
    done = run("--device", "cpu", "--quick", "--parts", "switches,engines,pipelines", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["machine"]["device"].startswith("cpu: ")
    assert {"torch", "driver", "cuda", "levels", "missing", "mps"} <= set(result["machine"])
    assert set(result["switches"]) == {"rollout", "train"}
    assert all(row["load_s"] > 0 and row["resident_bytes"] > 0 for row in result["switches"].values())
    assert list(result["pipelines"]["runs"]) == ["colocated", "solo", "fifo", "rollmux", "jigsaw", "rlmux"]
    assert {"colocated", "jigsaw", "rlmux"} <= set(result["pipelines"]["gain"])
    assert "solo refuses a pipeline: there is one device for both" in result["pipelines"]["notes"]
    assert result["pipelines"]["gain"]["colocated"] == 1.0
    assert result["engines"]["rlmux"]["promise"] == "exact"
    assert result["engines"]["rlmux"]["tokens_per_s"] > 0
    assert result["pipelines"]["are_weights_equal"]
    assert "no interference was measured in this command" in done.stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_quick_without_a_gpu_takes_a_core_and_says_so(capsys):
    chosen_device = runpy.run_path(str(BENCHMARK), run_name="gpu")["chosen_device"]
    assert chosen_device(None, is_quick=True) == "cpu"
    assert "torch sees no CUDA device: --quick runs on a core" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        chosen_device("cuda", is_quick=True)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do(monkeypatch):
    """In this process, which has imported torch already: nothing is measured."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK)])
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        runpy.run_path(str(BENCHMARK), run_name="__main__")
