"""Two pipelines of a tiny Qwen3 on a real server engine, sharing one device. `make engine-vllm`, `make engine-sglang`.

The engine lives in an environment of its own: RLMUX_ENGINE names it and RLMUX_ENGINE_PYTHON its Python. Without them
this test is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlmux.rl.determinism_class import DeterminismClass

ENGINE = os.environ.get("RLMUX_ENGINE", "")
PYTHON = os.environ.get("RLMUX_ENGINE_PYTHON", "")
LIMIT_S = 3000
STEPS = 2

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="RLMUX_ENGINE_PYTHON names no Python with an engine: make engine-vllm"
)


def test_two_pipelines_on_a_real_engine_share_a_device_and_finish(tmp_path: Path) -> None:
    file = {
        "policy": "rollmux",
        "cluster": {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}},
        "defaults": {
            "steps": STEPS,
            "task": {"name": "sort", "digits": 2},
            "model": {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128},
            "algorithm": {"prompts_per_step": 4, "group_size": 4},
            "rollout": {
                "slots": 16,
                "max_prompt_tokens": 24,
                "max_new_tokens": 8,
                "engine": {"name": ENGINE, "python": PYTHON, "start_limit_s": 600},
            },
        },
        "pipelines": [{"name": "one", "seed": 1}, {"name": "two", "seed": 2}],
    }
    (tmp_path / "file.yaml").write_text(json.dumps(file))
    words = ["run", str(tmp_path / "file.yaml"), "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run([sys.executable, "-m", "rlmux", *words], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    for pipeline in summary["pipelines"].values():
        assert (pipeline["status"], pipeline["steps"]) == ("finished", STEPS)
        assert pipeline["promise"] in {each.value for each in DeterminismClass}
    digests = {pipeline["weights_sha256"] for pipeline in summary["pipelines"].values()}
    assert len(digests) == 2
    assert None not in digests
    assert summary["num_switches"] > 0
    left = [each for each in psutil.process_iter(["cmdline"]) if PYTHON in (each.info["cmdline"] or ())]
    assert psutil.wait_procs(left, timeout=60)[1] == []
    report = [sys.executable, "-m", "rlmux", "report", str(tmp_path / "run")]
    print(subprocess.run(report, stdout=subprocess.PIPE, text=True, check=True).stdout)
