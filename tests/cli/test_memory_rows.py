"""What `plan` says of memory is what `run` adds up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlmux import plugins
from rlmux.config import Purpose, load_spec
from rlmux.rl.memory.footprint import footprint_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
pipelines:
  - name: dense
    task: sort
    train: {dtype: bfloat16, activation_checkpointing: true}
    estimate: {rollout_s: 1, train_s: 1}
  - name: moe
    task: sort
    model: {architecture: qwen3_moe, experts: 4, experts_per_token: 2, moe_intermediate_size: 64}
    estimate: {rollout_s: 1, train_s: 1}
"""


@pytest.fixture
def file(folder):
    (folder / "plan.yaml").write_text(FILE)
    return "plan.yaml"


def test_plan_tells_the_memory_of_each_worker_by_part(rlmux, file):
    memory = json.loads(rlmux("plan", file, "--json").out)["memory"]
    for pipeline in load_spec(file, purpose=Purpose.PLAN).pipelines:
        assert pipeline.training is not None
        footprint = footprint_of(pipeline.training)
        own = memory[pipeline.name]
        assert sum(own["rollout"].values()) == pytest.approx(footprint.rollout_device_bytes)
        assert sum(own["train"].values()) == pytest.approx(footprint.train_device_bytes)
    assert memory["dense"]["train"]["gradients"] == memory["dense"]["train"]["weights"] / 2
    assert memory["dense"]["parameters"] == memory["dense"]["active_parameters"]
    idle = memory["moe"]["parameters"] - memory["moe"]["active_parameters"]
    assert idle == 2 * 2 * 3 * 64 * 64  # layers, experts that are not picked, matrices, hidden size, width


def test_plan_prints_the_parts_as_a_table(rlmux, file):
    said = rlmux("plan", file).out
    assert "memory of one worker at its fullest moment, estimated:" in said
    for part in ("KV cache", "working weights", "moments", "checkpoint being written"):
        assert part in said


def test_plan_reads_a_checkpoint_once_and_no_packages_plug_ins(rlmux, folder, monkeypatch):
    read: list[Path] = []

    def read_bytes(path: Path, read_bytes=Path.read_bytes) -> bytes:
        read.append(path)
        return read_bytes(path)

    def entry_points(**_: str) -> None:
        raise AssertionError("the policy is built in")

    shutil.copytree(EXAMPLES / "qwen3-8b", folder / "qwen3-8b")
    shutil.copy(EXAMPLES / "14_eight_gpus.yaml", folder)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(plugins, "entry_points", entry_points)
    assert "countdown" in rlmux("plan", "14_eight_gpus.yaml").out
    assert read == [folder / "qwen3-8b" / "config.json"]
