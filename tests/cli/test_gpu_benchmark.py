"""The one command for a GPU, on a core: its code is run before any GPU sees it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest

from rlmux.engines.device_fraction import DeviceFractions

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


@pytest.mark.slow
def test_it_says_first_what_a_core_lacks_and_measures_the_rest(tmp_path):
    out = tmp_path / "result.json"
    done = run(
        *("--device", "cpu", "--quick", "--parts", "memory,publishing,promise,offload,fractions", "--out", str(out))
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert list(result["seconds"]) == ["promise", "publishing", "memory", "fractions"]
    assert {"offload", "fractions: MPS", "promise: vllm"} <= set(result["left_out"])
    assert done.stderr.index("left out: offload") < done.stderr.index("publishing: ")
    assert {name: row["promise"] for name, row in result["promise"].items()} == {
        "rlmux, float32": "exact",
        "rlmux, bfloat16": "exact",
    }
    assert list(result["publishing"]) == ["20MB"]
    assert [row["worker"] for row in result["memory"]["rows"]] == ["train", "rollout"]
    assert set(result["fractions"]["ways"]["whole"]["step_s"]) == {"sort", "reverse"}
    assert result["fractions"]["are_weights_equal"]


def test_what_a_gpu_lacks_is_named_with_what_is_needed(monkeypatch):
    monkeypatch.setattr(gpu, "free_gb", lambda: 20.0)
    monkeypatch.setattr(gpu, "mps_problem", lambda: "no MPS daemon")
    monkeypatch.setattr(gpu.shutil, "disk_usage", lambda path: SimpleNamespace(free=64e9))
    fractions = DeviceFractions(device="GPU", how="", missing="green contexts: too old a driver")
    found = gpu.left_out("cuda", fractions, None, is_quick=False)
    assert found["fractions: MPS"] == "no MPS daemon"
    assert found["fractions: orders"] == "green contexts: too old a driver"
    assert found["publishing: 8B"] == "20 GB of the GPU are free; needed: 40"
    assert "publishing: 0.6B" not in found


def test_a_program_is_taken_off_the_gpu_and_brought_back(monkeypatch):
    """With a tool and a GPU that only count."""
    free, calls = [10.0], []

    class Hooks:
        def offload(self):
            calls.append("offload")
            free[0] += 1.5

        def onload(self):
            calls.append("onload")
            free[0] -= 1.5

    monkeypatch.setattr(gpu, "HELD", "print(7, flush=True); input(); print(7)")
    monkeypatch.setattr(gpu, "cuda_checkpoint", lambda pids: Hooks())
    monkeypatch.setattr(gpu, "free_gb", lambda: free[0])
    found = gpu.offload(2)
    assert calls == ["offload", "onload"] * 2
    assert found["freed_gb"] == 1.5
    assert found["is_memory_equal"]


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
