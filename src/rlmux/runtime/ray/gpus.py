"""GPUs of a Ray cluster, held for a run device by device.

    node of a pool   ◀──▶  a placement group on its Ray node     device  ◀──▶  a bundle of its GPUs, mostly one
    worker                 an actor in its device's bundle, with a sliver of one GPU; with several GPUs it is told their
                           names, which a first task in the bundle has read

A bundle keeps the GPUs that Ray gave it. So all workers of a device see the same GPUs, workers of several pipelines use
them one after another, and no actor of another program gets it. A Ray node without GPUs has no group: its devices are
cores.

A module of its own: only clusters with GPUs use it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, DeviceId, NodeId
from rlmux.runtime.ray.cluster import RayNode

_SLIVER = 0.001
"""Fraction of a GPU that Ray counts for each worker: rlmux decides when each computes, so only memory limits them."""
_RESERVE_LIMIT_S = 30.0
"""Seconds to wait for GPUs of a run that has just ended."""


def check_gpus(cluster: Cluster, nodes: Mapping[NodeId, RayNode]) -> None:
    """Raises UserError where a Ray node has GPUs, but fewer than devices of the file."""
    wanted, num_devices = Counter[str](), Counter[str]()
    for node_id, node in nodes.items():
        pool = cluster.pools[node_id.pool]
        num_devices[node.ray_id] += pool.devices_per_node
        wanted[node.ray_id] += pool.devices_per_node * pool.gpus_per_device
    for node in nodes.values():
        if 0 < node.num_gpus < wanted[node.ray_id]:
            offered, gpus = num_devices[node.ray_id], wanted[node.ray_id]
            size = f" of {gpus} GPUs" if gpus > offered else ""
            raise UserError(
                f"Ray node {node.address} offers {offered} devices{size} and has {node.num_gpus} GPUs; accepted: all "
                "GPUs of each device on one node; or none (ray start --num-gpus=0, or CUDA_VISIBLE_DEVICES= for a "
                "cluster that rlmux starts itself), and devices are cores"
            )


class GpuReservations:
    """The GPUs of a run, by node. Ray takes them back when the run leaves the cluster."""

    def __init__(self, cluster: Cluster, nodes: Mapping[NodeId, RayNode]) -> None:
        """Raises UserError if another program holds them."""
        self._cluster = cluster
        self._groups: dict[NodeId, PlacementGroup] = {}
        self._names: dict[DeviceId, ray.ObjectRef[str]] = {}
        """Names of the GPUs of devices that have several, as CUDA_VISIBLE_DEVICES has them."""
        for node_id, node in nodes.items():
            self.reserve(node_id, node)
        until_s = time.monotonic() + _RESERVE_LIMIT_S
        for node_id, group in self._groups.items():
            if not group.wait(max(0.0, until_s - time.monotonic())):
                raise UserError(
                    f"Ray node {nodes[node_id].address}: its GPUs are held by others; needed for node {node_id}: "
                    f"{_num_gpus(cluster, node_id)}; end what holds them, or start more nodes"
                )

    def reserve(self, node_id: NodeId, node: RayNode) -> None:
        """Reserve the GPUs of each device of the node, on its Ray node; workers wait until they are there."""
        self.release(node_id)
        if not node.num_gpus:
            return
        pool = self._cluster.pools[node_id.pool]
        group = self._groups[node_id] = placement_group(
            [{"GPU": pool.gpus_per_device}] * pool.devices_per_node,
            strategy="STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": node.ray_id}] * pool.devices_per_node,
        )
        for device in pool.devices(node_id) if pool.gpus_per_device > 1 else ():
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=device.index)
            read: Any = ray.remote(num_cpus=0, num_gpus=pool.gpus_per_device)(_read_names)
            self._names[device] = read.options(scheduling_strategy=where).remote()

    def names_of(self, device: DeviceId | None) -> ray.ObjectRef[str] | None:
        """Names of a device's GPUs, where it has several: an actor that gets them starts once they are known."""
        return None if device is None else self._names.get(device)

    def release(self, node_id: NodeId) -> None:
        self._names = {device: names for device, names in self._names.items() if device.node_id != node_id}
        group = self._groups.pop(node_id, None)
        if group is not None:
            remove_placement_group(group)

    def has_gpu(self, device: DeviceId | None) -> bool:
        return device is not None and device.node_id in self._groups

    def actor_options(self, device: DeviceId | None, ray_id: str) -> dict[str, Any]:
        """Where Ray is to start a worker of the device, and with what."""
        if device is None or not self.has_gpu(device):
            return {"num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(ray_id, soft=False)}
        group = self._groups[device.node_id]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=device.index)
        return {"num_gpus": _SLIVER, "scheduling_strategy": strategy}


def _num_gpus(cluster: Cluster, node_id: NodeId) -> int:
    pool = cluster.pools[node_id.pool]
    return pool.devices_per_node * pool.gpus_per_device


def _read_names() -> str:
    """The GPUs that Ray gave this task."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
