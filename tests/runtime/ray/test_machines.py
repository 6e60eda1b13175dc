"""The machine of each node of a Ray cluster reaches the cluster that the scheduler places on."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

import ray  # noqa: E402

from rlmux.core.model import NodeId  # noqa: E402
from rlmux.runtime.launch import backend_maker  # noqa: E402
from rlmux.runtime.ray.actor import probe_node  # noqa: E402
from rlmux.runtime.ray.cluster import RayNode, machines_of  # noqa: E402


def test_the_scheduler_of_a_run_on_ray_knows_the_machine_of_each_node(real, one_node):
    try:
        _, cluster = backend_maker("ray", one_node.ray.address, real.cluster())
    finally:
        ray.shutdown()
    here = (probe_node().machine,)
    assert cluster == real.cluster().with_machines({"rollout": here, "train": here})
    assert cluster.machines == {"rollout": here, "train": here}


def test_several_ray_nodes_of_one_machine_are_one_machine(real):
    ray_ids = {("rollout", 0): "x", ("train", 0): "y", ("train", 1): "z", ("train", 2): "z"}
    nodes = {NodeId(*at): RayNode(node_id=NodeId(*at), ray_id=ray_id, address=ray_id) for at, ray_id in ray_ids.items()}
    machines = machines_of(nodes, {"x": "first", "y": "first", "z": "second"})
    assert machines == {"rollout": ("first",), "train": ("first", "second", "second")}
    cluster = real.cluster(train=3).with_machines(machines)
    assert [cluster.machine_of(NodeId("train", index)) for index in range(3)] == ["first", "second", "second"]
