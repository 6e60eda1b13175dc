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


LARGE = """
cluster:
  pools:
    rollout: {phase: rollout, devices: 1, gpus_per_device: 4, device_memory_gb: 320, host_memory_gb: 800}
    train: {phase: train, devices: 8, device_memory_gb: 80, host_memory_gb: 300}
policy: rlmux
pipelines:
  - name: countdown
    task: {name: "reasoning-gym:countdown"}
    model: {path: qwen3-32b}
    estimate: {rollout_s: 300, train_s: 300}
    algorithm: {name: grpo, prompts_per_step: 32, group_size: 8, learning_rate: 1e-6, micro_batch_size: 1}
    rollout:
      engine: {name: vllm, python: python}
      tensor_parallel: 4
      slots: 64
      max_prompt_tokens: 1024
      max_new_tokens: 7168
      dtype: bfloat16
    train: {workers: 8, sharding: shard, dtype: bfloat16, optimizer_state: 8bit, activation_checkpointing: true}
"""
QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def large(folder):
    config = json.loads((EXAMPLES / "qwen3-8b" / "config.json").read_text())
    (folder / "qwen3-32b").mkdir()
    (folder / "qwen3-32b" / "config.json").write_text(json.dumps(config | QWEN3_32B))
    (folder / "large.yaml").write_text(LARGE)
    return "large.yaml"


def test_a_model_larger_than_a_gpu_is_planned_over_several(rlmux, large):
    code, out, err = rlmux("plan", large)
    assert (code, err) == (0, "")
    assert "GPUs: 4 in rollout, 8 in train" in out
    assert "vllm server on 4 GPUs" in out


def test_a_plan_names_the_split_that_fits_where_one_gpu_is_too_small(rlmux, large, folder):
    several = "devices: 1, gpus_per_device: 4, device_memory_gb: 320, host_memory_gb: 800"
    single = LARGE.replace(several, "devices: 4, device_memory_gb: 80").replace("      tensor_parallel: 4\n", "")
    (folder / large).write_text(single)
    said = rlmux("plan", large)
    assert said.code == 2
    assert "there are 80.000 GB; it fits with rollout.tensor_parallel: 4 with cluster.pools.rollout." in said.err
    pools = single[: single.index("policy:")]
    both = "\ncluster: {pools: {all: {phase: both, devices: 8, device_memory_gb: 80}}}\n"
    (folder / large).write_text(single.replace(pools, both))
    assert "tensor_parallel" not in rlmux("plan", large).err, "a device for training, too, is one GPU"


def test_a_large_models_adapter_is_planned_with_a_server_over_several_gpus(rlmux, large, folder):
    eight = LARGE.replace("devices: 8, ", "devices: 4, ").replace("workers: 8", "workers: 4")
    (folder / large).write_text(eight.replace("    estimate:", "    adapter: {rank: 32, alpha: 64}\n    estimate:"))
    code, out, err = rlmux("plan", large)
    assert (code, err) == (0, "")
    assert "GPUs: 4 in rollout, 4 in train" in out
    assert "of host memory, once for" not in out, "the server and the ranks have bases of their own"
    memory = json.loads(rlmux("plan", large, "--json").out)["memory"]["countdown"]
    base_bytes = 32.8e9
    assert memory["train"]["base"] == pytest.approx(4 * base_bytes / 4, rel=0.01)  # float32, a part of each rank
    assert 2 * base_bytes < memory["rollout"]["vllm server on 4 GPUs"] < 320e9


def test_a_plan_names_the_split_for_an_adapters_server(rlmux, large, folder):
    several = "devices: 1, gpus_per_device: 4, device_memory_gb: 320, host_memory_gb: 800"
    single = LARGE.replace(several, "devices: 4, device_memory_gb: 80").replace("      tensor_parallel: 4\n", "")
    (folder / large).write_text(single.replace("    estimate:", "    adapter: {rank: 32, alpha: 64}\n    estimate:"))
    said = rlmux("plan", large)
    assert said.code == 2
    assert "it fits with rollout.tensor_parallel: 4 with cluster.pools.rollout.gpus_per_device: 4" in said.err
