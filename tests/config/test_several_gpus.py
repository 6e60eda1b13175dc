"""A rollout device may be several GPUs, and a server splits a model over them; what does not fit is one line."""

from __future__ import annotations

import pytest

from rlmux.config import Purpose
from rlmux.config.tree import plain_tree, read_tree
from rlmux.core.model import Phase
from rlmux.rl.config import EngineConfig, MisfitError, RolloutConfig

FILE = """\
cluster:
  pools:
    rollout: {devices: 2, gpus_per_device: 4, usd_per_gpu_hour: 2}
    train: {devices: 2}
pipelines:
  - name: a
    task: sort
    model: {heads: 4, kv_heads: 2}
    rollout: {engine: {name: vllm, python: python}, tensor_parallel: 2, workers: 2}
"""
NODES = ("devices: 2, gpus_per_device: 4", "nodes: 2, gpus_per_node: 4")
ENGINE, OWN = "engine: {name: vllm, python: python}", "engine: rlmux"


def test_a_device_of_several_gpus_is_one_place_that_is_billed_for_all(load):
    pool = load(FILE).cluster.pools["rollout"]
    assert (pool.num_nodes, pool.devices_per_node, pool.gpus_per_node) == (2, 1, 4)
    assert (pool.gpus_per_device, pool.num_gpus, pool.usd_per_node_hour) == (4, 8, 8.0)


def test_nodes_of_several_gpus_are_such_devices_for_rollouts_alone(load):
    pools = load(
        FILE.replace(*NODES).replace("train: {devices: 2}", "train: {nodes: 1, gpus_per_node: 8}")
    ).cluster.pools
    assert (pools["rollout"].gpus_per_device, pools["train"].gpus_per_device) == (4, 1)
    assert (pools["train"].num_gpus, pools["train"].gpus_per_node, pools["train"].phase) == (1, 8, Phase.TRAIN)


def test_the_tree_written_out_has_the_key_that_goes_with_the_pool(load):
    keys = {"devices": 2, "gpus_per_device": 4}, {"nodes": 2, "gpus_per_node": 4}
    for given in keys:
        read = read_tree(
            {
                "cluster": {"pools": {"rollout": given, "train": {"devices": 1}}},
                "pipelines": [{"name": "a", "task": {"name": "sort"}}],
            }
        )
        written = plain_tree(read)
        assert written["cluster"]["pools"]["rollout"].items() >= given.items()
        assert not set(written["cluster"]["pools"]["rollout"]) & {*keys[0], *keys[1]} - set(given)
        assert read_tree(written) == read


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_server_splits_a_model_over_a_part_of_its_devices_gpus(load, count):
    config = load(FILE.replace("tensor_parallel: 2", f"tensor_parallel: {count}")).pipelines[0].config
    assert config.rollout.tensor_parallel == count


def test_a_server_of_the_users_own_is_split_as_it_is(load):
    file = FILE.replace("python: python", "url: 'http://127.0.0.1:8000'").replace(", workers: 2", "")
    assert (
        load(file.replace("tensor_parallel: 2", "tensor_parallel: 3")).pipelines[0].config.rollout.tensor_parallel == 3
    )


@pytest.mark.parametrize(
    ("replace", "told"),
    {
        "with nodes": (
            [("devices: 2, gpus_per_device: 4", "nodes: 2, gpus_per_device: 4")],
            "two.yaml:3: cluster.pools.rollout.gpus_per_device is 4: goes with 'devices'; accepted with 'nodes': "
            "gpus_per_node",
        ),
        "gpus of nodes with devices": (
            [("gpus_per_device: 4", "gpus_per_node: 4")],
            "two.yaml:3: cluster.pools.rollout.gpus_per_node is 4: does not go with 'devices'; accepted: devices or",
        ),
        "for training": (
            [("train: {devices: 2}", "train: {devices: 2, gpus_per_device: 4}")],
            "two.yaml:4: cluster.pools.train.gpus_per_device is 4: a training worker computes on one GPU; accepted: 1, "
            "and train.workers: 4 with train.sharding: shard for a model over 4 GPUs",
        ),
        "for both phases": (
            [
                ("    rollout: {devices: 2, gpus_per_device: 4, usd_per_gpu_hour: 2}\n", ""),
                ("train: {devices: 2}", "all: {phase: both, devices: 2, gpus_per_device: 4}"),
            ],
            "two.yaml:3: cluster.pools.all.gpus_per_device is 4: a training worker computes on one GPU; accepted: 1, ",
        ),
        "our own engine on several": (
            [(ENGINE, OWN), ("tensor_parallel: 2, ", "")],
            "two.yaml:9: pipelines.a.rollout.engine is our own, which computes on one GPU, and a device of pool "
            "'rollout' has 4; accepted: vllm, sglang, or gpus_per_device: 1",
        ),
        "our own engine split": (
            [(ENGINE, OWN)],
            "two.yaml:9: pipelines.a.rollout.tensor_parallel is 2: the engine rlmux samples with whole copies of a "
            "model; accepted: 1, or rollout.engine: {name: vllm, python: PATH}",
        ),
        "no divisor of the device": (
            [("tensor_parallel: 2", "tensor_parallel: 3")],
            "two.yaml:9: pipelines.a.rollout.tensor_parallel is 3: a device of pool 'rollout' has 4 GPUs; accepted: 1, "
            "2, 4, or cluster.pools.rollout.gpus_per_device: 3",
        ),
        "more than the device": (
            [("devices: 2, gpus_per_device: 4", "devices: 2")],
            "two.yaml:9: pipelines.a.rollout.tensor_parallel is 2: a device of pool 'rollout' has 1 GPU; accepted: 1, "
            "or cluster.pools.rollout.gpus_per_device: 2",
        ),
        "more than the node": (
            [("devices: 2, gpus_per_device: 4", "nodes: 2")],
            "two.yaml:9: pipelines.a.rollout.tensor_parallel is 2: a device of pool 'rollout' has 1 GPU; accepted: 1, "
            "or cluster.pools.rollout.gpus_per_node: 2",
        ),
        "in one pool": (
            [
                ("    rollout: {devices: 2, gpus_per_device: 4, usd_per_gpu_hour: 2}\n", ""),
                ("train: {devices: 2}", "all: {phase: both, devices: 2}"),
            ],
            "two.yaml:8: pipelines.a.rollout.tensor_parallel is 2: a device of pool 'all' has 1 GPU; accepted: 1",
        ),
        "rollouts on training devices, by the policy": (
            [("pipelines:\n", "policy: colocated\npipelines:\n")],
            "two.yaml:10: pipelines.a.rollout.tensor_parallel is 2, which does not go with policy colocated: a "
            "training device is one GPU; accepted: 1, or no rollouts on training devices",
        ),
        "no divisor of the heads": (
            [("heads: 4, kv_heads: 2", "heads: 2, kv_heads: 1"), ("tensor_parallel: 2", "tensor_parallel: 4")],
            "two.yaml:9: pipelines.a.rollout.tensor_parallel is 4, over which 2 heads, 1 key/value heads and a width "
            "of 128 do not divide; accepted: 1, 2",
        ),
        "no divisor of the width": (
            [("kv_heads: 2", "kv_heads: 2, intermediate_size: 130"), ("tensor_parallel: 2", "tensor_parallel: 4")],
            "two.yaml:9: pipelines.a.rollout.tensor_parallel is 4, over which 4 heads, 2 key/value heads and a width "
            "of 130 do not divide; accepted: 1, 2",
        ),
    }.values(),
)
@pytest.mark.parametrize("purpose", [Purpose.RUN, Purpose.PLAN])
def test_what_does_not_fit_is_one_line(complaint, replace, told, purpose):
    if purpose is Purpose.PLAN:
        replace = [*replace, ("    task: sort\n", "    task: sort\n    estimate: {rollout_s: 1, train_s: 1}\n")]
        told = told.replace("yaml:10", "yaml:11").replace("yaml:9", "yaml:10").replace("yaml:8: p", "yaml:9: p")
    assert complaint(FILE, replace=replace, purpose=purpose).startswith(told)


def test_an_estimate_of_rollouts_on_training_devices_is_one_line(complaint):
    estimate = "estimate: {rollout_s: 1, train_s: 1, colocated_rollout_s: 1, colocated_train_s: 1}"
    told = complaint(FILE, replace=[("    task: sort\n", f"    task: sort\n    {estimate}\n")])
    assert "tensor_parallel is 2, which does not go with estimate.colocated_rollout_s: a training device is" in told


def test_python_is_told_the_same():
    for engine in (EngineConfig(), EngineConfig(name="my_engine:Engine")):
        with pytest.raises(MisfitError, match=r"accepted: 1, or rollout\.engine"):
            RolloutConfig(engine=engine, tensor_parallel=2)
    assert RolloutConfig(engine=EngineConfig(name="sglang", python="python"), tensor_parallel=2).tensor_parallel == 2
